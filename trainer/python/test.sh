#!/usr/bin/env bash
# Builds the extension and runs the tests of the Python package with .python/ of the repository, which `make test-tools` makes.
# Without it the tests are skipped and say so. `trainer/python/test.sh -k NAME` runs some of them. `make test` has built before
# (OFFLOADD_BUILT), with the test hooks too.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.python/bin/python}
if [ ! -x "$python" ]; then
    echo "skipped: trainer/python: no $python with torch and transformers; make test-tools installs it (5 GB)"
    exit 0
fi
[ -n "${OFFLOADD_BUILT:-}" ] || ${CARGO:-cargo} build -q -p offloadd-python -p offloadd -p test-hooks --features test-hooks/active
# Another part of the tests may have it open.
extension=trainer/python/python/offloadd/_offloadd.abi3.so
cp target/debug/lib_offloadd.so "$extension.$$" && mv "$extension.$$" "$extension"
exec "$python" -m pytest -q -c trainer/python/pyproject.toml trainer/python/tests "$@"

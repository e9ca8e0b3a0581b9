#!/usr/bin/env bash
# Checks the Python of the repository with ruff, as `ruff.toml` says; `.ci/ruff.sh --fix` formats it. `make test-tools` installs ruff into .python.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff=.python/bin/ruff
if [ ! -x $ruff ]; then
    echo "skipped: no $ruff: the form of Python files; make test-tools installs it"
    exit 0
fi
if [ "${1:-}" = --fix ]; then
    $ruff format -q .
    exec $ruff check -q --fix .
fi
$ruff check -q .
$ruff format -q --check . || { echo "run .ci/ruff.sh --fix"; exit 1; }

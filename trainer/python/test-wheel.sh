#!/usr/bin/env bash
# Installs the wheel into an empty virtual environment and runs its programs and examples/plain.py there, unbroken and killed in the
# middle. The PATH is empty: no compiler is found.
#
#   trainer/python/test-wheel.sh                 builds the wheel (make wheel); torch is that of .python/, the tests' environment
#   trainer/python/test-wheel.sh 2.4.1 2.15.0    with each of these versions of torch, from the package index (5 GB each, removed again)
#
# WHEEL names a wheel that is built, PYTHON another environment for the tests; PROFILE=dev compiles the wheel sooner.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(realpath -s "${PYTHON:-.python/bin/python}")
if [ ! -x "$python" ]; then
    echo "skipped: the wheel's test: no $python; make test-tools installs it (5 GB)"
    exit 0
fi
if [ -z "${WHEEL:-}" ]; then
    rm -rf target/wheels
    make wheel PYTHON="$python" PROFILE="${PROFILE:-release}"
    WHEEL=$(ls target/wheels/offloadd-*.whl)
fi
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT

fail() {
    echo "test-wheel: $*" >&2
    exit 1
}

[ "$(stat -c %s "$WHEEL")" -lt 40000000 ] || fail "$WHEEL has 40 MB or more"
contents=$("$python" -m zipfile -l "$WHEEL")
for file in offloadd/py.typed offloadd/_offloadd.pyi licenses/LICENSE-MIT licenses/LICENSE-APACHE licenses/LICENSES-dependencies; do
    grep -q "$file" <<<"$contents" || fail "$WHEEL lacks $file"
done

# `has PATTERN FILE`: a line of the installed package's METADATA.
has() {
    grep -qE "$1" "$2" || fail "$2 has no line $1"
}

# `plain NAME [LINES]` runs the example; it is killed when it has printed so many lines.
plain() {
    mkdir -p "$directory/$1-drive"
    PATH= "$directory/venv/bin/python" "$PWD/trainer/python/examples/plain.py" "$directory/$1" "$directory/$1-drive" >"$directory/out" &
    local child=$!
    if [ -n "${2:-}" ]; then
        until [ "$(wc -l <"$directory/out")" -ge "$2" ]; do
            kill -0 $child 2>/dev/null || fail "the example ended before it was killed"
            sleep 0.05
        done
        kill -9 $child
        wait $child 2>/dev/null || true
    else
        wait $child || fail "the example failed"
    fi
    cat "$directory/out"
}

for version in "${@:-}"; do
    rm -rf "$directory"/*
    "$python" -m venv "$directory/venv"
    if [ -n "$version" ]; then
        PATH= "$directory/venv/bin/pip" install -q --no-cache-dir "torch==$version" "$WHEEL"
    else
        PATH= "$directory/venv/bin/pip" install -q --no-deps "$WHEEL"
        "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo "$directory"/venv/lib/python3*/site-packages)/torch.pth"
    fi
    installed=$(cd "$directory" && "$directory/venv/bin/python" -c 'import offloadd, pathlib; print(pathlib.Path(offloadd.__file__).parent)')
    case $installed in "$directory"/*) ;; *) fail "offloadd comes from $installed" ;; esac
    # What tests change in a running program is not in what people install.
    if grep -q OFFLOADD_KILL "$installed"/bin/* "$installed"/_offloadd*.so; then
        fail "the wheel was built with test hooks"
    fi
    tag=$("$python" trainer/python/wheel_tag.py "$installed"/bin/* "$installed"/_offloadd*.so)
    case $WHEEL in *"-${tag}_$(uname -m).whl") ;; *) fail "$WHEEL needs the tag $tag" ;; esac
    [ "$tag" = manylinux_2_28 ] || fail "$WHEEL does not run on every system on which PyTorch's wheels do, of glibc 2.28 and newer: $tag"
    metadata=$(echo "$installed"-*.dist-info/METADATA)
    for line in '^License-Expression: MIT OR Apache-2.0$' '^Requires-Python: >=3.9$' '^Requires-Dist: torch>=2.4$' \
        '^Description-Content-Type: text/markdown' '^Classifier: Typing :: Typed$' '^# offloadd for PyTorch$'; do
        has "$line" "$metadata"
    done
    "$directory/venv/bin/offloadd" --version
    "$directory/venv/bin/bench-io" --version
    "$directory/venv/bin/offloadd-run" --help >/dev/null
    torch=$("$directory/venv/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null)
    case $torch in
    2.11.*) "$directory/venv/bin/trainer" --version ;;
    *)
        "$directory/venv/bin/trainer" --version 2>"$directory/refused" && fail "trainer runs with torch $torch"
        has "torch ${torch%+*}.* is installed in .*: pip install 'torch==2.11" "$directory/refused"
        ;;
    esac
    whole=$(plain whole)
    cut=$(plain cut 12)
    rest=$(plain cut)
    [ "$(tail -1 <<<"$whole")" = "$(tail -1 <<<"$rest")" ] || fail "the killed run ended with other weights: $rest"
    [ "$(head -1 <<<"$rest")" != "resumed 0" ] || fail "the killed run began again"
    [ "$(grep -c '^step' <<<"$whole")" = 40 ] || fail "the unbroken run did not make 40 steps"
    echo "test-wheel: torch $torch: killed, $(head -1 <<<"$rest"), same weights"
done

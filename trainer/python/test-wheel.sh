#!/usr/bin/env bash
# Installs the wheel into an empty virtual environment and runs examples/plain.py there, unbroken and killed in the middle.
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

# `plain NAME [LINES]` runs the example; it is killed when it has printed so many lines.
plain() {
    mkdir -p "$directory/$1-drive"
    "$directory/venv/bin/python" "$PWD/trainer/python/examples/plain.py" "$directory/$1" "$directory/$1-drive" >"$directory/out" &
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
        "$directory/venv/bin/pip" install -q --no-cache-dir "torch==$version" "$WHEEL"
    else
        "$directory/venv/bin/pip" install -q --no-deps "$WHEEL"
        "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo "$directory"/venv/lib/python3*/site-packages)/torch.pth"
    fi
    installed=$(cd "$directory" && "$directory/venv/bin/python" -c 'import offloadd, pathlib; print(pathlib.Path(offloadd.__file__).parent)')
    case $installed in "$directory"/*) ;; *) fail "offloadd comes from $installed" ;; esac
    # What tests change in a running program is not in what people install.
    if grep -q OFFLOADD_KILL "$installed/offloadd" "$installed"/_offloadd*.so; then
        fail "the wheel was built with test hooks"
    fi
    "$directory/venv/bin/offloadd" --version
    whole=$(plain whole)
    cut=$(plain cut 12)
    rest=$(plain cut)
    [ "$(tail -1 <<<"$whole")" = "$(tail -1 <<<"$rest")" ] || fail "the killed run ended with other weights: $rest"
    [ "$(head -1 <<<"$rest")" != "resumed 0" ] || fail "the killed run began again"
    [ "$(grep -c '^step' <<<"$whole")" = 40 ] || fail "the unbroken run did not make 40 steps"
    echo "test-wheel: $("$directory/venv/bin/python" -c 'import torch; print("torch", torch.__version__)' 2>/dev/null): killed, $(head -1 <<<"$rest"), same weights"
done

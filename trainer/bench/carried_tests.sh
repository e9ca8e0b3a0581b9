#!/usr/bin/env bash
# Runs tests on a machine that has a GPU and torch, but no Rust: the programs are built here and carried there.
#
#   trainer/bench/carried_tests.sh pack FILE          here: builds, and puts the stripped programs into FILE, a tar.xz of some 45 MB
#   trainer/bench/carried_tests.sh run FILE [TEST..]  there, in a copy of the sources at any path
#
# Each TEST is "PROGRAM ARGUMENTS", PROGRAM one of fused, cudnn, lib, model_gpu and runs. Without one: the tests of kernels and of gradients on a
# GPU. As root there, because the programs have this directory's path in them: a link is made from it.
set -euo pipefail

about() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }

pack() {
    local directory
    directory=$(mktemp -d)
    pwd > "$directory/built_in"
    cargo build -p offloadd -p trainer
    {
        cargo test -p kernels-torch --test fused --test cudnn --no-run --message-format=json
        cargo test -p trainer-torch --lib --test model_gpu --test runs --no-run --message-format=json
    } |
        python3 -c '
import json, sys
for line in sys.stdin:
    said = json.loads(line)
    if said.get("executable") and said["target"]["name"] in ("fused", "cudnn", "trainer_torch", "trainer-with-torch", "model_gpu", "runs"):
        name = "lib" if said["target"]["kind"] == ["lib"] else said["target"]["name"]
        print(name, said["executable"])' |
        while read -r name path; do strip -o "$directory/$name" "$path"; done
    for name in offloadd trainer; do strip -o "$directory/$name" "target/debug/$name"; done
    tar -C "$directory" -cf - . | xz -T0 -3 > "$1"
    ls -l "$directory" "$1"
    rm -r "$directory"
}

run() {
    local directory built_in libraries failed=0
    directory=$(mktemp -d)
    tar -C "$directory" -xJf "$1"
    shift
    built_in=$(cat "$directory/built_in")
    if [ ! -e "$built_in" ]; then
        mkdir -p "$(dirname "$built_in")"
        ln -s "$PWD" "$built_in"
    fi
    mkdir -p "$built_in/target/debug" "$built_in/target/tmp"
    cp "$directory/trainer" "$directory/trainer-with-torch" "$directory/offloadd" "$built_in/target/debug/"
    # Of torch, and of what it brings: NVRTC, NCCL.
    libraries=$(python3 -c '
import glob, os, torch
torch_directory = os.path.dirname(torch.__file__)
beside = glob.glob(os.path.join(os.path.dirname(torch_directory), "nvidia", "*", "lib"))
print(":".join([os.path.join(torch_directory, "lib"), *beside]))')
    export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    if [ $# = 0 ]; then
        set -- \
            "fused --nocapture" \
            "cudnn --nocapture" \
            "lib train::tests compute::tests::buffers --nocapture" \
            "model_gpu --nocapture" \
            "runs parity:: activations:: gpu_units:: --nocapture"
    fi
    cd "$built_in/trainer/torch"
    for test in "$@"; do
        echo "== $test"
        # shellcheck disable=SC2086
        "$directory"/$test || failed=1
    done
    exit $failed
}

case "${1:-}" in
pack | run) "$@" ;;
-h | --help) about ;;
*) about >&2; exit 2 ;;
esac

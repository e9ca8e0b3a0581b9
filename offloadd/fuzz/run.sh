#!/usr/bin/env bash
# Fuzzes the daemon's input, guided by coverage (libFuzzer), with AddressSanitizer and assertions on:
#
#   offloadd/fuzz/run.sh TARGET [SECONDS]      config, handover, handshake, messages, ring or store [60]
#
# Needs a C++ compiler; builds with the stable compiler into target/fuzz, which also gets the corpus and crashing inputs.
# `cargo fuzz run TARGET` does the same with a nightly compiler.
set -eu
cd "$(dirname "$0")/../.."
target=${1:?config, handover, handshake, messages, ring or store}
seconds=${2:-60}
coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1"
# These flags are unstable; RUSTC_BOOTSTRAP makes the stable compiler accept them.
RUSTC_BOOTSTRAP=1 RUSTFLAGS="$coverage -Zsanitizer=address -Cdebug-assertions --cfg fuzzing" CARGO_TARGET_DIR=target/fuzz \
    cargo build -q --release --manifest-path offloadd/fuzz/Cargo.toml --target x86_64-unknown-linux-gnu --bin "$target"
mkdir -p "target/fuzz/corpus/$target" "target/fuzz/artifacts/$target"
# A target that makes its own seeds writes them there.
export OFFLOADD_CORPUS="target/fuzz/corpus/$target"
exec "target/fuzz/x86_64-unknown-linux-gnu/release/$target" "$OFFLOADD_CORPUS" \
    -artifact_prefix="target/fuzz/artifacts/$target/" -max_total_time="$seconds" -max_len=8192 -timeout=60 -print_final_stats=1

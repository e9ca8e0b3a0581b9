#!/usr/bin/env bash
# What some tests need and `make test` puts there where it may: as root with apt, and with pip. A test whose tool is missing skips and
# says so, so nothing here is an error.
#
#   strace           refuses system calls
#   fio              beside which bench-io is measured
#   clang-N          compiles the GPU kernels for AMD; the newest apt has
#   libamdhip64-5    a HIP runtime that has no device, and with it a hipRTC
#   NVRTC            compiles the GPU kernels for NVIDIA (90 MB, into target/nvrtc)
set -u
cd "$(dirname "$0")/.."

apt_update() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    [ -n "${apt_updated:-}" ] || apt-get update -qq >/dev/null 2>&1
    apt_updated=1
}

apt_install() {
    apt_update || return 1
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1
}

newest_clang() {
    apt-cache pkgnames clang- 2>/dev/null | grep -xE 'clang-(1[7-9]|2[0-4])' | sort -V | tail -1
}

has_clang() {
    for n in 24 23 22 21 20 19 18 17; do
        command -v "clang++-$n" >/dev/null && return 0
    done
    return 1
}

command -v strace >/dev/null || apt_install strace || echo "no strace: the tests that need it are skipped"

command -v fio >/dev/null || apt_install fio || echo "no fio: the test that compares bench-io with it is skipped"

has_clang || { apt_update && clang=$(newest_clang) && [ -n "$clang" ] && apt_install "$clang"; } ||
    echo "no clang of version 17 or later: the check of GPU kernels for gfx942 is skipped"

ldconfig -p 2>/dev/null | grep -q 'libamdhip64.so' || apt_install libamdhip64-5 ||
    echo "no HIP runtime: the tests of its loader and its compiler are skipped"

python3 kernels/fetch-libtorch.py --nvrtc target/nvrtc ||
    echo "no NVRTC: the check of GPU kernels for NVIDIA is skipped"
exit 0

#!/usr/bin/env bash
# Installs the tools of some tests (`make test-tools`), as far as possible: with apt as root, and with pip. A test whose tool is missing is skipped
# with a message, so nothing here is an error.
#
#   strace           makes system calls fail
#   iproute2         makes network namespaces, in which several nodes are tested
#   fio              beside which bench-io is measured
#   clang-N          compiles the GPU kernels for AMD; the newest apt has
#   libamdhip64-5    a HIP runtime that has no device, and with it a hipRTC
#   qemu, busybox, a kernel of Debian's (27 MB, into target/guest): a machine whose power is cut and whose drives are pulled out
#   NVRTC            compiles the GPU kernels for NVIDIA (90 MB, into target/nvrtc)
#   glibc 2.28's symbols, with which the wheel is linked (93 MB fetched, 0.5 MB kept in target/glibc-2.28)
#   PyTorch          with transformers, pytest, ruff and hadolint, for the Python package (5 GB, into .python)
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

{ command -v ip && command -v tc; } >/dev/null || apt_install iproute2 || echo "no iproute2: the tests of several nodes are skipped"

command -v fio >/dev/null || apt_install fio || echo "no fio: the test that compares bench-io with it is skipped"

has_clang || { apt_update && clang=$(newest_clang) && [ -n "$clang" ] && apt_install "$clang"; } ||
    echo "no clang of version 17 or later: the check of GPU kernels for gfx942 is skipped"

ldconfig -p 2>/dev/null | grep -q 'libamdhip64.so' || apt_install libamdhip64-5 ||
    echo "no HIP runtime: the tests of its loader and its compiler are skipped"

# Where qemu's other tools come from backports, Debian's own emulator does not fit them: then it is taken from there as well.
backported_qemu() {
    local lists mirror codename
    apt_update && lists=$(mktemp -d) && mkdir -p "$lists/partial" || return 1
    mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -E '/debian/?$' | head -1)
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    for suite in "$codename" "$codename-backports"; do
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main"
    done >"$lists/sources.list"
    local options=(-oDir::Etc::SourceList="$lists/sources.list" -oDir::Etc::SourceParts=/dev/null -oDir::State::Lists="$lists")
    apt-get "${options[@]}" update -qq >/dev/null 2>&1 &&
        DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" install -y -qq --no-install-recommends \
            -t "$codename-backports" qemu-system-x86 >/dev/null 2>&1
    local result=$?
    rm -rf "$lists"
    return $result
}

guest_kernel() {
    [ -e target/guest/vmlinuz ] && return
    apt_update || return 1
    local directory package
    directory=$(mktemp -d) || return 1
    package=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null | awk '/Depends: linux-image/ {print $2; exit}')
    [ -n "$package" ] && (cd "$directory" && apt-get -oAPT::Sandbox::User=root download -qq "$package" >/dev/null 2>&1 && dpkg -x ./*.deb .) &&
        mkdir -p target/guest && cp "$directory"/boot/vmlinuz-* target/guest/vmlinuz
    local result=$?
    rm -rf "$directory"
    return $result
}

command -v qemu-system-x86_64 >/dev/null || apt_install qemu-system-x86 || backported_qemu ||
    echo "no qemu: the tests that cut the power of a machine are skipped"

command -v busybox >/dev/null || apt_install busybox-static || echo "no busybox: the machine whose power is cut does not start"

guest_kernel || echo "no kernel for a machine whose power is cut: its tests are skipped"

python3 kernels/fetch-libtorch.py --nvrtc target/nvrtc ||
    echo "no NVRTC: the check of GPU kernels for NVIDIA is skipped"

# Again when the requirements have changed.
requirements=trainer/python/requirements-test.txt
cmp -s $requirements .python/requirements.txt ||
    { python3 -m venv .python && .python/bin/pip install -q -r $requirements && cp $requirements .python/requirements.txt; } ||
    { rm -rf .python; echo "no PyTorch for Python: the tests of trainer/python are skipped"; }

[ ! -x .python/bin/python ] || .python/bin/python trainer/python/old_glibc/old_glibc.py target/glibc-2.28 ||
    echo "no symbols of glibc 2.28: the tests that link with them are skipped"
exit 0

#!/usr/bin/env bash
# Measures with bench-io what docs/benchmarks.md and RESULTS.md beside this file report of a machine. As root, in the repository's directory:
#
#   trainer/bench/io/measure.sh target/measured drives      OUT [PART...]; PROGRAMS=target/release, with fio in PATH
#
#   engines     uring and aio alternating on a loop device over RAM, with small and with huge pages   (1 min)
#   gpu         drives without a rate limit into a GPU's memory and out of it, and without the GPU   (1 min)
#   disk        this machine's disk, three rounds alternating with fio                               (1 min)
#   unequal     four drives of 6.2 and 3.2 GB/s, the last at half speed; 16 cores, 48 GiB            (1 min)
#   drives      1 to 4 such drives, tiles of 1 to 16 MiB, compared with fio, a picture               (5 min)
#   training    a step of llama-1.3b.toml on 1 to 4 such drives, predicted and measured; a GPU       (4 min)
#
# Without PART, measures all parts. Arenas are in huge pages, as in the installed service, except where `small pages` is printed.
set -u
case ${1:---help} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit $(($# == 0 ? 2 : 0)) ;; esac
out=$1
shift
[ $# -gt 0 ] || set -- engines gpu disk unequal drives training
bench=${PROGRAMS:-target/release}/bench-io
fast="--read 6.2GB/s --write 3.2GB/s --loop-devices 4 --size 1g"
pages=/sys/kernel/mm/transparent_hugepage/shmem_enabled
before=$(sed 's/.*\[\(.*\)\].*/\1/' $pages)
ram=
mkdir -p "$out"

leave() {
    echo "$before" >$pages
    [ -z "$ram" ] || { umount "$ram/drive"; losetup -d "$device"; umount "$ram"; rmdir "$ram"; }
}
said() { echo; echo "\$ bench-io $*" | sed "s|${ram:-no such}|RAM|g"; "$bench" "$@" 2>&1 | grep -v '^/run/testdrives'; }

# A directory on a loop device over RAM, once.
directory() {
    [ -z "$ram" ] || return 0
    ram=$(mktemp -d) && mount -t tmpfs -o size=8g none "$ram" && mkdir "$ram/drive" && fallocate -l 7g "$ram/image" &&
        device=$(losetup --find --show "$ram/image") && mkfs.ext4 -q -E nodiscard,lazy_itable_init=0 "$device" &&
        mount "$device" "$ram/drive"
}

part() {
    case $1 in
    engines)
        directory
        for round in 1 2 3; do
            for word in never advise; do
                echo $word >$pages
                for rw in read write; do
                    for engine in uring aio; do
                        printf '%s: huge pages %s, %s: ' $round $word $engine
                        "$bench" run --directory "$ram/drive" --rw $rw --bs 4m --iodepth 16 --size 1g --runtime 1.5 --ioengine $engine 2>&1 | grep -E "^$rw"
                    done
                done
            done
        done
        ;;
    gpu)
        "$bench" testdrives create 4 4g 100GB/s 100GB/s --loop-devices 2 --name gpu >"$out/directories" || return
        directories=$(sed 's/^/--directory /' "$out/directories" | tr '\n' ' ')
        for rw in read write rw; do
            for target in gpu daemon; do
                # shellcheck disable=SC2086
                said run --target $target $directories --rw $rw --bs 4m --iodepth 128 --size 512m --runtime 3
            done
        done
        # shellcheck disable=SC2086
        "$bench" testdrives destroy --name gpu
        ;;
    disk) said scale --directory "$out" --size 1g --runtime 1 ;;
    unequal) said scale --testdrives 4 --slow-last $fast --drives 2,4 --bs 4m --runtime 1.5 ;;
    drives) said scale --testdrives 4 $fast --bs 1m,4m,16m --runtime 1.5 --out "$out/drives" && trainer/bench/io/draw.py "$out/drives/scale.json" ;;
    training) said training --run trainer/bench/io/llama-1.3b.toml --read 6.2GB/s --write 3.2GB/s --loop-devices 2 --steps 7 --out "$out/training" ;;
    *) echo "$1: no such part" >&2; return 2 ;;
    esac
}

{
    trap leave EXIT
    for one; do
        echo advise >$pages
        echo "== $one"
        part "$one"
    done
} 2>&1 | tee -a "$out/measured.txt"

#!/usr/bin/env bash
# Measures four emulated NVMe drives of known speed through Linux's nvme driver, and rate-limited drives under cgroup v2, in a virtual machine.
#
#   trainer/bench/io/qemu/measure.sh     as any user; leaves OUT/{nvme,cgroup2}*; OUT is its argument, from the repository (default: target/qemu/out)
#
# Needs qemu-system-x86_64, nbdkit, busybox (static), cpio, fio, losetup, mkfs.ext4, python3, 4 GiB of memory, and once, to fetch
# Debian's cloud kernel (27 MB into target/qemu; it is unpacked, not installed), apt-get:
#   apt-get install qemu-system-x86 nbdkit busybox-static cpio fio e2fsprogs util-linux python3
# The processor is emulated (without KVM), several times slower than the host's. Drives are therefore throttled to what it can move: the percentages
# count, not the rates. On a busy machine use READ_RATE=6000000 WRITE_RATE=3000000. Each drive is served by an nbdkit that answers late, like a drive
# that needs time for its own work: a throttle alone, here or in the block cgroup, lets one request at a time pass at once. The control, one
# synchronous thread, therefore shows that more drives do not help a process that waits for each operation.
set -eu
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/../../../.."
PATH=$PATH:/usr/sbin:/sbin
out=${1:-target/qemu/out}
cache=target/qemu
read_rate=${READ_RATE:-20000000} write_rate=${WRITE_RATE:-10000000}     # of each drive, bytes a second
bs=131072 drive_mb=256
# Three times what a block takes at these rates.
read_ms=$((3000 * bs / read_rate)) write_ms=$((3000 * bs / write_rate))

need() { command -v "$1" >/dev/null || { echo "measure.sh: $1 is missing: see the top of this file" >&2; exit 1; }; }
for program in qemu-system-x86_64 nbdkit busybox cpio fio losetup mkfs.ext4 python3; do need "$program"; done
for program in bench-io offloadd; do
    [ -x "target/release/$program" ] || { echo "measure.sh: cargo build --release -p bench-io -p offloadd" >&2; exit 1; }
done

mkdir -p "$cache" "$out"
if ! ls "$cache"/kernel/boot/vmlinuz-* >/dev/null 2>&1; then
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ { print $2 }')
    mkdir -p "$cache/kernel"
    (cd "$cache/kernel" && apt-get -oAPT::Sandbox::User=root download -q "$package" && dpkg -x ./*.deb . && rm -f ./*.deb)
fi
kernel=$(ls "$cache"/kernel/boot/vmlinuz-* | head -1)

work=$(mktemp -d "${TMPDIR:-/dev/shm}/bench-io-qemu.XXXXXX")
servers=()
trap 'kill ${servers[@]+"${servers[@]}"} 2>/dev/null; rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"/{bin,dev,proc,sys,tmp,run,etc}

# Copies a program, the libraries it needs, and its loader.
carry() {
    cp -L "$1" "$root/bin/"
    ldd "$1" 2>/dev/null | grep -oE '/[^ ]+' | while read -r library; do
        mkdir -p "$root$(dirname "$library")"
        [ -e "$root$library" ] || cp -L "$library" "$root$library"
    done
}
cp -L "$(command -v busybox)" "$root/bin/busybox"
for name in $("$root/bin/busybox" --list | grep -vx busybox); do ln -sf busybox "$root/bin/$name"; done
for program in losetup mkfs.ext4 fio mount umount; do rm -f "$root/bin/$program"; carry "$(command -v $program)"; done
for program in bench-io offloadd; do carry "target/release/$program"; done
find "$cache/kernel/lib/modules" -name loop.ko -exec cp {} "$root/" \;

cat >"$root/init" <<'GUEST'
#!/bin/sh
export PATH=/bin HOME=/tmp
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev
mkdir -p /dev/shm; mount -t tmpfs t /dev/shm; mount -t tmpfs t /tmp; mount -t tmpfs t /run
mount -t cgroup2 c /sys/fs/cgroup; ulimit -l unlimited; insmod /loop.ko
. /rates
# Controllers are probed at the same time, so that names do not follow slots; serial numbers do.
drive() { for b in /sys/block/nvme*n1; do [ "$(tr -d ' ' <$b/device/serial)" = "$1" ] && echo /dev/$(basename $b); done; }
mkdir -p /out; directories=
for n in 0 1 2 3; do
    mkfs.ext4 -q -F -m 0 -O ^has_journal -E nodiscard,lazy_itable_init=0 $(drive s$n); mkdir -p /d$n; mount -o noatime $(drive s$n) /d$n
    directories="$directories --directory /d$n"
done
say() { echo "GUEST $(cut -d' ' -f1 /proc/uptime) s: $*"; }
say "$(uname -r), drives $(for n in 0 1 2 3; do drive s$n; done | tr '\n' ' ')"
say "four drives, nvme driver"
bench-io scale $directories --bs $BS --size 16m --iodepth 16 --runtime 4 --out /out/nvme >/out/nvme.txt 2>/out/nvme.err; say "rc $?"
say "rate-limited drives, cgroup v2"
bench-io scale --testdrives 2 --read $READ_RATE --write $WRITE_RATE --bs $BS --size 16m --iodepth 16 --runtime 4 --tolerance 5 --out /out/cgroup2 \
    >/out/cgroup2.txt 2>/out/cgroup2.err; say "rc $?"
tar -cf $(drive out) -C /out .; sync; poweroff -f
GUEST
chmod +x "$root/init"
printf 'READ_RATE=%s WRITE_RATE=%s BS=%s\n' "$read_rate" "$write_rate" "$bs" >"$root/rates"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1 >"$work/initrd")

drives=()
for n in 0 1 2 3; do
    # Written first, so that no unwritten block is read.
    dd if=/dev/urandom of="$work/drive$n" bs=1M count="$drive_mb" status=none
    nbdkit --foreground --unix "$work/nbd$n" --filter=delay file "$work/drive$n" "rdelay=${read_ms}ms" "wdelay=${write_ms}ms" &
    servers+=($!)
    drives+=(-drive "file=nbd+unix:///?socket=$work/nbd$n,if=none,id=d$n,format=raw,throttling.bps-read=$read_rate,throttling.bps-write=$write_rate"
        -device "nvme,serial=s$n,drive=d$n")
done
truncate -s 64M "$work/out"
for n in 0 1 2 3; do while [ ! -S "$work/nbd$n" ]; do sleep 0.1; done; done
timeout "${LIMIT:-1500}" qemu-system-x86_64 -nodefaults -no-user-config -machine q35 -accel tcg,thread=multi -cpu max -smp 2 -m "${MEMORY:-2560}" \
    -display none -serial stdio -no-reboot -kernel "$kernel" -initrd "$work/initrd" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off nvme_core.multipath=N" \
    "${drives[@]}" -drive "file=$work/out,if=none,id=out,format=raw,cache=unsafe" -device nvme,serial=out,drive=out | tee "$out/console.txt" | grep --line-buffered GUEST || true
tar -xf "$work/out" -C "$out" 2>/dev/null || { echo "measure.sh: the guest did not come to its end: $out/console.txt" >&2; exit 1; }
python3 - "$out" "$read_rate" "$write_rate" <<'CHECK'
# Compares each row with the number of drives times the limit, with fio, and with the control. The better of both comparisons counts: in four seconds
# some hundred operations end, and one more or less on either side is a percent.
import json, sys

out, rates = sys.argv[1], [int(rate) / 1e6 for rate in sys.argv[2:]]
worst, scales = 100.0, False
for name in ("nvme", "cgroup2"):
    report = json.load(open(f"{out}/{name}/scale.json"))
    print(f"{name}: {report['command']}")
    one = {}
    for row in report["rows"]:
        if name == "cgroup2" and row["unlimited"]:
            continue
        limit = sum(row["drives"] * rate for rate, way in zip(rates, ("read", "write")) if row["daemon"][way])
        total = lambda found: sum((found[way] or {}).get("bytes_per_s", 0) for way in ("read", "write")) / 1e6
        ours = total(row["daemon"])
        fio = row["fio"] and total(row["fio"])
        control = row["one_thread_bytes_per_s"]
        best = 100 * ours / limit
        words = f"  {row['drives']} drives {row['load']:5} {ours:7.1f} MB/s, {100 * ours / limit:5.1f} % of the limit"
        if fio:
            words += f", {100 * ours / fio:5.1f} % of fio"
            best = max(best, 100 * ours / fio)
        worst = min(worst, best)
        if control:
            first = one.setdefault(row["load"], control)
            # The cgroup's drives answer at once until their slice is used up.
            scales = scales or name == "nvme" and control > 1.5 * first
            words += f"; one synchronous thread {control / 1e6:6.1f} MB/s, {control / first:.2f} times that of one drive"
        print(words)
print(f"worst row: {worst:.1f} %")
if scales:
    print("one synchronous thread got more from more drives: these drives answer too soon to show anything")
sys.exit(0 if worst >= 95 and not scales else 1)
CHECK

#!/usr/bin/env bash
# Makes target/guest/debian.ext4, a Debian with systemd, in which the test `service` installs the package and lets systemd run the
# daemon. As root with apt (100 MB of packages; it installs debootstrap and e2fsprogs); a minute or two, once:
#
#   offloadd/tests/guest/debian.sh && cargo test -p offloadd --test guest service -- --nocapture
set -eu
cd "$(dirname "$0")/../../.."
image=target/guest/debian.ext4
mkdir -p target/guest
[ -e "$image" ] && { echo "$image is there"; exit 0; }
for program in debootstrap mkfs.ext4; do
    command -v "$program" >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends debootstrap e2fsprogs >/dev/null; }
done
.ci/test-tools.sh
root=$(mktemp -d)
# Remove what a failed debootstrap mounted and left behind.
trap 'umount "$root/sys" "$root/proc" 2>/dev/null || true; rm -rf --one-file-system "$root" "$image.new"' EXIT
chmod 755 "$root"
# The release of this machine, because programs built here need its libc.
codename=$(. /etc/os-release && [ "$ID" = debian ] && echo "$VERSION_CODENAME" || echo bookworm)
debootstrap --variant=minbase --include=systemd,systemd-sysv,udev,procps,passwd "$codename" "$root"
# Disable services that take long in an emulated processor and are not needed here.
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer e2scrub_all.timer e2scrub_reap.service; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
echo guest >"$root/etc/hostname"
mkdir "$root/payload"
mkfs.ext4 -q -F -d "$root" "$image.new" 1200M
mv "$image.new" "$image"
echo "$image"

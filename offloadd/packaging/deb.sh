#!/bin/sh
# Builds a Debian package of a built offloadd:  offloadd/packaging/deb.sh target/release/offloadd target
# Prints the path of the package. Needs dpkg-deb and gzip; installs nothing.
set -eu
binary=$1
out=$2
here=$(cd "$(dirname "$0")" && pwd)
version=$("$binary" --version | cut -d' ' -f2)
arch=$(dpkg --print-architecture)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"
umask 022

put() { # FILE PATH MODE
    mkdir -p "$tree$(dirname "$2")"
    install -m "$3" "$1" "$tree$2"
}
put "$binary" /usr/bin/offloadd 755
put "$here/offloadd.service" /usr/lib/systemd/system/offloadd.service 644
put "$here/sysusers.conf" /usr/lib/sysusers.d/offloadd.conf 644
put "$here/tmpfiles.conf" /usr/lib/tmpfiles.d/offloadd.conf 644
put "$here/offloadd.toml" /etc/offloadd/offloadd.toml 644
put "$here/raw-drives.conf" /usr/share/doc/offloadd/raw-drives.conf 644
put "$here/metrics-loopback.conf" /usr/share/doc/offloadd/metrics-loopback.conf 644
put "$here/copyright" /usr/share/doc/offloadd/copyright 644
for license in LICENSE-MIT LICENSE-APACHE; do
    put "$here/../../$license" "/usr/share/doc/offloadd/$license" 644
done
put "$here/../../configs/grafana.json" /usr/share/doc/offloadd/grafana.json 644

"$binary" man "$tree/usr/share/man/man8"
gzip -9 -n "$tree"/usr/share/man/man8/*.8
completions() { # SHELL PATH
    mkdir -p "$tree$(dirname "$2")"
    "$binary" completions "$1" >"$tree$2"
}
completions bash /usr/share/bash-completion/completions/offloadd
completions zsh /usr/share/zsh/vendor-completions/_offloadd
completions fish /usr/share/fish/vendor_completions.d/offloadd.fish

# The newest version of libc among the symbols that the program needs.
libc=$(grep -aoE 'GLIBC_2\.[0-9]+' "$binary" | sort -uV | tail -1 | cut -d_ -f2)
mkdir "$tree/DEBIAN"
cat >"$tree/DEBIAN/control" <<END
Package: offloadd
Version: $version
Architecture: $arch
Maintainer: offloadd <root@localhost>
Installed-Size: $(du -sk --exclude=DEBIAN "$tree" | cut -f1)
Depends: libc6 (>= ${libc:-2.34}), libgcc-s1
Recommends: systemd
Section: admin
Priority: optional
Description: serves drives and pinned host memory to training processes
 Training a model needs more memory than a GPU has. This daemon keeps the rest
 in host memory and on NVMe drives, durable and checked, and moves it for
 training processes through shared memory.
END
echo /etc/offloadd/offloadd.toml >"$tree/DEBIAN/conffiles"
for script in postinst prerm postrm; do
    install -m 755 "$here/deb/$script" "$tree/DEBIAN/$script"
done
mkdir -p "$out"
package="$out/offloadd_${version}_$arch.deb"
dpkg-deb --root-owner-group --build "$tree" "$package" >/dev/null
echo "$package"

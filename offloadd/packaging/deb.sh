#!/bin/sh
# Builds a Debian package:  offloadd/packaging/deb.sh PACKAGE BIN OUT
#
#   offloadd            the daemon, BIN/offloadd
#   offloadd-trainer    BIN/trainer, BIN/trainer-with-torch and BIN/bench-io, without libtorch
#
# Prints the path of the package. Needs dpkg-deb and gzip; installs nothing.
set -eu
package=$1
bin=$2
out=$3
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
arch=$(dpkg --print-architecture)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"
umask 022

put() { # FILE PATH MODE
    mkdir -p "$tree$(dirname "$2")"
    install -m "$3" "$1" "$tree$2"
}
write() { # PATH < CONTENT
    mkdir -p "$tree$(dirname "$1")"
    cat >"$tree$1"
}

put "$here/copyright" "/usr/share/doc/$package/copyright" 644
for license in LICENSE-MIT LICENSE-APACHE; do
    put "$root/$license" "/usr/share/doc/$package/$license" 644
done
mkdir "$tree/DEBIAN"
case $package in
offloadd)
    programs=offloadd
    recommends=systemd
    section=admin
    put "$here/offloadd.service" /usr/lib/systemd/system/offloadd.service 644
    put "$here/sysusers.conf" /usr/lib/sysusers.d/offloadd.conf 644
    put "$here/tmpfiles.conf" /usr/lib/tmpfiles.d/offloadd.conf 644
    put "$here/offloadd.toml" /etc/offloadd/offloadd.toml 644
    put "$here/raw-drives.conf" /usr/share/doc/offloadd/raw-drives.conf 644
    put "$here/metrics-loopback.conf" /usr/share/doc/offloadd/metrics-loopback.conf 644
    put "$root/configs/grafana.json" /usr/share/doc/offloadd/grafana.json 644
    "$bin/offloadd" man "$tree/usr/share/man/man8"
    gzip -9 -n "$tree"/usr/share/man/man8/*.8
    "$bin/offloadd" completions bash | write /usr/share/bash-completion/completions/offloadd
    "$bin/offloadd" completions zsh | write /usr/share/zsh/vendor-completions/_offloadd
    "$bin/offloadd" completions fish | write /usr/share/fish/vendor_completions.d/offloadd.fish
    echo /etc/offloadd/offloadd.toml >"$tree/DEBIAN/conffiles"
    description="serves drives and pinned host memory to training processes
 Training a model needs more memory than a GPU has. This daemon keeps the rest
 in host memory and on NVMe drives, durable and checked, and moves it for
 training processes through shared memory."
    ;;
offloadd-trainer)
    programs="trainer trainer-with-torch bench-io"
    recommends="fio, python3-venv"
    section=science
    put "$root/kernels/fetch-libtorch.py" /usr/share/offloadd-trainer/fetch-libtorch.py 755
    for program in trainer bench-io; do
        "$bin/$program" man "$tree/usr/share/man/man1"
        "$bin/$program" completions bash | write /usr/share/bash-completion/completions/$program
        "$bin/$program" completions zsh | write /usr/share/zsh/vendor-completions/_$program
        "$bin/$program" completions fish | write /usr/share/fish/vendor_completions.d/$program.fish
    done
    gzip -9 -n "$tree"/usr/share/man/man1/*.1
    description="trains language models with state in host memory and on drives
 Contains trainer, which trains models that do not fit into GPU memory, and
 bench-io, which measures drives. trainer needs libtorch of PyTorch 2.11: an
 installed torch, or its CPU part, which a script in the package fetches."
    ;;
*)
    echo "deb.sh: there is no package $package" >&2
    exit 2
    ;;
esac

version=$("$bin/${programs##* }" --version | cut -d' ' -f2)
for program in $programs; do
    put "$bin/$program" "/usr/bin/$program" 755
    if grep -qa 'libstdc++\.so' "$bin/$program"; then
        cxx=", libstdc++6"
    fi
done
[ "$package" = offloadd ] || daemon=", offloadd (= $version)"
# The newest version of libc among the symbols that the programs need.
libc=$(cd "$tree/usr/bin" && grep -haoE 'GLIBC_2\.[0-9]+' -- $programs | sort -uV | tail -1 | cut -d_ -f2)
cat >"$tree/DEBIAN/control" <<END
Package: $package
Version: $version
Architecture: $arch
Maintainer: offloadd <root@localhost>
Installed-Size: $(du -sk --exclude=DEBIAN "$tree" | cut -f1)
Depends: libc6 (>= ${libc:-2.34}), libgcc-s1${cxx:-}${daemon:-}
Recommends: $recommends
Section: $section
Priority: optional
Description: $description
END
for script in "$here/deb/$package".*; do
    install -m 755 "$script" "$tree/DEBIAN/${script##*.}"
done
mkdir -p "$out"
file="$out/${package}_${version}_$arch.deb"
dpkg-deb --root-owner-group --build "$tree" "$file" >/dev/null
echo "$file"

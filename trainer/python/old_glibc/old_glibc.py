#!/usr/bin/env python3
"""Makes a directory with which programs are linked for systems whose glibc is older than this machine's.

    old_glibc.py DIR       fetches Zig (93 MB) and keeps 0.5 MB; a second run does nothing

    cc -B DIR -L DIR -Wl,--allow-shlib-undefined ...

A linker that finds libc.so in DIR takes the symbols, and their versions, that glibc 2.28 has. The link fails if a program uses
another one, and names it: define it in newer_glibc.c or newer_libstdcxx.cpp if headers use it without being asked. Compilers, headers
and libstdc++ stay this machine's; its libstdc++ and libgcc_s need its own glibc, therefore --allow-shlib-undefined.

DIR contains shared libraries that have glibc's symbols and no code, the functions that 2.28 links into each program (such as stat),
the start of a program, and what newer_*.c* define. All but the last are Zig's, which brings the symbols of every version of glibc.

Zig (or maturin's --zig) does not compile the programs itself: its C++ library is LLVM's, whose std::string is another type than that of
libtorch (GNU's), and it does not compile GNU's headers.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

GLIBC = "2.28"
COMPILER = os.environ.get("CXX", "c++")
HERE = pathlib.Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
NEWER = (HERE / "newer_glibc.c", HERE / "newer_libstdcxx.cpp")
LIBRARIES = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libresolv.so.2")


def run(what, *command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{what} failed: {' '.join(map(str, command))}")
    return done.stdout


def make(directory, stdlib, scratch):
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes")
    run("fetching Zig", *pip, "--target", scratch / "zig", "-r", REQUIREMENTS)
    # Zig makes the libraries in its cache when it links any program for that glibc.
    (scratch / "main.c").write_text("int main(void) { return 0; }\n")
    run(
        f"making the libraries of glibc {GLIBC}",
        *(scratch / "zig" / "ziglang" / "zig", "cc", "-target", f"x86_64-linux-gnu.{GLIBC}", "-fPIE", "-pie", "-fno-sanitize=all"),
        *(scratch / "main.c", "-o", scratch / "main"),
        env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(scratch / "cache"), "ZIG_LOCAL_CACHE_DIR": str(scratch / "cache")},
    )

    def copy_library(name, to=None):
        (found,) = scratch.glob(f"cache/o/*/{name}")
        shutil.copy(found, directory / (to or name))

    copy_library("Scrt1.o")
    copy_library("libc_nonshared.a")
    copy_library("libld.so.2", "ld-linux-x86-64.so.2")
    for name in LIBRARIES:
        copy_library(name)
        (directory / re.sub(r"\.\d$", "", name)).symlink_to(name)
    for source in NEWER:
        language = ("-x", "c", "-D_GNU_SOURCE") if source.suffix == ".c" else ("-std=c++17",)
        run("compiling", COMPILER, *language, "-O2", "-fPIC", "-c", source, "-o", scratch / f"{source.stem}.o")
    run("packing", "ar", "rcs", directory / "libnewer.a", *(scratch / f"{source.stem}.o" for source in NEWER))
    # Linker scripts: the linker looks beside them for names without a directory.
    (directory / "libc.so").unlink()
    (directory / "libc.so").write_text("GROUP(libc.so.6 libc_nonshared.a libnewer.a AS_NEEDED(ld-linux-x86-64.so.2))\n")
    (directory / "libstdc++.so").write_text(f"GROUP(libnewer.a {stdlib})\n")


def main(directory):
    stdlib = run("finding libstdc++", COMPILER, "-print-file-name=libstdc++.so.6").strip()
    # Made again when one of the sources has changed, or the compiler.
    made_from = stdlib + "".join(file.read_text() for file in (REQUIREMENTS, *NEWER, pathlib.Path(__file__)))
    marker = directory / "made-from"
    if marker.exists() and marker.read_text() == made_from:
        return
    print(f"making {directory} for programs that run with glibc {GLIBC}: fetches Zig (93 MB)", flush=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as name:
        scratch = pathlib.Path(name)
        stage = scratch / "stage"
        stage.mkdir()
        make(stage, stdlib, scratch)
        (stage / "made-from").write_text(made_from)
        shutil.rmtree(directory, ignore_errors=True)
        stage.rename(directory)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute())

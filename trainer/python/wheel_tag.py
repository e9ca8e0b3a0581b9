#!/usr/bin/env python3
"""Prints the platform tag of a wheel that contains FILES: the oldest systems that have the symbols they need.

    wheel_tag.py FILES...          for example manylinux_2_28

PEP 600: `manylinux_2_N` runs where glibc is 2.N or newer. The tag follows from what the programs were linked with: old_glibc/.
"""

import pathlib
import re
import sys

# Tags in their order, with the newest versions of libstdc++'s symbols that each allows. PyTorch's wheels begin with the first.
ALLOWED = {28: ("3.4.24", "1.3.11"), 31: ("3.4.28", "1.3.12"), 34: ("3.4.29", "1.3.13"), 35: ("3.4.30", "1.3.13"), 39: ("3.4.33", "1.3.15")}


def numbers(version):
    return tuple(map(int, version.split(".")))


def newest(data, name):
    """The newest version of symbols of `name` in a program's bytes, as numbers."""
    return max((numbers(one.decode()) for one in re.findall(rb"\0%s_(\d+(?:\.\d+)+)(?=\0)" % name, data)), default=(0,))


def tag(files):
    glibc = 28
    for file in files:
        data = file.read_bytes()
        fitting = [
            number for number, (stdlib, abi) in ALLOWED.items() if newest(data, b"GLIBCXX") <= numbers(stdlib) and newest(data, b"CXXABI") <= numbers(abi)
        ]
        if not fitting:
            sys.exit(f"{file}: needs a newer libstdc++ than any known tag allows: add it to ALLOWED")
        glibc = max(glibc, fitting[0], newest(data, b"GLIBC")[1])
    return f"manylinux_2_{glibc}"


if __name__ == "__main__":
    print(tag([pathlib.Path(file) for file in sys.argv[1:]]))

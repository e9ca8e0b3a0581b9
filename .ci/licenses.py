#!/usr/bin/env python3
"""Checks that all dependencies have licenses that deny.toml allows and come from crates.io, without cargo-deny and without network."""

import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"


def allowed_of(text):
    """`licenses.allow` of deny.toml; its other lists have other names, so that no TOML parser is needed."""
    return set(re.findall(r'"(.+?)"', re.search(r"^allow = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)[1]))


def is_allowed(expression, allowed):
    """Whether an SPDX expression can be met with these licenses; "/" is the older way to write OR."""
    words = re.findall(r"[()]|[\w.+-]+(?: WITH [\w.-]+)?", expression.replace("/", " OR "))
    return bool(words) and eval(" ".join(word if word in "()" else word.lower() if word in ("AND", "OR") else str(word in allowed) for word in words))


def faults(packages, allowed):
    found = []
    for package in packages:
        name = f"{package['name']} {package['version']}"
        if not is_allowed(package["license"] or "", allowed):
            found.append(f"{name}: license {package['license']}, which deny.toml does not allow")
        if package["source"] not in (None, CRATES_IO):
            found.append(f"{name}: from {package['source']}, not from crates.io")
    return found


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--cargo", default="cargo", help="the program to call (default: %(default)s)")
    arguments = arguments.parse_args()
    command = [arguments.cargo, "metadata", "--locked", "--format-version=1", "--filter-platform=x86_64-unknown-linux-gnu"]
    packages = json.loads(subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=True).stdout)["packages"]
    found = faults(packages, allowed_of((ROOT / "deny.toml").read_text()))
    print(*found, f"licenses: {len(packages)} packages, {len(found)} faults", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

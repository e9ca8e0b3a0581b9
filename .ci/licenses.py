#!/usr/bin/env python3
"""Checks that all dependencies have licenses that deny.toml allows and come from crates.io, without cargo-deny and without network.

.ci/licenses.py
.ci/licenses.py --texts FILE trainer bench-io     writes the license texts of what these packages are linked with
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = re.compile(r"(?i)(un)?licen[cs]e|copying|notice")
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


def linked(metadata, roots):
    """Packages of other people that the packages named `roots` are linked with."""
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node["deps"] for node in metadata["resolve"]["nodes"]}
    left, seen = [id for id, package in packages.items() if package["name"] in roots], set()
    while left:
        id = left.pop()
        if id not in seen:
            seen.add(id)
            left += [dep["pkg"] for dep in nodes[id] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
    return sorted((packages[id] for id in seen if packages[id]["source"]), key=lambda package: (package["name"], package["version"]))


def texts(packages):
    """The licenses of packages, each text once."""
    users, without = {}, []
    for package in packages:
        name = f"{package['name']} {package['version']} ({package['license']})"
        directory = pathlib.Path(package["manifest_path"]).parent
        files = [file for file in sorted(directory.glob("*")) + sorted(directory.glob("*/*")) if TEXT.match(file.name) and file.is_file()]
        for file in files:
            users.setdefault(file.read_text(errors="replace").strip(), []).append(name)
        if not files:
            without.append(f"{name}, by {', '.join(package['authors']) or 'its contributors'}")
    parts = ["\n".join(dict.fromkeys(names)) + "\n\n" + text for text, names in users.items()]
    return ("\n\n" + "-" * 80 + "\n").join([*parts, "Packages without a license text of their own:\n" + "\n".join(without)]) + "\n"


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--texts", metavar="FILE", type=pathlib.Path, help="write license texts instead")
    arguments.add_argument("package", nargs="*", help="of --texts")
    arguments.add_argument("--cargo", default="cargo", help="the program to call (default: %(default)s)")
    arguments = arguments.parse_args()
    command = [arguments.cargo, "metadata", "--locked", "--format-version=1", "--filter-platform=x86_64-unknown-linux-gnu"]
    metadata = json.loads(subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=True).stdout)
    if arguments.texts:
        arguments.texts.write_text(texts(linked(metadata, arguments.package)))
        return 0
    packages = metadata["packages"]
    found = faults(packages, allowed_of((ROOT / "deny.toml").read_text()))
    print(*found, f"licenses: {len(packages)} packages, {len(found)} faults", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

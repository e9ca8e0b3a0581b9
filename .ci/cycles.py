#!/usr/bin/env python3
"""Finds Rust files of a crate that import each other in turn.

    .ci/cycles.py     fails for a circle that `KNOWN` does not have, and for one of `KNOWN` that is gone

A file imports another one with `use crate::...`, `use super::...` or a path that starts so. Modules import from lower layers only
(`trainer/tests/architecture.rs`); this holds the same for files, except for those that call each other in turn by their nature.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Crates with the files of each circle that is right as it is, and why.
KNOWN = {
    # An interpreter: values call methods, which render values.
    "trainer/chat-template": [
        {"args", "expressions", "filters", "format", "functions", "json", "methods", "object", "predicates", "python", "render", "value"}
    ],
}


def circles(source):
    """Sets of files below `source`, as module paths, that import each other in turn."""
    files = {module(source, path): path for path in source.rglob("*.rs") if not is_test(path)}
    files.pop((), None)
    imports = {name: imported(name, path.read_text(), files) for name, path in files.items()}
    return [{"::".join(name) for name in part} for part in strongly_connected(imports)]


def is_test(path):
    return "tests" in path.parts or path.name == "tests.rs"


def module(source, path):
    parts = path.relative_to(source).with_suffix("").parts
    if parts[-1] == "mod":
        parts = parts[:-1]
    return () if parts in (("lib",), ("main",)) else parts


def imported(name, text, files):
    """The files that the file of module `name` imports, without those of modules around it, which re-export."""
    code = re.sub(r"//.*", "", re.split(r"#\[cfg\(test\)\]\s*mod \w+ ?\{", text)[0])
    paths = [path for use in re.findall(r"\buse\s+((?:crate|super|self)\b[^;]*);", code) for path in spread(use)]
    paths += re.findall(r"\b((?:crate|super)(?:::[a-z_]\w*)+)::", code)
    found = set()
    for path in paths:
        parts = re.sub(r"\s", "", path).split("::")
        inside = [] if parts[0] == "crate" else list(name)
        parts = parts[1:] if parts[0] in ("crate", "self") else parts
        while parts and parts[0] == "super":
            inside, parts = inside[:-1], parts[1:]
        whole = (*inside, *parts)
        longest = next((whole[:n] for n in range(len(whole), 0, -1) if whole[:n] in files), None)
        if longest and longest != name[: len(longest)]:
            found.add(longest)
    return found


def spread(use):
    """The paths of `a::{b, c::{d}}`."""
    head, brace, body = use.strip().partition("{")
    if not brace:
        return [re.sub(r"\s+as\s+\w+", "", head)]
    paths, depth, item = [], 0, ""
    for letter in body[: body.rindex("}")] + ",":
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter != "," or depth:
            item += letter
        elif item.strip():
            paths += spread(head + item.strip())
            item = ""
        else:
            item = ""
    return paths


def strongly_connected(graph):
    """Sets of two or more nodes that reach each other."""
    reached = {node: reach(graph, node) for node in graph}
    parts = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph if node in reached[node]}
    return sorted((set(part) for part in parts if len(part) > 1), key=sorted)


def reach(graph, start):
    seen, ahead = set(), list(graph[start])
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += graph.get(node, ())
    return seen


def faults(root, known):
    said = []
    for manifest in sorted([*root.glob("[a-z]*/Cargo.toml"), *root.glob("[a-z]*/[a-z]*/Cargo.toml")]):
        crate = manifest.parent.relative_to(root).as_posix()
        found, expected = circles(manifest.parent / "src"), known.get(crate, [])
        said += [f"{crate}: these files import each other in turn: {', '.join(sorted(one))}" for one in found if one not in expected]
        said += [f"{crate}: no longer a circle, take it out of KNOWN: {', '.join(sorted(one))}" for one in expected if one not in found]
    return said


if __name__ == "__main__":
    found = faults(ROOT, KNOWN)
    print("\n".join(found) or "cycles: no new ones")
    sys.exit(bool(found))

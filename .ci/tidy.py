#!/usr/bin/env python3
"""Finds what compilers and ruff do not: functions that nothing names, comments that are too wide, long functions of Python.

    .ci/tidy.py [ROOT]     prints each place with what to do

A function, method or class of Python is dead if its name stands nowhere else outside of tests; `CALLED_BY_OTHERS` has the files whose names others
call. A public function or constant of Rust is named by another file of Rust, or it is private, and the compiler looks at it.
"""

import ast
import collections
import io
import os
import pathlib
import re
import sys
import tokenize

FUNCTION_LINES_MAX = 80

PACKAGE = "trainer/python/python/offloadd"

# Python whose functions are looked at.
PYTHON = (".ci/", f"{PACKAGE}/", "trainer/bench/")

# Files of the package with public names that nothing of ours names, or single names, and who does.
CALLED_BY_OTHERS = {
    "_accelerator": "scripts, as DeepSpeed's accelerator",
    "_deepspeed_utils._dump_state": "DeepSpeed's examples of its writer",
    "_finder": "importlib",
    "_initialize": "scripts, as DeepSpeed's engine",
    "_states": "scripts, as deepspeed.utils",
    "lightning": "Lightning",
}

# Names that unittest, ast and autograd look for.
LOOKED_FOR = re.compile(r"__\w+__$|test_|visit_|setUp|enter[A-Z]|setup_context$")

# Where a name counts: sources and what starts them, not what documents say.
SOURCES = (".py", ".rs", ".sh", ".toml", ".txt", "Makefile")

RUST_ITEM = r"^ *pub (?:(?:const|unsafe|async|extern \"C\") )*(fn|const|static)(?: mut)? (\w+)"


def sources(root):
    """Returns the texts of sources by their paths from `root`."""
    found = {}
    for place, dirs, files in os.walk(root):
        dirs[:] = sorted(name for name in dirs if name == ".ci" or not name.startswith(".") and name not in ("target", "node_modules", "__pycache__"))
        for name in sorted(files):
            if name.endswith(SOURCES):
                path = pathlib.Path(place, name)
                found[path.relative_to(root).as_posix()] = path.read_text()
    return found


def is_test(name):
    return "/tests/" in name or name.rpartition("/")[2].startswith("test_")


def dead_python(texts):
    """Returns a line for each function, method or class of Python that nothing names outside of tests."""
    named = collections.Counter(word for name, text in texts.items() if not is_test(name) for word in re.findall(r"\w+", text))
    named.subtract(one.partition(".")[2] for one in CALLED_BY_OTHERS)
    found, called = [], set()
    for name, text in texts.items():
        if not name.endswith(".py") or not name.startswith(PYTHON) or is_test(name):
            continue
        file = name.removeprefix(f"{PACKAGE}/").removesuffix(".py")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or LOOKED_FOR.match(node.name) or named[node.name] > 1:
                continue
            if (by := file if not node.name.startswith("_") else f"{file}.{node.name}") in CALLED_BY_OTHERS:
                called.add(by)
                continue
            found.append(f"{name}:{node.lineno}: {node.name}: nothing names it: remove it")
    gone = sorted(one for one in CALLED_BY_OTHERS if f"{PACKAGE}/{one.partition('.')[0]}.py" in texts and one not in called)
    return found + [f".ci/tidy.py: {one}: no name that only others call: take it out of CALLED_BY_OTHERS" for one in gone]


def public_rust(texts):
    """Returns a line for each public function or constant of Rust that no other file names."""
    code = {name: re.sub(r"^[ \t]*//.*$", "", text, flags=re.MULTILINE) for name, text in texts.items() if name.endswith(".rs")}
    files = collections.Counter(word for text in code.values() for word in set(re.findall(r"\w+", text)))
    found = []
    for name, text in code.items():
        for match in re.finditer(RUST_ITEM, text, re.MULTILINE):
            if files[match[2]] == 1 and not is_test(name):
                found.append(f"{name}:{text.count(chr(10), 0, match.start(2)) + 1}: {match[2]}: no other file names it: remove `pub`, or what is dead")
    return found


def comments(name, text):
    """Returns the lines that hold comments, doc comments or docstrings."""
    lines = text.splitlines()
    if name.endswith(".py"):
        numbers = {token.start[0] for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node) is not None:
                numbers.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        return sorted(numbers)
    mark = "//" if name.endswith(".rs") else "#"
    return [number for number, line in enumerate(lines, 1) if line.lstrip().startswith(mark)]


def wide_comments(texts, columns):
    """Returns a line for each comment that is wider than `columns`."""
    found = []
    for name, text in texts.items():
        lines = ["", *text.splitlines()]
        found += [f"{name}:{number}: {len(lines[number])} columns, at most {columns}" for number in comments(name, text) if len(lines[number]) > columns]
    return found


def long_functions(texts):
    """Returns a line for each function of Python that is too long."""
    found = []
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)) if name.endswith(".py") else ():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX:
                found.append(f"{name}:{node.lineno}: {node.name}: {lines} lines, at most {FUNCTION_LINES_MAX}")
    return found


def faults(root):
    """Returns a line for each place."""
    texts = sources(root)
    # Code and comments are as wide as ruff lets Python be; rustfmt keeps the code of Rust narrower, and leaves comments alone.
    columns = int(re.search(r"^line-length = (\d+)", texts["ruff.toml"], re.MULTILINE)[1])
    return dead_python(texts) + public_rust(texts) + wide_comments(texts, columns) + long_functions(texts)


if __name__ == "__main__":
    found = faults(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1]).resolve())
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)

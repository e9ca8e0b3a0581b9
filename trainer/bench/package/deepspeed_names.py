#!/usr/bin/env python3
"""Counts which scripts find all names of DeepSpeed that they use where offloadd answers to `import deepspeed`.

    trainer/bench/package/deepspeed_names.py DeepSpeedExamples

Reads the Python files below each directory, without running them, and lists those that miss a name. A name is what a file imports from
deepspeed, each chain of attributes on it (`deepspeed.comm.get_rank`), and each attribute of `get_accelerator()`. An import whose failure the
file expects (`except ImportError`) need not be there. Attributes of engines and other objects are not followed.
"""

import argparse
import ast
import collections
import importlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python/python"))

ROOT = "deepspeed"


class Names(ast.NodeVisitor):
    """Collects the dotted names of DeepSpeed in a file."""

    def __init__(self):
        self.found = set()
        # Local name to the dotted name that it stands for.
        self.bound = {}
        self._expected = 0

    def visit_Try(self, node):
        handled = {name.id for handler in node.handlers for name in ast.walk(handler.type or ast.Name("Exception")) if isinstance(name, ast.Name)}
        expects = bool(handled & {"ImportError", "ModuleNotFoundError", "Exception"})
        self._expected += expects
        for one in node.body:
            self.visit(one)
        self._expected -= expects
        for one in [*node.handlers, *node.orelse, *node.finalbody]:
            self.visit(one)

    def visit_Import(self, node):
        for one in node.names:
            if one.name.split(".")[0] == ROOT:
                self._use(one.name)
                self.bound[one.asname or ROOT] = one.name if one.asname else ROOT

    def visit_ImportFrom(self, node):
        module = node.module or ""
        if node.level or module.split(".")[0] != ROOT:
            return
        for one in node.names:
            if one.name == "*":
                self._use(module)
                continue
            self._use(f"{module}.{one.name}")
            self.bound[one.asname or one.name] = f"{module}.{one.name}"

    def visit_Attribute(self, node):
        name = self._name_of(node)
        if name is None:
            self.generic_visit(node)
        else:
            self._use(name)

    def _name_of(self, node):
        """The dotted name of a chain of attributes; `()` stands for a call of `get_accelerator`."""
        if isinstance(node, ast.Name):
            return self.bound.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._name_of(node.value)
            return base and f"{base}.{node.attr}"
        if isinstance(node, ast.Call):
            base = self._name_of(node.func)
            return f"{base}()" if base and base.endswith(".get_accelerator") else None
        return None

    def _use(self, name):
        if not self._expected:
            self.found.add(name)


def names_in(path):
    """The names of DeepSpeed in a file; none where it is not Python 3."""
    try:
        tree = ast.parse(path.read_text(errors="replace"))
    except SyntaxError:
        return set()
    names = Names()
    # Imports first: functions may use what a later line binds.
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names._expected += 1
            names.visit(node)
            names._expected -= 1
    names.visit(tree)
    return names.found


def is_there(name):
    """Whether a dotted name is found."""
    parts = name.split(".")
    called = {index for index, part in enumerate(parts) if part.endswith("()")}
    found = importlib.import_module(ROOT)
    for index, part in enumerate(parts[1:], 1):
        part, before = part.removesuffix("()"), ".".join(parts[:index])
        if not hasattr(found, part):
            try:
                found = importlib.import_module(f"{before}.{part}")
                continue
            except ImportError:
                return False
        found = getattr(found, part)
        if index in called:
            found = found()
        elif not isinstance(found, type(importlib)):
            # What an object has, only the running script knows.
            return True
    return True


def main(directories):
    import offloadd.as_deepspeed  # noqa: F401

    missing, files = collections.Counter(), 0
    lacking = {}
    for directory in directories:
        for path in sorted(directory.rglob("*.py") if directory.is_dir() else [directory]):
            names = names_in(path)
            files += bool(names)
            lacks = sorted(name for name in names if not is_there(name))
            if lacks:
                lacking[path] = lacks
                missing.update(lacks)
    for path, lacks in lacking.items():
        print(f"{path}: {', '.join(lacks)}")
    print()
    for name, count in missing.most_common():
        print(f"{count:4}  {name}")
    print(f"\n{files - len(lacking)} of {files} files find every name of deepspeed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=pathlib.Path, metavar="DIRECTORY")
    main(parser.parse_args().directories)

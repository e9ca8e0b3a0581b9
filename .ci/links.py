#!/usr/bin/env python3
"""Checks that relative links in the documents point to files and headings that exist, that paths in backticks are files,
and that the page of promises names tests that exist. Prints what does not; needs no network.

    .ci/links.py [ROOT]     README.md, docs/*.md, the pages of measurements and of tests
"""

import pathlib
import re
import sys

PAGES = ["README.md", "docs/**/*.md", "offloadd/tests/*.md", "trainer/bench/*.md", "trainer/bench/io/*.md"]

# Page that names tests.
PROMISES = "PROMISES.md"


def without_code(text):
    """Returns the text without fenced blocks and code in backticks, whose brackets are not links."""
    text = re.sub(r"^(```+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def named_paths(text):
    """Returns paths of the repository that a page names in backticks, as in `trainer/run/src/plan/`."""
    text = re.sub(r"^(```+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`((?:offloadd|client|swapper|kernels|test-hooks|trainer|bench-io|configs|docs|\.ci)/[\w./-]*)`", text)


def stale_tests(root, text):
    """Returns tests that a page names as in `module::a_test_...` or `module::*` but that no source file has."""
    sources = [path for path in root.glob("**/*.rs") if "target" not in path.relative_to(root).parts]
    code = "\n".join(path.read_text() for path in sources)
    functions = re.findall(r"\bfn (\w+)", code)
    modules = {*re.findall(r"\bmod (\w+)", code), *(name for path in sources for name in (path.stem, path.parent.name))}
    stale = []
    for name in re.findall(r"`((?:\w+::)+(?:\w+\*?|\*)(?:\.\.\.)?)`", text):
        *path, last = name.split("::")
        stem = re.sub(r"(_?\.\.\.|\*)$", "", last)
        if not modules.issuperset(path) or not any(function.startswith(stem) for function in functions):
            stale.append(name)
    return stale


def anchors(text):
    """Returns the anchors of the headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^(```+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def faults(root):
    """Returns a line for each broken link."""
    found = []
    pages = [page for pattern in PAGES for page in sorted(root.glob(pattern))]
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists():
                found.append(f"{page.relative_to(root)}: {link}: no such file")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
                found.append(f"{page.relative_to(root)}: {link}: no such heading")
        found += [f"{page.relative_to(root)}: {path}: no such file" for path in named_paths(page.read_text()) if not (root / path).exists()]
        if page.name == PROMISES:
            found += [f"{page.relative_to(root)}: {name}: no such test" for name in stale_tests(root, page.read_text())]
    return found if pages else [f"{root}: no documents"]


if __name__ == "__main__":
    found = faults(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1]))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)

"""A prepared model behaves as plain PyTorch does, or refuses by name: each line of the table in the modules beside this one."""

import json
import os
import pathlib

import pytest

import forks
import pages
from run import lines
from table import PROGRAM

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def said(request):
    """Returns what was said of a line. The lines of a theme run when the first of them is asked for."""
    wanted = {}
    for item in request.session.items:
        if item.function is test_a_line:
            line = item.callspec.params["line"]
            wanted.setdefault(line.theme, []).append(line.key)
    found = {}

    def of_line(line):
        if line.key not in found:
            out, errors = forks.start(HERE / "run.py", *wanted[line.theme]).communicate()
            found.update(map(json.loads, out.splitlines()))
            assert line.key in found, errors
            # A line that ended its process has said nothing but to stderr.
            found.update({key: f"{said}\n{errors}" for key, said in found.items() if said.startswith("ends with")})
        return found[line.key]

    return of_line


@pytest.mark.skipif(PROGRAM is None, reason="offloadd is not built: cargo build -p offloadd")
@pytest.mark.parametrize("line", [pytest.param(line, id=line.key) for line in lines()])
def test_a_line(line, said):
    assert said(line) == "", said(line)


def test_each_line_has_a_name_of_its_own():
    keys = [line.key for line in lines()]
    assert len(keys) == len(set(keys))


def test_docs_have_the_table():
    if "UPDATE_DOCS" in os.environ:
        pages.PAGE.write_text(pages.text())
    assert pages.PAGE.read_text() == pages.text(), "run `make docs`"

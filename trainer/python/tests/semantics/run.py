"""Runs the lines of the table whose keys are the arguments. Prints for each a JSON list of its key and what is not as
it says.

`run.py --show PART...` is for people: it runs the lines that have one of the parts in their keys.
"""

import json
import sys
import time

import torch

import idioms  # noqa: F401
import modules  # noqa: F401
import programs  # noqa: F401
import reading  # noqa: F401
import stepping  # noqa: F401
import untrained  # noqa: F401
import writing  # noqa: F401
from table import THEMES, run


def lines():
    """All lines of the table."""
    return [line for theme in THEMES for line in theme.lines]


def show(parts):
    """Runs lines whose keys have one of `parts` in them, and prints how each ended."""
    wanted = [line for line in lines() if not parts or any(part in line.key for part in parts)]
    bad, began = 0, time.monotonic()
    for line, said in run(wanted):
        bad += bool(said)
        print(f"{time.monotonic() - began:5.1f} {line.key}\t{said or 'ok'}", flush=True)
    print(f"{len(wanted)} lines, {bad} not as they say, {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--show"]:
        show(sys.argv[2:])
    else:
        for line, said in run(line for line in lines() if line.key in sys.argv[1:]):
            print(json.dumps([line.key, said]), flush=True)

"""The console script `offloadd`: the daemon's program, which the wheel brings."""

import os
import pathlib
import sys


def main() -> None:
    """Becomes the program."""
    program = pathlib.Path(__file__).with_name("offloadd")
    os.execv(program, [str(program), *sys.argv[1:]])

"""What a person reads while a run goes on: lines on stderr."""

import sys


def say(text: str) -> None:
    """Writes a line to stderr."""
    sys.stderr.write(f"offloadd: {text}\n")
    sys.stderr.flush()

"""Lines on stderr for the person who started the script."""

import sys


def say(text: str) -> None:
    """Writes a line to stderr."""
    sys.stderr.write(f"offloadd: {text}\n")
    sys.stderr.flush()

"""Lines on stderr for the person who started the script, and sizes in them."""

import os
import sys
from typing import Optional


def say(text: str, rank: Optional[int] = None) -> None:
    """Writes a line to stderr, on the first of several ranks only unless it is about `rank`."""
    if rank is None and os.environ.get("RANK", "0") != "0":
        return
    sys.stderr.write(f"offloadd: {'' if rank is None else f'rank {rank}: '}{text}\n")
    sys.stderr.flush()


def bytes_text(count: float) -> str:
    """A number of bytes for people, with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"

"""Lines on stderr for the person who started the script."""

import os
import sys
from typing import Optional


def say(text: str, rank: Optional[int] = None) -> None:
    """Writes a line to stderr, on the first of several ranks only unless it is about `rank`."""
    if rank is None and os.environ.get("RANK", "0") != "0":
        return
    sys.stderr.write(f"offloadd: {'' if rank is None else f'rank {rank}: '}{text}\n")
    sys.stderr.flush()

"""Lines about steps on stderr: seconds a step, bottleneck, I/O efficiency, bytes, waits."""

from __future__ import annotations

import time
from typing import Any, Optional

from ._console import say

# Seconds between two lines where `steps_per_print` does not say how many steps.
LINE_EVERY_S = 10.0


class Progress:
    """Sums up steps between two lines."""

    def __init__(self, steps_per_print: Optional[int]) -> None:
        self._every = steps_per_print
        self._said_at = time.monotonic()
        self._steps = 0
        self._sums = dict.fromkeys(("step_s", "bound_s", "waited_s", "read_bytes", "written_bytes"), 0.0)

    def step(self, number: int, facts: Any) -> None:
        """One more step has ended."""
        self._steps += 1
        for name in self._sums:
            self._sums[name] += getattr(facts, name)
        now = time.monotonic()
        due = number % self._every == 0 if self._every else now - self._said_at >= LINE_EVERY_S
        if due:
            say(self._line(number, facts.wall))
            self._said_at, self._steps = now, 0
            self._sums = dict.fromkeys(self._sums, 0.0)

    def _line(self, number: int, wall: str) -> str:
        sums, seconds = self._sums, max(self._sums["step_s"], 1e-9)
        line = f"step {number}  {seconds / self._steps:.3g} s/step  bottleneck: {wall}"
        if sums["read_bytes"] + sums["written_bytes"]:
            line += f"  read {sums['read_bytes'] / seconds / 1e9:.2f} GB/s  written {sums['written_bytes'] / seconds / 1e9:.2f} GB/s"
        line += f"  I/O efficiency {100 * sums['bound_s'] / seconds:.0f} %"
        return line + f"  waited {100 * sums['waited_s'] / seconds:.0f} %"

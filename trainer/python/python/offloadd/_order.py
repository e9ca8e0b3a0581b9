"""The order in which a pass uses units: recorded in the first pass of its kind, announced to the engine in the next ones."""

from __future__ import annotations

import itertools
from typing import Callable, Hashable, Sequence

from ._console import say

Op = tuple[bool, int]  # whether gradients come, and the unit

# Passes of one kind that differ from the order before an order is said not to settle.
UNSETTLED_MAX = 6


class Order:
    """Says what comes next, and corrects itself when something else comes.

    `announce` takes the rest of a pass; it is called once a pass as long as passes of a kind repeat. An operation found later in
    the order skips to it; an unknown one is put before the rest. Two equal deviations in a row become the order.
    """

    def __init__(self, announce: Callable[[list[Op]], None], tells: bool = True) -> None:
        self._announce = announce
        self._known: dict[Hashable, list[Op]] = {}
        self._candidates: dict[Hashable, list[Op]] = {}
        self._kind: Hashable = None
        self._seen: list[Op] = []
        self._rest: list[Op] = []
        self._at = 0
        # Operations outside of passes that were announced and have not come.
        self._coming = 0
        self._unsettled = 0
        self._told = not tells
        self.deviations = 0
        # Seconds that operations took that were not announced in time.
        self.waited_s = 0.0

    def begin(self, kind: Hashable) -> None:
        """A pass of `kind` begins; the one before has ended."""
        self._learn()
        self._kind, self._seen, self._at, self._coming = kind, [], 0, 0
        self._rest = self._known.get(kind, [])
        if self._rest:
            self._announce(self._rest)

    def next(self, op: Op) -> bool:
        """`op` is about to be done. Returns whether it is one that the order of its kind of pass did not foresee."""
        self._seen.append(op)
        if self._at < len(self._rest) and self._rest[self._at] == op:
            self._at += 1
            return False
        left = self._rest[self._at :]
        self._rest = left[left.index(op) :] if op in left else [op, *left]
        self._at = 1
        self._announce(self._rest)
        deviates = self._kind in self._known
        self.deviations += deviates
        return deviates

    def gathers(self, unit: int, count: int, group_of: Sequence[int], repeats: bool = False) -> list[int]:
        """The units that come after `unit`, as far as the order is known: the rest of its group and the next `count` groups. Where the
        pass `repeats`, those of the next one follow."""
        if count == 0:
            return []
        found, came = [], {unit}
        # Not a copy, at each unit, of what is left.
        rest = (self._rest[at] for at in range(self._at, len(self._rest)))
        for gradients, coming in itertools.chain(rest, self._known.get(self._kind, []) if repeats else []):
            if gradients:
                continue
            # A unit that comes again does so for another use of its module.
            if group_of[coming] != group_of[next(iter(came))] or coming in came:
                if count == 0:
                    break
                count, came = count - 1, set()
            came.add(coming)
            found.append(coming)
        return found

    def outside(self, op: Op) -> None:
        """`op` is done between passes, or by something no pass repeats: it is not recorded."""
        if self._coming and self._rest[self._at : self._at + 1] == [op]:
            self._at += 1
            self._coming -= 1
            return
        self._announce([op, *self._rest[self._at :]])
        self._rest, self._at = [op, *self._rest[self._at :]], 1

    def outside_all(self, ops: list[Op]) -> None:
        """`ops` follow, each with a call of `outside`."""
        self._rest, self._at, self._coming = [*ops, *self._rest[self._at :]], 0, len(ops)
        if ops:
            self._announce(self._rest)

    def forget_rest(self) -> None:
        """Forgets the rest of the announced order, as after a step's end."""
        self._rest, self._at, self._coming = [], 0, 0

    def _learn(self) -> None:
        if not self._seen:
            return
        if self._seen == self._known.get(self._kind):
            self._unsettled = 0
            return
        self._warn_unsettled()
        if self._kind not in self._known or self._candidates.get(self._kind) == self._seen:
            self._known[self._kind] = self._seen
        self._candidates[self._kind] = self._seen

    def _warn_unsettled(self) -> None:
        """Says once that the order does not settle."""
        self._unsettled += self._kind in self._known
        if self._unsettled < UNSETTLED_MAX or self._told:
            return
        self._told = True
        say(
            f"each of the last {self._unsettled} passes used the model's units in another order than the passes before; "
            f"{self.deviations} units could not be read ahead, which cost {self.waited_s:.3g} s so far. Losses and weights are the "
            "same. To avoid the waits, use the units in one order, or raise offloadd.resident_fraction"
        )

"""The order in which a pass uses units: recorded in the first pass of its kind, announced to the engine in the next ones."""

from __future__ import annotations

from typing import Callable, Hashable

Op = tuple[bool, int]  # whether gradients come, and the unit


class Order:
    """Says what comes next, and corrects itself when something else comes.

    `announce` takes the rest of a pass; it is called once a pass as long as passes of a kind repeat. An operation found later in
    the order skips to it; an unknown one is put before the rest. Two equal deviations in a row become the order.
    """

    def __init__(self, announce: Callable[[list[Op]], None]) -> None:
        self._announce = announce
        self._known: dict[Hashable, list[Op]] = {}
        self._candidates: dict[Hashable, list[Op]] = {}
        self._kind: Hashable = None
        self._seen: list[Op] = []
        self._rest: list[Op] = []
        self._at = 0
        self.deviations = 0

    def begin(self, kind: Hashable) -> None:
        """A pass of `kind` begins; the one before has ended."""
        self._learn()
        self._kind, self._seen, self._at = kind, [], 0
        self._rest = self._known.get(kind, [])
        if self._rest:
            self._announce(self._rest)

    def next(self, op: Op) -> None:
        """`op` is about to be done."""
        self._seen.append(op)
        if self._at < len(self._rest) and self._rest[self._at] == op:
            self._at += 1
            return
        left = self._rest[self._at :]
        self._rest = left[left.index(op) :] if op in left else [op, *left]
        self._at = 1
        self._announce(self._rest)
        if self._kind in self._known:
            self.deviations += 1

    def outside(self, op: Op) -> None:
        """`op` is done between passes, or by something no pass repeats: it is not recorded."""
        self._announce([op, *self._rest[self._at :]])
        self._rest, self._at = [op, *self._rest[self._at :]], 1

    def forget_rest(self) -> None:
        """What was announced no longer holds, as after a step's end."""
        self._rest, self._at = [], 0

    def _learn(self) -> None:
        if not self._seen or self._seen == self._known.get(self._kind):
            return
        if self._kind not in self._known or self._candidates.get(self._kind) == self._seen:
            self._known[self._kind] = self._seen
        self._candidates[self._kind] = self._seen

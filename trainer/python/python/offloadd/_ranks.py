"""What the ranks of a run agree on: work that succeeds on all of them or fails on all, flags, sums, what each tells the others."""

from __future__ import annotations

import array
import functools
import hashlib
import json
import operator
from typing import Any, Iterable

from ._errors import Error
from ._meetings import Meetings
from ._nodes import Topology
from ._transfers import Transfers
from ._units import Unit


class Ranks:
    """The ranks of a run: their `meetings`, the tensors that they exchange (`transfers`), and here the values."""

    def __init__(self) -> None:
        self.meetings = Meetings()
        self.transfers = Transfers(self.meetings)
        self.rank, self.count = self.meetings.rank, self.meetings.count
        self.meet, self.on_all_ranks = self.meetings.meet, self.meetings.on_all_ranks

    def open(self, params: int) -> None:
        """Meets the others for the first time; `params` bounds what they exchange."""
        self.meetings.open(params, self.transfers.end)

    @property
    def topology(self) -> Topology:
        return self.meetings.topology

    @property
    def first(self) -> bool:
        """Whether this rank writes reports, checkpoints and weights."""
        return self.rank == 0

    @property
    def first_of_node(self) -> bool:
        """Whether this rank manages its node's directory and daemon."""
        return self.meetings.topology.first_of_node

    def first_bytes(self, what: str, data: bytes) -> bytes:
        """The first rank's data, on all ranks."""
        return self.meet(what, data)[0]

    def by_node(self, what: str, value: Any) -> list[Any]:
        """What the first rank of each node tells, in the order of nodes: values of JSON. All ranks must call it."""
        told = self.meet(what, json.dumps(value).encode())
        return [json.loads(told[first]) for first in self.topology.first_ranks]

    def first_of_node_bytes(self, what: str, data: bytes) -> bytes:
        """The data of the first rank of this rank's node."""
        return self.meet(what, data)[self.topology.local.start]

    def compare(self, described: str, machine: str) -> None:
        """Refuses ranks whose model and settings are described otherwise than the first rank's, or whose machine is described otherwise
        than by the first rank of its node."""
        told = self.meet("compare models and settings", b"".join(hashlib.sha256(text.encode()).digest() for text in (described, machine)))
        for rank, digests in enumerate(told):
            first = self.topology.ranks_of(self.topology.node_of(rank)).start
            if digests[:32] == told[0][:32] and digests[32:] == told[first][32:]:
                continue
            than = 0 if digests[:32] != told[0][:32] else first
            self.meetings.end(f"rank {rank} has another model or other settings")
            raise Error(
                f"rank {rank} has another model or other settings than rank {than}: parameters, run_dir and the configuration must be the "
                "same on all ranks; only nvme_path, socket, program, staging_bytes, update_threads and gradients may differ between nodes"
            )

    def any(self, what: str, flags: bytes) -> bytes:
        """Flags that are set on any rank: bitwise or."""
        told = self.meet(what, flags)
        return flags if len(told) == 1 else bytes(functools.reduce(operator.or_, of_ranks) for of_ranks in zip(*told))

    def sum(self, what: str, values: list[float]) -> list[float]:
        """Sums over the ranks, in their order: the same bits on all of them."""
        if self.count == 1:
            return values
        told = [array.array("d", data) for data in self.meet(what, array.array("d", values).tobytes())]
        return [sum(of_ranks) for of_ranks in zip(*told)]

    def total(self, what: str, value: int) -> int:
        """The sum of whole numbers over the ranks, modulo 2^64."""
        return sum(int.from_bytes(data, "little") for data in self.meet(what, value.to_bytes(8, "little"))) % (1 << 64)

    def divide(self, units: Iterable[Unit], shard_elems: Iterable[int]) -> None:
        """Gives every unit room for equal parts of all ranks."""
        for unit, elems in zip(units, shard_elems):
            unit.shard_elems = elems
            unit.room_elems = elems * self.count

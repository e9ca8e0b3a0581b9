"""The nodes of a run: which ranks are where, and what nodes tell each other through torch.distributed's store.

    meetings    the first rank of a node tells what its ranks bring, once all of them have come
    states      each rank tells twice a second where it is; one that is silent for too long, and not connected with rank 0, is gone
    commits     each rank tells which generation its node has prepared

Each has a client of the store of its own: a call blocks others on the same client, and for good where the network fails. The rules by
which ranks make up nodes, and nodes agree on a commit, are the trainer's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Optional

from . import _offloadd
from ._connections import Connections

# Time between two states of a rank, and time without one after which the rank is gone. A rank that is connected has longer: as long as an
# operation of torch.distributed may take by default.
_ROUND_S, _SILENT_S, _SILENT_CONNECTED_S = 0.5, 5.0, 1800.0

# Longest time for which a rank waits until rank 0 knows who is connected, before it looks itself whether rank 0 is there.
_CONNECTED_S = 20.0

# Longest pause between two looks for messages of other nodes.
_PAUSE_S = 0.01

# Time in which the other ranks leave the store of the first one, which may end with it; and where they do not all leave.
_LEAVE_S, _LEAVE_FAILED_S = 5.0, 2.0

_LENGTHS = struct.Struct("<qq")


@dataclass(frozen=True)
class Topology:
    """The place of a rank among the ranks and nodes of its run."""

    rank: int = 0
    count: int = 1
    # The first rank of each node.
    first_ranks: tuple[int, ...] = (0,)
    # The name of each rank's machine.
    hosts: tuple[str, ...] = ("",)

    @property
    def nodes(self) -> int:
        return len(self.first_ranks)

    @property
    def node(self) -> int:
        return self.node_of(self.rank)

    def node_of(self, rank: int) -> int:
        return sum(first <= rank for first in self.first_ranks) - 1

    def ranks_of(self, node: int) -> range:
        return range(*(*self.first_ranks, self.count)[node : node + 2])

    @property
    def local(self) -> range:
        """The ranks of this node."""
        return self.ranks_of(self.node)

    @property
    def first_of_node(self) -> bool:
        return self.rank in self.first_ranks


def guess(rank: int, count: int) -> Topology:
    """The topology of a run that is only planned: nodes of as many ranks as this one has."""
    local = _local()
    size = local[1] if local is not None and count % local[1] == 0 else count
    return Topology(rank, count, tuple(range(0, count, size)), ("",) * count)


def find(store: Any, key: str, rank: int, count: int) -> Topology:
    """Asks all ranks where they are. The launcher's variables count; without them, ranks on one machine are a node."""
    store.set(f"{key}/place/{rank}", json.dumps([_local(), _machine(), socket.gethostname()]))
    told = [json.loads(store.get(f"{key}/place/{one}")) for one in range(count)]
    local_numbers = [local for local, _, _ in told]
    if None in local_numbers:
        machines = [machine for _, machine, _ in told]
        local_numbers = [[machines[:one].count(machine), machines.count(machine)] for one, machine in enumerate(machines)]
    return Topology(rank, count, tuple(_offloadd.first_ranks(local_numbers)), tuple(host for _, _, host in told))


def _local() -> Optional[list[int]]:
    """This process's number on its node and the number of processes there, as torchrun tells them."""
    told = [os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    return [int(one) for one in told] if all(one.isdigit() and len(one) < 10 for one in told) and told[1] != "0" else None


def _machine() -> str:
    """Tells a machine from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Link:
    """The connection of a rank to those of other nodes."""

    def __init__(self, store: Any, key: str, topology: Topology) -> None:
        self._key, self._topology = key, topology
        # Its server may end with it, and a script may end its process group before the run.
        self._store = store
        self._meetings, self._states, self._commits = (store.clone() for _ in range(3))
        self._others = [rank for rank in range(topology.count) if rank not in topology.local]
        # Rank 0 tells which others are connected.
        self._heeded = sorted({*self._others, 0} - {topology.rank})
        self._connections = Connections(store, key, topology.rank, set(range(topology.count)) - set(topology.ranks_of(0)))
        self._sent = 0
        # What this rank tells the others of itself. Several threads update it.
        self.state: dict[str, Any] = {}
        self._told: dict[int, dict[str, Any]] = {rank: {} for rank in self._heeded}
        # The time that `tick` counts, when the store and each rank were heard last, and rounds so far.
        self._now = self._heard = 0.0
        self._seen = dict.fromkeys(self._heeded, 0.0)
        self._rounds, self._lost = 0, False
        self._leaves = threading.Event()
        self.exchange = _offloadd.Exchange()
        self._threads = [threading.Thread(target=work, name="offloadd nodes", daemon=True) for work in (self._publish_states, self._commit)]
        self._tell_once()

    def start(self) -> None:
        """Begins to tell, when all ranks have made their link. Returns when this rank knows which others are connected, and rank 0 that this one
        is: from then on it may keep the interpreter's lock, though no thread of its own has run."""
        key = f"{self._key}/connected"
        if self._topology.rank > 0:
            # After an error, which may be rank 0's end, the threads find out and name it.
            with contextlib.suppress(RuntimeError):
                self._store.wait([key], timedelta(seconds=_CONNECTED_S))
        self._connections.complete()
        if self._topology.rank == 0:
            self._note_connected()
            self._tell_once()
            self._store.set(key, "")
        self._read_states()
        for thread in self._threads:
            thread.start()

    def close(self, in_order: bool) -> None:
        """Tells for the last time. The first rank waits for the others to leave its store. `in_order`: all are about to."""
        self.exchange.fail("the run has ended on this rank")
        self._leaves.set()
        for thread in self._threads:
            # One that waits for a node that is gone is left behind.
            thread.join(_LEAVE_S if in_order else 2 * _ROUND_S)
        if not self._lost and not self._threads[0].is_alive():
            with contextlib.suppress(RuntimeError):
                self._leave(_LEAVE_S if in_order else _LEAVE_FAILED_S)
        self._connections.close()

    def _leave(self, within_s: float) -> None:
        if self._topology.rank > 0:
            self._states.set(f"{self._key}/left/{self._topology.rank}", "")
            return
        until = time.monotonic() + within_s
        left = [f"{self._key}/left/{rank}" for rank in range(1, self._topology.count) if rank not in self._silent()]
        while left and time.monotonic() < until and not self._states.check(left):
            time.sleep(_PAUSE_S)

    # Meetings

    def exchange_parts(self, number: int, parts: Callable[[], list[tuple[str, bytes]]]) -> Optional[dict[int, tuple[str, bytes]]]:
        """Tells the other nodes what the ranks of this one bring to meeting `number`. Returns what theirs bring, or None as long as one
        has not told it."""
        key = f"{self._key}/meeting"
        if self._sent < number:
            self._sent = number
            self._meetings.set(f"{key}/{self._topology.node}/{number}", b"".join(map(_packed, parts())))
            # All nodes have left the last meeting but one: they came to the last one.
            self._meetings.delete_key(f"{key}/{self._topology.node}/{number - 2}")
        nodes = [node for node in range(self._topology.nodes) if node != self._topology.node]
        keys = [f"{key}/{node}/{number}" for node in nodes]
        if not self._meetings.check(keys):
            return None
        brought = {}
        for node, data in zip(nodes, self._meetings.multi_get(keys)):
            brought.update(zip(self._topology.ranks_of(node), _unpacked(data)))
        return brought

    # States

    def tick(self, seconds: float) -> None:
        """Counts time in which this process ran: after a pause of its own it has not heard of others, and they are not gone."""
        self._now += min(seconds, 2 * _ROUND_S)

    def told(self, rank: int) -> dict[str, Any]:
        """The last state of a rank of another node."""
        return self._told.get(rank, {})

    def silent(self) -> str:
        """Which rank of another node has not been heard for too long; empty if none."""
        self._connections.check()
        self._note_connected()
        store = f"rank 0 on {self._topology.hosts[0]}, or the launcher that keeps torch.distributed's store for it,"
        if self._lost:
            return f"{store} is gone"
        if self._now - self._heard > _SILENT_S:
            return f"{store} has not answered for {_SILENT_S:.0f} s"
        silent = self._silent()
        if not silent:
            return ""
        rank = silent[0]
        since = f"has not answered for {self._heard - self._seen[rank]:.0f} s"
        return f"rank {rank} (node {self._topology.node_of(rank)}, {self._topology.hosts[rank]}) {since}"

    def _note_connected(self) -> None:
        if self._topology.rank == 0:
            self.state.update(connected=[*self._topology.local, *self._connections.ranks])

    def _silent(self) -> list[int]:
        return [rank for rank in self._others if self._heard - self._seen[rank] > self._allowed_s(rank) and not self._told[rank].get("left")]

    def _allowed_s(self, rank: int) -> float:
        """Time for which a rank of another node may be silent."""
        first = 0 in (rank, self._topology.rank)
        connected = self._connections.ranks if first else self._told[0].get("connected", ())
        return _SILENT_CONNECTED_S if rank in connected else _SILENT_S

    def _publish_states(self) -> None:
        while not self._leaves.wait(_ROUND_S):
            try:
                self._tell_once()
                self._read_states()
            except RuntimeError:
                # A connection that was closed stays closed.
                self._lost = True
                return
        self.state.update(left=True)
        with contextlib.suppress(RuntimeError):
            self._tell_once()

    def _tell_once(self) -> None:
        self._rounds += 1
        self._states.set(f"{self._key}/state/{self._topology.rank}", json.dumps({**self.state, "round": self._rounds}))

    def _read_states(self) -> None:
        now = self._now
        for rank, text in zip(self._heeded, self._states.multi_get([f"{self._key}/state/{rank}" for rank in self._heeded])):
            state = json.loads(text)
            if state["round"] != self._told[rank].get("round"):
                self._told[rank], self._seen[rank] = state, now
        self._heard = now

    # Commits

    def _commit(self) -> None:
        """Carries the messages of the swapper's commits."""
        number, ranks = 0, range(self._topology.count)
        while (own := self.exchange.next()) is not None:
            number += 1
            try:
                self._commits.set(f"{self._key}/commit/{self._topology.rank}/{number}", own)
                self._commits.delete_key(f"{self._key}/commit/{self._topology.rank}/{number - 2}")
                keys, pause = [f"{self._key}/commit/{rank}/{number}" for rank in ranks], 1e-3
                while not self._commits.check(keys):
                    if self._leaves.wait(pause):
                        return
                    pause = min(2 * pause, _PAUSE_S)
                self.exchange.answer(self._commits.multi_get(keys))
            except RuntimeError:
                self._lost = True
                return


def _packed(part: tuple[str, bytes]) -> bytes:
    what, data = part[0].encode(), part[1]
    return _LENGTHS.pack(len(what), len(data)) + what + data


def _unpacked(data: bytes) -> list[tuple[str, bytes]]:
    parts = []
    while data:
        whats, bytes_ = _LENGTHS.unpack_from(data)
        data = data[_LENGTHS.size :]
        parts.append((data[:whats].decode(errors="replace"), data[whats : whats + bytes_]))
        data = data[whats + bytes_ :]
    return parts

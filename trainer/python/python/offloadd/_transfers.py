"""Tensors that the ranks of a run exchange: parts of units, gradients, first values. Each exchange comes to a meeting first."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any, Callable, Iterable, Iterator, Optional

import torch
import torch.distributed as dist

from . import _nodes
from ._meetings import Meetings
from ._units import Unit

# All ranks begin an operation together, so this bounds a transfer.
_TRANSFER_MAX = datetime.timedelta(hours=1)


class Transfers:
    """Operations of torch.distributed in the run's own groups: the script's operations keep their order beside them."""

    def __init__(self, meetings: Meetings) -> None:
        self._meetings, self._rank, self._count, self._meet = meetings, meetings.rank, meetings.count, meetings.meet
        self._groups: dict[str, Any] = {}
        # This rank's parts of the copies that the ranks of its node keep of units in host memory, by unit; None if they keep none.
        self.copies: Optional[dict[int, torch.Tensor]] = None

    def gather(self, unit: Unit, when: Callable[[], str], changed: bool = True) -> None:
        """Brings the other ranks' parts of a unit of which this rank's lies in its place. Where nodes keep copies, a unit that has not
        `changed` since it was last brought comes from the ranks of this node alone."""
        if self._count == 1:
            return
        self._meet(f"bring {unit.name} ({when()})")
        whole, copies = _bytes_of(unit.flat.untyped_storage(), unit.bytes), self.copies
        if copies is not None and not changed and unit.index in copies:
            copied = self._copied(whole)
            copied.copy_(copies[unit.index], non_blocking=True)
            with self.failures_blamed():
                dist.all_gather_into_tensor(whole, copied, group=self._group(whole, of_node=True))
            return
        own = unit.bytes // self._count
        with self.failures_blamed():
            dist.all_gather_into_tensor(whole, whole[self._rank * own : (self._rank + 1) * own], group=self._group(whole))
        if copies is not None:
            copied = self._copied(whole)
            if unit.index not in copies:
                copies[unit.index] = torch.empty(len(copied), dtype=torch.uint8, pin_memory=whole.is_cuda)
            copies[unit.index].copy_(copied, non_blocking=True)

    def complete(self, what: str, whole: torch.Tensor) -> None:
        """Brings the other ranks' parts of a tensor with a number for each element of a unit, of which this rank's lies in its place."""
        if self._count == 1:
            return
        self._meet(what)
        own = len(whole) // self._count
        with self.failures_blamed():
            dist.all_gather_into_tensor(whole, whole[self._rank * own : (self._rank + 1) * own], group=self._group(whole))

    def _copied(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a unit's bytes that this rank keeps of the node's copy."""
        local = self._meetings.topology.local
        part = len(whole) // len(local)
        return whole[(self._rank - local.start) * part :][:part]

    def run_collective(self, what: str, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of operations of torch.distributed that `call` makes in a group of the script's."""
        self._meet(what)
        with self.failures_blamed():
            return call()

    def reduce(self, unit: Unit, gradients: torch.Tensor) -> None:
        """Makes this rank's part of a unit's gradients their mean over all ranks."""
        if self._count == 1:
            return
        self._meet(f"add up the gradients of {unit.name}")
        # Before the sum, which might leave the range of 16 bits.
        gradients.div_(self._count)
        own = gradients[self._rank * unit.shard_elems : (self._rank + 1) * unit.shard_elems]
        with self.failures_blamed():
            dist.reduce_scatter_tensor(own, gradients, group=self._group(gradients))

    def broadcast(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Gives tensors the first rank's values."""
        for tensor in tensors if self._count > 1 else ():
            if tensor.numel() == 0:
                continue
            self._meet(what)
            flat = tensor.detach().contiguous()
            with self.failures_blamed(), torch.no_grad():
                dist.broadcast(flat.reshape(-1).view(torch.uint8), src=0, group=self._group(flat))
                if flat.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(flat)

    def open_nodes(self) -> None:
        """Prepares `gather_nodes`. All ranks must call it."""
        if "nodes" not in self._groups:
            self._meet("open the group of the nodes")
            self._groups["nodes"] = dist.new_group(list(self._meetings.topology.first_ranks), backend="gloo", timeout=_TRANSFER_MAX)

    def gather_nodes(self, own: bytes) -> list[bytes]:
        """The bytes of all nodes, of equal length. The first ranks of the nodes call it."""
        size, nodes = len(own), self._meetings.topology.nodes
        if not size:
            return [own] * nodes
        whole = bytearray(size * nodes)
        with self.failures_blamed():
            given, brought = (torch.frombuffer(data, dtype=torch.uint8) for data in (bytearray(own), whole))
            dist.all_gather_into_tensor(brought, given, group=self._groups["nodes"])
        return [bytes(memoryview(whole)[size * node : size * (node + 1)]) for node in range(nodes)]

    def _group(self, tensor: torch.Tensor, of_node: bool = False) -> Any:
        """The run's own group for tensors of a device, of all ranks or those of this node: the script's operations keep their order
        beside it."""
        key = tensor.device.type + " of the node" * of_node
        if key not in self._groups:
            backend = "gloo" if tensor.device.type == "cpu" else "nccl"
            topology = self._meetings.topology
            # All ranks must make the groups of all nodes.
            ranks = [list(topology.ranks_of(node)) for node in range(topology.nodes)] if of_node else [None]
            groups = [dist.new_group(of_one, backend=backend, timeout=_TRANSFER_MAX) for of_one in ranks]
            self._groups[key] = groups[topology.node if of_node else 0]
        return self._groups[key]

    @contextlib.contextmanager
    def failures_blamed(self) -> Iterator[None]:
        """An operation of torch.distributed, whose failure is another rank's end."""
        try:
            yield
        except RuntimeError as error:
            self._meetings.raise_own()
            blamed = self._meetings.blame(error, 2 + (_nodes._SILENT_S if self._meetings.link is not None else 0))
            if blamed is error:
                raise
            raise blamed from error

    def end(self) -> None:
        """Ends the run's own groups with their threads. Such a thread drops tensors after the operation has returned, for which it takes the
        interpreter's lock: it must not do that while the interpreter is taken down."""
        for group in self._groups.values():
            # A script may have ended all groups before.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)
        self._groups.clear()


def _bytes_of(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,))

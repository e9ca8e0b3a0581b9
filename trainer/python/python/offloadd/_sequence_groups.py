"""Ranks that have parts of one sequence: their groups, and the exchange around attention.

hidden states    [batch, all heads, part of the sequence]
exchange         all-to-all
attention        [batch, part of the heads, whole sequence]
exchange back    all-to-all
"""

from __future__ import annotations

import contextlib
import datetime
from typing import Any, Callable, Iterator, Optional

import torch
import torch.distributed as dist

from ._errors import Error

# As for the transfers of a run: all ranks begin an operation together.
_TIMEOUT = datetime.timedelta(hours=1)

# The label of a token that a loss does not count.
IGNORED = -100


class SequenceGroup:
    """The `size` neighbouring ranks that have the parts of one sequence, in the order of ranks; `rank` is this one's place among them."""

    def __init__(self, size: int) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if size < 2 or world % size:
            raise Error(f"sequence_parallel_size = {size}: {world} ranks are not a multiple of it; it must be at least 2 and divide the number of ranks")
        self.size, self.rank = size, dist.get_rank() % size
        self.data_ranks = world // size
        # The last two for tensors of the host. All ranks make the groups of all.
        number = dist.get_rank() // size
        made = [(dist.new_group(ranks, timeout=_TIMEOUT), dist.new_group(ranks, backend="gloo", timeout=_TIMEOUT)) for ranks in _parts(world, size)]
        self.group, self.host_group = made[number]
        # All ranks.
        self.world = dist.group.WORLD
        # Names another rank's end where an operation fails, while a run is open.
        self.blamed: Callable[[], Any] = contextlib.nullcontext

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks of the sequence, of one shape and type, on this one's device."""
        tensor = tensor.contiguous()
        told = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.blamed():
            dist.all_gather(told, tensor, group=self.host_group if tensor.device.type == "cpu" else self.group)
        return told

    def gather_objects(self, value: Any) -> list[Any]:
        """Plain values of all ranks of the sequence."""
        told: list[Any] = [None] * self.size
        with self.blamed():
            dist.all_gather_object(told, value, group=self.host_group)
        return told

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sends part r of the first dimension to rank r of the sequence."""
        sent = tensor.contiguous()
        brought = torch.empty_like(sent)
        # As bytes: every backend knows them.
        with self.blamed():
            dist.all_to_all_single(_as_bytes(brought), _as_bytes(sent), group=self.host_group if sent.device.type == "cpu" else self.group)
        return brought

    def scatter(self, parts: Optional[list[torch.Tensor]], like: torch.Tensor, source: int) -> torch.Tensor:
        """This rank's one of the `parts`, in host memory, that rank `source` of the sequence has; it is `like` this one."""
        brought = torch.empty_like(like)
        sent = None if parts is None else [_as_bytes(part) for part in parts]
        with self.blamed():
            dist.scatter(_as_bytes(brought), sent, src=dist.get_global_rank(self.host_group, source), group=self.host_group)
        return brought


def _parts(world: int, size: int) -> Iterator[list[int]]:
    return (list(range(first, first + size)) for first in range(0, world, size))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


_group: Optional[SequenceGroup] = None


def group_of(size: int) -> SequenceGroup:
    """The group of this rank. A process has sequences on one number of ranks. All ranks must call it."""
    global _group
    if _group is not None and _is_alive(_group) and _group.size != size:
        raise Error(f"sequence_parallel_size = {size}: sequences of this process lie on {_group.size} ranks already")
    if _group is None or not _is_alive(_group):
        _group = SequenceGroup(size)
    return _group


def current() -> Optional[SequenceGroup]:
    """The group of this rank, if one was made."""
    return _group if _group is not None and _is_alive(_group) else None


def _is_alive(group: SequenceGroup) -> bool:
    """Whether torch's groups are those of before: a script may have ended them."""
    return dist.is_initialized() and group.world is dist.group.WORLD


def the_group() -> SequenceGroup:
    """The group of this rank. Raises `Error` where none was made."""
    found = current()
    if found is None:
        raise Error('no model is prepared with "sequence_parallel_size" in its configuration: call offloadd.prepare first')
    return found


class _Exchange(torch.autograd.Function):
    """All-to-all of the first dimension, whose gradient is the same."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        return group.all_to_all(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Optional[torch.Tensor], None]:
        return ctx.group.all_to_all(grad), None


def heads_for_tokens(states: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """A part of the heads with the whole sequence, of all heads with a part of it: [batch, heads, tokens, size]."""
    batch, heads, tokens, size = states.shape
    by_rank = states.reshape(batch, group.size, heads // group.size, tokens, size).movedim(1, 0)
    brought = _Exchange.apply(by_rank, group)
    return brought.movedim(0, 2).reshape(batch, heads // group.size, group.size * tokens, size)


def tokens_for_heads(states: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """All heads with a part of the sequence, of a part of the heads with the whole: [batch, tokens, heads, size], as attention returns it."""
    batch, tokens, heads, size = states.shape
    by_rank = states.reshape(batch, group.size, tokens // group.size, heads, size).movedim(1, 0)
    brought = _Exchange.apply(by_rank, group)
    return brought.movedim(0, 2).reshape(batch, tokens // group.size, group.size * heads, size)

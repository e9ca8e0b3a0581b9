"""Inputs of checkpointed blocks on drives: scratch tiles of the run's session, which end with it and are in no commit.

    forward     a tensor  ──▶  slots, pinned  ──▶  tiles          a thread copies and writes; a forward waits until its inputs are in slots
    backward    a tensor  ◀──  slots, pinned  ◀──  tiles          one block ahead

The area has a fixed size. Tensors of any length take whole tiles, so that lengths that change leave no gaps.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Optional

import torch

from . import _offloadd
from ._copies import Form
from ._errors import Error, NoSpace
from ._meetings import Meetings
from ._memory import GpuDevice


class TileBuffer:
    """Tiles of one tensor."""

    def __init__(self, tiles: list[int], nbytes: int) -> None:
        self.tiles, self.nbytes = tiles, nbytes


class TilePool:
    """Tiles that hold nothing."""

    def __init__(self, tile_bytes: int, count: int) -> None:
        self._tile_bytes, self._count = tile_bytes, count
        # The lowest are used first.
        self._free = list(reversed(range(count)))

    @property
    def nbytes(self) -> int:
        """Bytes of tiles that are lent."""
        return (self._count - len(self._free)) * self._tile_bytes

    def lend(self, size: int) -> TileBuffer:
        """Lends tiles for `size` bytes. Raises `NoSpace` where the area is full."""
        count = -(-size // self._tile_bytes)
        if count > len(self._free):
            raise NoSpace(
                f"offloadd.activations_bytes: the space on drives for inputs of blocks is full: {self.nbytes} of {self._count * self._tile_bytes} bytes are "
                f"in use, and {size} more are needed: set it to at least {self.nbytes + count * self._tile_bytes} (python -m offloadd plan --seq-len TOKENS "
                "--activations nvme computes what a micro-batch takes), or take shorter sequences"
            )
        return TileBuffer([self._free.pop() for _ in range(count)], count * self._tile_bytes)

    def give(self, buffer: TileBuffer) -> None:
        """Takes tiles back, which copies may still be using: those of one tile are made in order."""
        self._free += reversed(buffer.tiles)

    def close(self) -> None:
        """Nothing: the tiles end with the session."""


class _TileCopy:
    """A copy between a tensor and tiles."""

    def __init__(self, copies: "TileCopies", number: int, stream: int) -> None:
        self._copies, self._number, self._stream = copies, number, stream

    def wait(self) -> None:
        self._copies.wait(self._number, self._stream)

    def forget(self) -> None:
        self._copies.forget(self._number, self._stream)


class TileCopies:
    """Copies between tensors and tiles."""

    def __init__(self, meetings: Meetings, gpu: Optional[GpuDevice]) -> None:
        self._gpu = gpu
        self.device = torch.device("cpu") if gpu is None else gpu.device
        # Tensors that are being copied, by the number of the copy: the thread does not see that a signal ends a wait. And copies that nobody waits
        # for, with the streams on which they began.
        self.under_way: dict[int, torch.Tensor] = {}
        self._forgotten: dict[int, int] = {}
        self.tiles: Any = meetings.watched(_offloadd.ActivationTiles.open(meetings.core, None if gpu is None else gpu.index))

    def pool(self) -> TilePool:
        """All tiles of the area."""
        return TilePool(self.tiles.tile_bytes, self.tiles.tile_count)

    def stream(self) -> int:
        """The stream on which PyTorch computes; 0 on a processor."""
        return 0 if self._gpu is None else self._gpu.stream()

    def leave(self, one: torch.Tensor, buffer: TileBuffer) -> _TileCopy:
        return self._begin(self.tiles.leave, one, buffer)

    def bring_back(self, buffer: TileBuffer, form: Form) -> tuple[torch.Tensor, _TileCopy]:
        one = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=self.device)
        return one, self._begin(self.tiles.bring_back, one, buffer)

    def _begin(self, begin: Callable[..., int], one: torch.Tensor, buffer: TileBuffer) -> _TileCopy:
        for number, stream in list(self._forgotten.items()):
            if self.tiles.has_result(number):
                del self._forgotten[number]
                with contextlib.suppress(Error):
                    self.wait(number, stream)
        stream = self.stream()
        number = begin(one.data_ptr(), one.nbytes, buffer.tiles, stream)
        self.under_way[number] = one
        return _TileCopy(self, number, stream)

    def wait(self, number: int, stream: int) -> None:
        """Waits for a copy that began on `stream`, unless somebody has."""
        if number not in self.under_way:
            return
        try:
            self.tiles.wait(number, [stream, self.stream()])
        except Error:
            del self.under_way[number]
            raise
        del self.under_way[number]

    def forget(self, number: int, stream: int) -> None:
        """Lets a copy that began on `stream` end by itself. What it reads and writes is kept as long."""
        if number in self.under_way:
            self._forgotten[number] = stream

    def close(self) -> None:
        """Ends the thread that copies, when it has."""
        self.tiles.close()
        self.under_way.clear()

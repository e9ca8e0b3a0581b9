"""The board of a run's ranks: a file in shared memory where each writes what it is about to do."""

from __future__ import annotations

import mmap
import os
import struct

from ._errors import Error

# A rank's part begins with numbers: meetings, its process, since when it waits in torch.distributed (0: it does not).
_HEAD = struct.Struct("<qqd")

# Then come texts, each behind its length: where it is in the script, why it has ended, what it is about to do.
_LENGTH = struct.Struct("<q")
_TEXT_BYTES = 1024
_WHERE, _ENDED, _SLOTS = 64, 64 + _TEXT_BYTES, 4096


class Board:
    """A part for each rank, with what it brings to the last two meetings.

    A rank comes to a meeting only when all have left the one before the last, so two slots are enough. Numbers are written last: who
    sees one finds the rest.
    """

    def __init__(self, file: int, ranks: int, data_bytes: int) -> None:
        self._data_bytes = data_bytes
        self._slot_bytes = -(-(_TEXT_BYTES + _LENGTH.size + data_bytes) // 4096) * 4096
        self._rank_bytes = _SLOTS + 2 * self._slot_bytes
        os.ftruncate(file, ranks * self._rank_bytes)
        self._map = mmap.mmap(file, ranks * self._rank_bytes)

    def arrive(self, rank: int, number: int, what: str, data: bytes) -> None:
        """A rank comes to meeting `number`."""
        if len(data) > self._data_bytes:
            raise Error(f"{what}: a rank tells the others {len(data)} bytes, but the limit is {self._data_bytes}")
        at = self._slot(rank, number)
        self._write(at, what.encode())
        _LENGTH.pack_into(self._map, at + _TEXT_BYTES, len(data))
        at += _TEXT_BYTES + _LENGTH.size
        self._map[at : at + len(data)] = data
        _LENGTH.pack_into(self._map, rank * self._rank_bytes, number)

    def number(self, rank: int) -> int:
        """The last meeting the rank came to."""
        return self._head(rank)[0]

    def what(self, rank: int, number: int) -> str:
        """The action that the rank was about to take at one of its last two meetings."""
        return self._read(self._slot(rank, number))

    def data(self, rank: int, number: int) -> bytes:
        """The value that the rank brought there."""
        at = self._slot(rank, number) + _TEXT_BYTES
        (length,) = _LENGTH.unpack_from(self._map, at)
        return self._map[at + _LENGTH.size : at + _LENGTH.size + length]

    def set_process(self, rank: int, process: int) -> None:
        _LENGTH.pack_into(self._map, rank * self._rank_bytes + 8, process)

    def process(self, rank: int) -> int:
        return self._head(rank)[1]

    def set_where(self, rank: int, where: str, waits_since: float) -> None:
        """The rank's position in its script, and the time since when it waits there in torch.distributed, or 0."""
        self._write(rank * self._rank_bytes + _WHERE, where.encode())
        struct.pack_into("<d", self._map, rank * self._rank_bytes + 16, waits_since)

    def where(self, rank: int) -> str:
        return self._read(rank * self._rank_bytes + _WHERE)

    def waits_since(self, rank: int) -> float:
        return self._head(rank)[2]

    def end(self, rank: int, why: str) -> None:
        """The rank comes to no meeting any more."""
        self._write(rank * self._rank_bytes + _ENDED, why.encode())

    def ended(self, rank: int) -> str:
        """Why the rank comes no more; empty while it does."""
        return self._read(rank * self._rank_bytes + _ENDED)

    def _head(self, rank: int) -> tuple[int, int, float]:
        return _HEAD.unpack_from(self._map, rank * self._rank_bytes)

    def _slot(self, rank: int, number: int) -> int:
        return rank * self._rank_bytes + _SLOTS + number % 2 * self._slot_bytes

    def _write(self, at: int, text: bytes) -> None:
        text = text[: _TEXT_BYTES - _LENGTH.size]
        self._map[at + _LENGTH.size : at + _LENGTH.size + len(text)] = text
        _LENGTH.pack_into(self._map, at, len(text))

    def _read(self, at: int) -> str:
        (length,) = _LENGTH.unpack_from(self._map, at)
        return self._map[at + _LENGTH.size : at + _LENGTH.size + length].decode(errors="replace")

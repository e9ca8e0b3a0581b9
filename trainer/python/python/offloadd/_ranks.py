"""The ranks of a run: processes of one node that train one model together, each with a part of every unit's tiles.

Before anything that needs all ranks they *meet*: each writes on the board what it is about to do, and continues when all have written the
same. Nobody therefore waits in a collective operation that another rank does not enter, and ranks whose order differs are told where
each of them is. A rank that has ended is noticed by the end of its process. One process is a group of one, which meets nobody.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import datetime
import functools
import hashlib
import operator
import os
import select
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional, TypeVar

import torch
import torch.distributed as dist

from ._board import Board
from ._console import say
from ._errors import Error, NotSupported, OrderDiffers, RankGone
from ._units import Unit

T = TypeVar("T")

# A rank that waits for others looks after so long whether they will come, and says after so long where all of them are.
_LOOK_S, _TELL_S = 0.1, 20.0

# A rank that has waited for so long in an operation of torch.distributed, while others wait here, waits for one of them.
_STUCK_S = 15.0

# Time between two notes of where a rank is, and time in which a script must notice that another rank is gone.
_NOTE_S, _GRACE_S = 1.0, 6.0

# All ranks begin an operation together, so this bounds a transfer.
_TRANSFER_MAX = datetime.timedelta(hours=1)

# Bytes that a rank can bring to a meeting beside 16 a parameter.
_DATA_BYTES = 64 << 10

# Runs of several ranks that this process has opened.
_opened = 0


class Ranks:
    """The processes of torch.distributed's default group, from the opening of a run to its end."""

    def __init__(self) -> None:
        self.rank, self.count = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.count = dist.get_rank(), dist.get_world_size()
        elif int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise Error(
                f"{os.environ['WORLD_SIZE']} processes were started (WORLD_SIZE), and torch.distributed is not initialized: call "
                "torch.distributed.init_process_group() before offloadd.prepare"
            )
        self._number = 0
        self._groups: dict[str, Any] = {}
        self._board: Optional[Board] = None
        # Whether this rank comes to no meeting any more, and why another one does not.
        self._ended = False
        self._gone = ""
        self._noticed = False
        self._watcher: Optional[threading.Thread] = None
        # The extension's object, whose waits for other ranks end when one is gone.
        self.core: Any = None

    @property
    def first(self) -> bool:
        """Whether this rank manages the run's directory and its daemon, and writes reports and weights."""
        return self.rank == 0

    def open(self, params: int) -> None:
        """Meets the others for the first time; `params` bounds what they exchange."""
        global _opened
        if self.count == 1:
            return
        store, key = dist.distributed_c10d._get_default_store(), f"offloadd/{_opened}"
        _opened += 1
        store.set(f"{key}/node/{self.rank}", f"{_node()} {socket.gethostname()}")
        nodes = [store.get(f"{key}/node/{rank}").decode() for rank in range(self.count)]
        other = next((rank for rank in range(self.count) if nodes[rank].split()[0] != nodes[0].split()[0]), None)
        if other is not None:
            raise NotSupported(
                f"rank 0 is on {nodes[0].split()[1]} and rank {other} on {nodes[other].split()[1]}: runs over several nodes are not "
                "built; start all processes on one node"
            )
        data_bytes = _DATA_BYTES + 16 * params
        failed = ""
        if self.first:
            file, path = tempfile.mkstemp(prefix="offloadd-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
            store.set(f"{key}/board", path)
        else:
            path = store.get(f"{key}/board").decode()
        try:
            file = file if self.first else os.open(path, os.O_RDWR)
            self._board = Board(file, self.count, data_bytes)
            os.close(file)
            self._board.set_process(self.rank, os.getpid())
        except OSError as error:
            failed = f"rank {self.rank} cannot use {path}: {error.strerror}; all ranks must see the same /dev/shm, as in one container"
        # Until then there are no process numbers to look at.
        store.set(f"{key}/open/{self.rank}", failed)
        opened = [store.get(f"{key}/open/{rank}").decode() for rank in range(self.count)]
        if self.first:
            os.unlink(path)
        if any(opened):
            raise NotSupported(next(filter(None, opened)))
        self._processes = {rank: self._board.process(rank) for rank in range(self.count) if rank != self.rank}
        self._main = threading.current_thread().ident
        self._woken, self._wake = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="offloadd ranks", daemon=True)
        self._watcher.start()
        # No thread of ours is left when the interpreter is taken down.
        atexit.register(self.close)

    # Meeting

    def meet(self, what: str, data: bytes = b"") -> list[bytes]:
        """Returns when all ranks are about to do `what`, with what each of them brings.

        Raises `OrderDiffers` if one is about to do something else, `RankGone` if one comes no more.
        """
        if self.count == 1:
            return [data]
        board, ranks = self._board, range(self.count)
        self._number += 1
        number, began, pause = self._number, time.monotonic(), 1e-5
        board.come(self.rank, number, what, data)
        looked = told = began
        while True:
            late = [rank for rank in ranks if board.number(rank) < number]
            if not late:
                break
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                self._look(what, late, now - began)
                if now - told > _TELL_S:
                    told = now
                    say(f"waiting for {_names(late)} since {now - began:.0f} s: {self._places()}", self.rank)
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        if any(board.what(rank, number) != what for rank in ranks):
            # Another rank may have left this meeting already. It is stopped at its next one.
            places = [f'rank {rank}: "{board.what(rank, number)}"' for rank in ranks]
            raise self._fail(OrderDiffers(f"the ranks are about to do different things: {'; '.join(places)}. {_SAME_ORDER}"))
        return [board.data(rank, number) for rank in ranks]

    def _look(self, what: str, late: list[int], waited_s: float) -> None:
        """Raises if one of the ranks that are late will not come."""
        if any(map(self._has_ended, late)):
            raise self._fail(RankGone(self.gone_text()))
        if waited_s > _STUCK_S and all(self._stuck(rank) for rank in late):
            raise self._fail(OrderDiffers(f"the ranks wait for each other: {self._places()}. {_SAME_ORDER}"))

    def _has_ended(self, rank: int) -> bool:
        if self._board.ended(rank):
            self._gone = f"rank {rank} has ended its run: {self._board.ended(rank)}"
        return bool(self._gone)

    def _fail(self, error: Error) -> Error:
        self._noticed = True
        self.end(str(error))
        return error

    def gone_text(self) -> str:
        """Which rank is gone, and what to do."""
        return f"{self._gone}; start the script again on all ranks: with device nvme it resumes after the last committed step"

    def _stuck(self, rank: int) -> bool:
        since = self._board.waits_since(rank)
        return 0 < since < time.monotonic() - _STUCK_S

    def _places(self) -> str:
        """The position of each rank."""
        board = self._board
        newest = max(board.number(rank) for rank in range(self.count))
        places = []
        for rank in range(self.count):
            number = board.number(rank)
            if number == newest:
                places.append(f'rank {rank} waits at "{board.what(rank, number)}"')
                continue
            passed = f'has passed "{board.what(rank, number)}"' if number else "has met no other rank yet"
            places.append(f"rank {rank} {passed}" + (f" and is at {board.where(rank)}" if board.where(rank) else ""))
        return "; ".join(places)

    def end(self, why: str) -> None:
        """Tells the others that this rank comes to no meeting any more."""
        if self._board is not None and not self._ended:
            self._board.end(self.rank, why)
        self._ended = True

    @property
    def broken(self) -> bool:
        """Whether this rank or another one comes to no meeting any more."""
        return self._ended or bool(self._gone)

    def close(self) -> None:
        """Ends this rank's part: it comes to no meeting any more. A second call and one in a fork do nothing."""
        self._ended = True
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            if watcher.is_alive():
                os.write(self._wake, b"\0")
            watcher.join()
            os.close(self._woken)
            os.close(self._wake)
            atexit.unregister(self.close)

    # Together

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Does `work` on every rank, which meets nobody. Fails on all of them if it fails on one."""
        result, failed = None, None
        try:
            result = work()
        except Error as error:
            failed = error
        told = self.meet(what, str(failed or "").encode()[:_DATA_BYTES])
        if failed is not None:
            self.end(str(failed))
            raise failed
        for rank, text in enumerate(told):
            if text:
                self.end(f"rank {rank} failed")
                raise Error(f"{what}: rank {rank} failed: {text.decode(errors='replace')}")
        return result

    def first_bytes(self, what: str, data: bytes) -> bytes:
        """The first rank's data, on all ranks."""
        return self.meet(what, data)[0]

    def compare(self, described: str) -> None:
        """Refuses ranks whose model and settings are described otherwise than the first rank's."""
        told = self.meet("compare models and settings", hashlib.sha256(described.encode()).digest())
        other = next((rank for rank, digest in enumerate(told) if digest != told[0]), None)
        if other is not None:
            self.end(f"rank {other} has another model or other settings")
            raise Error(
                f"rank {other} has another model or other settings than rank 0: parameters, run_dir and the configuration must be the same "
                "on all ranks"
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

    # Bulk data

    def gather(self, unit: Unit, when: Callable[[], str]) -> None:
        """Brings the other ranks' parts of a unit of which this rank's lies in its place."""
        if self.count == 1:
            return
        self.meet(f"bring {unit.name} ({when()})")
        whole = _bytes_of(unit.flat.untyped_storage(), unit.bytes)
        own = unit.bytes // self.count
        with self._transfer():
            dist.all_gather_into_tensor(whole, whole[self.rank * own : (self.rank + 1) * own], group=self._group(whole))

    def reduce(self, unit: Unit, gradients: torch.Tensor) -> None:
        """Makes this rank's part of a unit's gradients their mean over all ranks."""
        if self.count == 1:
            return
        self.meet(f"add up the gradients of {unit.name}")
        # Before the sum, which might leave the range of 16 bits.
        gradients.div_(self.count)
        own = gradients[self.rank * unit.shard_elems : (self.rank + 1) * unit.shard_elems]
        with self._transfer():
            dist.reduce_scatter_tensor(own, gradients, group=self._group(gradients))

    def broadcast(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Gives tensors the first rank's values."""
        for tensor in tensors if self.count > 1 else ():
            if tensor.numel() == 0:
                continue
            self.meet(what)
            flat = tensor.detach().contiguous()
            with self._transfer(), torch.no_grad():
                dist.broadcast(flat.reshape(-1).view(torch.uint8), src=0, group=self._group(flat))
                if flat.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(flat)

    def _group(self, tensor: torch.Tensor) -> Any:
        """The run's own group for tensors of a device: the script's operations keep their order beside it."""
        kind = tensor.device.type
        if kind not in self._groups:
            backend = "gloo" if kind == "cpu" else "nccl"
            self._groups[kind] = dist.new_group(backend=backend, timeout=_TRANSFER_MAX)
        return self._groups[kind]

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[None]:
        """An operation of torch.distributed, whose failure is another rank's end."""
        try:
            yield
        except RuntimeError as error:
            blamed = self.blame(error)
            if blamed is error:
                raise
            raise blamed from error

    # Ranks that are gone

    def watched(self, it: Any) -> Any:
        """An object of the extension, whose calls say so where they fail because another rank is gone."""
        return it if self.count == 1 else _Watched(self, it)

    def blame(self, error: Exception) -> Exception:
        """The error to raise where `error` may come from another rank's end."""
        until = time.monotonic() + 2
        while not any(map(self._has_ended, self._processes)):
            if time.monotonic() > until:
                return error
            time.sleep(0.01)
        return self._fail(RankGone(self.gone_text()))

    def _watch(self) -> None:
        """Notes where this rank is, and notices when another one is gone."""
        poll, ranks = select.poll(), {}
        for rank, process in self._processes.items():
            try:
                handle = os.pidfd_open(process)
            except ProcessLookupError:
                return self._lost(rank)
            ranks[handle] = rank
            poll.register(handle, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        place, since = None, 0.0
        while not self._ended:
            lost = [ranks[handle] for handle, _ in poll.poll(1000 * _NOTE_S) if handle in ranks]
            if lost:
                self._lost(lost[0])
                break
            at = _place(sys._current_frames().get(self._main))
            if at != place:
                place, since = at, time.monotonic()
            where, waits = (at[-1], at[-2]) if at else ("", False)
            self._board.set_where(self.rank, where, since if waits else 0.0)
        for handle in ranks:
            os.close(handle)

    def _lost(self, rank: int) -> None:
        if self._ended:
            return
        if not self._has_ended(rank):
            self._gone = f"rank {rank} (process {self._processes[rank]}) is gone"
        if self.core is not None:
            self.core.cancel(self.gone_text())
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until:
            if self._ended or self._noticed:
                return
            time.sleep(0.1)
        # It waits in what cannot be interrupted, as an operation on a GPU that the lost rank never joins.
        say(f"{self.gone_text()}. This rank ends now", self.rank)
        os._exit(1)


_SAME_ORDER = "Every rank must make the same calls in the same order: as many batches, generate with synced_gpus, weights read and saved on all ranks"


class _Watched:
    """Calls of an object of the extension; one that fails because another rank is gone says so."""

    def __init__(self, ranks: Ranks, it: Any) -> None:
        self._ranks, self._it = ranks, it

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._it, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            try:
                return found(*args)
            except Error as error:
                self._ranks._noticed = True
                raise self._ranks.blame(error) from None

        self.__dict__[name] = call
        return call


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _node() -> str:
    """Tells a node from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _bytes_of(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,))


_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep


def _place(frame: Any) -> Any:
    """The position of a thread: its innermost frame and instruction, whether that is in torch.distributed, and the script's line."""
    if frame is None:
        return None
    innermost, waits = (id(frame), frame.f_lasti), frame.f_code.co_filename.startswith(_DISTRIBUTED)
    while frame.f_back is not None and ("site-packages" in frame.f_code.co_filename or frame.f_code.co_filename.startswith(_HERE)):
        frame = frame.f_back
    return (*innermost, waits, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})")


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep

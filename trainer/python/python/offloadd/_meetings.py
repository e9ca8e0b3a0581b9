"""Who waits for whom among the ranks of a run: processes of one or several nodes that train one model together.

Before anything that needs all ranks they *meet*: each writes on the board what it is about to do, and continues when all have written the
same. Nobody therefore waits in a collective operation that another rank does not enter, and ranks whose order differs are told where
each of them is. A rank that has ended is noticed by the end of its process, and one of another node by its silence (`_nodes`) while no
connection says that it is there (`_connections`). One process is a group of one, which meets nobody.

No other file waits for a rank: what ranks agree on (`_ranks`) and the tensors that they exchange (`_transfers`) come to a meeting first.
"""

from __future__ import annotations

import atexit
import os
import select
import sys
import tempfile
import threading
import time
from typing import Any, Callable, Optional, TypeVar

import torch
import torch.distributed as dist

from . import _nodes
from ._board import Board
from ._console import say
from ._errors import Error, NotSupported, OrderDiffers, RankGone
from ._nodes import Link, Topology

T = TypeVar("T")

# A rank that waits for others looks after so long whether they will come, and says after so long where all of them are.
_LOOK_S, _TELL_S = 0.1, 20.0

# A rank that has waited for so long in an operation of torch.distributed, while others wait here, waits for one of them.
_STUCK_S = 15.0

# Time between two notes of where a rank is, and time in which a script must notice that another rank is gone: less for one that was
# silent before.
_NOTE_S, _GRACE_S, _SILENT_GRACE_S = 1.0, 6.0, 2.0

# Bytes that a rank can bring to a meeting beside 16 a parameter.
_DATA_BYTES = 64 << 10

# Runs of several ranks that this process has opened.
_opened = 0


class Meetings:
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
        self._board: Optional[Board] = None
        self.topology = Topology() if self.count == 1 else _nodes.guess(self.rank, self.count)
        # The connection to other nodes, if there are several.
        self.link: Optional[Link] = None
        # Whether this rank comes to no meeting any more; and which other rank is gone, with its own reason or with what to do.
        self._ended = False
        self._gone = ""
        self._noticed = False
        self._watcher: Optional[threading.Thread] = None
        # The extension's object, whose waits for other ranks end when one is gone.
        self.core: Any = None

    def open(self, params: int, at_close: Callable[[], None]) -> None:
        """Meets the others for the first time; `params` bounds what they exchange. `at_close` is called where this rank's part ends in order."""
        global _opened
        if self.count == 1:
            return
        self._at_close = at_close
        store, key = dist.distributed_c10d._get_default_store(), f"offloadd/{_opened}"
        _opened += 1
        self.topology = topology = _nodes.find(store, key, self.rank, self.count)
        if topology.nodes > 1 and not hasattr(store, "clone"):
            raise NotSupported(f"torch {torch.__version__} has no Store.clone, which several nodes need: install a newer one (2.11 was tested)")
        board = f"{key}/board/{topology.node}"
        data_bytes = _DATA_BYTES + 16 * params
        failed = ""
        if self.topology.first_of_node:
            file, path = tempfile.mkstemp(prefix="offloadd-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
            store.set(board, path)
        else:
            path = store.get(board).decode()
        try:
            file = file if self.topology.first_of_node else os.open(path, os.O_RDWR)
            self._board = Board(file, self.count, data_bytes)
            os.close(file)
            self._board.set_process(self.rank, os.getpid())
        except OSError as error:
            failed = f"rank {self.rank} cannot use {path}: {error.strerror}; all ranks of a node must see the same /dev/shm, as in one container"
        if topology.nodes > 1:
            self.link = Link(store, key, topology)
        # Until then there are no process numbers to look at.
        store.set(f"{key}/open/{self.rank}", failed)
        opened = [store.get(f"{key}/open/{rank}").decode() for rank in range(self.count)]
        if self.topology.first_of_node:
            os.unlink(path)
        if any(opened):
            raise NotSupported(next(filter(None, opened)))
        self._processes = {rank: self._board.process(rank) for rank in topology.local if rank != self.rank}
        self._main, self._process = threading.current_thread().ident, os.getpid()
        self._woken, self._wake = os.pipe()
        if self.link is not None:
            self.link.start()
        self._watcher = threading.Thread(target=self._watch, name="offloadd ranks", daemon=True)
        self._watcher.start()
        # No thread of ours is left when the interpreter is taken down.
        atexit.register(self.close)

    def meet(self, what: str, data: bytes = b"") -> list[bytes]:
        """Returns when all ranks are about to do `what`, with what each of them brings.

        Raises `OrderDiffers` if one is about to do something else, `RankGone` if one comes no more.
        """
        if self.count == 1:
            return [data]
        board, ranks = self._board, range(self.count)
        self._number += 1
        number, began, pause = self._number, time.monotonic(), 1e-5
        board.arrive(self.rank, number, what, data)
        looked = told = began
        while True:
            late = [rank for rank in ranks if board.number(rank) < number]
            if not late:
                break
            if self.link is not None and self.topology.first_of_node and not any(rank in self.topology.local for rank in late):
                self._exchange_nodes(number)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                self._check_late(what, late, now - began)
                if now - told > _TELL_S:
                    told = now
                    say(f"has waited for {_names(late)} for {now - began:.0f} s: {self._places()}", self.rank)
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        if any(board.what(rank, number) != what for rank in ranks):
            # Another rank may have left this meeting already. It is stopped at its next one.
            waiting = [f'rank {rank}: "{board.what(rank, number)}"' for rank in ranks]
            raise self._fail(OrderDiffers(f"the ranks are about to do different things: {'; '.join(waiting)}. {_SAME_ORDER}"))
        return [board.data(rank, number) for rank in ranks]

    def _exchange_nodes(self, number: int) -> None:
        """Writes on the board what the ranks of other nodes bring to a meeting to which all ranks of this node have come, if it is there."""
        board = self._board
        try:
            brought = self.link.exchange_parts(number, lambda: [(board.what(rank, number), board.data(rank, number)) for rank in self.topology.local])
        except RuntimeError as error:
            self.raise_own()
            raise self.blame(error, _nodes._SILENT_S + 2) from error
        for rank, (what, data) in (brought or {}).items():
            board.arrive(rank, number, what, data)

    def _check_late(self, what: str, late: list[int], waited_s: float) -> None:
        """Raises if one of the ranks that are late will not come, or wait for this one in vain."""
        self.raise_own()
        newest = self._board.number(self.rank)
        # A rank may have come and then ended its run, as with an error of this meeting, since it was found late.
        if any(self._has_ended(rank) and self._board.number(rank) < newest for rank in late):
            raise self._fail(RankGone(self._gone))
        # Where others of its node are late, a rank of another node may have come.
        late = [rank for rank in late if self._at(rank)[0] < newest]
        if waited_s > _STUCK_S and late and all(self._stuck(rank) for rank in late):
            raise self._fail(OrderDiffers(f"the ranks wait for each other: {self._places()}. {_SAME_ORDER}"))

    def raise_own(self) -> None:
        """Raises why this rank's part of the run has failed, if it has told the other nodes so."""
        if self._given_up:
            self._noticed = True
            # Any call of an engine that has failed says why.
            self.core.drain()

    @property
    def _given_up(self) -> Optional[str]:
        return self.link.exchange.given_up if self.link is not None else None

    def _has_ended(self, rank: int) -> bool:
        why = self._board.ended(rank) or self._told(rank).get("ended")
        if why and not self._gone:
            self._gone = self._told(rank).get("gone") or f"rank {rank} has ended its run: {why}"
        return bool(self._gone)

    def _told(self, rank: int) -> dict[str, Any]:
        """The last state of a rank of another node; empty for one of this node."""
        return self.link.told(rank) if self.link is not None else {}

    def _fail(self, error: Error) -> Error:
        self._noticed = True
        self.end(str(error))
        return error

    def _stuck(self, rank: int) -> bool:
        if rank not in self.topology.local:
            return self._told(rank).get("waited_s", 0) > _STUCK_S
        since = self._board.waits_since(rank)
        return 0 < since < time.monotonic() - _STUCK_S

    def _at(self, rank: int) -> tuple[int, str, str]:
        """The last meeting a rank came to, its name there, and the rank's position in its script."""
        number, told = self._board.number(rank), self._told(rank)
        if told.get("number", 0) > number:
            return told["number"], told["what"], told["where"]
        return number, self._board.what(rank, number), told.get("where", self._board.where(rank))

    def _places(self) -> str:
        """The position of each rank."""
        ats = [self._at(rank) for rank in range(self.count)]
        newest = max(number for number, _, _ in ats)
        lines = []
        for rank, (number, what, where) in enumerate(ats):
            if number == newest:
                lines.append(f'rank {rank} waits at "{what}"')
                continue
            passed = f'has passed "{what}"' if number else "has met no other rank yet"
            lines.append(f"rank {rank} {passed}" + (f" and is at {where}" if where else ""))
        return "; ".join(lines)

    def end(self, why: str) -> None:
        """Tells the others that this rank comes to no meeting any more."""
        if self._board is not None and not self._ended:
            self._board.end(self.rank, why)
            if self.link is not None:
                self.link.state.update(ended=why, gone=self._gone)
        self._ended = True

    @property
    def broken(self) -> bool:
        """Whether this rank or another one comes to no meeting any more."""
        return self._ended or bool(self._gone)

    def close(self) -> None:
        """Ends this rank's part: it comes to no meeting any more. A second call and one in a fork do nothing."""
        in_order, self._ended = not self.broken, True
        watcher, self._watcher = self._watcher, None
        if watcher is not None and os.getpid() == self._process:
            if watcher.is_alive():
                os.write(self._wake, b"\0")
            watcher.join()
            if self.link is not None:
                self.link.close(in_order)
            if in_order:
                self._at_close()
            os.close(self._woken)
            os.close(self._wake)
            atexit.unregister(self.close)

    def on_all_ranks(self, what: str, work: Callable[[], T], ends: bool = True) -> T:
        """Does `work` on every rank, which meets nobody. Fails on all of them if it fails on one, and the run `ends` then."""
        result, failed = None, None
        try:
            result = work()
        except Error as error:
            failed = error
        if failed is not None and self._ended:
            raise failed
        told = self.meet(what, str(failed or "").encode()[:_DATA_BYTES])
        if failed is not None:
            if ends:
                self.end(str(failed))
                raise failed
            self._noticed = False
            raise failed if self.topology.nodes == 1 else type(failed)(f"node {self.topology.node}: {failed}") from failed
        for rank, text in enumerate(told):
            if text:
                if ends:
                    self.end(f"rank {rank} failed")
                node = f" (node {self.topology.node_of(rank)})" if self.topology.nodes > 1 else ""
                raise Error(f"{what}: rank {rank}{node} failed: {text.decode(errors='replace')}")
        return result

    # Ranks that are gone

    def watched(self, it: Any) -> Any:
        """An object of the extension, whose calls say so where they fail because another rank is gone."""
        return it if self.count == 1 else _WatchedCalls(self, it)

    def blame(self, error: Exception, within_s: float) -> Exception:
        """The error to raise where `error` may come from another rank's end, which is known within some seconds."""
        until = time.monotonic() + (0 if self._given_up else within_s)
        while self._given_up or not any(self._has_ended(rank) for rank in range(self.count) if rank != self.rank):
            if time.monotonic() > until:
                return error
            time.sleep(0.01)
        return self._fail(RankGone(self._gone))

    def _watch(self) -> None:
        """Notes where this rank is, and notices when another one is gone."""
        poll, ranks = select.poll(), {}
        for rank, process in self._processes.items():
            try:
                handle = os.pidfd_open(process)
            except ProcessLookupError:
                return self._lost(f"rank {rank} (process {process}) is gone; {_AGAIN}", _GRACE_S)
            ranks[handle] = rank
            poll.register(handle, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        place, since, looked = None, 0.0, time.monotonic()
        while not self._ended:
            lost = [ranks[handle] for handle, _ in poll.poll(1000 * min(_NOTE_S, _nodes._ROUND_S)) if handle in ranks]
            if lost:
                self._has_ended(lost[0])
                self._lost(f"rank {lost[0]} (process {self._processes[lost[0]]}) is gone; {_AGAIN}", _GRACE_S)
                break
            at, now = _place(sys._current_frames().get(self._main)), time.monotonic()
            if at != place:
                place, since = at, now
            where, waits = (at[-1], at[-2]) if at else ("", False)
            self._board.set_where(self.rank, where, since if waits else 0.0)
            if self.link is not None and self._look_beyond(where, now - since if waits else 0.0, now - looked):
                break
            looked = now
        for handle in ranks:
            os.close(handle)

    def _look_beyond(self, where: str, waited_s: float, passed_s: float) -> bool:
        """Tells the other nodes where this rank is. Returns whether one of their ranks is gone, or this one was."""
        link, number = self.link, self._board.number(self.rank)
        link.state.update(number=number, what=self._board.what(self.rank, number), where=where, waited_s=waited_s)
        link.tick(passed_s)
        if self._given_up:
            # The script learns it with its next call, but may wait for a rank that waits for this one's commit.
            self._board.end(self.rank, self._given_up)
            self._lost(f"rank {self.rank} has failed: {self._given_up}", _GRACE_S)
        elif any(self._has_ended(rank) for rank in range(self.count) if rank not in self.topology.local):
            self._lost(self._gone, _GRACE_S)
        elif silent := link.silent():
            self._lost(f"{silent}; {_AGAIN}", _SILENT_GRACE_S)
        return bool(self._gone)

    def _lost(self, gone: str, grace_s: float) -> None:
        """Ends what waits for other ranks, and this process where the script does not notice in time."""
        if self._ended:
            return
        self._gone = self._gone or gone
        if self.link is not None:
            self.link.state.update(ended=self._gone, gone=self._gone)
            self.link.exchange.fail(self._gone)
        if self.core is not None and not self._given_up:
            self.core.cancel(self._gone)
        until = time.monotonic() + grace_s
        while time.monotonic() < until:
            if self._ended or self._noticed:
                return
            time.sleep(0.1)
        # It waits in what cannot be interrupted, as an operation on a GPU that the lost rank never joins.
        say(f"{self._gone}. This rank ends now", self.rank)
        os._exit(1)


_AGAIN = "start the script again on all ranks: with device nvme it resumes after the last committed step"
_SAME_ORDER = "Every rank must make the same calls in the same order: as many batches, generate with synced_gpus, weights read and saved on all ranks"


class _WatchedCalls:
    """Calls of an object of the extension; one that fails because another rank is gone says so."""

    def __init__(self, meetings: Meetings, it: Any) -> None:
        self._meetings, self._it = meetings, it

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._it, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            try:
                return found(*args)
            except Error as error:
                self._meetings._noticed = True
                # The daemon ends with the first rank of its node, at once.
                raise self._meetings.blame(error, 2) from None

        self.__dict__[name] = call
        return call


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


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

"""Copies files between nodes that share no directory, so that every node has all of a checkpoint (checkpoint.use_node_local_storage).

    separate   whether each node has a directory of its own under the same path
    copy       the first rank of each node sends files of its node, and receives those that it lacks

The exchange is the native trainer's. Only messages about the files pass through torch.distributed's store.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, TypeVar

from . import _offloadd
from ._console import say
from ._errors import Error
from ._ranks import Ranks

T = TypeVar("T")

SETTING = "checkpoint.use_node_local_storage"

# Time in which a file of one node appears on the others if they share the directory. A network file system asks its server at once for
# a name that it has never read.
_SEEN_S = 1.0

# The answers of `separate`, by the device number of the directory's file system.
_separate: dict[int, bool] = {}


class Files(NamedTuple):
    """Files in a directory, as `_offloadd.describe_file` and `_offloadd.held_checkpoint` describe them."""

    directory: Path
    tiles: list[dict[str, Any]]
    others: list[dict[str, Any]]

    def total_bytes(self) -> int:
        return sum(file["bytes"] for file in (*self.tiles, *self.others))


def described(directory: Path, name: str) -> dict[str, Any]:
    """The size and fingerprint of a file."""
    return json.loads(_offloadd.describe_file(str(directory), name))


def separate(ranks: Ranks, directory: Path) -> bool:
    """Whether the directory, which is made if it is missing, is another one on each node. All ranks must call it."""
    device = 0

    def find_device() -> None:
        nonlocal device
        if ranks.first_of_node:
            directory.mkdir(parents=True, exist_ok=True)
            device = os.stat(directory).st_dev

    ranks.on_all_ranks("make a checkpoint's directory", lambda: on_files(directory, find_device), ends=False)
    answers = set(ranks.by_node("compare what is known of the nodes' directories", _separate.get(device)))
    if answers in ({True}, {False}):
        return answers.pop()

    name = f".seen-by-all-{os.urandom(8).hex()}"
    touch = lambda: (directory / name).touch() if ranks.first_of_node else None
    ranks.on_all_ranks("write into a checkpoint's directory", lambda: on_files(directory, touch), ends=False)
    names, until = ranks.by_node("look for the nodes' files", name), time.monotonic() + _SEEN_S
    while True:
        seen = [(directory / one).exists() for one in names]
        if all(seen) or not ranks.first_of_node or time.monotonic() > until:
            break
        time.sleep(0.02)
    seen_by = ranks.by_node("tell whose files are seen", seen)
    if ranks.first_of_node:
        (directory / name).unlink(missing_ok=True)
    sharing = [str(node) for node, seen in enumerate(seen_by) if sum(seen) > 1]
    if sharing and not all(map(all, seen_by)):
        raise Error(
            f"{SETTING}: nodes {', '.join(sharing)} see the same {directory} as other nodes, but not all nodes do: let all share it, or "
            "give each a directory of its own"
        )
    if sharing:
        say(f"note: {SETTING}: all nodes see the same {directory}, so each checkpoint is written once")
    _separate[device] = not sharing
    return not sharing


def copy(ranks: Ranks, what: str, directory: Path, work: Callable[[], Files], receives: bool = True) -> None:
    """Sends the files that `work` returns on the first rank of each node, and writes those of other nodes below `directory` where it
    `receives` and lacks them. All of them are on the drive when it returns. Fails on all ranks if it fails on one, and the run goes on.
    All ranks must call it."""
    ranks.transfers.open_nodes()

    def copied() -> None:
        if not ranks.first_of_node:
            return
        own, failed = Files(directory, [], []), None
        try:
            own = work()
        except Error as error:
            failed = error
        topology, tiles, others = ranks.topology, json.dumps(own.tiles), json.dumps(own.others)
        why = None if failed is None else str(failed)
        given = (topology.node, topology.nodes, str(directory), str(own.directory), tiles, others, receives, why)
        _in_thread(lambda: _offloadd.copy_between_nodes(ranks.transfers.gather_nodes, *given))
        if failed is not None:
            raise failed

    ranks.on_all_ranks(what, copied, ends=False)


def on_files(path: Path, work: Callable[[], T]) -> T:
    """Does `work` on files of the checkpoint `path`, whose failure becomes an `Error`."""
    try:
        return work()
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        raise Error(f"the checkpoint {path} cannot be written: {file}{error.strerror or error}") from error


def _in_thread(work: Callable[[], None]) -> None:
    """Does `work` in another thread: the main one then waits for no single operation of torch.distributed, and Ctrl-C ends its wait."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="offloadd copies", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]

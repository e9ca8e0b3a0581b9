"""Checkpoints: copies of a run's tiles and state in a directory of the caller's.

    DIR/TAG/tiles.0     parameters and optimizer state, in the native trainer's format, with a fingerprint
    DIR/TAG/checkpoint.json   what the tiles are, and fingerprints of the other files
    DIR/TAG/state.pt    scheduler, random numbers, position in the data, and the caller's own state
    DIR/latest          the newest tag

A checkpoint is named when it is whole and on the drive. It is loaded into a model of the same units and type.

Several nodes write into one directory that all see, or each has its own (checkpoint.use_node_local_storage). Every node then keeps
whole checkpoints: nodes copy each other's files before any of them names a checkpoint, and before one is loaded that a node lacks.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Optional

import torch

from . import _offloadd
from ._commits import Commits, check_of_script
from ._config import Settings
from ._console import bytes_text, say
from ._each_node import SETTING, Files, copy, described, on_files, separate
from ._errors import Damaged, Error, NoSpace
from ._ranks import Ranks
from ._state import check_readable, flush_dir, load_plain, write_flushed
from ._weights import write_weights

LATEST = "latest"
_STATE, _DESCRIPTION = "state.pt", "checkpoint.json"

# Time in which a directory that the first node made appears on the others.
_SEEN_S = 5.0

# Space that a checkpoint needs beside its files.
_SLACK_BYTES = 1 << 20


def is_separate(settings: Settings, ranks: Ranks, directory: Path) -> bool:
    """Whether each node keeps whole checkpoints in its own `directory`. All ranks must call it."""
    return settings.use_node_local_storage and ranks.topology.nodes > 1 and separate(ranks, directory)


def save_checkpoint(
    commits: Commits,
    directory: Path,
    tag: str,
    client_state: dict[str, Any],
    save_latest: bool,
    add: Optional[Callable[[Path], str]] = None,
    weights: Optional[str] = None,
) -> None:
    """Writes a checkpoint of `run` after its last step; one of the same tag is replaced. On each rank `add` writes a further file into
    its directory and returns its name; `weights` names a file with the model's. Where a rank fails, all raise the error, no checkpoint is
    made, and the run goes on."""
    if Path(tag).name != tag or tag == LATEST:
        raise Error(f"checkpoint tag {tag!r}: must be the name of a directory other than {LATEST!r}")
    partial, ranks = directory / f"{tag}.partial", commits.ranks
    for written in (commits.engine.gathering, commits.optimizer._state_copies):
        written.refuse_writes()
    commits.drain()
    separately = is_separate(commits.settings, ranks, directory)
    # The ranks that make a directory and name it.
    keeps = ranks.first_of_node if separately else ranks.first

    def on_all_ranks(what: str, work: Callable[[], Any]) -> Any:
        return ranks.on_all_ranks(what, lambda: on_files(partial, work), ends=False)

    try:
        on_all_ranks("begin a checkpoint", lambda: _begin(partial) if keeps else None)
        if ranks.topology.nodes > 1 and not separately:
            # A name of its own: an earlier save may have left a directory of this name on the node.
            mark = partial / ranks.first_bytes("mark a checkpoint's directory", f".{os.urandom(8).hex()}".encode()).decode()
            on_all_ranks("mark a checkpoint's directory", lambda: mark.touch() if keeps else None)
            on_all_ranks("look for a checkpoint's directory", lambda: _check_shared(mark))
            on_all_ranks("remove the mark of a checkpoint's directory", lambda: mark.unlink() if keeps else None)
        tiles, frozen = on_all_ranks("write a checkpoint's tiles", lambda: commits.core.save(str(partial)))
        commits.engine.gathering.order.forget_rest()
        frozen = ranks.total("add up frozen parameters", frozen)
        others = [] if add is None else [on_all_ranks("write a checkpoint's further files", lambda: described(partial, add(partial)))]
        if weights is not None:
            others += _save_weights(commits, partial, weights, on_all_ranks)
        told = [json.loads(files) for files in ranks.meet("tell a checkpoint's files", json.dumps([json.loads(tiles), others]).encode())]
        files = Files(partial, [of_one[0] for of_one in told], [other for of_one in told for other in of_one[1]])

        def complete() -> Files:
            """Describes the checkpoint on the first rank. Returns this node's files."""
            here = [told[rank] for rank in ranks.topology.local]
            own = Files(partial, [of_one[0] for of_one in here], [other for of_one in here for other in of_one[1]])
            return own if not ranks.first else own._replace(others=own.others + _describe(commits, files, client_state, frozen))

        if separately:
            copy(ranks, "complete a checkpoint", partial, lambda: on_files(partial, complete))
        else:
            on_all_ranks("complete a checkpoint", lambda: complete() if ranks.first else None)
        on_all_ranks("name a checkpoint", lambda: _name(directory, tag, save_latest) if keeps else None)
    except Error:
        if keeps:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _begin(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()


def _check_shared(mark: Path) -> None:
    """Waits until this node sees the file `mark` of the first one. Network file systems keep what they have read of a directory for
    seconds."""
    until = time.monotonic() + _SEEN_S
    while not mark.exists():
        if time.monotonic() > until:
            raise Error(
                f"this node does not see {mark.parent} as the first node does, and all nodes write checkpoints there: name a directory that "
                f"all nodes share, or set {SETTING} = true, so that every node keeps every checkpoint in a directory of its own"
            )
        time.sleep(0.02)


def _save_weights(commits: Commits, partial: Path, name: str, on_all_ranks: Callable) -> list[dict[str, Any]]:
    """Writes the model's weights on the first rank, and describes their file there."""
    failed: list[Exception] = []
    gathering = commits.engine.gathering
    try:
        gathering.on_first(lambda: write_weights(gathering, partial / name))
    except (Error, OSError) as error:
        failed.append(error)

    def written() -> list[dict[str, Any]]:
        if failed:
            raise failed[0]
        return [described(partial, name)] if commits.ranks.first else []

    return on_all_ranks("write a checkpoint's weights", written)


def _describe(commits: Commits, files: Files, client_state: dict[str, Any], frozen: int) -> list[dict[str, Any]]:
    """Writes the state and the description of a checkpoint with `files` of all ranks. Returns what it has written."""
    partial, buffer = files.directory, io.BytesIO()
    check_readable(client_state, "client_state")
    run = commits.state()
    check_of_script(commits.optimizer, commits.track, run["track"], run["extra"])
    torch.save({"run": run, "client": client_state}, buffer)
    state = buffer.getvalue()
    write_flushed(partial / _STATE, state)
    kept = described(partial, _STATE)
    state_json = json.dumps({"layout": commits.layout.stored(), "others": [*files.others, kept]})
    # Larger than that of the checkpoint before, so that the clock of another first node does not make this one older.
    commits.saved_unix_s = max(int(time.time()), commits.saved_unix_s + 1)
    commits.core.describe(str(partial), commits.steps_done, commits.saved_unix_s, state_json, json.dumps(files.tiles), frozen)
    return [kept, described(partial, _DESCRIPTION)]


def _name(directory: Path, tag: str, save_latest: bool) -> None:
    """Gives a checkpoint whose files are on the drive its name."""
    partial, path = directory / f"{tag}.partial", directory / tag
    flush_dir(partial)
    if path.exists():
        replaced = directory / f"{tag}.removed"
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(path, replaced)
        os.rename(partial, path)
        shutil.rmtree(replaced)
    else:
        os.rename(partial, path)
    flush_dir(directory)
    if save_latest:
        write_flushed(directory / LATEST, tag.encode())


def latest_tag(directory: Path) -> Optional[str]:
    """The tag that `latest` in a directory names."""
    try:
        return (directory / LATEST).read_text().strip()
    except FileNotFoundError:
        return None


def load_checkpoint(commits: Commits, directory: Path, tag: Optional[str]) -> tuple[Optional[str], Optional[dict[str, Any]]]:
    """Brings `run` to a checkpoint and commits it. Returns (None, None) where the directory has no newest one."""
    tag = restore_here(commits.settings, commits.ranks, directory, tag)
    if tag is None:
        return None, None
    path = directory / tag
    try:
        kept = json.loads(_offloadd.checkpoint_state(str(path)))
        commits.layout.check(kept["layout"], f"the checkpoint {path}")
        state = load_plain(read_file(path, _STATE), f"the checkpoint {path}")
        commits.restore(path, state["run"])
        for copies in (commits.engine.gathering.state_copies, commits.optimizer._state_copies):
            copies.forget()
        commits.saved_unix_s = max(commits.saved_unix_s, age(directory, tag)[0])
    except Damaged as error:
        if commits.settings.use_node_local_storage and commits.ranks.topology.nodes > 1:
            raise Damaged(f"node {commits.ranks.topology.node}: {error}, or delete {path} on this node: the next load copies another node's") from None
        raise
    return str(path), state["client"]


def read_file(path: Path, name: str) -> bytes:
    """The contents of a file of the checkpoint in `path` that has no tiles. Raises `Damaged` if they are not what was saved."""
    kept = json.loads(_offloadd.checkpoint_state(str(path)))
    try:
        found, data = described(path, name), (path / name).read_bytes()
    except OSError as error:
        raise Error(f"the checkpoint {path} cannot be read: {error}") from None
    if found not in kept["others"]:
        raise Damaged(f"the checkpoint {path} is damaged: {name} differs from what was written; load another tag")
    return data


def restore_here(settings: Settings, ranks: Ranks, directory: Path, tag: Optional[str]) -> Optional[str]:
    """The tag of the checkpoint to load: `tag`, or the newest one that `latest` names; None where there is none. Where each node keeps
    checkpoints, those that lack it have it then. All ranks must call it."""
    if not settings.use_node_local_storage or ranks.topology.nodes == 1:
        return latest_tag(directory) if tag is None else tag
    stale = False
    if tag is None:
        latest = latest_tag(directory)
        told = ranks.by_node("compare the newest checkpoints", [latest, age(directory, latest)])
        tag = max(told, key=lambda one: (one[0] is not None, one[1]))[0]
        if tag is None:
            return None
        stale = any(latest != tag for latest, _ in told)
    path = directory / tag
    held = _held(path)
    sums = held and [[held["unix_s"], held["step"]], held["fingerprint"], Files(path, held["tiles"], held["others"]).total_bytes()]
    told = ranks.by_node("compare checkpoints", sums)
    # Of several the newest counts, then that of the first node.
    source = max(range(len(told)), key=lambda node: (told[node] is not None, told[node] and told[node][0], -node))
    if told[source] is None:
        # Loading it says why.
        return tag
    _, fingerprint, size = told[source]
    lacking = [node for node, one in enumerate(told) if one is None or one[1] != fingerprint]
    if lacking and separate(ranks, directory):
        say(f"copying the checkpoint {path}, {bytes_text(size)}, from node {source} to node {', '.join(map(str, lacking))}")
        _copy(ranks, path, held, source, lacking, size)
    if stale and separate(ranks, directory):
        # A node that trains alone later begins there too.
        renew = lambda: write_flushed(directory / LATEST, tag.encode()) if ranks.first_of_node and latest_tag(directory) != tag else None
        ranks.on_all_ranks("name the newest checkpoint", lambda: on_files(directory / LATEST, renew), ends=False)
    return tag


def _copy(ranks: Ranks, path: Path, held: Optional[dict[str, Any]], source: int, lacking: list[int], size: int) -> None:
    """Copies a checkpoint from a node to those that lack it, or have another one of this name."""
    node, partial = ranks.topology.node, path.with_name(f"{path.name}.partial")
    lacks = node in lacking and ranks.first_of_node

    def begin() -> None:
        check_room(path, size)
        _begin(partial)

    def work() -> Files:
        if node != source:
            return Files(partial, [], [])
        return Files(path, held["tiles"], [*held["others"], described(path, _DESCRIPTION)])

    try:
        ranks.on_all_ranks("make room for a checkpoint", lambda: on_files(partial, begin) if lacks else None, ends=False)
        copy(ranks, "copy a checkpoint", partial, work, receives=lacks)
        name = lambda: _name(path.parent, path.name, save_latest=False) if lacks else None
        ranks.on_all_ranks("name a checkpoint", lambda: on_files(partial, name), ends=False)
    except Error:
        if lacks:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def check_room(path: Path, size: int) -> None:
    """Refuses to copy a checkpoint of `size` bytes to where it has no room."""
    free = shutil.disk_usage(path.parent).free
    if free < size + _SLACK_BYTES:
        raise NoSpace(f"the checkpoint {path} takes {bytes_text(size)}, but the file system has {bytes_text(free)} free: free some space")


def _held(path: Path) -> Optional[dict[str, Any]]:
    """What the checkpoint in `path` is, if all its tiles are there."""
    found = _offloadd.held_checkpoint(str(path))
    return None if found is None else json.loads(found)


def age(directory: Path, tag: Optional[str]) -> list[int]:
    """Time and step of a checkpoint, to be compared with those of others; less than any where there is none."""
    held = None if tag is None else _held(directory / tag)
    return [-1, -1] if held is None else [held["unix_s"], held["step"]]

"""Checkpoints: copies of a run's tiles and state in a directory of the caller's.

    DIR/TAG/tiles.0     parameters and optimizer state, in the native trainer's format, with a fingerprint
    DIR/TAG/checkpoint.json   what the tiles are, and fingerprints of the other files
    DIR/TAG/state.pt    scheduler, random numbers, position in the data, and the caller's own state
    DIR/latest          the newest tag

A checkpoint is named when it is whole and on the drive. It is loaded into a model of the same units and type.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Optional

import torch

from . import _offloadd
from ._errors import Damaged, Error, NotSupported
from ._state import flush_dir, write_flushed

LATEST = "latest"
_STATE = "state.pt"

# Time in which a directory that the first node made appears on the others.
_SEEN_S = 5.0


def save_checkpoint(
    run: Any, directory: Path, tag: str, client_state: dict[str, Any], save_latest: bool, add: Optional[Callable[[Path], None]] = None
) -> None:
    """Writes a checkpoint of `run` after its last step; one of the same tag is replaced. On each rank `add` writes further files into its
    directory."""
    if Path(tag).name != tag or tag == LATEST:
        raise Error(f"checkpoint tag {tag!r}: must be the name of a directory other than {LATEST!r}")
    partial, ranks = directory / f"{tag}.partial", run.ranks
    run.drain()
    ranks.together("begin a checkpoint", lambda: _begin(partial) if ranks.first else None)
    if ranks.places.nodes > 1:
        ranks.together("look for a checkpoint's directory", lambda: _check_shared(partial, ranks.places.node))
    file, frozen = ranks.together("write a checkpoint's tiles", lambda: run.core.save(str(partial)))
    run.engine.order.forget_rest()
    frozen = ranks.total("add up frozen parameters", frozen)
    if add is not None:
        add(partial)
    files = [one.decode() for one in ranks.meet("name a checkpoint's files", file.encode())]
    finish = lambda: _finish(run, directory, tag, client_state, save_latest, files, frozen) if ranks.first else None
    ranks.together("complete a checkpoint", finish)


def _begin(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()


def _check_shared(partial: Path, node: int) -> None:
    """Waits until this node sees what the first one has made. Network file systems keep what they have read of a directory for seconds."""
    until = time.monotonic() + _SEEN_S
    while not partial.exists():
        if time.monotonic() > until:
            raise Error(
                f"node {node} does not see {partial} as the first node does, and all nodes write checkpoints there: name a directory that "
                "all nodes share"
            )
        time.sleep(0.02)


def _finish(run: Any, directory: Path, tag: str, client_state: dict[str, Any], save_latest: bool, files: list[str], frozen: int) -> None:
    """Describes a checkpoint whose tiles are written, and names it."""
    partial = directory / f"{tag}.partial"
    buffer = io.BytesIO()
    torch.save({"run": run.state(), "client": client_state}, buffer)
    state = buffer.getvalue()
    try:
        torch.load(io.BytesIO(state), weights_only=True)
    except Exception as error:
        raise NotSupported(
            f"client_state: a checkpoint holds plain data (numbers, texts, tensors, lists, dicts): {error}"
        ) from None
    write_flushed(partial / _STATE, state)
    described = {"file": _STATE, "sha256": hashlib.sha256(state).hexdigest(), "layout": run.layout}
    run.core.describe(str(partial), run.steps_done, json.dumps(described), files, frozen)
    flush_dir(partial)
    path = directory / tag
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


def load_checkpoint(run: Any, directory: Path, tag: Optional[str]) -> tuple[Optional[str], Optional[dict[str, Any]]]:
    """Brings `run` to a checkpoint and commits it. Returns (None, None) where the directory has no newest one."""
    if tag is None:
        try:
            tag = (directory / LATEST).read_text().strip()
        except FileNotFoundError:
            return None, None
    path = directory / tag
    described = json.loads(_offloadd.checkpoint_state(str(path)))
    run.check_layout(described["layout"], f"the checkpoint {path}")
    try:
        data = (path / described["file"]).read_bytes()
    except OSError as error:
        raise Error(f"the checkpoint {path} cannot be read: {error}") from None
    if hashlib.sha256(data).hexdigest() != described["sha256"]:
        raise Damaged(f"the checkpoint {path} is damaged: {described['file']} differs from what was written; load another tag")
    state = torch.load(io.BytesIO(data), weights_only=True)
    run.restore(path, state["run"])
    return str(path), state["client"]

"""The directory of a run: who uses it, where its tiles lie, and how it is deleted with them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Iterator

from . import _offloadd
from ._config import Settings
from ._console import bytes_text, say
from ._errors import Error, LayoutChanged
from ._nodes import Topology
from ._plan import Plan, part_of, program_of

# Names and shapes of the run's parameters, written with the first commit.
LAYOUT = "layout.json"

# How the kind of a parameter that is not trained begins in it.
FROZEN = "frozen in "

# Where the run's tiles lie. Its lock says that the run is in use.
STORE = _offloadd.STORE_FILE

# What a run has in its directory.
_OF_RUN = (LAYOUT, STORE, "measured.json", "metrics.jsonl", "metrics.jsonl.old", "offloadd", "rank-[0-9]*", "state-[0-9]*.pt", "state-[0-9]*.pt.part")
_OF_RUN += ("trainer-resume", "tensorboard", "csv_monitor", "nodes")


# Directories of the runs that this process has open, with what is trained in each.
_open: dict[Path, str] = {}


class InUse(Exception):
    """Another process has the run."""


def check_name(run_dir: Path) -> None:
    """Refuses a path that is no text: files and other programs name it."""
    try:
        os.fsencode(run_dir).decode()
    except UnicodeDecodeError:
        raise Error(f"run_dir {os.fsencode(run_dir)!r} is not UTF-8: name another run_dir") from None


def claim(run_dir: Path, model: str) -> None:
    """Notes that this process trains `model` in the directory. Refuses a directory in which it trains another model."""
    path = run_dir.resolve()
    if path in _open:
        raise Error(
            f"{run_dir} has the run of another model of this process ({_open[path]}): give each run its own directory, by the argument run_dir or the "
            "key offloadd.run_dir; or call close() of the other run first"
        )
    _open[path] = model


def disclaim(run_dir: Path) -> None:
    """Lets this process open another run in the directory."""
    _open.pop(run_dir.resolve(), None)


@contextlib.contextmanager
def writable() -> Iterator[None]:
    """Turns the system's error about a directory into one that says what to do."""
    try:
        yield
    except OSError as error:
        raise Error(f"{error.filename} cannot be written: {error.strerror}; name another run_dir (for Hugging Face's Trainer another output_dir)") from None


def open_private(path: Path, mode: str) -> IO[Any]:
    """Opens a file of a run; a new one can be read by its owner only, also in a directory that others may enter."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_private(path: Path, text: str) -> None:
    """Writes a file of a run."""
    with open_private(path, "w") as file:
        file.write(text)


def lock(run_dir: Path, exclusive: bool = False) -> IO[Any]:
    """Marks a run as in use until the result is closed: each rank that trains it shares the lock, who deletes it is alone.

    Raises `InUse` where another process has it. A file system without locks says nothing.
    """
    file = open_private(run_dir / STORE, "a")
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise InUse from None
    return file


def check_place(run_dir: Path) -> None:
    """Refuses the directory of a run that was begun under another path: its tiles have that path's name and would not be found."""
    try:
        store = json.loads((run_dir / STORE).read_text())
    except ValueError:
        # Being written, or a start was killed while it wrote.
        return
    if store["run_dir"] != str(run_dir) and (store["socket"] or any(map(os.path.exists, store["device_files"]))):
        raise Error(
            f"the run in {run_dir} was begun as {store['run_dir']}, and its tiles are stored under that path: move the directory back; "
            "for a new run name another run_dir"
        )


def check_moments(run_dir: Path, settings: Settings) -> None:
    """Refuses a run whose tiles have other moments, or moments or masters of another type."""
    store = json.loads((run_dir / STORE).read_text() or "{}")
    rule, kept = store.get("optimizer", "AdamW"), store.get("moments", "fp32")
    if rule != settings.rule:
        raise LayoutChanged(
            f"{run_dir}: it was begun with {rule}, and the optimizer is now {settings.rule}: its moments are others; use {rule}, or name another "
            "run_dir (for Hugging Face's Trainer another output_dir)"
        )
    if kept != settings.moments:
        raise LayoutChanged(
            f"{run_dir}: it was begun with moments in {kept}, and offloadd.moments is now {settings.moments}; set it to {kept}, or name another "
            "run_dir (for Hugging Face's Trainer another output_dir)"
        )
    kept = store.get("master", "fp32")
    if kept != settings.master:
        raise LayoutChanged(
            f"{run_dir}: it was begun with masters in {kept}, and offloadd.master is now {settings.master}; set it to {kept}, or name another "
            "run_dir (for Hugging Face's Trainer another output_dir)"
        )


def begin_part(plan: Plan, topology: Topology, resume: bool) -> None:
    """Checks that this node has its own part of the run, as far as there is one, and notes where its tiles lie. Without `resume`, tiles
    that are divided among several nodes are removed: all of them begin anew. So are tiles of a run whose directory was deleted."""
    run_dir, settings = plan.run_dir, plan.settings
    kept = (run_dir / STORE).read_text()
    with contextlib.suppress(ValueError):
        store = json.loads(kept)
        nodes = store.get("nodes", 1)
        if not resume and max(nodes, topology.nodes) > 1:
            remove_store(store)
            (run_dir / LAYOUT).unlink(missing_ok=True)
        elif nodes != topology.nodes and (store["socket"] or any(map(os.path.exists, store["device_files"]))):
            raise Error(
                f"{run_dir}: the run's state is divided over {nodes} node(s), and this start has {topology.nodes}: start {nodes} node(s), or "
                f"{_offloadd.BEGIN_ANEW}"
            )
    files = [directory / f"offloadd-{plan.job}.tiles" for directory in settings.nvme]
    if resume and not any(file.exists() for file in files):
        _check_drives(settings, part_of(plan.base_dir, 0)[1], topology.node)
    store = {"run_dir": str(run_dir), "job": plan.job, "device_files": list(map(str, files)), "program": program_of(settings)}
    store["socket"] = str(settings.socket.absolute()) if settings.socket else None
    if settings.moments != "fp32":
        store["moments"] = settings.moments
    if settings.master != "fp32":
        store["master"] = settings.master
    if settings.rule != "AdamW":
        store["optimizer"] = settings.rule
    if topology.nodes > 1 and settings.device == "nvme":
        store["nodes"] = topology.nodes
    text = json.dumps(store)
    if not kept and topology.nodes == 1 and (left := _remove_left(store)):
        say(f"{run_dir} is a new directory, so the run begins anew: removed the tiles of an earlier run whose directory was deleted, {left}")
    # A start that is killed here must not lose what is there.
    if kept != text:
        write_private(run_dir / STORE, text)


def _remove_left(store: dict[str, Any]) -> str:
    """Removes the tiles that a run has left whose directory was deleted. Returns what was there."""
    if not store["socket"]:
        left = [file for file in store["device_files"] if os.path.exists(file)]
        _offloadd.remove_files(left)
        return ", ".join(left)
    # Whatever keeps it from being deleted is said where it is opened.
    with contextlib.suppress(OSError, Error):
        if not _delete_job(store).returncode:
            return f"job {store['job']} of the daemon at {store['socket']}"
    return ""


def _check_drives(settings: Settings, job: str, node: int) -> None:
    """Refuses drives with another node's part of the run: this node would begin anew beside it."""
    for directory in settings.nvme:
        for file in sorted({*directory.glob(f"offloadd-{job}.tiles"), *directory.glob(f"offloadd-{job}-node[0-9]*.tiles")}):
            other = file.stem.removeprefix(f"offloadd-{job}").removeprefix("-node") or "0"
            raise Error(
                f"node {node}: {file} is the part of node {other} of this run: number the nodes as at the run's first start, set "
                f"nvme_path to this node's own drives, or {_offloadd.BEGIN_ANEW}"
            )


def has_run(run_dir: Path) -> bool:
    """Whether this machine has a node's part of a run that has committed something."""
    return (run_dir / LAYOUT).exists() or any(run_dir.glob(f"nodes/*/{LAYOUT}"))


def delete(run_dir: Path, agreed: bool) -> int:
    """Deletes a run that no process uses, after it has asked unless it is `agreed`. Returns the exit status. What a deletion that was
    interrupted has left can be deleted again."""
    if not (run_dir / STORE).exists():
        below = run_dir / "offloadd"
        hint = f"name {below}" if (below / STORE).exists() else "name the directory that the start of the run printed"
        raise Error(f"{run_dir} is not the directory of a run: it has no {STORE}; {hint}")
    try:
        held = lock(run_dir, exclusive=True)
    except InUse:
        raise Error(f"{run_dir}: the run is in use: end its script first") from None
    with held:
        store = _store_of(run_dir)
        # The run of an optimizer alone lies beside its tiles.
        own = (*_OF_RUN, *(tiles.with_suffix(end).name for tiles in map(Path, store["device_files"]) for end in (".tiles", ".run")))
        others = sorted(one.name for one in run_dir.iterdir() if not any(fnmatch(one.name, pattern) for pattern in own))
        others += [f"offloadd/{STORE} (another run)"] * (run_dir / "offloadd" / STORE).exists()
        parts = sorted(part.parent for part in run_dir.glob(f"nodes/*/{STORE}"))
        others += [f"nodes/{part.name} (another node's part, to be deleted on that node)" for part in parts if not _is_here(part)]
        if others:
            raise Error(f"{run_dir} also has files of others, and nothing was deleted: move or delete {', '.join(others)} first")
        files = [file for file in map(Path, store["device_files"]) if file.exists()]
        print(run_dir)
        for file in files:
            print(f"{file}  {bytes_text(file.stat().st_blocks * 512)}")
        if store["socket"]:
            print(f"job {store['job']} of the daemon at {store['socket']}")
        for part in parts:
            print(f"{part} and its tiles")
        if not agreed and not _agrees():
            print("nothing was deleted")
            return 1
        for part in parts:
            delete(part, True)
        remove_store(store)
        # Last what a second deletion needs.
        for one in sorted(run_dir.iterdir(), key=lambda one: one.name == STORE):
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one)
            else:
                one.unlink()
        run_dir.resolve().rmdir()
        if run_dir.is_symlink():
            run_dir.unlink()
        if run_dir.parent.name == "nodes":
            with contextlib.suppress(OSError):
                # Others lie there, or one was the last.
                run_dir.parent.rmdir()
        return 0


def _is_here(part: Path) -> bool:
    """Whether another node's part of a run can be deleted on this machine: its tiles are files here, or there are none."""
    store = _store_of(part)
    return not store["socket"] and all(map(os.path.exists, store["device_files"]))


def remove_store(store: dict[str, Any]) -> None:
    """Removes the tiles of a run."""
    if store["socket"]:
        try:
            _delete_job(store)
        except OSError as error:
            program = store["program"] or "offloadd"
            raise Error(f"{program} cannot be started: {error.strerror}; delete the job {store['job']} with `offloadd job delete`") from None
    _offloadd.remove_files(store["device_files"])


def is_untrained(run_dir: Path) -> bool:
    """Whether the directory has weights that were written once, and nothing that was trained."""
    try:
        layout = json.loads((run_dir / LAYOUT).read_text())
    except (FileNotFoundError, ValueError):
        return False
    return all(kind.startswith(FROZEN) for unit in layout for _, _, kind in unit)


def remove_weights(run_dir: Path) -> None:
    """Removes the tiles of a run that trains nothing."""
    remove_store(_store_of(run_dir))
    (run_dir / LAYOUT).unlink()


def _store_of(run_dir: Path) -> dict[str, Any]:
    """What `begin_part` wrote, unless it is damaged or of another run, whose tiles are not this one's to delete."""
    text = (run_dir / STORE).read_text()
    if not text:
        # The first start was killed before it opened anything.
        return {"device_files": [], "socket": None}
    try:
        store = json.loads(text)
        began, name = Path(store["run_dir"]), f"offloadd-{store['job']}.tiles"
        sound = all(Path(file).name == name for file in store["device_files"]) and {"socket", "program"} <= store.keys()
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise Error(
            f"{run_dir / STORE} is damaged, so its tiles cannot be found: delete the directory by hand, and the files "
            f"offloadd-{run_dir.name}-*.tiles in nvme_path"
        )
    if (began / STORE).exists() and not (began / STORE).samefile(run_dir / STORE):
        raise Error(f"{run_dir} is a copy of {began}, and its tiles are that run's: delete the copy by hand")
    return store


def _agrees() -> bool:
    try:
        return input("delete all of it? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _delete_job(store: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Deletes the run's job. Raises OSError where the program cannot be started."""
    command = [store["program"] or "offloadd", "job", "delete", store["job"], "--force", "--socket", store["socket"]]
    result = subprocess.run(command, capture_output=True, text=True)
    # There is none where the first start was refused, or a deletion was interrupted.
    if result.returncode and "has no job" not in result.stderr:
        raise Error(f"job {store['job']} of the daemon at {store['socket']} cannot be deleted: {result.stderr.strip()}")
    return result

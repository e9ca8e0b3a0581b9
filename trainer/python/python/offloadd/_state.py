"""The state that is committed beside the tiles: step, random numbers, position in the data, tracked objects."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import re
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch

from ._errors import Damaged, Error, NotSupported

# Larger states lie in files beside the run; a commit's own record holds 64 KiB.
_INLINE_BYTES_MAX = 48 << 10

# Commits outstanding, and the one that is resumed from.
_FILES_KEPT = 4

# What to do about a state that cannot be used.
_WAY_BACK = "bring the file back, or name another run_dir and load a checkpoint"


def random_state() -> dict[str, Any]:
    """The states of all generators a script draws from: Python's, NumPy's where it is loaded, PyTorch's and its GPUs'."""
    version, numbers, gauss = random.getstate()
    # Tensors: a list of as many numbers takes milliseconds to save.
    state: dict[str, Any] = {"python": [version, _words(torch.tensor(numbers, device="cpu")), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = _numpy()
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, _words(torch.from_numpy(keys.astype(numpy.int64))), position, has_gauss, cached]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of `random_state`."""
    random.setstate(python_state(state))
    torch.set_rng_state(state["torch"])
    for index, kept in enumerate(state.get("cuda", ())):
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(kept, index)
    of_numpy = numpy_state(state)
    if of_numpy is not None:
        _numpy().random.set_state(of_numpy)


def python_state(state: dict[str, Any]) -> tuple[int, tuple[int, ...], Any]:
    """The state of Python's generator, as `random.setstate` takes it."""
    version, numbers, gauss = state["python"]
    return version, tuple(_whole(numbers).tolist()), gauss


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Whole numbers below 2^32 in 4 bytes each."""
    return numbers.view(torch.int32)[::2].clone()


def _whole(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_words`."""
    return words.to(torch.int64) & 0xFFFFFFFF


def numpy_state(state: dict[str, Any]) -> Any:
    """The state of NumPy's generator, as `numpy.random.set_state` takes it; None where it was not loaded."""
    numpy = _numpy()
    if numpy is None or "numpy" not in state:
        return None
    name, keys, *rest = state["numpy"]
    return (name, _whole(keys).numpy().astype(numpy.uint32), *rest)


def same_random(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two random states draw the same numbers."""

    def alike(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(alike, a, b))
        return a == b

    return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)


def _numpy():
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def to_blob(state: dict[str, Any], run_dir: Path) -> bytes:
    """The state as what goes with a commit: its bytes, or the name and fingerprint of a file that is on disk by then."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    if len(data) <= _INLINE_BYTES_MAX:
        return data
    path = run_dir / f"state-{state['steps_done']}.pt"
    try:
        write_flushed(path, data, private=True)
    except OSError as error:
        raise Error(
            f"{path}: the state of step {state['steps_done']} cannot be written: {error.strerror}; free some space, then continue or start the script again"
        ) from None
    old = sorted(run_dir.glob("state-*.pt"), key=lambda one: int(one.stem.split("-")[1]))
    for one in old[:-_FILES_KEPT]:
        one.unlink()
    return json.dumps({"file": path.name, "sha256": hashlib.sha256(data).hexdigest()}).encode()


def write_flushed(path: Path, data: bytes, private: bool = False) -> None:
    """Writes a file whole or not at all; it is on the drive when this returns. A `private` one can be read by its owner only."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600 if private else 0o666)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    flush_dir(path.parent)


def flush_dir(directory: Path) -> None:
    """Puts a directory's names on the drive."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def from_blob(blob: bytes, run_dir: Path) -> dict[str, Any]:
    """The inverse of `to_blob`."""
    if blob.startswith(b"{"):
        named = json.loads(blob)
        path = run_dir / named["file"]
        try:
            blob = path.read_bytes()
        except OSError as error:
            raise Error(f"{path}, the state of the last committed step, cannot be read: {error.strerror}; {_WAY_BACK}") from None
        if hashlib.sha256(blob).hexdigest() != named["sha256"]:
            raise Damaged(f"{path}, the state of the last committed step, is damaged: its contents differ from what was committed; {_WAY_BACK}")
    return load_plain(blob, "the state of the last committed step")


# Types of what was read back once, with those of arrays.
_readable: set[Any] = set()


def check_readable(value: Any, what: str) -> None:
    """Refuses a value of a script's that `load_plain` could not read: a run that has committed it could never be resumed. Values of types that
    were tried before cost nothing."""
    types = set(_types(value))
    if types <= _readable:
        return
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        load_plain(buffer.getvalue(), what)
    except Exception as error:
        raise NotSupported(
            f"{what} cannot be kept with a commit or a checkpoint, which hold plain data (numbers, texts, tensors, arrays, lists, dicts): {_of_torch(error)}"
        ) from None
    _readable.update(types)


def _types(value: Any) -> Iterator[Any]:
    """The types of a value and of what is in it."""
    yield type(value)
    if isinstance(value, Mapping):
        for part in (value.keys(), value.values()):
            yield from _types(tuple(part))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for kind in set(map(type, value)):
            yield kind
            if kind not in _SINGLE:
                for one in value:
                    yield from _types(one) if type(one) is kind else ()
    elif hasattr(value, "dtype"):
        yield type(value), str(value.dtype)


_SINGLE = (bool, int, float, str, bytes, type(None))


def load_plain(data: bytes, what: str) -> Any:
    """Reads what `torch.save` has written of plain data. Numbers and arrays of NumPy are: schedules of scripts are made of them."""
    try:
        with _arrays_allowed():
            return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError as error:
        raise Error(f"{what} has something else than numbers, texts, tensors, arrays, lists and dicts: {_of_torch(error)}; {_WAY_BACK}") from None


def _of_torch(error: Exception) -> str:
    """The part of torch's advice that says what it is about."""
    text = str(error)
    found = re.search(r"Unsupported [^\n]*?(?= was not an allowed| whose module|\n|$)", text)
    return found.group() if found else text


@contextlib.contextmanager
def _arrays_allowed() -> Iterator[None]:
    numpy = _numpy()
    if numpy is None:
        yield
        return
    core = numpy._core if hasattr(numpy, "_core") else numpy.core
    kinds = {type(numpy.dtype(name)) for name in "?bhilqBHILQefdFD"}
    names = [core.multiarray.scalar, core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, *kinds]
    if hasattr(torch.serialization, "safe_globals"):
        with torch.serialization.safe_globals(names):
            yield
    else:
        torch.serialization.add_safe_globals(names)
        yield

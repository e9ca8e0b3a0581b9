"""Memory of parameters that a script holds from before `prepare`, by what `param.data` gave, a `state_dict()`, a buffer of which parameters are views, or an
array of numpy. In plain PyTorch it goes on to be the parameters'. Here they move to tiles, and it keeps the values of then.

    arrays of numpy    of trained parameters are refused before anything moves, since nothing tells of their use; others become read-only
    tensors            refuse to be written, and to be read once weights are replaced: see `ReadOnlyCopy` in _released.py
    anything else      raises where it reaches memory of trained parameters once weights are replaced: see _storage.py

torch counts who has a storage: where nobody holds a parameter's, nothing is looked for.
"""

from __future__ import annotations

import bisect
import collections
import functools
import gc
import inspect
import itertools
import sys
import types
import weakref
from typing import Any, Iterable, Iterator, NamedTuple, Optional, Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ._console import bytes_text, say
from ._errors import NotSupported
from ._released import AS_TENSORS, BEFORE, Origin, ReadOnlyCopy, ReadOnlyParam
from ._storage import forbid_for_good
from ._units import Unit
from ._watch import watch_of

# Those of a frame, of a variable here and of an argument.
_REFERENCES_TO_LOCALS = 3

_INSTEAD = "plain PyTorch would go on to share it with the parameter, which moves to a tile: drop it before offloadd.prepare, or keep a copy of it"


class Place(NamedTuple):
    """Where a parameter lies before it moves, or memory of its gradient."""

    start: int
    end: int
    name: str
    trained: bool
    param: Optional[nn.Parameter] = None


class _Places:
    """Those of all parameters, by their addresses."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._sorted = sorted(places, key=lambda place: place[:2])
        # The highest end of each of them and those before.
        self._ends = list(itertools.accumulate((place.end for place in self._sorted), max))

    def between(self, start: int, end: int) -> Optional[Place]:
        """A parameter that lies between two addresses, at least partly; a trained one if there is one."""
        found, at = None, bisect.bisect_left(self._sorted, (end,)) - 1
        while at >= 0 and self._ends[at] > start and not (found and found.trained):
            if self._sorted[at].end > start and (found is None or self._sorted[at].trained):
                found = self._sorted[at]
            at -= 1
        return found


class _Values:
    """Values that were held before the parameters moved: old ones, once `steps` has changed."""

    steps = 0


class HeldMemory:
    """What others hold of the memory of one model's units."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], wholes: Iterable[torch.Tensor] = ()) -> None:
        """Looks for it, before anything moves. `wholes` are parameters of which units have parts."""
        self._trained, self._frozen = _Values(), _Values()
        self._tensors: list[tuple[torch.Tensor, Place]] = []
        self._arrays: list[Any] = []
        # Storages that somebody else has, those of arrays not among them.
        self._storages: list[tuple[StorageWeakRef, Place]] = []
        with AS_TENSORS():
            moving = [(one, param, unit) for unit in units for param, packed in zip(unit.params, unit.packed) for one in (packed.part, *packed.shares)]
            own = {id(one): one for one in (*(one for one, *_ in moving), *model.parameters(), *model.buffers(), *wholes) if has_memory(one)}
            moving = [one for one in moving if id(one[0]) in own]
            names = {id(param): name for name, param in model.named_parameters()}
            name_of = lambda param: names.get(id(param), f"a parameter of shape {tuple(param.shape)}")
            # zero.Init builds large parameters in files without a name, which nobody else can open.
            built = lambda param: hasattr(param, "_offloadd_built")
            _check_shared((one, name_of(param)) for one, param, unit in moving if unit.trained and not built(param))
            if not storages_of_others(own.values(), (one for one, *_ in moving)):
                return
            _list_all()
            # Garbage that waits for the collector of cycles holds nothing.
            gc.collect()
            suspects = storages_of_others(own.values(), (one for one, *_ in moving))
            if not suspects:
                return
            self._places = _Places(Place(*address_range(one), name_of(param), unit.trained, param) for one, param, unit in moving)
            self._find_arrays()
            beside = self._find_tensors(own)
            moves = {id(one) for one in (*(one for one, *_ in moving), *wholes)}
            stays = {one.untyped_storage()._cdata for one in (*beside, *(one for key, one in own.items() if key not in moves))}
            for storage in suspects:
                place = self._places.between(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
                if place is not None and storage._cdata not in stays:
                    self._storages.append((StorageWeakRef(storage), place))

    def _find_arrays(self) -> None:
        for array in _arrays():
            place = self._places.between(*_range_of_array(array)) if array.size else None
            if place is None:
                continue
            if place.trained:
                raise NotSupported(f"an array of numpy of shape {array.shape} has the memory of {place.name}, and {_INSTEAD}")
            self._arrays.append(array)

    def _find_tensors(self, own: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Finds the tensors of others. Returns those that have no parameter's memory, though some may have the rest of a storage."""
        beside = []
        for one in gc.get_objects():
            if not issubclass(type(one), torch.Tensor) or id(one) in own or not has_memory(one):
                continue
            place = self._places.between(*address_range(one))
            if place is None:
                beside.append(one)
            elif one.is_inference():
                continue
            elif type(one) in (torch.Tensor, nn.Parameter):
                self._tensors.append((one, place))
            elif place.trained:
                raise NotSupported(f"a {type(one).__name__} of shape {tuple(one.shape)} has the memory of {place.name}, and {_INSTEAD}")
        return beside

    # The run

    def begin(self, resumed: bool) -> None:
        """The parameters have moved, and those that are trained have other values if the run is `resumed`."""
        for one, place in self._tensors:
            values = self._trained if place.trained else self._frozen
            what = f"{place.name}, whose memory it had before offloadd.prepare, and whose values are in tiles: {BEFORE}"
            # Not by an operation, which would be one more node of autograd's.
            one.__class__ = ReadOnlyParam if type(one) is nn.Parameter else ReadOnlyCopy
            one.origin = Origin(lambda what=what: what, values, values.steps, refused=functools.partial(_forgive, weakref.ref(place.param)))
        for array in self._arrays:
            array.flags.writeable = False
        self._tensors.clear()
        self._arrays.clear()
        left = [(ref, place) for ref, place in self._storages if not ref.expired()]
        sizes = [storage.nbytes() for ref, _ in left if (storage := _storage_of(ref)) is not None and storage.resizable()]
        if sum(sizes):
            say(
                f"warning: {bytes_text(sum(sizes))} of memory that parameters had before offloadd.prepare stay beside the tiles: the script holds that of "
                f"{left[0][1].name}, by a state_dict, by what .data gave, or otherwise; drop it before offloadd.prepare"
            )
        self._storages = left
        if resumed:
            self.replaced()

    def replaced(self) -> None:
        """Trained weights have got other values."""
        self._trained.steps += 1
        storages, self._storages = self._storages, []
        for ref, place in storages:
            storage = _storage_of(ref)
            if place.trained and storage is not None:
                forbid_for_good(storage, f"memory that {place.name} had before offloadd.prepare is used after weights were replaced, and {_INSTEAD}")

    def end(self) -> None:
        """The run has ended, and the parameters have memory of their own again."""
        self._trained.steps += 1
        self._frozen.steps += 1


def _forgive(param: "weakref.ref[nn.Parameter]", before: int, after: int) -> None:
    """A write to memory that a parameter had is refused. What `detach()` gave counts its versions with the parameter."""
    if (found := param()) is not None and (watch := watch_of(found)) is not None:
        watch.forgive(found, before, after)


def storages_of_others(own: Iterable[torch.Tensor], moving: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of `moving` that others have than the tensors `own`, and those whose memory torch has from somebody else, unless it is a file's."""
    users = collections.Counter(one.untyped_storage()._cdata for one in own)
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in moving}
    count = getattr(torch._C, "_storage_Use_Count", None)
    # References to the object of a storage that nobody else has: PyTorch may keep one.
    of_own = {0: torch.zeros(1, device="cpu")}
    of_own[1] = of_own[0].untyped_storage()
    ours = sys.getrefcount(of_own[1])
    # One more is the object here.
    held = {key for key in storages if count is None or count(key) > users[key] + 1 or sys.getrefcount(storages[key]) > ours}
    foreign = {key for key, storage in storages.items() if key not in held and not storage.resizable()}
    files = _mapped_files() if foreign else []
    in_file = lambda storage: any(start <= storage.data_ptr() < end for start, end in files)
    return [storage for key, storage in storages.items() if key in held or key in foreign and not in_file(storage)]


def place_of_array(places: Iterable[Place]) -> Optional[Place]:
    """One of these places in memory of which an array of numpy has a part."""
    of = _Places(places)
    found = (of.between(*_range_of_array(array)) for array in _arrays() if array.size)
    return next(filter(None, found), None)


def has_memory(one: Any) -> bool:
    """Whether a tensor has memory of its own, or a part of some."""
    try:
        return one.layout is torch.strided and one.numel() > 0 and one.untyped_storage().nbytes() > 0 and one.data_ptr() > 0
    except (RuntimeError, NotImplementedError):
        # One of a transform or a tracer, or one that must not be accessed.
        return False


def _check_shared(trained: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Refuses parameters that other processes may have too."""
    for one, name in trained:
        # Memory of a GPU always counts as shared.
        if one.device.type == "cpu" and one.untyped_storage().is_shared():
            raise NotSupported(
                f"{name} lies in memory that other processes may have too, as after share_memory() or in a model that torch.multiprocessing has passed, and moves "
                "to a tile: give it memory of its own before offloadd.prepare, as param.data = param.data.clone() does"
            )


def address_range(one: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(one.size(), one.stride()))
    return one.data_ptr(), one.data_ptr() + (last + 1) * one.element_size()


def _range_of_array(array: Any) -> tuple[int, int]:
    ways = [(size - 1) * stride for size, stride in zip(array.shape, array.strides)]
    return array.ctypes.data + sum(min(way, 0) for way in ways), array.ctypes.data + sum(max(way, 0) for way in ways) + array.itemsize


def _list_all() -> None:
    """Lets the collector of cycles list what `gc.freeze()` took out, as scripts call it before they fork. Frozen again, this run's own objects would
    never be freed."""
    gc.unfreeze()


def _arrays() -> Iterator[Any]:
    """The arrays of numpy of this process, which the collector of cycles does not list: what its objects and the functions that run have."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return

    def of_frames() -> Iterator[Any]:
        for frame in sys._current_frames().values():
            while frame is not None:
                yield from _locals_of(frame)
                frame = frame.f_back

    _list_all()
    seen: set[int] = set()
    for one in itertools.chain(of_frames(), itertools.chain.from_iterable(map(gc.get_referents, gc.get_objects()))):
        left = [one]
        while left:
            one = left.pop()
            if issubclass(type(one), numpy.ndarray):
                yield one
                if one.dtype.hasobject and id(one) not in seen:
                    seen.add(id(one))
                    left.extend(one.flat)
            # A container of nothing that refers to others is not listed either.
            elif type(one) is dict and not gc.is_tracked(one):
                left.extend(one.values())
            elif type(one) is tuple and one and not gc.is_tracked(one):
                left.extend(one)


def _locals_of(frame: types.FrameType) -> list[Any]:
    """What the variables of a function that runs have."""
    by_name = frame.f_locals
    found = list(by_name.values())
    # Before Python 3.13 a function's are copied to a dict, which would keep what the function drops. A script that has called locals() has the same dict,
    # and a debugger writes it back.
    is_copy = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and frame.f_trace is None and sys.getrefcount(by_name) == _REFERENCES_TO_LOCALS:
        by_name.clear()
    return found


def _mapped_files() -> list[tuple[int, int]]:
    """Where files lie in memory."""
    with open("/proc/self/maps") as maps:
        lines = [line.split(None, 5) for line in maps]
    return [tuple(int(address, 16) for address in place.split("-")) for place, _, _, _, inode, *_ in lines if inode != "0"]


def _storage_of(ref: StorageWeakRef) -> Optional[torch.UntypedStorage]:
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)

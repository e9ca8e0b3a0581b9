"""What `state_dict()` of a model or an optimizer gives a script of what lies in tiles: copies, where plain PyTorch gives the memory itself.

What a script writes to a copy is not lost in silence: it must be given to `load_state_dict` before the next pass or step, before a checkpoint,
and before the run ends. Writes are noted by the functions of PyTorch that make them, and those of compiled functions by the version counters of
copies that are there when somebody asks. Not seen are writes to a copy's storage, by collectives, and those below PyTorch.
"""

from __future__ import annotations

import weakref
from typing import Any, Hashable, Iterable, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map

from ._console import say
from ._errors import NotSupported
from ._released import AS_TENSORS, in_transform

# Functions in place that change the shape of a tensor and no values.
_SHAPES = frozenset("unsqueeze_ squeeze_ t_ transpose_ swapaxes_ swapdims_ as_strided_".split())


class StateCopies:
    """Those of one `owner`, "model" or "optimizer"."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        # Names of those that were written to, by what they are copies of.
        self._written: dict[Hashable, str] = {}
        # Those that scripts hold, with their version counters.
        self._held: list[_CopyVersion] = []

    def guard(self, copy: torch.Tensor, name: str, keys: Iterable[Hashable]) -> torch.Tensor:
        """Notes what will be written to a copy of what has these keys."""
        if type(copy) is not torch.Tensor:
            # A DTensor has no class but its own.
            return copy
        if copy.is_inference():
            # It would not count its changes.
            with torch.inference_mode(False):
                copy = copy.clone()
        return StateOrigin(self, name, tuple(keys), StorageWeakRef(copy.untyped_storage())).mark(copy)

    def hold(self, one: "StateCopy") -> None:
        """Compares the version counter of a copy when somebody asks whether it was written to."""
        self._held.append(_CopyVersion(weakref.ref(one), one._version))

    def keep_versions(self, changed: "StateCopy") -> None:
        """What was done to a copy, or to what has its version counter and other memory, is no write."""
        with AS_TENSORS():
            self._held = [
                held._replace(version=one._version) if one.origin.storage == changed.origin.storage else held
                for held in self._held
                if (one := held.copy()) is not None
            ]

    def note(self, name: str, keys: Iterable[Hashable]) -> None:
        """A copy was written to."""
        self._written.update(dict.fromkeys(keys, name))

    def loaded(self, keys: Iterable[Hashable]) -> None:
        """What has these keys has got other values."""
        self._compare()
        for key in keys:
            self._written.pop(key, None)

    def forget(self) -> None:
        """All has got other values."""
        self._compare()
        self._written.clear()

    def refuse_writes(self) -> None:
        """Raises where a copy was written to and nothing was loaded: once, as for a parameter that was written to, and the script may go on without."""
        if why := self._why_written():
            self._written.clear()
            raise NotSupported(why)

    def warn_of_writes(self) -> None:
        """Says what nobody can load any more."""
        if why := self._why_written():
            say(f"warning: the {self._owner} does not have what was written to its state: {why}")

    def _why_written(self) -> str:
        self._compare()
        if not self._written:
            return ""
        return (
            f"{next(iter(self._written.values()))} of {self._owner}.state_dict() was changed in place. It is a copy of what lies in tiles, and plain PyTorch would "
            f"have changed the {self._owner}: give the changed state to {self._owner}.load_state_dict before the next pass or step, or change a clone() of it"
        )

    def _compare(self) -> None:
        """Notes writes that no function has told of."""
        held, self._held = self._held, []
        with AS_TENSORS():
            for one, version in held:
                copy = one()
                if copy is not None and copy.origin.is_of(copy):
                    if copy._version != version:
                        self.note(copy.origin.name, copy.origin.keys)
                    self.hold(copy)


class _CopyVersion(NamedTuple):
    copy: "weakref.ref[StateCopy]"
    version: int


class StateOrigin(NamedTuple):
    """What a copy is one of."""

    copies: StateCopies
    name: str
    keys: tuple[Hashable, ...]
    # Not its address, which another may have later.
    storage: StorageWeakRef

    def mark(self, one: torch.Tensor) -> torch.Tensor:
        """Lets a tensor with this memory tell of writes."""
        # Not by an operation, which would be one more node of autograd's.
        one.__class__ = StateCopy
        one.origin = self
        if not one.is_inference():
            with AS_TENSORS():
                self.copies.hold(one)
        return one

    def is_of(self, one: torch.Tensor) -> bool:
        """Whether a tensor has this memory still. A module that is converted gives its parameters another one."""
        return one.untyped_storage()._cdata == self.storage.cdata


class StateCopy(torch.Tensor):
    """A copy, or a view of one, that tells when it is written to."""

    origin: StateOrigin

    # Compilers break their graphs there: they know no tensors of this class.
    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with AS_TENSORS():
            # Storages and versions cannot be looked at within a transform.
            copies = [] if in_transform() else [one for one in tree_flatten((args, kwargs))[0] if type(one) is StateCopy]
            before = [one._version for one in copies]
            result = func(*args, **(kwargs or {}))
            for one, version in zip(copies, before):
                if one._version == version:
                    continue
                if func.__name__ in _SHAPES or not one.origin.is_of(one):
                    one.origin.copies.keep_versions(one)
                else:
                    one.origin.copies.note(one.origin.name, one.origin.keys)
            origins = {one.origin.storage.cdata: one.origin for one in copies}
            return tree_map(lambda one: _guarded(one, origins), result) if copies else result

    def __repr__(self, *, tensor_contents=None):
        return repr(self.as_subclass(torch.Tensor))

    def __copy__(self):
        with AS_TENSORS():
            return self.origin.mark(self.detach().requires_grad_(self.requires_grad))

    def __deepcopy__(self, memo):
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise NotSupported(f"dlpack of {self.origin.name} of a state_dict(), which is a copy of what lies in tiles: pass a clone() of it")


def _guarded(one: Any, origins: dict[int, StateOrigin]) -> Any:
    """A result of an operation on copies, which tells of writes too where it shares their memory."""
    if type(one) is torch.Tensor and one.layout is torch.strided and not one.is_meta:
        origin = origins.get(one.untyped_storage()._cdata) if one.numel() else None
        if origin is not None:
            origin.mark(one)
    elif type(one).__module__ == "numpy" and hasattr(getattr(one, "flags", None), "writeable"):
        one.flags.writeable = False
    return one

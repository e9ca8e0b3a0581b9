"""What `state_dict()` of a model or an optimizer gives a script of what lies in tiles: copies, where plain PyTorch gives the memory itself.

What a script writes to a copy is not lost in silence: it must be given to `load_state_dict` before the next pass or step.
"""

from __future__ import annotations

from typing import Any, Hashable, Iterable

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ._errors import NotSupported
from ._released import AS_TENSORS, in_transform


class StateCopies:
    """Those of one `owner`, "model" or "optimizer"."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        # Names of those that were written to, by what they are copies of.
        self._written: dict[Hashable, str] = {}

    def guard(self, copy: torch.Tensor, name: str, keys: Iterable[Hashable]) -> torch.Tensor:
        """Notes what will be written to a copy of what has these keys."""
        if type(copy) is not torch.Tensor:
            # A DTensor has no class but its own.
            return copy
        if copy.is_inference():
            # It would not count its changes.
            with torch.inference_mode(False):
                copy = copy.clone()
        # Not by an operation, which would be one more node of autograd's.
        copy.__class__ = StateCopy
        copy.origin = self, name, tuple(keys)
        return copy

    def note(self, name: str, keys: Iterable[Hashable]) -> None:
        """A copy was written to."""
        self._written.update(dict.fromkeys(keys, name))

    def loaded(self, keys: Iterable[Hashable]) -> None:
        """What has these keys has got other values."""
        for key in keys:
            self._written.pop(key, None)

    def forget(self) -> None:
        """All has got other values."""
        self._written.clear()

    def refuse_writes(self) -> None:
        """Raises where a copy was written to and nothing was loaded."""
        if why := self.why_written():
            self._written.clear()
            raise NotSupported(why)

    def why_written(self) -> str:
        """The error of `refuse_writes`; empty where there is none."""
        if not self._written:
            return ""
        return (
            f"{next(iter(self._written.values()))} of {self._owner}.state_dict() was changed in place. It is a copy of what lies in tiles, and plain PyTorch would "
            f"have changed the {self._owner}: give the changed state to {self._owner}.load_state_dict before the next pass or step, or change a clone() of it"
        )


class StateCopy(torch.Tensor):
    """A copy, or a view of one, that tells when it is written to."""

    origin: tuple[StateCopies, str, tuple[Hashable, ...]]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with AS_TENSORS():
            # Storages and versions cannot be looked at within a transform.
            copies = [] if in_transform() else [one for one in tree_flatten((args, kwargs))[0] if type(one) is StateCopy]
            before = [one._version for one in copies]
            result = func(*args, **(kwargs or {}))
            for one, version in zip(copies, before):
                if one._version != version:
                    of_model, name, keys = one.origin
                    of_model.note(name, keys)
            origins = {one.untyped_storage().data_ptr(): one.origin for one in copies}
            return tree_map(lambda one: _guarded(one, origins), result) if copies else result

    def __repr__(self, *, tensor_contents=None):
        return repr(self.as_subclass(torch.Tensor))

    def __deepcopy__(self, memo):
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _guarded(one: Any, origins: dict[int, Any]) -> Any:
    """A result of an operation on copies, which tells of writes too where it shares their memory."""
    if type(one) is torch.Tensor and one.layout is torch.strided and not one.is_meta:
        origin = origins.get(one.untyped_storage().data_ptr()) if one.numel() else None
        if origin is not None:
            one.__class__ = StateCopy
            one.origin = origin
    elif type(one).__module__ == "numpy" and hasattr(getattr(one, "flags", None), "writeable"):
        one.flags.writeable = False
    return one

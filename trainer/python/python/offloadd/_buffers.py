"""Buffers of a model where a run resumes: passes exchange, make, share and drop them, and a later start has those of the beginning. And what modules keep
beside tensors, their extra state."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Optional, Union

import torch
from torch import nn

# The end of its name in a state_dict.
_EXTRA = "_extra_state"

# A buffer, the name of an earlier one that is the same tensor, or none.
Kept = Union[torch.Tensor, str, None]


class Buffers:
    """Those of one run's model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Before the first pass.
        self._first = [name for name, *_ in _places(model)]

    def state(self) -> dict[str, Any]:
        """What is committed of them."""
        kept: dict[str, Kept] = {}
        names: dict[int, str] = {}
        for name, module, own in _places(self._model):
            buffer = module._buffers[own]
            first = names.setdefault(id(buffer), name)
            kept[name] = None if buffer is None else buffer.detach().to("cpu", copy=True) if first == name else first
        extra = extra_states(self._model)
        return {"extra": extra, "buffers": kept, "dropped": [name for name in self._first if name not in kept], "unsaved": _unsaved(self._model)}

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Makes the model's buffers and extra states those of `state`, which may be of a commit before some of its parts were kept. Returns the names of
        those whose modules are not there."""
        modules, lost = dict(self._model.named_modules()), []
        device = next((one.device for one in (*self._model.buffers(), *self._model.parameters())), None)
        for name in state.get("dropped", ()):
            path, _, own = name.rpartition(".")
            if own in getattr(modules.get(path), "_buffers", {}):
                delattr(modules[path], own)
        # The tensors of this start, by the first of their names, and which of them those are that it has had.
        made: dict[str, Optional[torch.Tensor]] = {}
        written: set[int] = set()
        for name, kept in state["buffers"].items():
            path, _, own = name.rpartition(".")
            module = modules.get(path)
            first = kept if isinstance(kept, str) else name
            value = state["buffers"][first]
            if module is None or own not in module._buffers and hasattr(module, own):
                lost += [name] if value is not None else []
                continue
            now = module._buffers[own] if own in module._buffers else None
            if first not in made and _takes(now, value) and id(now) not in written:
                made[first] = now.copy_(value)
                written.add(id(now))
            elif first not in made:
                made[first] = None if value is None else value.to(device if now is None else now.device)
            if own in module._buffers:
                module._buffers[own] = made[first]
            else:
                module.register_buffer(own, made[first], persistent=name not in state.get("unsaved", ()))
        for path, extra in state.get("extra", {}).items():
            if path in modules and _has(modules[path], "set_extra_state"):
                modules[path].set_extra_state(extra)
            else:
                lost.append(f"{path}.{_EXTRA}".lstrip("."))
        return lost


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules give as their extra state, by the name of the module."""
    return {path: module.get_extra_state() for path, module in model.named_modules() if _has(module, "get_extra_state")}


def _has(module: nn.Module, method: str) -> bool:
    """Whether a module has a method of its own, as PyTorch asks."""
    return getattr(type(module), method, None) is not getattr(nn.Module, method)


def _takes(now: Optional[torch.Tensor], value: Optional[torch.Tensor]) -> bool:
    """Whether the values can be written where a buffer is now, for who has it otherwise too."""
    if now is None or value is None or now.layout is not torch.strided or now.shape != value.shape or now.dtype != value.dtype:
        return False
    return all(stride or size < 2 for size, stride in zip(now.shape, now.stride()))


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Where the model has buffers, or none under a buffer's name: the name, the module and its own name of it."""
    for path, module in model.named_modules():
        for own in list(module._buffers.keys()):
            yield f"{path}.{own}".lstrip("."), module, own


def _unsaved(model: nn.Module) -> list[str]:
    """The names of buffers that the model's `state_dict` leaves out."""
    return [f"{path}.{name}".lstrip(".") for path, module in model.named_modules() for name in module._non_persistent_buffers_set]

"""Modules of a model that are in forward, and what their forwards return."""

from __future__ import annotations

import collections
import dataclasses
import sys
from typing import Any, Iterator, Mapping, NamedTuple, Optional

import torch
from torch import nn

from ._units import Unit


class Forward(NamedTuple):
    """A module in forward."""

    units: list[Unit]
    # Units that were gathered on its behalf, and go with it.
    companions: list[Unit]
    # Autograd's sequence number when it began.
    number: int


class Forwards(list[Forward]):
    """Those under way, the outermost first."""

    def begin(self, units: list[Unit]) -> Forward:
        made = Forward(units, [], torch.autograd._get_sequence_nr())
        self.append(made)
        return made

    def release_with_innermost(self, units: list[Unit]) -> None:
        """Lets the innermost module release units when it ends, and gather them again for its backward."""
        self[-1].companions.extend(units)

    @property
    def under_way(self) -> bool:
        """Whether a forward or a backward is."""
        return bool(self) or in_backward()

    def position(self) -> str:
        """The position of the program, for people."""
        if in_backward():
            return "backward"
        if not self:
            return "outside of forward and backward"
        return "forward" if torch.is_grad_enabled() else "forward without gradients"


def of_engine(hook: Any) -> Any:
    """Marks a hook of modules as ours."""
    hook.of_engine = True
    return hook


def is_of_engine(hook: Any) -> bool:
    """Whether a hook of a module is ours."""
    return getattr(hook, "of_engine", False)


def in_backward() -> bool:
    """Whether autograd is at work."""
    return torch._C._current_graph_task_id() != -1


def calls_of(module: Optional[nn.Module]) -> int:
    """Calls of a module that are under way, or of all modules."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        calls += frame.f_code.co_name == "_call_impl" and (module is None or frame.f_locals.get("self") is module)
        frame = frame.f_back
    return calls


def tensors_in(value: Any, depth: int = 8, objects: bool = True) -> Iterator[torch.Tensor]:
    """The tensors in a module's inputs or output, in dataclasses too, and with `objects` in other plain objects."""
    if isinstance(value, torch.Tensor):
        # Logits without values are gone back to what they are made of.
        yield getattr(value, "made_of", value)
        return
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif objects and hasattr(value, "__dict__") and not callable(value):
        parts = vars(value).values()
    else:
        return
    for part in list(parts) if depth else ():
        yield from tensors_in(part, depth - 1, objects)


def returned(unit: Unit, output: Any) -> bool:
    """Whether a forward's output has a view of the unit's parameters."""
    storage = unit.flat.untyped_storage()._cdata
    return any(one.layout is torch.strided and one.untyped_storage()._cdata == storage for one in tensors_in(output))

"""Modules of a model that are in forward, which thread it is that uses the model, and what forwards return."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
import threading
from typing import Any, Iterator, Mapping, NamedTuple, Optional

import torch
from torch import nn

from ._errors import NotSupported
from ._units import Unit

_OWN = os.path.dirname(__file__)


class Use(NamedTuple):
    """A thread's use of a model, during which no other thread may bring or release units."""

    thread: int


class Forward(NamedTuple):
    """A module in forward."""

    units: list[Unit]
    # Units that were gathered on its behalf, and go with it.
    companions: list[Unit]
    # Autograd's sequence number when it began.
    number: int
    # The use of the model that began with it, if one did.
    use: Optional[Use]


class Forwards(list[Forward]):
    """Those under way, the outermost first. One thread at a time uses the model: units go and come with what it does, whoever else computes with them."""

    def __init__(self) -> None:
        super().__init__()
        # Whether a backward is under way, or did not end.
        self.backward = False
        # The use that is under way, if one is. In a dictionary, one of two threads sets it.
        self._use: dict[None, Use] = {}

    def begin(self, units: list[Unit]) -> Forward:
        made = Forward(units, [], torch.autograd._get_sequence_nr(), self.enter())
        self.append(made)
        return made

    def end(self) -> Optional[Forward]:
        """Takes the innermost one, whose use of the model goes on; none in a thread that was refused."""
        use = self._use.get(None)
        if not in_backward() and (use is None or use.thread != threading.get_ident()):
            return None
        return self.pop()

    def enter(self) -> Optional[Use]:
        """Begins a use of this thread's, unless one is under way, and returns it. Refuses it while another thread uses the model."""
        self.check_thread()
        if in_backward():
            return None
        use = Use(threading.get_ident())
        found = self._use.setdefault(None, use)
        if found.thread == use.thread:
            return use if found is use else None
        # Of a thread that was interrupted, unless it has just begun.
        self.check_thread()
        self._use[None] = use
        return use

    def leave(self, use: Optional[Use]) -> None:
        if use is not None and self._use.get(None) is use:
            del self._use[None]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A use of the model by this thread."""
        use = self.enter()
        try:
            yield
        finally:
            self.leave(use)

    def check_thread(self) -> None:
        """Refuses a thread while another one uses the model. A backward calls hooks in threads of its own, and functions at its end."""
        use, this, backward = self._use.get(None), threading.get_ident(), in_backward()
        other = use is not None and use.thread != this and _is_at_work(use.thread, but_in_backward=backward)
        other = other or self.backward and not backward and any(_is_in_backward(thread) for thread in sys._current_frames() if thread != this)
        if other and (backward or _is_of_script(this)):
            raise NotSupported(
                "two threads use a prepared model at once, and what one brings into memory the other would release: let one wait for the other, as with a "
                "threading.Lock around each forward with its backward, each step and each read of weights"
            )

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


def _codes(thread: int) -> Iterator[Any]:
    """The functions that a thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _is_of_script(thread: int) -> bool:
    """Whether Python has begun a thread, and not autograd."""
    return any(one.ident == thread and not isinstance(one, threading._DummyThread) for one in threading.enumerate())


def _is_in_backward(thread: int) -> bool:
    return any(code.co_name == "_engine_run_backward" for code in _codes(thread))


def _is_at_work(thread: int, but_in_backward: bool) -> bool:
    """Whether a thread is in a module or in what is ours, and did not begin a backward there if `but_in_backward`."""
    if but_in_backward and _is_in_backward(thread):
        return False
    return any(code.co_name == "_call_impl" or code.co_filename.startswith(_OWN) for code in _codes(thread))


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

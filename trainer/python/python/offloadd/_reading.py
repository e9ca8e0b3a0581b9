"""What a script reads of released parameters, in a forward, in a backward, or between steps: see `_released`, whose `Reader` this is."""

from __future__ import annotations

import contextlib
import weakref
from typing import Callable, Optional

import torch
from torch import nn

from ._errors import NotSupported
from ._forwards import Forwards
from ._gathering import Gathering
from ._held import HeldMemory
from ._packed import is_wrapper
from ._released import AS_TENSORS, ReleasedParam, on_copies
from ._units import Unit


class Reading:
    """Reads parameters of one model whose values are in tiles."""

    def __init__(self, gathering: Gathering, forwards: Forwards, used_again: Callable[[Unit, int], None]) -> None:
        """`used_again` is told of units that a backward computes with again, and of its graph task."""
        self._gathering, self._forwards, self._used_again = gathering, forwards, used_again
        # Times that weights were replaced, by a step or otherwise.
        self.steps = 0
        # Copies whose addresses a script has asked for since, by parameter.
        self.addressed: dict[int, torch.Tensor] = {}
        # What a script holds of the parameters' memory of before.
        self.held: Optional[HeldMemory] = None
        gathering.released = type("Released", (ReleasedParam,), {"reader_ref": weakref.ref(self)})
        self.read = torch.compiler.disable(self.read)

    def replaced(self) -> None:
        """Weights were replaced: copies of them are old."""
        self.steps += 1
        self.addressed.clear()
        if self.held is not None:
            self.held.replaced()

    def name(self, param: torch.Tensor) -> str:
        return self._gathering.name(param)

    @property
    def under_way(self) -> bool:
        return self._forwards.under_way

    def read(self, params: list[nn.Parameter], func, args, kwargs):
        """Calls `func`, which takes released parameters."""
        absent = [unit for unit in self._gathering.units_with(params) if not unit.here]
        task = torch._C._current_graph_task_id()
        # Those that are wrapped around others compute with functions of their class.
        as_tensors = contextlib.nullcontext if any(map(is_wrapper, params)) else AS_TENSORS
        if not self._forwards.under_way:
            with contextlib.ExitStack() as gathered:
                for unit in absent:
                    gathered.enter_context(self._gathering.gathered(unit))
                with as_tensors():
                    return on_copies(self, params, func, args, kwargs)
        for unit in absent:
            self._gathering.gather(unit, record=bool(self._forwards))
        if self._forwards:
            # Released with the module that used them, and gathered again for that module's backward.
            self._forwards.release_with_innermost(absent)
        try:
            with as_tensors():
                return func(*args, **kwargs)
        finally:
            for unit in absent if not self._forwards else ():
                # Computed again for this backward, which may need the values.
                self._used_again(unit, task)

    def is_same(self, param: nn.Parameter, value: torch.Tensor) -> bool:
        """Whether a released parameter has this value, type and device already."""
        with AS_TENSORS():
            like = lambda one: (one.shape, one.dtype, one.device, one.stride())
            if like(param) != like(value):
                return False
            with self._gathering.gathered(self._gathering.unit_of[id(param)]):
                return torch.equal(param, value)

    def check_trainable(self, param: nn.Parameter, requires_grad: bool = True) -> None:
        """Refuses to train what was frozen when the model was prepared: its tiles have no gradients and no moments."""
        if requires_grad and self._gathering.trains and not self._gathering.unit_of[id(param)].trained:
            raise NotSupported(
                f"{self.name(param)} was frozen when the model was prepared, so its tiles have no moments: let it require gradients before "
                "offloadd.prepare, and give it a learning rate of 0 until it is to be trained; or close() the run and prepare the model again"
            )

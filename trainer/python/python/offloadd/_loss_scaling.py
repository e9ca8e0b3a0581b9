"""The scale of an engine's losses: gradient_accumulation_steps, and the loss scale of fp16.

`engine.backward(loss)` scales the loss. A script may also call `loss.backward()`: its gradients are then divided by
gradient_accumulation_steps as they come, and fp16 needs `engine.scale(loss)` before.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Mapping, Optional

import torch

from . import _offloadd
from ._errors import NotSupported


class LossScaling:
    """The scale of one engine's losses."""

    # Calls of `backward` under way, of any engine: a generator's loss passes through the model of its critic, which has an engine of its own.
    _in_backward: ClassVar[int] = 0
    # Whether the backward that is under way is of a loss that `scale` of an engine has scaled.
    _of_scaled: ClassVar[bool] = False

    def __init__(self, accumulated: int, overflow: Any, scales: bool) -> None:
        self.accumulated, self.scales = accumulated, scales
        # A step whose gradients are not finite is skipped in fp16, and in bf16 where the configuration says so.
        self._adapted = _offloadd.LossScale(json.dumps(overflow)) if overflow != "stops" else None

    @property
    def needed(self) -> bool:
        """Whether a gradient may have to be changed, or refused."""
        return self.accumulated > 1 or self.scales

    @property
    def skips(self) -> bool:
        """Whether steps whose gradients are not finite are skipped."""
        return self._adapted is not None

    @property
    def scale(self) -> float:
        return 1.0 if self._adapted is None else self._adapted.scale

    @property
    def skipped(self) -> int:
        return 0 if self._adapted is None else self._adapted.skipped

    def step(self, finite: bool) -> None:
        """Adapts the scale after the gradients of a step."""
        if self._adapted is not None:
            self._adapted.step(finite)

    def backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        """Runs the backward of a loss that is divided already."""
        LossScaling._in_backward += 1
        try:
            (loss * self.scale if self.scales else loss).backward(retain_graph=retain_graph)
        finally:
            LossScaling._in_backward -= 1

    def scale_of_script(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, whose `backward` the script calls."""
        if not self.scales:
            return loss
        scaled = loss * self.scale
        if scaled.requires_grad:
            scaled.register_hook(LossScaling._begin_scaled)
        return scaled

    @classmethod
    def _begin_scaled(cls, _: torch.Tensor) -> None:
        cls._of_scaled = True
        queue = torch.autograd.Variable._execution_engine.queue_callback
        # After what the models have queued by then, which takes the last gradients.
        queue(lambda: queue(cls.forget_scaled))

    @classmethod
    def forget_scaled(cls) -> None:
        """The backward of a scaled loss is over: another one needs a scale of its own."""
        cls._of_scaled = False

    def of_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns what a gradient that comes adds to those of the step."""
        if LossScaling._in_backward:
            return grad
        if self.scales and not LossScaling._of_scaled:
            raise NotSupported(
                "loss.backward() with fp16: the loss must be multiplied with the loss scale: call engine.backward(loss), or engine.scale(loss).backward()"
            )
        return grad / self.accumulated if self.accumulated > 1 else grad

    def state_dict(self) -> Optional[dict[str, Any]]:
        return None if self._adapted is None else self._adapted.state_dict()

    def load_state_dict(self, state: Optional[Mapping[str, Any]]) -> None:
        if self._adapted is not None and state is not None:
            self._adapted.load_state_dict(state)

"""The optimizers that `offloadd.prepare` takes, and why it takes no others."""

from __future__ import annotations

from typing import Any

import torch

from ._errors import Error, NotSupported
from ._untrained import Untrained

_SCHEDULERS = "torch.optim.lr_scheduler"

_KINDS = (torch.optim.Adam, torch.optim.AdamW)

# Options that change the update.
_OPTIONS = ("amsgrad", "maximize", "differentiable")

# Parts of the names of optimizers that save memory which the moments take here in no GPU.
_SAVE_MEMORY = ("4bit", "8bit", "fp8", "paged", "galore", "apollo", "lomo", "layerwise", "cpuoffload", "zeroredundancy")


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer whose update is not the engine's."""
    kind, name = type(optimizer), name_of(type(optimizer))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Error(f"the optimizer is a {name}, which is no torch.optim.Optimizer: pass a torch.optim.AdamW")
    if kind not in (*_KINDS, Untrained):
        raise NotSupported(f"the optimizer is {name}, and offloadd updates with torch.optim.Adam or torch.optim.AdamW only: {_instead(kind, name)}")
    step = vars(optimizer).get("step", kind.step)
    while getattr(step, "__globals__", {}).get("__name__") == _SCHEDULERS:
        # A scheduler notes only that it was called.
        step = step.__wrapped__
    if getattr(step, "__func__", step) is not kind.step:
        raise NotSupported(
            f"the optimizer's step was replaced by {getattr(step, '__qualname__', type(step).__name__)}, which would not be called: replace it after "
            "offloadd.prepare, or use register_step_pre_hook and register_step_post_hook"
        )
    check_settings(optimizer)


def check_settings(optimizer: torch.optim.Optimizer) -> None:
    """Refuses settings of parameter groups that are not the engine's. A script may change them before each step."""
    name = name_of(type(optimizer))
    for group in optimizer.param_groups:
        for key in _OPTIONS:
            if group.get(key):
                raise NotSupported(f"{name} with {key}=True: leave it out")
        decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
        if group["weight_decay"] and not decoupled:
            raise NotSupported(
                f"{name} with weight_decay adds the decay to the gradient, which is not supported: use torch.optim.AdamW, which decays the weight"
            )


def name_of(kind: type) -> str:
    """The name of a class with its package."""
    if kind.__module__.startswith("torch.optim."):
        return f"torch.optim.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _instead(kind: type, name: str) -> str:
    trainers = 'a Trainer makes it with optim="adamw_torch"'
    if any(part in name.lower() for part in _SAVE_MEMORY):
        return (
            f"use torch.optim.AdamW ({trainers}), whose moments are in host memory or on drives and take no GPU memory; the key offloadd.moments = "
            '"bf16" halves them'
        )
    if issubclass(kind, _KINDS):
        return f"use {name_of(next(one for one in kind.__mro__ if one in _KINDS))} itself, since a subclass's own step would not be called"
    if "lion" in name.lower():
        return f"use torch.optim.AdamW ({trainers}), or Lion in the native trainer"
    return f"use torch.optim.AdamW ({trainers})"

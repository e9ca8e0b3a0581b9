"""What the optimizer keeps of a parameter, to read and to change: DeepSpeed's `safe_get_full_*` and `safe_set_full_*`.

All ranks must call them, with the same parameter and the same value. Each reads or writes the tiles of one unit.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from ._errors import Error
from ._units import Unit
from ._zero import run_of


def safe_get_full_fp32_param(param: torch.Tensor) -> Optional[torch.Tensor]:
    """The fp32 values that the optimizer updates; None for a parameter of no engine."""
    return _read(param, "master")


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> Optional[torch.Tensor]:
    """The moment "exp_avg" or "exp_avg_sq" in fp32; None for a parameter that is not trained."""
    return _read(param, optim_state_key)


def safe_get_full_grad(param: torch.Tensor) -> Optional[torch.Tensor]:
    """The fp32 gradient of the step so far, the mean over the ranks; None where none has come since the last step. Clipping in `step` is not
    in it, the loss scale of fp16 is."""
    run = run_of(param)
    held = None if run is None else run.engine.gradients.handles.get(id(param))
    if held is None or held is not param.grad:
        return None
    if held.value is not None or held.zero:
        return held.clone().float()
    unit, index = _place(run, param)
    found = Unit.view_of(run.engine.gradients.of_unit(unit), param, unit.offsets[index]).float() * held.scale.cpu()
    return found.to(param.device)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a parameter other fp32 values, and commits them."""
    _write(param, "master", value)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Gives the moment "exp_avg" or "exp_avg_sq" of a parameter other values, and commits them."""
    _write(param, optim_state_key, value)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Gives the gradient of the step so far other values."""
    run = run_of(param)
    if run is None or param.grad is None:
        raise Error("safe_set_full_grad: no gradient of this parameter has come since the last step: call it between backward and step")
    param.grad.copy_(_shaped(param, value).to(param.grad.dtype))


def _read(param: torch.Tensor, name: str) -> Optional[torch.Tensor]:
    run = run_of(param)
    if run is None:
        return None
    unit, index = _place(run, param)
    if not unit.trained:
        if name != "master":
            return None
        with run.engine.gathering.gathered(unit):
            return param.detach().float().clone()
    flat = run.moments.read(unit)[_number(run, param, name)]
    return Unit.view_of(flat, param, unit.offsets[index]).clone().to(param.device)


def _write(param: torch.Tensor, name: str, value: torch.Tensor) -> None:
    run = run_of(param)
    if run is None or not run.engine.gathering.unit_of[id(param)].trained:
        raise Error("safe_set_full: the parameter is not trained by an engine of this process: change its values before deepspeed.initialize")
    unit, index = _place(run, param)
    flats = run.moments.read(unit)
    Unit.view_of(flats[_number(run, param, name)], param, unit.offsets[index]).copy_(_shaped(param, value))
    run.moments.set(unit, index, flats)


def _number(run: Any, param: torch.Tensor, name: str) -> int:
    kept = ("master", *run.moments.names_of(param))
    if name not in kept:
        raise Error(f"the optimizer keeps no {name!r} of a parameter: name " + " or ".join(f'"{one}"' for one in kept[1:]))
    return kept.index(name)


def _place(run: Any, param: torch.Tensor) -> tuple[Any, int]:
    """The unit of a parameter, and its number there."""
    unit = run.engine.gathering.unit_of[id(param)]
    return unit, next(index for index, one in enumerate(unit.params) if one is param)


def _shaped(param: torch.Tensor, value: Any) -> torch.Tensor:
    """The value in the parameter's shape."""
    value = torch.as_tensor(value).detach()
    if value.numel() != param.numel():
        raise Error(f"the parameter has the shape {tuple(param.shape)}, and the value {tuple(value.shape)}: pass as many numbers")
    return value.reshape(param.shape)

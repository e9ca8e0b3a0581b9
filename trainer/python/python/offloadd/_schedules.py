"""The `optimizer` and `scheduler` sections of DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any, Iterable, Mapping, Optional

import torch
from torch.optim.lr_scheduler import LRScheduler

from . import _offloadd
from ._errors import Error, NotSupported

# Each scheduler with the parameters it has.
_PARAMS = dict(_offloadd.deepspeed_schedulers())

SCHEDULERS = tuple(_PARAMS)

_OPTIMIZER_PARAMS = {"lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode", "fused", "foreach"}


class Schedule(LRScheduler):
    """One of DeepSpeed's schedules, with its rate at every step. `description` is what the extension reads."""

    def __init__(self, optimizer: torch.optim.Optimizer, description: Mapping[str, Any]) -> None:
        self.description = json.dumps(description)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """The rate of the next step, for every parameter group; sets betas where the schedule has them."""
        rate, betas = _offloadd.learning_rate(self.description, self.last_epoch + 1)
        for group in self.optimizer.param_groups:
            if betas is not None:
                group["betas"] = tuple(betas)
        return [rate] * len(self.optimizer.param_groups)


def optimizer_of(config: Mapping[str, Any], parameters: Iterable) -> Optional[torch.optim.Optimizer]:
    """The optimizer of the section `optimizer`; None where there is none."""
    section = config.get("optimizer") or {}
    if not section:
        return None
    kind, params = section.get("type", "AdamW"), _without_auto(section.get("params") or {})
    if kind.lower() not in ("adam", "adamw"):
        raise NotSupported(f'optimizer.type: "{kind}" is not supported: use "AdamW" or "Adam"')
    for key in params:
        if key not in _OPTIMIZER_PARAMS:
            raise NotSupported(f"optimizer.params.{key} is not supported: leave it out")
    decoupled = kind.lower() == "adamw" or params.get("adam_w_mode", True)
    if not decoupled and params.get("weight_decay", 0):
        raise NotSupported(
            "optimizer.params.adam_w_mode: weight decay inside the gradient (adam_w_mode = false) is not supported: use "
            "AdamW or weight_decay = 0"
        )
    return torch.optim.AdamW(
        parameters,
        lr=params.get("lr", 1e-3),
        betas=tuple(params.get("betas", (0.9, 0.999))),
        eps=params.get("eps", 1e-8),
        weight_decay=params.get("weight_decay", 0.0),
    )


def schedule_of(config: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Optional[Schedule]:
    """The scheduler of the section `scheduler`; None where there is none."""
    section = config.get("scheduler") or {}
    if not section.get("type"):
        return None
    kind, params = section["type"], _without_auto(section.get("params") or {})
    if kind not in _PARAMS:
        raise NotSupported(f'scheduler.type: "{kind}" is not supported: use one of {", ".join(_PARAMS)}')
    known = (*_PARAMS[kind], "last_batch_iteration")
    for key in params:
        if key not in known:
            raise Error(f"scheduler.params: {kind} has no {key}: it has {', '.join(_PARAMS[kind])}")
    return Schedule(optimizer, _description(kind, params, optimizer.param_groups[0]["lr"]))


def _description(kind: str, params: Mapping[str, Any], lr: float) -> dict[str, Any]:
    """The schedule with DeepSpeed's defaults filled in."""
    get = params.get
    if kind == "LRRangeTest":
        return {
            "range_test": {
                "min_lr": get("lr_range_test_min_lr", 1e-3),
                "step_size": get("lr_range_test_step_size", 2000),
                "step_rate": get("lr_range_test_step_rate", 1.0),
                "staircase": get("lr_range_test_staircase", False),
            }
        }
    if kind == "OneCycle":
        first, stairs = get("cycle_first_step_size", 2000), get("cycle_first_stair_count", 0)
        momentum = {
            "min": get("cycle_min_mom", 0.8),
            "max": get("cycle_max_mom", 0.9),
            "decay_rate": get("decay_mom_rate", 0.0),
        }
        return {
            "one_cycle": {
                "min_lr": _required(params, kind, "cycle_min_lr"),
                "max_lr": _required(params, kind, "cycle_max_lr"),
                "first_steps": first,
                "second_steps": get("cycle_second_step_size", first),
                "first_stairs": stairs,
                "second_stairs": get("cycle_second_stair_count", stairs),
                "decay_steps": get("decay_step_size", 0),
                "decay_lr_rate": get("decay_lr_rate", 0.0),
                "momentum": momentum if get("cycle_momentum", True) else None,
            }
        }
    warmup_type = get("warmup_type", "log")
    if warmup_type not in ("log", "linear"):
        raise Error(f'scheduler.params.warmup_type: "{warmup_type}": use "log" or "linear"')
    warmup = {
        "min_lr": get("warmup_min_lr", 0.0),
        "max_lr": get("warmup_max_lr", lr),
        "steps": max(2, get("warmup_num_steps", 1000)),
        "logarithmic": warmup_type == "log",
    }
    if kind == "WarmupLR":
        return {"warmup": warmup}
    total = _required(params, kind, "total_num_steps")
    if kind == "WarmupDecayLR":
        return {"warmup_decay": {"warmup": warmup, "total_steps": total}}
    warmup["min_lr"] = lr * get("warmup_min_ratio", 0.0)
    ratio = get("cos_min_ratio", 1e-4)
    return {"warmup_cosine": {"warmup": warmup, "total_steps": total, "min_ratio": ratio}}


def _required(params: Mapping[str, Any], kind: str, key: str) -> Any:
    if key not in params:
        raise Error(f"scheduler.params.{key}: {kind} needs it")
    return params[key]


def _without_auto(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if value is not None and value != "auto"}

"""The `optimizer` and `scheduler` sections of DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Iterable, Optional

import torch
from torch.optim.lr_scheduler import LRScheduler

from . import _offloadd
from ._config import Settings
from ._errors import NotSupported
from ._lion import Lion

# Names of DeepSpeed's schedulers.
SCHEDULERS = tuple(name for name, _ in _offloadd.deepspeed_schedulers())


class Schedule(LRScheduler):
    """One of DeepSpeed's schedules, with its rate at every step. `description` is what the extension reads."""

    def __init__(self, optimizer: torch.optim.Optimizer, description: str) -> None:
        self.description = description
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """The rate of the next step, for every parameter group; sets betas where the schedule has them."""
        rate, betas = _offloadd.learning_rate(self.description, self.last_epoch + 1)
        for group in self.optimizer.param_groups:
            if betas is not None:
                group["betas"] = tuple(betas)
        return [rate] * len(self.optimizer.param_groups)


def optimizer_of(settings: Settings, parameters: Iterable) -> Optional[torch.optim.Optimizer]:
    """The optimizer of the section `optimizer`; None where there is none."""
    given = settings.optimizer
    if given is None:
        return None
    same, kind = {"lr": given["lr"], "betas": tuple(given["betas"]), "weight_decay": given["weight_decay"]}, given["type"]
    if kind == "Lion":
        return Lion(parameters, **same)
    if kind == "AdamW":
        return torch.optim.AdamW(parameters, eps=given["eps"], **same)
    raise NotSupported(f"optimizer.type = {kind!r}: no class here makes it; pass the optimizer to initialize")


def schedule_of(settings: Settings, optimizer: torch.optim.Optimizer) -> Optional[Schedule]:
    """The scheduler of the section `scheduler`; None where there is none."""
    if settings.scheduler is None:
        return None
    rate = float(optimizer.param_groups[0]["lr"])
    return Schedule(optimizer, _offloadd.schedule_of(json.dumps(settings.scheduler), rate))

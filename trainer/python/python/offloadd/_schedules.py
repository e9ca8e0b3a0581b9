"""The `optimizer` and `scheduler` sections of DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any, Iterable, Mapping, Optional

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from . import _offloadd
from ._config import Settings
from ._errors import NotSupported
from ._lion import Lion
from ._muon import MuonWithAdamW, grouped
from ._muon import rule_of as rule_of_group
from ._supported_optimizers import rule_of

# Names of DeepSpeed's schedulers.
SCHEDULERS = tuple(name for name, _ in _offloadd.deepspeed_schedulers())


class Schedule(LRScheduler):
    """One of DeepSpeed's schedules, with its rate at every step. `description` is what the extension reads. All groups have this rate, but with Muon those
    of other rates than the matrices keep the ratio."""

    def __init__(self, optimizer: torch.optim.Optimizer, description: str) -> None:
        self.description = description
        rates = [_first_rate(group) for group in optimizer.param_groups]
        of_matrices = next((rate for rate, group in zip(rates, optimizer.param_groups) if _is_of_muon(optimizer, group)), 0.0)
        self._factors = [rate / of_matrices if of_matrices else 1.0 for rate in rates]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """The rate of the next step, for every parameter group; sets betas where the schedule has them."""
        rate, betas = _offloadd.learning_rate(self.description, self.last_epoch + 1)
        for group in self.optimizer.param_groups:
            if betas is not None and "betas" in group:
                group["betas"] = tuple(betas)
        return [rate * factor for factor in self._factors]


def optimizer_of(settings: Settings, model: nn.Module, parameters: Iterable) -> Optional[torch.optim.Optimizer]:
    """The optimizer of the section `optimizer` for parameters of the model; None where there is none."""
    given = settings.optimizer
    if given is None:
        return None
    same, kind = {"lr": given["lr"], "betas": tuple(given["betas"]), "weight_decay": given["weight_decay"]}, given["type"]
    if kind == "Lion":
        return Lion(parameters, **same)
    if kind == "AdamW":
        return torch.optim.AdamW(parameters, eps=given["eps"], **same)
    if kind == "Muon":
        muon = given["muon"]
        groups = grouped(model, settings.units or None, parameters, given["lr"], muon["adam_lr"])
        rest = {"betas": same["betas"], "eps": given["eps"], "weight_decay": given["weight_decay"]}
        groups = [group if group["use_muon"] else {**rest, **group} for group in groups]
        own = {key: muon[key] for key in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")}
        return MuonWithAdamW(groups, lr=given["lr"], weight_decay=given["weight_decay"], ns_coefficients=tuple(muon["ns_coefficients"]), **own)
    raise NotSupported(f"optimizer.type = {kind!r}: no class here makes it; pass the optimizer to initialize")


def schedule_of(settings: Settings, optimizer: torch.optim.Optimizer) -> Optional[Schedule]:
    """The scheduler of the section `scheduler`; None where there is none."""
    if settings.scheduler is None:
        return None
    return Schedule(optimizer, _offloadd.schedule_of(json.dumps(settings.scheduler), _rate_of(optimizer)))


def _rate_of(optimizer: torch.optim.Optimizer) -> float:
    """The rate that a schedule of an optimizer begins with: that of matrices, where Muon updates some."""
    groups = optimizer.param_groups
    return _first_rate(next((group for group in groups if _is_of_muon(optimizer, group)), groups[0]))


def _first_rate(group: Mapping[str, Any]) -> float:
    """The rate of a group before an earlier schedule has changed it."""
    return float(group.get("initial_lr", group["lr"]))


def _is_of_muon(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether Muon updates a group of an optimizer."""
    return rule_of(optimizer) == "Muon" and rule_of_group(group) == "Muon"

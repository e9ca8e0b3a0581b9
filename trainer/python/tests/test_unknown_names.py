"""A name from outside that is known to nobody is refused with its own words: none falls through to a default."""

import dataclasses
import json
import pathlib

import pytest
import torch
from torch import nn

import offloadd
from offloadd import _muon
from offloadd._config import settings_of
from offloadd._deepspeed import configure
from offloadd._nodes import Topology
from offloadd._plan import engine_plan
from offloadd._schedules import optimizer_of
from offloadd._sketch import quantize
from offloadd._supported_optimizers import rule_named, rule_of
from offloadd._units import units_of
from offloadd._zero import Init


class SomeOptimizer(torch.optim.Optimizer):
    """Of a script's own."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0})


def planned(optimizer):
    model = nn.Linear(2, 2)
    return offloadd.prepare(model, optimizer(model.parameters()), {}, plan_only=True)


def of_settings(**changed):
    return dataclasses.replace(settings_of({"optimizer": {"type": "AdamW"}}), **changed)


def quantized(how):
    model = nn.Module()
    model.config = type("Config", (), {"quantization_config": {"quant_method": how}})
    quantize(model, None)


def described(**changed):
    """A run as the extension reads it."""
    return json.dumps(engine_plan(of_settings(**changed), pathlib.Path("run"), units_of(nn.Linear(2, 2), None)[0], Topology(), None))


# Where a name comes from, what reads it, and the name as the error has it.
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
NAMES = {
    "an optimizer, of a plan": (lambda: planned(SomeOptimizer), "SomeOptimizer"),
    "an optimizer, of torch, of a plan": (lambda: planned(torch.optim.SGD), "torch.optim.SGD"),
    "an optimizer, its rule": (lambda: rule_of(SomeOptimizer([nn.Parameter(torch.zeros(1))])), "SomeOptimizer"),
    "no optimizer at all": (lambda: planned(list), "builtins.list"),
    "optimizer.type": (lambda: settings_of({"optimizer": {"type": "Sophia"}}), "Sophia"),
    "optimizer.type, behind the check": (
        lambda: optimizer_of(of_settings(optimizer={**ADAMW, "type": "Sophia"}), nn.Module(), [nn.Parameter(torch.zeros(1))]),
        "Sophia",
    ),
    "the rule that tiles are updated by": (lambda: offloadd._offloadd.plan(described(rule="Sophia")), "Sophia"),
    "scheduler.type": (lambda: settings_of({"scheduler": {"type": "Triangle"}}), "Triangle"),
    "optim of a Trainer": (lambda: rule_named("sophia"), "sophia"),
    "adjust_lr_fn of Muon": (lambda: _muon.scalars_of({"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": "square"}, (2, 2)), "square"),
    "a method of quantization": (lambda: quantized("octonions"), "octonions"),
    "an argument of zero.Init": (lambda: Init(sideways=True), "sideways"),
    "an argument of checkpointing.configure": (lambda: configure(sideways=True), "sideways"),
    **{
        key: (lambda key=key: settings_of({"offloadd": {key: "tape"}}), "tape")
        for key in ("optimizer_step", "optimizer_device", "gradients", "activations", "matmuls", "moments", "master", "shard")
    },
    "a key of offloadd": (lambda: settings_of({"offloadd": {"sideways": 1}}), "sideways"),
    **{
        f"{section}.device": (lambda section=section: settings_of({"zero_optimization": {section: {"device": "tape"}}}), "tape")
        for section in ("offload_param", "offload_optimizer")
    },
    "data_types.grad_accum_dtype": (lambda: settings_of({"data_types": {"grad_accum_dtype": "fp7"}}), "fp7"),
}


@pytest.mark.parametrize("origin", NAMES)
def test_an_unknown_name_is_refused_by_its_name(origin):
    read, name = NAMES[origin]
    with pytest.raises((offloadd.Error, TypeError), match=name):
        read()

"""The optimizers that are taken, by their class or by Hugging Face's name, and why no others are."""

from __future__ import annotations

import dataclasses
from typing import Any, Container, Mapping

import torch

from . import _muon
from ._config import Settings
from ._errors import Error, NotSupported
from ._lion import Lion
from ._muon import MuonWithAdamW, TorchMuon
from ._untrained import NoOptimizer

_SCHEDULERS = "torch.optim.lr_scheduler"

_KINDS = (torch.optim.Adam, torch.optim.AdamW)

# Those whose groups may have matrices that Muon updates.
_MUONS = (MuonWithAdamW, TorchMuon)

# Moments of a parameter in PyTorch's form, by the rule of the update. Tiles have them in this order.
MOMENTS = {"AdamW": ("exp_avg", "exp_avg_sq"), "Lion": ("exp_avg",), "Muon": ("momentum_buffer",)}

# Settings of a group that a rule reads.
_SETTINGS = {
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "Lion": ("lr", "betas", "weight_decay"),
    "Muon": ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
}

# Names that a Trainer's argument `optim` may have, with the rule of their update: they differ in where moments lie and in how it is computed.
NAMED = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "paged_adamw_32bit"), "AdamW"),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), "Lion"),
}

# Those of bitsandbytes with moments in 8 bits.
_EIGHT_BITS = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "AdamW"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "Lion"),
}
NAMED.update(_EIGHT_BITS)

# What an optimizer has that a Trainer made by such a name: the name.
_NAME_HERE = "offloadd_optim"

# The name that a Trainer has for a rule here, and the class.
_NAME = {"AdamW": "adamw_torch", "Lion": "lion_32bit"}
_CLASS = {"AdamW": "torch.optim.AdamW", "Lion": "lion_pytorch.Lion"}

# Those of others that are updated as our Lion, by their class: nothing is imported for them.
_LIONS = ("lion_pytorch.lion_pytorch.Lion", "lion_pytorch.foreach.Lion")

# What is Muon here.
_MUON = "offloadd.optim.Muon, whose groups with use_muon=False are for all but the matrices of blocks and are updated by AdamW"

# Why a run takes no further parameters.
NO_MOMENTS = (
    "the run's tiles have moments for the parameters that the optimizer had then. Give it all of them, with a learning rate of 0 until they are to be "
    "trained; or close() the run and prepare the model again"
)

# Options that change the update.
_OPTIONS = ("amsgrad", "maximize", "differentiable")

# Parts of the names of optimizers that save memory which the moments take here in no GPU.
_SAVE_MEMORY = ("4bit", "8bit", "fp8", "paged", "galore", "apollo", "lomo", "layerwise", "cpuoffload", "zeroredundancy")


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer whose update is not the engine's."""
    kind = type(optimizer)
    plain = plain_of(kind)
    if not isinstance(optimizer, torch.optim.Optimizer) or plain not in (*_KINDS, *_MUONS, Lion, NoOptimizer) and name_of(plain) not in _LIONS:
        raise _refusal(optimizer)
    if plain is not kind:
        optimizer.check_bare()
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
    name, rule = name_of(type(optimizer)), rule_of(optimizer)
    if getattr(optimizer, "decoupled_wd", False):
        raise NotSupported(f"{name} with decoupled_weight_decay=True: leave it out, and divide weight_decay by the learning rate")
    given: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if id(param) in given:
                raise NotSupported(
                    f"parameter {index} of group {number} of {name} is there twice, so that torch.optim updates it twice in a step: give each parameter once"
                )
            given.add(id(param))
        of_group = _muon.rule_of(group) if rule == "Muon" else rule
        if missing := [key for key in _SETTINGS[of_group] if key not in group]:
            raise NotSupported(f"group {number} of {name} has no {', '.join(missing)}, which the update of {of_group} needs: load a state whose groups have it")
        for key in _OPTIONS:
            if group.get(key):
                raise NotSupported(f"{name} with {key}=True: leave it out")
        # 1 is Lion itself.
        if group.get("cautious_factor", 1.0) != 1.0:
            raise NotSupported(f"{name} with cautious_factor={group['cautious_factor']}: it changes the update; use lion_pytorch.Lion")
        decoupled = rule != "AdamW" or group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        if group["weight_decay"] and not decoupled:
            raise NotSupported(
                f"{name} with weight_decay adds the decay to the gradient, which is not supported: use torch.optim.AdamW as it is, which decays the weight"
            )


def check_added(optimizer: torch.optim.Optimizer, known: Container[int]) -> None:
    """Refuses gradients of parameters that a script has put into the groups since the run began: only those with the ids `known` are in tiles."""
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            # A parameter without elements needs no update.
            if id(param) not in known and param.numel() and param.grad is not None:
                raise NotSupported(
                    f"parameter {index} of group {number} of {name_of(type(optimizer))}, which was frozen when the model was prepared, or put there after "
                    f"offloadd.prepare: {NO_MOMENTS}"
                )


def plain_of(kind: type) -> type:
    """The class whose update a class of `offloadd.optim` has; another class is its own."""
    return vars(kind).get("plain", kind)


def check_rules(optimizer: torch.optim.Optimizer, muon: Container[int], names: Mapping[int, str]) -> None:
    """Refuses groups that another rule updates than the one for which the tiles of their parameters were made: Muon's for those with the ids `muon`. `names`
    has the parameters that have tiles, by their ids."""
    if rule_of(optimizer) != "Muon":
        return
    for group in optimizer.param_groups:
        rule = _muon.rule_of(group)
        for param in group["params"]:
            if id(param) in names and (rule == "Muon") != (id(param) in muon):
                then = "AdamW" if rule == "Muon" else "Muon"
                raise NotSupported(
                    f"{names[id(param)]} is in a group that is updated by {rule} now, and {then} has updated it since the optimizer began: divide parameters into "
                    "groups before the first step, and leave use_muon as it is"
                )


def rule_of(optimizer: Any) -> str:
    """Whose rule updates the parameters of an optimizer: "AdamW", also for Adam, "Lion" or "Muon". Refuses others."""
    # A subclass is one that a run has made of the script's optimizer.
    for kind in type(optimizer).__mro__:
        if kind in _MUONS:
            return "Muon"
        if kind is Lion or name_of(kind) in _LIONS:
            return "Lion"
        if kind in (*_KINDS, NoOptimizer):
            return "AdamW"
    raise _refusal(optimizer)


def _refusal(optimizer: Any) -> Error:
    """Why an optimizer's update is not the engine's."""
    kind, name = type(optimizer), name_of(type(optimizer))
    if isinstance(optimizer, (list, tuple)) and any(isinstance(one, torch.optim.Optimizer) for one in optimizer):
        return NotSupported(f"{len(optimizer)} optimizers: a run has one; put all parameters into its groups, for Muon and AdamW into those of {_MUON}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        return Error(f"the optimizer is a {name}, which is no torch.optim.Optimizer: pass a torch.optim.AdamW")
    return NotSupported(
        f"the optimizer is {name}, and offloadd updates with torch.optim.Adam, torch.optim.AdamW, torch.optim.Muon or lion_pytorch.Lion only: {_instead(kind, name)}"
    )


def name_of(kind: type) -> str:
    """The name of a class with its package."""
    if kind.__module__.startswith("torch.optim."):
        return f"torch.optim.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def rule_named(optim: str) -> str:
    """The rule of the update that a Trainer's argument `optim` names. Refuses those that are no rule here, and says which is near."""
    if optim not in NAMED:
        other = f'; a DeepSpeed configuration with optimizer.type = "Muon", or, passed to the Trainer, {_MUON}' * ("muon" in optim)
        raise NotSupported(f'optim="{optim}" is not supported: use optim="{_NAME[_nearest(optim)]}", {_bytes(_nearest(optim))}{other}')
    return NAMED[optim]


def maker(optim: str, kind: type[torch.optim.Optimizer]) -> type:
    """The class that a Trainer calls for the optimizer that its argument `optim` names: `kind`, or one whose calls make a `kind` with that name."""
    if optim not in _EIGHT_BITS:
        return kind

    def make(_: type, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        made = kind(*args, **kwargs)
        setattr(made, _NAME_HERE, optim)
        return made

    # A Trainer takes what is no class of an optimizer for a factory, which it calls without parameters.
    return type(kind.__name__, (torch.optim.Optimizer,), {"__new__": make})


def with_optimizer(settings: Settings, optimizer: Any) -> Settings:
    """The settings of a run with the rule of its optimizer, and with the moments of the name that a Trainer has made it by."""
    settings, optim = with_rule(settings, rule_of(optimizer)), getattr(optimizer, _NAME_HERE, None)
    return settings if optim is None else with_optim(settings, optim)


def with_rule(settings: Settings, rule: str) -> Settings:
    """The settings of a run whose optimizer has a rule. Refuses numbers that it does not have."""
    for key, value in (("moments", settings.moments), ("master", settings.master)):
        if rule == "Muon" and value != "fp32":
            raise NotSupported(f'{key} = "{value}" with Muon, whose momentum and masters lie in fp32: leave {key} out')
    return dataclasses.replace(settings, rule=rule)


def with_optim(settings: Settings, optim: str) -> Settings:
    """The settings of a run whose optimizer a Trainer's argument `optim` names: its rule, and moments in 8 bits where the name asks for them and the
    configuration says nothing else."""
    settings = dataclasses.replace(settings, rule=rule_named(optim))
    given = "moments" in (settings.json.get("offloadd") or {}) or "bf16_optimizer_states" in (settings.json.get("bf16") or {})
    if optim not in _EIGHT_BITS or settings.moments != "fp32" or given:
        return settings
    said = f'optim="{optim}": moments in 8 bits as offloadd.moments = "8bit" has them, of all parameters, in host memory or on drives'
    return dataclasses.replace(settings, moments="8bit", said=(*settings.said, said))


def _nearest(name: str) -> str:
    return "Lion" if "lion" in name.lower() else "AdamW"


def _bytes(rule: str) -> str:
    """What the moments of a rule take, and what would take less."""
    count = 4 * len(MOMENTS[rule])
    less = f'{count // 2} with offloadd.moments = "bf16" and {count // 4} with "8bit"'
    text = f"whose moments take {count} bytes a parameter, {less}, in host memory or on drives and none on a GPU"
    return text if rule == "Lion" else text + f'; those of optim="{_NAME["Lion"]}" take half'


def _instead(kind: type, name: str) -> str:
    if "muon" in name.lower():
        return f"use {_MUON}"
    rule = _nearest(name)
    use = f'use {_CLASS[rule]} (a Trainer makes it with optim="{_NAME[rule]}")'
    if issubclass(kind, _KINDS):
        return f"use {name_of(next(one for one in kind.__mro__ if one in _KINDS))} itself, since a subclass's own step would not be called"
    if rule == "Lion" or any(part in name.lower() for part in _SAVE_MEMORY):
        return f"{use}, {_bytes(rule)}"
    return use

"""The modules that `import deepspeed` finds in a process where offloadd answers to it.

An interface for scripts that name it: `initialize` and its engine are offloadd's. What is not here is refused by name.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import os
import types
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional

import torch

from . import _deepspeed_utils as utils
from . import _deepspeed_sequence as sequences
from . import _finder, _states
from ._accelerator import get_accelerator
from ._config import Settings, settings_of
from ._deepspeed_ranks import answering, barrier, destroy_process_group, get_local_rank, get_rank, get_world_size, init_distributed, is_initialized
from ._deepspeed_refused import NoAttribute, NoModule, OpBuilder, refusal, refused_when_called
from ._errors import NotSupported
from ._initialize import GRADIENT_CLIPPING, TrainingEngine, initialize as _initialize
from ._schedules import SCHEDULERS
from ._untrained import beside
from ._zero import GatheredParameters, Init, unused_dir


def check_module(name: str) -> None:
    """Raises `NotSupported` unless the module is one that offloadd answers with."""
    if name not in _MODULES:
        # As an attribute of its parent it may be there.
        parent, _, last = name.rpartition(".")
        if last not in _MODULES.get(parent, {}):
            raise NoModule(refusal(name))
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class Answer(types.ModuleType):
    """A module with the names of the table below."""

    def fill(self) -> None:
        """Gives the module its names, and imports its submodules."""
        vars(self).update(_MODULES[self.__name__], __path__=[])
        for name in _MODULES:
            if name.rpartition(".")[0] == self.__name__:
                importlib.import_module(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise NoAttribute(refusal(f"{self.__name__}.{name}"))


# How the next `initialize` of this process begins its run, where Hugging Face's Trainer calls it.
beginning: dict[str, Any] = {}

# Where the Trainer that was made last has its output.
output_dir: Optional[Path] = None


def reading_dir() -> Optional[Path]:
    """The directory of a model that a Trainer does not train; None without a Trainer."""
    return None if output_dir is None else unused_dir(beside(output_dir / "offloadd"))


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`offloadd.initialize`, for a script that counts its steps itself: the run begins with the model's weights. It
    resumes only if the script calls `load_checkpoint`."""
    answering()
    init_distributed()
    given = inspect.signature(_initialize).bind(*args, **kwargs).arguments
    if "engine" in beginning:
        engine = beginning.pop("engine")
        return engine, engine.optimizer, None, engine.renew_schedule(given.get("lr_scheduler"))
    config = next((given[name] for name in ("config", "config_params") if given.get(name) is not None), None)
    if given.get("optimizer") is None and config is not None and given.get("model") is not None:
        settings = settings_in(config, sequences.ranks())
        if settings.optimizer is None:
            made = _initialize(model=given["model"], config=settings, run_dir=reading_dir(), resume=False)
            _mark(made[0].module)
            return made
    if sequences.ranks() is not None and given.get("mpu") is None:
        # As there, where attention is registered for all models.
        given["mpu"] = importlib.import_module(sequences.MPU)
    how = {"resume": False, **given, **beginning}
    beginning.clear()
    made = _initialize(**how)
    _mark(made[0].module)
    return made


def settings_in(config: Any, sequence_ranks: Optional[int] = None) -> Settings:
    """The settings in a configuration as scripts pass it, which may have made groups of `sequence_ranks`."""
    # trl writes some keys as paths at the top level, where DeepSpeed does not see them.
    config = {key: value for key, value in config.items() if "." not in key} if isinstance(config, Mapping) else config
    return settings_of(config, GRADIENT_CLIPPING, sequence_ranks=sequence_ranks)


class ZeroParamStatus(enum.Enum):
    """What scripts compare a parameter's `ds_status` with before they gather it."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def _mark(model: torch.nn.Module) -> None:
    """Lets scripts that ask gather each parameter, which costs nothing where it is in memory."""
    for number, param in enumerate(model.parameters()):
        param.ds_id, param.ds_status = number, ZeroParamStatus.NOT_AVAILABLE


# Optimizers


class DeepSpeedCPUAdam:
    """Makes `torch.optim.AdamW`, or Adam without `adamw_mode`: the update is the engine's."""

    def __new__(
        cls,
        model_params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        asked = {"bias_correction=False": not bias_correction, "amsgrad=True": amsgrad, "fp32_optimizer_states=False": not fp32_optimizer_states}
        return _adam("DeepSpeedCPUAdam", asked, adamw_mode, model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class FusedAdam:
    """Makes `torch.optim.AdamW`, or Adam without `adam_w_mode`: the update is the engine's."""

    def __new__(
        cls,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        asked = {"bias_correction=False": not bias_correction, "amsgrad=True": amsgrad, "set_grad_none=False": not set_grad_none}
        return _adam("FusedAdam", asked, adam_w_mode, params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _adam(name: str, refused: Mapping[str, bool], decoupled: bool, params: Iterable, **given: Any) -> torch.optim.Optimizer:
    for asked in (asked for asked, is_asked in refused.items() if is_asked):
        raise NotSupported(f"{name} with {asked}: leave it out")
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, **{**given, "betas": tuple(given["betas"])})


# Others


def set_z3_leaf_modules(model: torch.nn.Module, leaf_module_classes: list, raise_if_not_found: bool = True) -> list[torch.nn.Module]:
    """The modules of these classes. Each block's parameters come together here anyway."""
    classes = tuple(one for one in leaf_module_classes if isinstance(one, type))
    names = {one for one in leaf_module_classes if isinstance(one, str)}
    found = [module for module in model.modules() if isinstance(module, classes) or type(module).__name__ in names]
    if raise_if_not_found and not found:
        raise ValueError(f"no modules of type {leaf_module_classes} in {type(model).__name__}")
    return found


def clone_tensors_for_torch_save(item: Any, device: Any = torch.device("cpu")) -> Any:
    """Copies of the tensors in dicts, lists and tuples, each with memory of its own size."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


def checkpoint(function: Callable, *args: Any) -> Any:
    """Computes `function` again in backward instead of keeping its activations."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(
    mpu: Any = None,
    deepspeed_config: Any = None,
    partition_activations: Optional[bool] = None,
    contiguous_checkpointing: Optional[bool] = None,
    num_checkpoints: Optional[int] = None,
    checkpoint_in_cpu: Optional[bool] = None,
    synchronize: Optional[bool] = None,
    profile: Optional[bool] = None,
) -> None:
    """Accepts settings of activation checkpointing: how activations are kept is torch's business here."""
    if mpu is not None:
        raise NotSupported("checkpointing.configure: mpu is not supported: leave it out")


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Accepts that a module uses another one's parameter: its values come wherever it is used."""


def is_configured() -> bool:
    return True


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options that a script passes on as `args` of `initialize`."""
    group = parser.add_argument_group("deepspeed", "answered by offloadd")
    group.add_argument("--deepspeed", action="store_true", help="has no effect: the script decides")
    group.add_argument("--deepspeed_config", default=None, help="the configuration, a JSON file")
    if "LOCAL_RANK" in os.environ:
        # DeepSpeed's launcher passes it as an argument.
        parser.set_defaults(local_rank=int(os.environ["LOCAL_RANK"]))
    return parser


_ZERO: dict[str, Any] = {
    "GatheredParameters": GatheredParameters,
    "Init": Init,
    "TiledLinear": utils.TiledLinear,
    "register_external_parameter": register_external_parameter,
    "unregister_external_parameter": register_external_parameter,
}

# What the optimizer keeps of a parameter.
_SAFE = {name: getattr(_states, name) for name in vars(_states) if name.startswith("safe_")}

_LINES = {"log_dist": utils.log_dist, "logger": utils.logger, "warning_once": utils.warning_once}

# Functions of torch.distributed.
_COLLECTIVES = {
    name: utils.collective(name)
    for name in (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
        *("broadcast", "broadcast_object_list", "gather", "irecv", "isend", "monitored_barrier", "new_group", "recv"),
        *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
    )
}

_OPTIMIZERS = {"DeepSpeedCPUAdam": DeepSpeedCPUAdam, "FusedAdam": FusedAdam}

# Each module that is answered, with its names beside its submodules.
_MODULES: dict[str, dict[str, Any]] = {
    "deepspeed": {
        "__version__": _finder.VERSION,
        "DeepSpeedConfig": utils.DeepSpeedConfig,
        "DeepSpeedEngine": TrainingEngine,
        "OnDevice": utils.OnDevice,
        "add_config_arguments": add_config_arguments,
        "get_accelerator": get_accelerator,
        "init_distributed": init_distributed,
        "initialize": initialize,
        "log_dist": utils.log_dist,
        "logger": utils.logger,
    },
    "deepspeed.accelerator": {"get_accelerator": get_accelerator},
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": {"clone_tensors_for_torch_save": clone_tensors_for_torch_save},
    "deepspeed.checkpointing": {"checkpoint": checkpoint, "configure": configure, "is_configured": is_configured},
    "deepspeed.comm": {
        **_COLLECTIVES,
        "all_reduce": sequences.without_gradient(_COLLECTIVES["all_reduce"]),
        "ReduceOp": torch.distributed.ReduceOp,
        "barrier": barrier,
        "destroy_process_group": destroy_process_group,
        "get_local_rank": get_local_rank,
        "get_rank": get_rank,
        "get_world_size": get_world_size,
        "has_all_gather_into_tensor": lambda: True,
        "has_reduce_scatter_tensor": lambda: True,
        "init_distributed": init_distributed,
        "is_available": torch.distributed.is_available,
        "is_initialized": is_initialized,
    },
    "deepspeed.compression": {},
    "deepspeed.compression.helper": {"recursive_getattr": utils.recursive_getattr, "recursive_setattr": utils.recursive_setattr},
    "deepspeed.constants": {
        "CROSS_RANK": "CROSS_RANK",
        "CROSS_SIZE": "CROSS_SIZE",
        "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
        "default_pg_timeout": utils.PG_TIMEOUT,
    },
    "deepspeed.io": {
        "FastFileWriter": utils.FastFileWriter,
        "FastFileWriterConfig": utils.FastFileWriterConfig,
        "PyFileWriter": utils.PyFileWriter,
    },
    "deepspeed.launcher": {},
    # A file with variables for other nodes, which `accelerate launch` names.
    "deepspeed.launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": ".deepspeed_env"},
    "deepspeed.moe": {},
    "deepspeed.moe.utils": {name: refused_when_called(f"deepspeed.moe.utils.{name}") for name in ("split_params_into_different_moe_groups_for_optimizer",)},
    "deepspeed.ops": {},
    "deepspeed.ops.adam": _OPTIMIZERS,
    "deepspeed.ops.adam.cpu_adam": {"DeepSpeedCPUAdam": DeepSpeedCPUAdam},
    "deepspeed.ops.adam.fused_adam": {"FusedAdam": FusedAdam},
    "deepspeed.ops.op_builder": dict.fromkeys(("CPUAdamBuilder", "FusedAdamBuilder"), OpBuilder),
    "deepspeed.runtime": {},
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": {"checkpoint": checkpoint, "configure": configure, "is_configured": is_configured},
    "deepspeed.runtime.config": {
        "ADAMW_OPTIMIZER": "adamw",
        "ADAM_OPTIMIZER": "adam",
        "DeepSpeedConfig": utils.DeepSpeedConfig,
        "LAMB_OPTIMIZER": "lamb",
        "ONEBIT_ADAM_OPTIMIZER": "onebitadam",
        "ONEBIT_LAMB_OPTIMIZER": "onebitlamb",
    },
    "deepspeed.runtime.dataloader": {"RepeatingLoader": utils.RepeatingLoader},
    "deepspeed.runtime.engine": {"DeepSpeedEngine": TrainingEngine},
    "deepspeed.runtime.lr_schedules": {"VALID_LR_SCHEDULES": list(SCHEDULERS)},
    "deepspeed.runtime.sequence_parallel": {},
    sequences.MPU: sequences.STATE,
    "deepspeed.runtime.sequence_parallel.ulysses_sp": sequences.ATTENTION,
    "deepspeed.runtime.utils": {
        "move_to_device": utils.move_to_device,
        "see_memory_usage": utils.see_memory_usage,
        "set_random_seed": utils.set_random_seed,
    },
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.config": {"ZeroStageEnum": utils.ZeroStageEnum},
    "deepspeed.runtime.zero.offload_config": {
        "OffloadDeviceEnum": utils.OffloadDeviceEnum,
        "OffloadStateTypeEnum": utils.OffloadStateTypeEnum,
    },
    # transformers replaces it while it builds a model, so that the types of buffers stay: they do here.
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        "ZeroParamStatus": ZeroParamStatus,
        "zero_wrapper_for_fp_tensor_constructor": None,
    },
    "deepspeed.runtime.zero.tiling": {"TiledLinear": utils.TiledLinear},
    "deepspeed.utils": {
        **_LINES,
        **_SAFE,
        "OnDevice": utils.OnDevice,
        "RepeatingLoader": utils.RepeatingLoader,
        "instrument_w_nvtx": utils.instrument_w_nvtx,
        "set_z3_leaf_modules": set_z3_leaf_modules,
    },
    "deepspeed.utils.groups": sequences.GROUPS,
    "deepspeed.utils.logging": _LINES,
    "deepspeed.utils.tensor_fragment": _SAFE,
    "deepspeed.zero": _ZERO,
}

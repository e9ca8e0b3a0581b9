"""The modules that `import deepspeed` finds in a process where offloadd answers to it.

An interface for scripts that name it: `initialize` and its engine are offloadd's. What is not here is refused by name.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import importlib
import inspect
import logging
import os
import types
from typing import Any, Callable, Iterable, Mapping, Optional

import torch

from . import _finder
from ._config import Settings, settings_of
from ._console import say
from ._errors import NotSupported
from ._initialize import ReadingEngine, TrainingEngine, initialize as _initialize
from ._schedules import SCHEDULERS
from ._zero import GatheredParameters, Init

_DOC = 'see "Scripts that use DeepSpeed" in docs/pytorch.md'

# What to use instead of each missing name.
_INSTEAD = {
    "pipe": "pipelines are not supported: train the model as one module",
    "PipelineModule": "pipelines are not supported: train the model as one module",
    "moe": "expert parallelism is not supported: use the experts of the model itself",
    "init_inference": "only training is done here: call the model itself",
    "InferenceEngine": "only training is done here: call the model itself",
    "tp_model_init": "tensor parallelism is not supported: leave tensor_parallel out of the configuration",
    "compression": "it changes weights: leave it out",
    "OnebitAdam": "gradients are not compressed: use AdamW",
    "DeepSpeedCPUAdagrad": "the engine updates with Adam or AdamW: use torch.optim.AdamW",
    "DeepSpeedCPULion": "the engine updates with Adam or AdamW: use torch.optim.AdamW",
    "sequence_parallel": "sequence parallelism is not supported: leave it out",
    "groups": "groups of ranks for model parallelism are not supported",
}


class _NoAttribute(NotSupported, AttributeError):
    """A name that is not answered; `hasattr` sees that it is missing."""


class _NoModule(NotSupported, ModuleNotFoundError):
    """A module that is not answered; `except ImportError` sees that it is missing."""


def _refusal(name: str) -> str:
    what = next((_INSTEAD[part] for part in reversed(name.split(".")) if part in _INSTEAD), "leave it out, or run the script without offloadd-run")
    return f"{name} is not supported by offloadd, which answers to `import deepspeed` here: {what}; {_DOC}"


def check_module(name: str) -> None:
    """Raises `NotSupported` unless the module is one that offloadd answers with."""
    if name not in _MODULES:
        # As an attribute of its parent it may be there.
        parent, _, last = name.rpartition(".")
        if last not in _MODULES.get(parent, {}):
            raise _NoModule(_refusal(name))
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
        raise _NoAttribute(_refusal(f"{self.__name__}.{name}"))


_answering = False


def answering() -> None:
    """Says once, on the first rank, who answers."""
    global _answering
    if not _answering:
        say(f"answers to `import deepspeed` in this process (interface {_finder.VERSION}); DeepSpeed is not used")
    _answering = True


# How the next `initialize` of this process begins its run, where Hugging Face's Trainer calls it.
beginning: dict[str, Any] = {}


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
        settings = settings_in(config)
        if not settings.json.get("optimizer"):
            if settings.precision is not None:
                given["model"].to(getattr(torch, settings.precision))
            _mark(given["model"])
            return ReadingEngine(given["model"], settings), None, None, None
    how = {"resume": False, **given, **beginning}
    beginning.clear()
    made = _initialize(**how)
    _mark(made[0].module)
    return made


def settings_in(config: Any) -> Settings:
    """The settings in a configuration as scripts pass it."""
    # trl writes some keys as paths at the top level, where DeepSpeed does not see them.
    return settings_of({key: value for key, value in config.items() if "." not in key} if isinstance(config, Mapping) else config)


class ZeroParamStatus(enum.Enum):
    """What scripts compare a parameter's `ds_status` with before they gather it."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def _mark(model: torch.nn.Module) -> None:
    """Lets scripts that ask gather each parameter, which costs nothing where it is in memory."""
    for param in model.parameters():
        param.ds_status = ZeroParamStatus.NOT_AVAILABLE


# Ranks


def is_initialized() -> bool:
    return torch.distributed.is_initialized()


def init_distributed(
    dist_backend: Optional[str] = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: Optional[datetime.timedelta] = None,
    init_method: Optional[str] = None,
    dist_init_required: Optional[bool] = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Opens torch's process group unless it is open: over the ranks that a launcher started, or of this process alone."""
    if torch.distributed.is_initialized():
        return
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if rank >= 0 and world_size > 0:
        given.update(rank=rank, world_size=world_size)
    if init_method is not None:
        given["init_method"] = init_method
    elif "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        given.update(store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.distributed.init_process_group(backend, **given)


def get_rank(group: Any = None) -> int:
    return torch.distributed.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return torch.distributed.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    return torch.distributed.barrier(group, async_op, device_ids) if is_initialized() else None


class _Accelerator:
    """The device that torch computes on."""

    def device_name(self, device_index: Optional[int] = None) -> str:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        return name if device_index is None or name == "cpu" else f"{name}:{device_index}"

    def current_device(self) -> int:
        return torch.cuda.current_device() if self.is_available() else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        if self.is_available():
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        return torch.cuda.device_count() if self.is_available() else 1

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def communication_backend_name(self) -> str:
        return "nccl" if self.is_available() else "gloo"

    def empty_cache(self) -> None:
        if self.is_available():
            torch.cuda.empty_cache()

    def __getattr__(self, name: str) -> Any:
        raise _NoAttribute(_refusal(f"deepspeed.accelerator.get_accelerator().{name}"))


_accelerator = _Accelerator()


def get_accelerator() -> _Accelerator:
    return _accelerator


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
        for name, asked in (("bias_correction=False", not bias_correction), ("amsgrad=True", amsgrad), ("fp32_optimizer_states=False", not fp32_optimizer_states)):
            if asked:
                raise NotSupported(f"DeepSpeedCPUAdam with {name}: leave it out")
        kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
        return kind(model_params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)


# Others


def set_z3_leaf_modules(model: torch.nn.Module, leaf_module_classes: list) -> list[torch.nn.Module]:
    """The modules of these classes. Each block's parameters come together here anyway."""
    classes = tuple(one for one in leaf_module_classes if isinstance(one, type))
    names = {one for one in leaf_module_classes if isinstance(one, str)}
    return [module for module in model.modules() if isinstance(module, classes) or type(module).__name__ in names]


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


def configure(mpu: Any = None, deepspeed_config: Any = None, **settings: Any) -> None:
    """Accepts settings of activation checkpointing: how activations are kept is torch's business here."""
    if mpu is not None:
        raise NotSupported("checkpointing.configure: mpu is not supported: leave it out")


def is_configured() -> bool:
    return True


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options that a script passes on as `args` of `initialize`."""
    group = parser.add_argument_group("deepspeed", "answered by offloadd")
    group.add_argument("--deepspeed", action="store_true", help="has no effect: the script decides")
    group.add_argument("--deepspeed_config", default=None, help="the configuration, a JSON file")
    return parser


_INTERFACE: dict[str, Any] = {"Init": Init, "GatheredParameters": GatheredParameters}

# Each module that is answered, with its names beside its submodules.
_MODULES: dict[str, dict[str, Any]] = {
    "deepspeed": {
        "__version__": _finder.VERSION,
        "DeepSpeedEngine": TrainingEngine,
        "add_config_arguments": add_config_arguments,
        "init_distributed": init_distributed,
        "initialize": initialize,
    },
    "deepspeed.accelerator": {"get_accelerator": get_accelerator},
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": {"clone_tensors_for_torch_save": clone_tensors_for_torch_save},
    "deepspeed.checkpointing": {"checkpoint": checkpoint, "configure": configure, "is_configured": is_configured},
    "deepspeed.comm": {
        "barrier": barrier,
        "get_local_rank": get_local_rank,
        "get_rank": get_rank,
        "get_world_size": get_world_size,
        "init_distributed": init_distributed,
        "is_initialized": is_initialized,
    },
    "deepspeed.launcher": {},
    # A file with variables for other nodes, which `accelerate launch` names.
    "deepspeed.launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": ".deepspeed_env"},
    "deepspeed.ops": {},
    "deepspeed.ops.adam": {"DeepSpeedCPUAdam": DeepSpeedCPUAdam},
    "deepspeed.runtime": {},
    "deepspeed.runtime.engine": {"DeepSpeedEngine": TrainingEngine},
    "deepspeed.runtime.lr_schedules": {"VALID_LR_SCHEDULES": list(SCHEDULERS)},
    "deepspeed.runtime.zero": _INTERFACE,
    # transformers replaces it while it builds a model, so that the types of buffers stay: they do here.
    "deepspeed.runtime.zero.partition_parameters": {"ZeroParamStatus": ZeroParamStatus, "zero_wrapper_for_fp_tensor_constructor": None},
    "deepspeed.utils": {"logger": logging.getLogger("offloadd"), "set_z3_leaf_modules": set_z3_leaf_modules},
    "deepspeed.zero": _INTERFACE,
}

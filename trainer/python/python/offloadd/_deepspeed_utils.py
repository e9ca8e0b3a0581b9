"""Small parts of DeepSpeed's interface that scripts use beside `initialize`: loaders, lines, devices, split layers, files."""

from __future__ import annotations

import contextlib
import datetime
import enum
import functools
import logging
import operator
import random
from pathlib import Path
from typing import Any, Callable, Iterable, Optional, Sequence, Union

import torch
from torch import nn

from ._accelerator import get_accelerator
from ._config import Config, settings_of
from ._console import bytes_text, say
from ._deepspeed_refused import refused_attribute
from ._errors import NotSupported

logger = logging.getLogger("offloadd")

# The longest wait for other ranks.
PG_TIMEOUT = datetime.timedelta(minutes=30)


# Lines


def log_dist(message: str, ranks: Optional[Sequence[int]] = None, level: int = logging.INFO) -> None:
    """Logs on the `ranks`; on all where they are left out or have -1."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, f"[Rank {rank}] {message}")


@functools.lru_cache(maxsize=None)
def warning_once(*args: Any, **kwargs: Any) -> None:
    """Warns of the same once."""
    logger.warning(*args, **kwargs)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Writes the memory that the device and this process use; nothing without `force`, as DeepSpeed."""
    if not force:
        return
    device = get_accelerator()
    figures = [f"allocated {bytes_text(device.memory_allocated())}", f"at most {bytes_text(device.max_memory_allocated())}"]
    say(f"{message}: {device.device_name()}: {', '.join(figures)}; {bytes_text(device.available_memory())} available")


def instrument_w_nvtx(function: Callable) -> Callable:
    """Returns the function: the steps are timed anyway."""
    return function


# Loaders, random numbers, attributes


class RepeatingLoader:
    """A loader that begins again when it has ended."""

    def __init__(self, loader: Iterable) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def set_random_seed(seed: int) -> None:
    """Seeds Python, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: Any, criterion_func: Optional[Callable] = None) -> Any:
    """The tensors in lists, tuples and dicts on `device`. Those for which `criterion_func` is true change in place."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(one, device, criterion_func) for one in item)
    if isinstance(item, dict):
        return {key: move_to_device(one, device, criterion_func) for key, one in item.items()}
    return item.to(device)


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The module or attribute of this dotted name."""
    return operator.attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Replaces the module or attribute of this dotted name."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


class OnDevice(contextlib.AbstractContextManager):
    """Makes tensors and parameters within it on `device`, "meta" by default, and in `dtype` where their type is not given."""

    def __init__(self, dtype: Optional[torch.dtype], device: Union[str, torch.device] = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "OnDevice":
        if self._enabled:
            self._stack.enter_context(torch.device(self._device))
            if self._dtype is not None:
                self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


class TiledLinear(nn.Module):
    """A linear layer made of `in_splits` times `out_splits` smaller ones, so that only a part of a large weight is in memory at a time."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: Optional[nn.Module] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"TiledLinear: {name} = {splits}: must be 1 to {features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_sizes, self.out_sizes = _parts(in_features, in_splits), _parts(out_features, out_splits)
        last = in_splits - 1
        # The bias is added once, with the last part of the input.
        self.linears = nn.ModuleList(
            nn.ModuleList(linear_cls(in_size, out_size, bias=bias and number == last, **kwargs) for number, in_size in enumerate(self.in_sizes))
            for out_size in self.out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        if self.input_is_already_split:
            inputs = list(input_)
        else:
            inputs = input_.split(self.in_sizes, dim=-1)
        outputs = [functools.reduce(operator.add, (linear(one) for linear, one in zip(row, inputs))) for row in self.linears]
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Takes the weight and the bias of a linear layer of the same size."""
        if (other.bias is not None) != self.use_bias or tuple(other.weight.shape) != (self.out_features, self.in_features):
            raise RuntimeError("TiledLinear.copy_params_from: the other layer has another size, or a bias where this one has none")
        biases = other.bias.split(self.out_sizes) if self.use_bias else [None] * self.out_splits
        for row, rows, bias in zip(self.linears, other.weight.split(self.out_sizes, dim=0), biases):
            for linear, part in zip(row, rows.split(self.in_sizes, dim=1)):
                linear.weight.copy_(part)
            if bias is not None:
                row[-1].bias.copy_(bias)


def _parts(features: int, splits: int) -> list[int]:
    """Sizes of nearly equal parts, the larger ones first."""
    size, more = divmod(features, splits)
    return [size + (number < more) for number in range(splits)]


# Settings


class OffloadDeviceEnum(str, enum.Enum):
    """Where state may be."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """Kinds of state that `offload_states` names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(enum.IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class DeepSpeedConfig:
    """The checked settings of a configuration under DeepSpeed's names."""

    def __init__(self, config: Config, mpu: Any = None, mesh_device: Any = None) -> None:
        settings = settings_of(config, 1.0)
        micro, accumulated = settings.micro_batch, settings.micro_batches
        self._param_dict = dict(settings.json)
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = settings.train_batch_size, micro, accumulated
        self.gradient_clipping, self.steps_per_print = settings.gradient_clipping, settings.steps_per_print
        self.wall_clock_breakdown = settings.wall_clock_breakdown
        self.fp16_enabled, self.bfloat16_enabled = settings.precision == "float16", settings.precision == "bfloat16"
        self.optimizer_name = optimizer_name(settings)
        self.optimizer_params = settings.optimizer
        self.scheduler_name = settings.scheduler and settings.scheduler["type"]
        # State, gradients and parameters are always divided.
        self.zero_enabled, self.zero_optimization_stage = True, 3

    def __getattr__(self, name: str) -> Any:
        raise refused_attribute(f"deepspeed.DeepSpeedConfig.{name}")


def optimizer_name(settings: Any) -> Optional[str]:
    """DeepSpeed's name of the configured optimizer."""
    section = settings.json.get("optimizer") or {}
    return str(section.get("type", "AdamW")).lower() if settings.optimizer is not None else None


# Files


class PyFileWriter:
    """A file to which `torch.save` writes."""

    def __init__(self, file_path: Union[str, Path]) -> None:
        self._file = open(file_path, "wb")

    def write(self, buffer: Any) -> int:
        return self._file.write(buffer)

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "PyFileWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _dump_state(self) -> None:
        pass


class FastFileWriterConfig:
    """Accepts the settings of DeepSpeed's writer: the file is written by the system."""

    def __init__(
        self,
        dnvme_handle: Any = None,
        pinned_tensor: Any = None,
        double_buffer: bool = True,
        num_parallel_writers: int = 1,
        writer_rank: int = 0,
        global_rank: int = 0,
    ) -> None:
        self.num_parallel_writers, self.writer_rank = num_parallel_writers, writer_rank
        if num_parallel_writers != 1:
            raise NotSupported(f"FastFileWriterConfig: num_parallel_writers={num_parallel_writers}: each rank writes its own files; leave it out")


class FastFileWriter(PyFileWriter):
    """A file to which `torch.save` writes."""

    def __init__(self, file_path: Union[str, Path], config: Optional[FastFileWriterConfig] = None) -> None:
        super().__init__(file_path)


# Ranks


def collective(name: str) -> Callable:
    """The function of torch.distributed of this name, without DeepSpeed's arguments for logs."""
    plain = getattr(torch.distributed, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        for one in ("prof", "log_name", "debug"):
            kwargs.pop(one, None)
        return plain(*args, **kwargs)

    return call

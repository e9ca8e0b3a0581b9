"""Accelerate with a prepared model: mixed precision and compilation are Accelerate's; devices, ranks and state are the engine's."""

from __future__ import annotations

import functools
from typing import Any, Optional

from torch import nn

from . import _deepspeed
from ._errors import NotSupported
from ._wrappers import is_prepared

# Values of `Accelerator.distributed_type` that would divide the model themselves.
_DIVIDE = ("FSDP", "MEGATRON_LM", "XLA")


def patch(module: Any) -> None:
    """Changes `accelerate.Accelerator`, whose module was just imported."""
    kind = module.Accelerator
    prepare_plain, prepare_model_plain, prepare_optimizer_plain = kind.prepare, kind.prepare_model, kind.prepare_optimizer

    @functools.wraps(prepare_plain)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        for one in args:
            if isinstance(one, nn.Module):
                _check(self, one)
        return prepare_plain(self, *args, **kwargs)

    @functools.wraps(prepare_model_plain)
    def prepare_model(self: Any, model: nn.Module, device_placement: Optional[bool] = None, evaluation_mode: bool = False) -> nn.Module:
        if is_prepared(model.parameters()):
            _check(self, model)
            # What Accelerate does for evaluation: autocast and compilation, without DistributedDataParallel.
            device_placement, evaluation_mode = False, True
        return prepare_model_plain(self, model, device_placement, evaluation_mode)

    @functools.wraps(prepare_optimizer_plain)
    def prepare_optimizer(self: Any, optimizer: Any, device_placement: Optional[bool] = None) -> Any:
        # It would read all moments and load them again.
        return prepare_optimizer_plain(self, optimizer, False if hasattr(optimizer, "_offloadd_run") else device_placement)

    kind.prepare, kind.prepare_model, kind.prepare_optimizer = prepare, prepare_model, prepare_optimizer


def _check(accelerator: Any, model: nn.Module) -> None:
    """Refuses what Accelerate would do to the parameters of a model that is prepared, or that its DeepSpeed plugin prepares here."""
    prepared, how = is_prepared(model.parameters()), accelerator.distributed_type.value
    if prepared and how == "DEEPSPEED" and not getattr(getattr(model, "_offloadd_run", None), "trains", True):
        # As a reference, and from now on it is trained: `initialize` ends the run.
        return
    # A second `train` of a Trainer goes on with the engine of the first.
    if prepared and how == "DEEPSPEED" and "engine" not in _deepspeed.beginning:
        raise NotSupported(
            "Accelerate's DeepSpeed plugin around a prepared model: leave out the plugin, or offloadd.prepare: the plugin calls it below offloadd-run"
        )
    if prepared and how in _DIVIDE:
        raise NotSupported(
            f"Accelerate's {how} around a prepared model: offloadd divides the model among the ranks itself; leave {how} out of Accelerate's configuration"
        )
    if (prepared or how == "DEEPSPEED") and accelerator.mixed_precision == "fp8":
        raise NotSupported('Accelerate with mixed_precision="fp8" replaces layers of the model, whose parameters are in tiles: use mixed_precision="bf16"')

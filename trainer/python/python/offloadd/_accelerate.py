"""Accelerate with a prepared model: mixed precision and compilation are Accelerate's; devices, ranks and state are the engine's.

With Accelerate's DeepSpeed plugin, which our engines answer, `accelerator.backward` makes the step, and `optimizer.step` after it does nothing, as with
DeepSpeed. Where Accelerate alone would compute something else, the script is refused by name.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Mapping, Optional

import torch
from torch import nn

from . import _deepspeed, _finder
from ._errors import NotSupported
from ._initialize import TrainingEngine
from ._wrappers import is_prepared

# Values of `Accelerator.distributed_type` that would divide the model themselves.
_DIVIDE = ("FSDP", "MEGATRON_LM", "XLA")

_SCHEDULER = torch.optim.lr_scheduler.LRScheduler


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
    if _finder.answers():
        _patch_plugin(module)


def _patch_plugin(module: Any) -> None:
    """Changes what Accelerate's DeepSpeed plugin does with our engines."""
    kind, of_engine = module.Accelerator, module.DeepSpeedOptimizerWrapper
    prepare_plain, backward_plain, clip_plain, zero_plain = kind._prepare_deepspeed, kind.backward, kind.clip_grad_norm_, module.AcceleratedOptimizer.zero_grad

    @functools.wraps(prepare_plain)
    def prepare(self: Any, *args: Any) -> tuple:
        _check_new(module, self, args)
        made = prepare_plain(self, *args)
        if not any(isinstance(one, nn.Module) for one in args):
            # Without their model it leaves schedulers as they are, which move with each batch of an accumulation then.
            return tuple(self.prepare_scheduler(one) if isinstance(one, _SCHEDULER) else one for one in made)
        engine = next((one for one in made if isinstance(one, TrainingEngine) and one.optimizer is not None), None)
        for one in made:
            if engine is not None and isinstance(one, of_engine):
                # Until zero_grad(), gradients that a script uses say that they are gone with the step.
                engine.drops_gradients = False
                one._offloadd_engine, one._offloadd_stepped = engine, None
        wrapped = self.deepspeed_engine_wrapped
        if engine is not None and not _trains(wrapped.engine):
            # The loss is that of the model that is trained, also where its teacher was prepared first.
            wrapped.engine = engine
        return made

    @functools.wraps(backward_plain)
    def backward(self: Any, loss: torch.Tensor, **kwargs: Any) -> None:
        optimizer = _optimizer_of_engine(self)
        if optimizer is not None:
            _check_backward(self, optimizer, kwargs)
        backward_plain(self, loss, **kwargs)
        if optimizer is not None and self.sync_gradients:
            optimizer._offloadd_stepped = _settings_of(optimizer)

    @functools.wraps(clip_plain)
    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        optimizer = _optimizer_of_engine(self)
        if optimizer is not None:
            _check_clipping(optimizer._offloadd_engine, float(max_norm), float(norm_type))
        return clip_plain(self, parameters, max_norm, norm_type)

    def step(self: Any, closure: Any = None) -> None:
        if closure is not None:
            raise NotSupported("optimizer.step(closure) with Accelerate's DeepSpeed plugin, where accelerator.backward() makes the step: leave the closure out")
        _check_step(self)
        self._offloadd_stepped = None

    def zero_grad(self: Any, set_to_none: Optional[bool] = None) -> None:
        engine = getattr(self, "_offloadd_engine", None)
        if engine is None or engine.run.closed or not self.gradient_state.sync_gradients:
            return
        if engine.accumulates or self._offloadd_stepped is not None:
            raise NotSupported(
                "optimizer.zero_grad() between accelerator.backward() and optimizer.step(), whose gradients Accelerate alone drops there, and the DeepSpeed plugin "
                "does not: call it after optimizer.step()"
            )
        # Those of another model's loss too, such as a generator's, whose step is not this engine's.
        zero_plain(self, set_to_none)

    kind._prepare_deepspeed, kind.backward, kind.clip_grad_norm_ = prepare, backward, clip_grad_norm_
    of_engine.step, of_engine.zero_grad = step, zero_grad
    # It would put Adam in the place of any other optimizer. The engine takes the script's, or refuses it by name.
    module.map_pytorch_optim_to_deepspeed = lambda optimizer: optimizer


def _trains(engine: Any) -> bool:
    """Whether it is an engine of ours that trains, and has not ended."""
    return isinstance(engine, TrainingEngine) and engine.optimizer is not None and not engine.run.closed


def _optimizer_of_engine(accelerator: Any) -> Any:
    """The script's optimizer of the engine that `accelerator.backward` runs; None where none is ours."""
    engine = _engine_of(accelerator)
    return next((one for one in accelerator._optimizers if engine is not None and getattr(one, "_offloadd_engine", None) is engine), None)


def _engine_of(accelerator: Any) -> Any:
    """The engine that `accelerator.backward` runs, if there is one."""
    return getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)


def _settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups, with which an engine has made its step."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _check_new(module: Any, accelerator: Any, args: tuple) -> None:
    """Refuses what of the arguments of `accelerator.prepare` would not be trained."""
    optimizers = [one for one in args if isinstance(one, (torch.optim.Optimizer, module.DummyOptim))]
    schedulers = [one for one in args if isinstance(one, (_SCHEDULER, module.DummyScheduler))]
    for found, what, instead in (
        (optimizers, "optimizers", "put all parameters into the groups of one"),
        (schedulers, "schedulers", "chain them, as torch.optim.lr_scheduler.ChainedScheduler does"),
    ):
        if len(found) > 1:
            raise NotSupported(f"accelerator.prepare with {len(found)} {what} of one model, of which the DeepSpeed plugin takes the last: {instead}")
    for one in (one for one in optimizers if isinstance(one, module.DummyOptim)):
        _check_dummy(module, one, accelerator.deepspeed_plugin.deepspeed_config.get("optimizer"))
    if optimizers and any(isinstance(one, nn.Module) for one in args) and _trains(_engine_of(accelerator)):
        raise NotSupported(
            "accelerator.prepare with a second model that is trained: accelerator.backward() makes steps of the first one only; make an Accelerator of its own "
            "for the second, or call accelerator.free_memory() when the first is trained"
        )


def _check_dummy(module: Any, optimizer: Any, configured: Optional[Mapping[str, Any]]) -> None:
    """Refuses settings of a DummyOptim that the configuration has otherwise or not at all."""
    default, params = module.DummyOptim([]), (configured or {}).get("params") or {}
    said = {name: getattr(optimizer, name) for name in ("lr", "weight_decay") if getattr(optimizer, name) != getattr(default, name)}
    for name, value in (*said.items(), *optimizer.kwargs.items()):
        found = params.get(name)
        if found != "auto" and found != (list(value) if isinstance(value, tuple) else value):
            raise NotSupported(
                f"DummyOptim: {name} is {value}, and the configuration, which counts, has {'none' if found is None else found}: write the value into "
                f"optimizer.params.{name}"
            )


def _check_backward(accelerator: Any, optimizer: Any, kwargs: dict[str, Any]) -> None:
    """Refuses a backward that Accelerate alone would add to another one's gradients, or divide by another number."""
    if optimizer._offloadd_stepped is not None:
        raise NotSupported(
            "accelerator.backward() twice without optimizer.step() between: with the DeepSpeed plugin each backward makes a step, outside of "
            "accelerator.accumulate(). Accumulate batches within it, add the losses of one batch, and call optimizer.step() after each backward"
        )
    steps, configured = accelerator.gradient_accumulation_steps, optimizer._offloadd_engine.gradient_accumulation_steps()
    if kwargs.get("scale_wrt_gas", True) and steps != configured:
        raise NotSupported(
            f"gradient_accumulation_steps of the Accelerator is {steps} now, and the engine was made with {configured}: set it before accelerator.prepare, and "
            "in the configuration"
        )


def _check_step(optimizer: Any) -> None:
    """Refuses a step that `accelerator.backward` has not made, or that a script has changed since."""
    engine = getattr(optimizer, "_offloadd_engine", None)
    if engine is None or engine.run.closed:
        return
    stepped, gradients = optimizer._offloadd_stepped, engine.run.engine.gradients
    if stepped is None and optimizer.gradient_state.sync_gradients and gradients.handles:
        raise NotSupported(
            "optimizer.step() without accelerator.backward(loss) since the last one: with the DeepSpeed plugin that makes the step, and gradients that came "
            "otherwise, or have made their step, make none"
        )
    if stepped is None:
        return
    regroup, changed = stepped != _settings_of(optimizer), gradients.changed
    if regroup or changed:
        what = "settings of parameter groups" if regroup else "gradients"
        raise NotSupported(
            f"{what} were changed between accelerator.backward(), which makes the step with the DeepSpeed plugin, and optimizer.step(): change settings before "
            "accelerator.backward(), and gradients in hooks (param.register_hook)"
        )


def _check_clipping(engine: TrainingEngine, norm: float, kind: float) -> None:
    """Refuses to clip otherwise than the engine has done in its step, if it has made one."""
    if not engine.was_step_applied():
        return
    if kind != 2:
        raise NotSupported(
            f"accelerator.clip_grad_norm_ with norm_type={kind:g}: with the DeepSpeed plugin the engine clips, by the norm of type 2: leave it out"
        )
    clips = engine.gradient_clipping()
    if norm != (clips or math.inf):
        wanted = 0.0 if math.isinf(norm) else norm
        raise NotSupported(
            f"accelerator.clip_grad_norm_ at {norm:g}: with the DeepSpeed plugin the engine has clipped already, {f'at {clips:g}' if clips else 'at no norm'}. Write "
            f'"gradient_clipping": {wanted:g} into the configuration; left out or "auto" it is 1'
        )


def _check(accelerator: Any, model: nn.Module) -> None:
    """Refuses what Accelerate would do to the parameters of a model that is prepared, or that its DeepSpeed plugin prepares here."""
    prepared, how = is_prepared(model.parameters()), accelerator.distributed_type.value
    if prepared and how == "DEEPSPEED" and not getattr(getattr(model, "_offloadd_run", None), "trains", True):
        # As a reference, and from now on it is trained: `initialize` ends the run.
        return
    # A second `train` of a Trainer goes on with the engine of the first.
    if prepared and how == "DEEPSPEED" and "engine" not in _deepspeed.beginning:
        raise NotSupported(
            "Accelerate's DeepSpeed plugin around a prepared model: leave out the plugin, or offloadd.prepare: the plugin calls it below offloadd-run. Where it "
            "has done so already, as for an earlier Trainer, end that with engine.destroy() (trainer.model_wrapped is the engine)"
        )
    if prepared and how in _DIVIDE:
        raise NotSupported(
            f"Accelerate's {how} around a prepared model: offloadd divides the model among the ranks itself; leave {how} out of Accelerate's configuration"
        )
    if (prepared or how == "DEEPSPEED") and accelerator.mixed_precision == "fp8":
        raise NotSupported('Accelerate with mixed_precision="fp8" replaces layers of the model, whose parameters are in tiles: use mixed_precision="bf16"')

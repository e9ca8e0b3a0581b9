"""Wrappers of others around a model: those that `offloadd.prepare` looks through, and those that a prepared model does without."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable, Iterable, Sequence

import torch
from torch import nn

from . import _finder
from ._errors import NotSupported


# Modules of torch that have what FSDP does.
_FSDP = ("torch.distributed.fsdp.fully_sharded_data_parallel", "torch.distributed.fsdp._fully_shard._fsdp_param_group")

# Where Lightning's Fabric has its wrappers: in its own package, and in that of Lightning.
_FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")

# Runs of this process.
_runs: "weakref.WeakSet[Any]" = weakref.WeakSet()


def remember(run: Any) -> None:
    """Lets wrappers see that the parameters of `run` are in tiles."""
    _runs.add(run)


def is_prepared(params: Iterable[torch.Tensor]) -> bool:
    """Whether an open run has some of the parameters."""
    found = set(map(id, params))
    return any(not found.isdisjoint(run.engine.gathering.unit_of) for run in _runs if not run.closed)


# Wrappers that compute the same as what they wrap: their module, their class, and where they have it.
_OF_MODELS = (("torch._dynamo", "OptimizedModule", "_orig_mod"), *((name, "_FabricModule", "_forward_module") for name in _FABRIC))
_OF_OPTIMIZERS = (("accelerate.optimizer", "AcceleratedOptimizer", "optimizer"), *((name, "_FabricOptimizer", "optimizer") for name in _FABRIC))


def _bare(one: Any, wrappers: Sequence[tuple[str, str, str]]) -> Any:
    """What the `wrappers` around an object, if any, have wrapped. Their modules are not imported for this."""
    for name, kind, inner in wrappers:
        if isinstance(one, getattr(sys.modules.get(name), kind, ())):
            return _bare(getattr(one, inner), wrappers)
    return one


def bare_model(model: nn.Module) -> nn.Module:
    """The model that `torch.compile`, Accelerate or Lightning's Fabric has wrapped, which computes the same below the wrapper."""
    model = _bare(model, _OF_MODELS)
    parallel = [nn.DataParallel, nn.parallel.DistributedDataParallel]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    parallel += [fsdp.FullyShardedDataParallel] if fsdp is not None else []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.RecursiveScriptModule) and next(module.parameters(), None) is not None:
            raise NotSupported(
                f"{name or 'the model'} is made by torch.jit.script, whose modules take no hooks: pass the module of which it was made, and script that after "
                "close() of the run"
            )
        if isinstance(module, tuple(parallel)):
            raise NotSupported(
                f"the model is wrapped in {type(module).__name__}, and offloadd adds the ranks' gradients up itself: pass the model without it; with "
                "Accelerate call offloadd.prepare before accelerator.prepare, which then leaves it out"
            )
    return model


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer that Accelerate or Lightning's Fabric has wrapped."""
    return _bare(optimizer, _OF_OPTIMIZERS)


def renew(optimizer: Any) -> None:
    """Lets a wrapper of Accelerate's around the optimizer find the `step` that `offloadd.prepare` has put there."""
    if isinstance(optimizer, getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", ())):
        optimizer.__setstate__({})


def watch() -> None:
    """Changes the wrappers of others so that they work with a prepared model, or say why they do not."""
    _refuse(nn.DataParallel, "DataParallel", "start one process for each GPU, with torchrun, or make one GPU visible")
    _refuse(nn.parallel.DistributedDataParallel, "DistributedDataParallel")
    _finder.patch("accelerate.accelerator", *_FSDP)


def patch_fsdp(module: Any) -> None:
    """Lets FSDP, a module of which was just imported, refuse a prepared model."""
    if hasattr(module, "FSDPParamGroup"):
        _refuse(module.FSDPParamGroup, "fully_shard")
    else:
        _refuse(module.FullyShardedDataParallel, "FullyShardedDataParallel")


def _refuse(kind: type, name: str, instead: str = "call the model itself") -> None:
    """Lets a class, whose first argument has parameters, refuse those of a prepared model."""
    plain = kind.__init__
    if hasattr(plain, "_offloadd_refuses"):
        return

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        first = args[0] if args else kwargs.get("module", ())
        if is_prepared(first.parameters() if isinstance(first, nn.Module) else first):
            raise NotSupported(
                f"{name} around a prepared model: offloadd divides the model among the ranks and adds their gradients up itself; leave {name} out: {instead}"
            )
        plain(self, *args, **kwargs)

    __init__._offloadd_refuses = True
    kind.__init__ = __init__


# Methods of modules that a prepared model refuses.
_OF_MODULES = ("_apply", "__deepcopy__", "__reduce_ex__", "__prepare_scriptable__")


def protect(modules: Iterable[nn.Module]) -> None:
    """Lets modules whose parameters are in tiles refuse to be copied, pickled, scripted, moved and converted."""

    def refuse_copy(memo: Any) -> Any:
        raise NotSupported("a prepared model cannot be copied: copy it before offloadd.prepare, or save and load its state_dict")

    def refuse_pickle(protocol: Any) -> Any:
        raise NotSupported("a prepared model cannot be pickled, as by torch.save(model): save its state_dict, or call save_pretrained")

    def refuse_script() -> Any:
        raise NotSupported("torch.jit.script of a prepared model: script it after close() of its run")

    for module in modules:
        of_module = (functools.partial(_apply, module), refuse_copy, refuse_pickle, refuse_script)
        vars(module).update(zip(_OF_MODULES, of_module))


def unprotect(modules: Iterable[nn.Module]) -> None:
    """Undoes `protect`."""
    for module in modules:
        for name in _OF_MODULES:
            vars(module).pop(name, None)


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Does nothing where `to`, `cuda`, `half` and others would change nothing, and refuses the rest."""
    with torch.no_grad():
        for device, dtype in {(one.device, one.dtype) for one in (*module.parameters(), *module.buffers())}:
            before = torch.empty(0, device=device, dtype=dtype)
            after = fn(before)
            if (after.device, after.dtype) != (device, dtype) or after.device.type == "cpu" and after.is_shared():
                shared = " in shared memory" * after.is_shared()
                raise NotSupported(
                    f"{type(module).__name__} would be brought from {dtype} on {device} to {after.dtype} on {after.device}{shared}, and its parameters are in "
                    "tiles: do it before offloadd.prepare; the key offloadd.compute_device names the device to compute on"
                )
    return module

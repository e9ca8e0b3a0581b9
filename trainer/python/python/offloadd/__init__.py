"""Trains any PyTorch model with its parameters and optimizer state in host memory or on NVMe drives.

    run = offloadd.prepare(model, optimizer, "ds_config.json", run_dir="runs/bert", track=[scheduler])
    for batch in run.batches(loader):
        model(**batch).loss.backward()
        optimizer.step(); scheduler.step(); optimizer.zero_grad()

or, for Hugging Face's Trainer, `offloadd.hf.attach(trainer, "ds_config.json")` before `trainer.train()`.

The same script started again resumes after the last committed step.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import optim, sequence_parallel
    from ._errors import DaemonGone, Damaged, DeviceFailed, Error, LayoutChanged, NoSpace, NotSupported, OrderDiffers, RankGone
    from ._initialize import TrainingEngine, initialize
    from ._plan import Plan
    from ._run import Run, prepare
    from ._weights import init

# Names and the modules they come from, imported when they are used: console scripts start without torch.
_FROM = {
    **dict.fromkeys(["DaemonGone", "Damaged", "DeviceFailed", "Error", "LayoutChanged", "NoSpace", "NotSupported", "OrderDiffers", "RankGone"], "_errors"),
    "Plan": "_plan",
    "Run": "_run",
    "TrainingEngine": "_initialize",
    "init": "_weights",
    "initialize": "_initialize",
    "prepare": "_run",
}

# Modules that are imported when they are used.
_MODULES = ("optim", "sequence_parallel")

__all__ = [*_FROM, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_FROM[name]}", __name__), name)
    return value

"""Trains any PyTorch model with its parameters and optimizer state in host memory or on NVMe drives.

    run = offloadd.prepare(model, optimizer, "ds_config.json", run_dir="runs/bert", track=[scheduler])
    for batch in run.batches(loader):
        model(**batch).loss.backward()
        optimizer.step(); scheduler.step(); optimizer.zero_grad()

or, for Hugging Face's Trainer, `offloadd.hf.attach(trainer, "ds_config.json")` before `trainer.train()`.

The same script started again resumes after the last committed step.
"""

from ._errors import DaemonGone, Damaged, DeviceFailed, Error, LayoutChanged, NoSpace, NotSupported
from ._initialize import TrainingEngine, initialize
from ._plan import Plan
from ._run import Run, prepare
from ._weights import init

__all__ = [
    "DaemonGone",
    "Damaged",
    "DeviceFailed",
    "Error",
    "LayoutChanged",
    "NoSpace",
    "NotSupported",
    "Plan",
    "Run",
    "TrainingEngine",
    "init",
    "initialize",
    "prepare",
]

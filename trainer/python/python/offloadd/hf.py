"""Hugging Face's Trainer on the engine."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any, Mapping, Optional, Union

import torch

from ._ranks import Ranks
from ._run import Run, prepare

# Where `Trainer.train` finds the last committed step, in the form of one of its checkpoints.
_RESUME_DIR = "trainer-resume"


def attach(
    trainer: Any, config: Union[str, os.PathLike, Mapping[str, Any]], *, run_dir: Optional[Union[str, os.PathLike]] = None
) -> Run:
    """Takes over the model and the optimizer of a `transformers.Trainer`, before `trainer.train()`.

    The run lies in `run_dir`, by default `output_dir/offloadd`. `trainer.train()` goes on after the last committed step, whatever
    `resume_from_checkpoint` says: it is newer than any checkpoint. Checkpoints that the Trainer writes hold the weights, and no
    moments.
    """
    kept = _TrainerState(trainer)
    trainer.create_optimizer()
    directory = Path(run_dir or Path(trainer.args.output_dir) / "offloadd")
    run = prepare(trainer.model, trainer.optimizer, config, run_dir=directory, track=[kept])
    names = ("train", "_save", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model")
    original = {name: getattr(trainer, name) for name in names}
    resume_dir = run.run_dir / _RESUME_DIR

    def train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        resumes = kept.loaded is not None
        if resumes:
            kept.write(resume_dir, run.resumed_random, run.ranks)
        result = original["train"](str(resume_dir) if resumes else None, *args, **kwargs)
        run.drain()
        return result

    def save(*args: Any, **kwargs: Any) -> None:
        run.on_first(lambda: original["_save"](*args, **kwargs))

    def load_model(checkpoint: str, model: Any = None) -> None:
        if Path(checkpoint) != resume_dir:
            original["_load_from_checkpoint"](checkpoint, model)

    def load_optimizer_and_scheduler(checkpoint: Optional[str]) -> None:
        if checkpoint is not None and Path(checkpoint) == resume_dir:
            trainer.lr_scheduler.load_state_dict(kept.loaded["scheduler"])
            run.restore_groups()
        else:
            original["_load_optimizer_and_scheduler"](checkpoint)

    def load_best_model() -> None:
        run.allow_load_state_dict()
        original["_load_best_model"]()

    trainer.train = train
    trainer._save = save
    trainer._load_best_model = load_best_model
    trainer._load_from_checkpoint = load_model
    trainer._load_optimizer_and_scheduler = load_optimizer_and_scheduler
    return run


class _TrainerState:
    """The Trainer's progress and its scheduler, as what is committed with each step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.loaded: Optional[dict[str, Any]] = None

    def state_dict(self) -> dict[str, Any]:
        scheduler = self.trainer.lr_scheduler
        state = json.dumps(dataclasses.asdict(self.trainer.state), default=float)
        return {"state": state, "scheduler": scheduler.state_dict() if scheduler is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["scheduler"] is not None:
            self.loaded = state

    def write(self, directory: Path, random_state: dict[str, Any], ranks: Ranks) -> None:
        """Writes what `Trainer.train` reads of a checkpoint: its state, and the random numbers of each rank."""
        import numpy

        directory.mkdir(exist_ok=True)
        if ranks.first:
            (directory / "trainer_state.json").write_text(self.loaded["state"])
        version, numbers, gauss = random_state["python"]
        name, keys, *rest = random_state.get("numpy") or numpy.random.get_state()
        states = {
            "python": (version, tuple(numbers), gauss),
            "numpy": (name, numpy.array(keys, dtype=numpy.uint32), *rest),
            "cpu": random_state["torch"],
        }
        if "cuda" in random_state:
            states["cuda"] = random_state["cuda"][torch.cuda.current_device()]
        assert random.getstate()[0] == version
        torch.save(states, directory / ("rng_state.pth" if ranks.count == 1 else f"rng_state_{ranks.rank}.pth"))
        ranks.meet("write what the Trainer resumes from")

"""Hugging Face's Trainer in a process where offloadd answers to `import deepspeed`: its run lies in `output_dir/offloadd`, and
`resume_from_checkpoint=True` lands on the last committed step."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from . import _deepspeed
from ._config import own_keys
from ._run import LAYOUT
from ._state import random_state
from .hf import RESUME_DIR, TrainerProgress, write_random_state


def patch_trainer(module: Any) -> None:
    """Changes `transformers.Trainer`, whose module was just imported."""
    plain = module.Trainer.train

    @functools.wraps(plain)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is None:
            return plain(self, resume_from_checkpoint, *args, **kwargs)
        own = own_keys(plugin.hf_ds_config.config)
        run_dir = Path(own.get("run_dir") or Path(self.args.output_dir) / "offloadd")
        kept = TrainerProgress(self)
        # A checkpoint that is named is loaded by `load_checkpoint`.
        resumes = resume_from_checkpoint is True and (run_dir / LAYOUT).exists() and hasattr(self, "_init_training_state")
        _deepspeed.beginning.update(run_dir=run_dir, resume=resumes, track=[kept])
        if resumes:
            resume_from_checkpoint = str(_resume(module, self, kept, run_dir / RESUME_DIR))
        try:
            result = plain(self, resume_from_checkpoint, *args, **kwargs)
        finally:
            _deepspeed.beginning.clear()
        self.model_wrapped.run.drain()
        return result

    module.Trainer.train = train


def _resume(module: Any, trainer: Any, kept: TrainerProgress, directory: Path) -> Path:
    """Lets `trainer.train` resume from `directory`, where the last committed step is written as soon as the run is open."""
    directory.mkdir(exist_ok=True)
    # Each rank writes the same.
    module.TrainerState().save_to_json(str(directory / "trainer_state.json"))
    initialize, prepare = trainer._init_training_state, trainer._prepare_for_training
    prepared: list[Any] = []

    def init_training_state(max_steps: int, *others: Any) -> Any:
        model, _ = prepare(max_steps, None, None)
        prepared.append(model)
        run = model.run
        if kept.loaded is not None:
            kept.write(directory, run.resumed_random, run.ranks)
            kept.catch_up(run, directory)
            # The scheduler that the Trainer made; one that the engine made is there already.
            trainer.lr_scheduler.load_state_dict(kept.loaded["scheduler"])
            run.restore_groups()
        else:
            write_random_state(directory, random_state(), run.ranks)
        return initialize(max_steps, *others)

    def prepare_for_training(max_steps: int, train_dataloader: Any, checkpoint: Any) -> Any:
        trainer._init_training_state, trainer._prepare_for_training = initialize, prepare
        trainer.callback_handler.train_dataloader = train_dataloader
        return prepared.pop(), train_dataloader

    trainer._init_training_state, trainer._prepare_for_training = init_training_state, prepare_for_training
    return directory

"""Hugging Face's Trainer and Accelerate in a process where offloadd answers to `import deepspeed`: the Trainer's run lies in
`output_dir/offloadd`, and `resume_from_checkpoint=True` lands on the last committed step."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch

from . import _deepspeed, _trainer_nodes
from ._config import processes
from ._errors import NotSupported
from ._initialize import TrainingEngine
from ._run_dir import has_run
from ._sequence_loader import Loader
from ._state import random_state
from ._wrappers import bare_optimizer
from .hf import RESUME_DIR, TrainerProgress, check_arguments, choose_optimizer, has_checkpoint, write_random_state


def patch_trainer(module: Any) -> None:
    """Changes `transformers.Trainer`, whose module was just imported."""
    plain, plain_init = module.Trainer.train, module.Trainer.__init__

    @functools.wraps(plain_init)
    def __init__(self: Any, model: Any = None, args: Any = None, *more: Any, **kwargs: Any) -> None:
        # A reference or a reward model that the Trainer prepares has its weights beside what is trained.
        _deepspeed.output_dir = None if args is None or args.output_dir is None else Path(args.output_dir)
        plain_init(self, model, args, *more, **kwargs)
        config = getattr(self.args, "hf_deepspeed_config", None) or getattr(self.accelerator.state, "deepspeed_plugin", None)
        config = getattr(config, "hf_ds_config", config)
        if config is not None:
            # A Trainer that evaluates first takes the section away.
            self._offloadd_optimizer = config.config.get("optimizer")
            if not _has_optimizer(config):
                choose_optimizer(self)

    @functools.wraps(plain)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is None:
            return plain(self, resume_from_checkpoint, *args, **kwargs)
        config = plugin.hf_ds_config.config
        if self._offloadd_optimizer is not None:
            config.setdefault("optimizer", self._offloadd_optimizer)
        # The Trainer leaves clipping to the engine.
        config.setdefault("gradient_clipping", self.args.max_grad_norm or 0.0)
        open_engine = _reopened(self, resume_from_checkpoint)
        # The batch is counted again when ranks of sequences are known.
        settings = _deepspeed.settings_in({**config, "train_batch_size": "auto"})
        run_dir = Path(settings.run_dir or Path(self.args.output_dir) / "offloadd")
        kept = TrainerProgress(self)
        # A checkpoint that is named is loaded by `load_checkpoint`; without drives it is all that is left of a run.
        resumes = resume_from_checkpoint is True and settings.device == "nvme" and has_run(run_dir) and hasattr(self, "_init_training_state")
        if open_engine is None and settings.use_node_local_storage and processes() > 1:
            resumes, resume_from_checkpoint = _trainer_nodes.bring_checkpoints(self, settings, resumes, resume_from_checkpoint)
        if open_engine is not None:
            begins = {"engine": open_engine}
        else:
            begins = {"run_dir": run_dir, "resume": resumes, "track": [kept]}
            _keep_given(self, config)
        if resumes:
            resume_from_checkpoint = str(_resume(module, self, kept, run_dir / RESUME_DIR))
        elif resume_from_checkpoint is True and not has_checkpoint(self.args.output_dir):
            # The first start of a script that always asks.
            resume_from_checkpoint = None
        try:
            with _each_time(self, begins):
                result = plain(self, resume_from_checkpoint, *args, **kwargs)
        finally:
            _deepspeed.beginning.clear()
        self.model_wrapped.run.drain()
        return result

    module.Trainer.train, module.Trainer.__init__ = train, __init__
    _skip_parts(module)


def _skip_parts(module: Any) -> None:
    """Lets a Trainer that resumes skip parts of sequences where their ranks divide batches: Accelerate would skip whole ones, and divide none."""
    plain = getattr(module, "skip_first_batches", None)
    if plain is None:
        return

    @functools.wraps(plain)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        return dataloader.skipping(num_batches, plain) if isinstance(dataloader, Loader) else plain(dataloader, num_batches)

    module.skip_first_batches = skip_first_batches


def patch_arguments(module: Any) -> None:
    """Lets `transformers.TrainingArguments`, whose module was just imported, refuse optimizers before a script loads its model."""
    plain = module.TrainingArguments.__post_init__

    @functools.wraps(plain)
    def __post_init__(self: Any) -> None:
        plain(self)
        if self.deepspeed and not _has_optimizer(self.hf_deepspeed_config):
            check_arguments(self)

    module.TrainingArguments.__post_init__ = __post_init__


def _has_optimizer(config: Any) -> bool:
    """Whether a configuration of DeepSpeed names the optimizer; the Trainer's arguments do not count then."""
    return "optimizer" in config.config


def patch_state(module: Any) -> None:
    """Lets Accelerate, whose module was just imported, open DeepSpeed's ranks on the CPU too, where it sees one process."""
    plain = module.PartialState._prepare_backend

    @functools.wraps(plain)
    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, kind = plain(self, *args, **kwargs)
        ranks = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
        if ranks and deepspeed and backend is None and not torch.cuda.is_available():
            return "gloo", module.DistributedType.MULTI_CPU
        return backend, kind

    module.PartialState._prepare_backend = prepare_backend


@contextlib.contextmanager
def _each_time(trainer: Any, begins: Mapping[str, Any]) -> Iterator[None]:
    """Lets each model that the Trainer's loop prepares begin so: it begins anew where a batch was too large (auto_find_batch_size)."""
    plain = trainer._inner_training_loop

    @functools.wraps(plain)
    def inner_training_loop(*args: Any, **kwargs: Any) -> Any:
        _deepspeed.beginning.update(begins)
        return plain(*args, **kwargs)

    trainer._inner_training_loop = inner_training_loop
    try:
        yield
    finally:
        del trainer._inner_training_loop


def _keep_given(trainer: Any, config: Mapping[str, Any]) -> None:
    """Lets a Trainer train with the optimizer and the schedule that it was given: with a configuration of DeepSpeed's it would make others."""
    optimizer, schedule = trainer.optimizer, trainer.lr_scheduler
    if not isinstance(optimizer, torch.optim.Optimizer) or bare_optimizer(optimizer) is not optimizer:
        # Of an earlier training, if there is one.
        return
    for section, given in (("optimizer", optimizer), ("scheduler", schedule)):
        if section in config and given is not None:
            raise NotSupported(f"the Trainer was given the script's {section}, and the configuration has a section {section}: leave one of them out")

    def create_optimizer(*_: Any, **__: Any) -> torch.optim.Optimizer:
        trainer.optimizer = optimizer if trainer.optimizer is None else trainer.optimizer
        return trainer.optimizer

    trainer.create_optimizer = create_optimizer
    if schedule is not None:

        def create_scheduler(*_: Any, **__: Any) -> Any:
            trainer.lr_scheduler = schedule
            return schedule

        trainer.create_scheduler = create_scheduler


def _reopened(trainer: Any, resume_from_checkpoint: Any) -> Any:
    """Returns the engine of an earlier `train` of this Trainer, which trains on with its weights and moments; None without one, and where the Trainer makes
    another model."""
    engine = trainer.model_wrapped
    if isinstance(engine, TrainingEngine) and engine.optimizer is None:
        # Of an evaluation. It ends when the model is trained.
        trainer.accelerator.deepspeed_engine_wrapped = None
        trainer.model_wrapped = engine.module
        return None
    if not isinstance(engine, TrainingEngine) or engine.run.closed or getattr(trainer, "model_init", None) is not None:
        return None
    if resume_from_checkpoint is True:
        raise NotSupported("a second train() in one process with resume_from_checkpoint=True: name a checkpoint, or start the script again")
    # Accelerate would end the engine's run, and the Trainer would prepare nothing anew.
    trainer.accelerator.deepspeed_engine_wrapped = None
    trainer.model_wrapped, trainer.optimizer = engine.module, engine.optimizer
    return engine


def _resume(module: Any, trainer: Any, kept: TrainerProgress, directory: Path) -> Path:
    """Lets `trainer.train` resume from `directory`, where the last committed step is written as soon as the run is open."""
    directory.mkdir(exist_ok=True)
    # For a run without a committed step. Each rank writes the same.
    begun = module.TrainerState(train_batch_size=trainer.args.train_batch_size, stateful_callbacks=kept.callbacks())
    begun.save_to_json(str(directory / "trainer_state.json"))
    initialize, prepare = trainer._init_training_state, trainer._prepare_for_training
    prepared: list[Any] = []

    def init_training_state(max_steps: int, *others: Any) -> Any:
        model, _ = prepare(max_steps, None, None)
        prepared.append(model)
        run = model.run
        if kept.loaded is not None:
            kept.write(directory, run.commits.take_random(), run.ranks)
            kept.catch_up(run, directory)
            # The scheduler that the Trainer made; one that the engine made is there already.
            trainer.lr_scheduler.load_state_dict(kept.loaded["scheduler"])
            run.commits.restore_groups()
        else:
            # Each rank writes the same.
            begun.compute_steps(trainer.args, max_steps)
            begun.save_to_json(str(directory / "trainer_state.json"))
            write_random_state(directory, random_state(), run.ranks, trainer.args)
        return initialize(max_steps, *others)

    def prepare_for_training(max_steps: int, train_dataloader: Any, checkpoint: Any) -> Any:
        trainer._init_training_state, trainer._prepare_for_training = initialize, prepare
        trainer.callback_handler.train_dataloader = train_dataloader
        model = prepared.pop()
        if model.sequence_parallel_size > 1:
            train_dataloader = trainer.accelerator.deepspeed_ulysses_dl_adapter(train_dataloader, model)
        return model, train_dataloader

    trainer._init_training_state, trainer._prepare_for_training = init_training_state, prepare_for_training
    return directory

"""Hugging Face's Trainer on the engine."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import random
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, TypeVar, Union

import torch

from ._checkpoint import load_checkpoint, save_checkpoint
from ._config import settings_of
from ._errors import NotSupported
from ._lion import Lion
from ._ranks import Ranks
from ._run import Run, prepare
from ._state import numpy_state, python_state, random_state, set_random_state
from ._supported_optimizers import maker, rule_named

# Where `Trainer.train` finds the last committed step, in the form of one of its checkpoints.
RESUME_DIR = "trainer-resume"

# Moments and masters in a checkpoint of the Trainer's.
TILES = "offloadd-tiles"

# What a step still asks for when it is committed before its evaluation or its checkpoint.
_ASKED = ("should_log", "should_evaluate", "should_save")

Arguments = TypeVar("Arguments")


def keep_in_place(args: Arguments) -> Arguments:
    """Returns `args` for a `transformers.Trainer` that leaves its model in host memory until `attach`, from where blocks come to the GPU.

    Without it, the Trainer moves the whole model to the GPU when it is made, and TRL loads a model that is given by its name there.
    """
    check_arguments(args)
    kind = type(args)

    def reduced(self: Any, protocol: Any) -> Any:
        # The Trainer's checkpoints hold its arguments, and are read without this library.
        plain = kind.__new__(kind)
        plain.__dict__.update(self.__dict__)
        # Newer protocols refuse another object's class.
        return plain.__reduce_ex__(1)

    kept = copy.copy(args)
    kept.__class__ = type(kind.__name__, (kind,), {"place_model_on_device": False, "__reduce_ex__": reduced})
    if hasattr(kept, "model_init_kwargs"):
        # With None, bitsandbytes loads a model that it quantizes onto the GPU.
        kept.model_init_kwargs = {"device_map": {"": "cpu"}, **(kept.model_init_kwargs or {})}
    return kept


def attach(trainer: Any, config: Union[str, os.PathLike, Mapping[str, Any]], *, run_dir: Optional[Union[str, os.PathLike]] = None) -> Run:
    """Takes over the model and the optimizer of a `transformers.Trainer`, before `trainer.train()`.

    The model computes on the Trainer's GPU, if it has one; it must fit there unless the Trainer was made with arguments of
    `keep_in_place`. The run lies in `run_dir`, else in the key offloadd.run_dir, else in `output_dir/offloadd`. `trainer.train()` continues after the
    last committed step, whatever `resume_from_checkpoint` says: it is newer than any checkpoint. Without a committed step, as with state in
    host memory, it resumes from the checkpoint that is named. An evaluation or a checkpoint that
    was due after that step is made again. The Trainer's number of micro-batches counts where `config` names none. Checkpoints that
    the Trainer writes hold the run's tiles in place of `optimizer.pt`, since its moments need not fit into memory.
    """
    kept = TrainerProgress(trainer)
    optimizer = _create_optimizer(trainer)
    settings = settings_of(config, schedules=False)
    if settings.compute_device is None and trainer.args.device.type == "cuda":
        # The Trainer brings batches there.
        settings = dataclasses.replace(settings, compute_device=str(trainer.args.device))
    directory = Path(run_dir or settings.run_dir or Path(trainer.args.output_dir) / "offloadd")
    if settings.json.get("gradient_accumulation_steps") in (None, "auto"):
        # With one pass a step, gradients of 16-bit parameters need no fp32.
        given = {**settings.json, "gradient_accumulation_steps": trainer.args.gradient_accumulation_steps}
        settings = dataclasses.replace(settings_of(given, schedules=False), compute_device=settings.compute_device)
    run = prepare(trainer.model, optimizer, settings, run_dir=directory, track=[kept])
    trainer.create_optimizer = lambda *_, **__: optimizer
    names = ("train", "_save", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model", "_save_optimizer_and_scheduler")
    original = {name: getattr(trainer, name) for name in names}
    resume_dir = run.run_dir / RESUME_DIR

    def train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        resumes = kept.loaded is not None
        if resumes:
            kept.write(resume_dir, run.commits.take_random(), run.ranks)
            kept.catch_up(run, resume_dir)
        elif resume_from_checkpoint is True and not has_checkpoint(trainer.args.output_dir):
            # The first start of a script that always asks.
            resume_from_checkpoint = None
        result = original["train"](str(resume_dir) if resumes else resume_from_checkpoint, *args, **kwargs)
        run.drain()
        return result

    def save(*args: Any, **kwargs: Any) -> None:
        run.on_first(lambda: original["_save"](*args, **kwargs))

    def load_model(checkpoint: str, model: Any = None) -> None:
        if Path(checkpoint) != resume_dir:
            original["_load_from_checkpoint"](checkpoint, model)

    def save_optimizer_and_scheduler(output_dir: str) -> None:
        save_checkpoint(run.commits, Path(output_dir), TILES, {}, save_latest=False)
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def load_optimizer_and_scheduler(checkpoint: Optional[str]) -> None:
        if checkpoint is not None and Path(checkpoint) == resume_dir:
            trainer.lr_scheduler.load_state_dict(kept.loaded["scheduler"])
            run.commits.restore_groups()
        elif checkpoint is not None and (Path(checkpoint) / TILES).exists():
            before = kept.loaded
            load_checkpoint(run.commits, Path(checkpoint), TILES)
            # The Trainer reads its own state itself.
            kept.loaded = before
            trainer.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))
            run.commits.restore_groups()
        else:
            original["_load_optimizer_and_scheduler"](checkpoint)

    def load_best_model() -> None:
        run.rewriting.allow()
        original["_load_best_model"]()

    if getattr(trainer.args, "ds3_gather_for_generation", False):
        _generate_gathered(run)
    trainer.train = train
    trainer._save = save
    trainer._load_best_model = load_best_model
    trainer._load_from_checkpoint = load_model
    trainer._load_optimizer_and_scheduler = load_optimizer_and_scheduler
    trainer._save_optimizer_and_scheduler = save_optimizer_and_scheduler
    return run


def check_arguments(args: Any) -> None:
    """Refuses `transformers.TrainingArguments` whose optimizer is none of ours, before a model is loaded."""
    rule_named(getattr(args.optim, "value", args.optim))


def choose_optimizer(trainer: Any) -> None:
    """Lets a Trainer make the optimizer that its arguments name as a class of ours or of torch, whichever package they name. One that the script
    has made stays."""
    if trainer.optimizer is not None or getattr(trainer, "optimizer_cls_and_kwargs", None) is not None:
        return
    import transformers

    own = getattr(type(trainer), "get_optimizer_cls_and_kwargs", None)
    if own is not getattr(transformers.Trainer, "get_optimizer_cls_and_kwargs", None):
        # The script's choice: what it makes is judged as any optimizer is.
        return
    args, name = trainer.args, getattr(trainer.args.optim, "value", trainer.args.optim)
    rule = rule_named(name)
    given = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
    if rule == "Lion":
        trainer.optimizer_cls_and_kwargs = maker(name, Lion), given
    elif name != "adamw_torch_fused":
        trainer.optimizer_cls_and_kwargs = maker(name, torch.optim.AdamW), {**given, "eps": args.adam_epsilon}


def _create_optimizer(trainer: Any) -> torch.optim.Optimizer:
    if getattr(trainer, "model_init", None) is not None:
        raise NotSupported(
            f"attach: {type(trainer).__name__} has model_init, by which train() would make another model: pass it the model, or a configuration of DeepSpeed's"
        )
    choose_optimizer(trainer)
    made = trainer.create_optimizer()
    # Trainers with optimizers of their own make another one at each call, and some return none.
    trainer.optimizer = made if made is not None else trainer.optimizer
    return trainer.optimizer


def _generate_gathered(run: Run) -> None:
    """Lets `generate` of the model have all weights in memory, as TRL's trainers ask for."""
    plain = run.model.generate

    @functools.wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        with run.gathered():
            return plain(*args, **kwargs)

    run.model.generate = generate


def has_checkpoint(output_dir: str) -> bool:
    """Whether a Trainer has written a checkpoint into `output_dir`."""
    from transformers.trainer_utils import get_last_checkpoint

    return os.path.isdir(output_dir) and get_last_checkpoint(output_dir) is not None


class TrainerProgress:
    """The Trainer's progress and its scheduler, as what is committed with each step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.loaded: Optional[dict[str, Any]] = None
        # The random numbers that the epoch began with: a sampler without a generator of its own draws its order from them.
        self._epoch_random: Optional[dict[str, Any]] = None
        if hasattr(trainer, "_run_epoch"):
            trainer._run_epoch = self._in_its_order(trainer._run_epoch)

    def _in_its_order(self, plain: Callable) -> Callable:
        """The Trainer's `_run_epoch`, which skips what a resumed epoch has seen and then reads the random numbers that go with its next step."""

        def run_epoch(**given: Any) -> Any:
            skips = given["epoch"] == given["epochs_trained"] and given["steps_trained_in_current_epoch"] > 0
            if skips and self._epoch_random is not None:
                set_random_state(self._epoch_random)
            self._epoch_random = random_state()
            return plain(**given)

        return run_epoch

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        progress = dataclasses.asdict(trainer.state)
        progress["stateful_callbacks"] = self.callbacks()
        loss = getattr(trainer, "_tr_loss", None)
        return {
            "state": json.dumps(progress, default=float),
            "scheduler": trainer.lr_scheduler.state_dict() if hasattr(trainer.lr_scheduler, "state_dict") else None,
            "asked": [name for name in _ASKED if getattr(trainer.control, name)],
            # The sum since the last step that was logged.
            "loss": 0.0 if loss is None else float(loss),
            "logged": getattr(trainer, "_globalstep_last_logged", 0),
            "epoch_random": self._epoch_random,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Commits that are older than the key do not have it.
        self._epoch_random = state.get("epoch_random")
        if state["scheduler"] is not None:
            self.loaded = state

    def callbacks(self) -> dict[str, Any]:
        """States of the callbacks that have one, as the Trainer's checkpoints have them."""
        from transformers.trainer_callback import ExportableState, TrainerState

        every = [*self.trainer.callback_handler.callbacks, self.trainer.control]
        return TrainerState(stateful_callbacks=[one for one in every if isinstance(one, ExportableState)]).stateful_callbacks

    def write(self, directory: Path, randoms: dict[str, Any], ranks: Ranks) -> None:
        """Writes what `Trainer.train` reads of a checkpoint: its state, and the random numbers of each rank."""
        directory.mkdir(exist_ok=True)
        if ranks.first_of_node:
            (directory / "trainer_state.json").write_text(self.loaded["state"])
        write_random_state(directory, randoms, ranks, self.trainer.args)

    def catch_up(self, run: Run, directory: Path) -> None:
        """Lets the first epoch of the resumed training begin with what the last committed step still asked for."""
        trainer, loaded = self.trainer, self.loaded
        if not hasattr(trainer, "_run_epoch"):
            return
        original = trainer._run_epoch

        def run_epoch(**given: Any) -> Any:
            trainer._run_epoch = original
            # The sum that is logged next; the average of this call of `train` has only its own steps.
            trainer._tr_loss += loaded["loss"]
            trainer._total_loss_scalar -= loaded["loss"]
            trainer._globalstep_last_logged = loaded["logged"]
            set_random_state(run.commits.resumed_random)
            if loaded["asked"]:
                for name in _ASKED:
                    setattr(trainer.control, name, name in loaded["asked"])
                names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
                rate = trainer._get_learning_rate()
                trainer._maybe_log_save_evaluate(trainer._tr_loss, run.grad_norm, *(given[name] for name in names), learning_rate=rate)
                # The next step draws after them.
                write_random_state(directory, random_state(), run.ranks, trainer.args)
                if trainer.control.should_training_stop:
                    return None
            return original(**given)

        trainer._run_epoch = run_epoch


def write_random_state(directory: Path, state: dict[str, Any], ranks: Ranks, args: Any) -> None:
    """Writes this rank's random numbers as the checkpoints of a Trainer with these arguments have them."""
    import numpy
    from transformers.training_args import ParallelMode

    kept = python_state(state)
    states = {"python": kept, "numpy": numpy_state(state) or numpy.random.get_state(), "cpu": state["torch"]}
    if "cuda" in state:
        # Below a launcher, and with DeepSpeed's configuration also in one process, it reads those of all GPUs.
        distributed = args.parallel_mode == ParallelMode.DISTRIBUTED
        states["cuda"] = state["cuda"][: torch.cuda.device_count()] if distributed else state["cuda"][torch.cuda.current_device()]
    assert random.getstate()[0] == kept[0]
    torch.save(states, directory / ("rng_state.pth" if ranks.count == 1 else f"rng_state_{ranks.rank}.pth"))
    ranks.meet("write what the Trainer resumes from")

"""Lightning on the engine: `Trainer(strategy=offloadd.lightning.Strategy("ds_config.json"))`.

Processes, devices and samplers are those of Lightning's strategy `ddp`. A checkpoint is a directory:

    PATH/tiles.N, checkpoint.json, state.pt   trained parameters and optimizer state: see `_checkpoint`
    PATH/weights.safetensors            the model's weights, for other programs and for `test` in another process
    PATH/lightning.N.pt                 rank N's progress, callbacks, schedulers, random numbers and position in its data

A checkpoint of weights only (`save_weights_only=True`) is Lightning's own file.

On several nodes that share no directory, each keeps all of these directories (checkpoint.use_node_local_storage).
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Union

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ._checkpoint import restore_here, is_separate, load_checkpoint, read_file, save_checkpoint
from ._config import read, settings_of
from ._errors import Error, NotSupported
from ._run import Run, prepare
from ._state import random_state, set_random_state, write_flushed
from ._weights import Blocks

# Lightning is the same under two names; a Trainer takes the strategies of its own.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.strategies import DDPStrategy
else:
    try:
        from lightning.pytorch.strategies import DDPStrategy
    except ModuleNotFoundError:
        try:
            from pytorch_lightning.strategies import DDPStrategy
        except ModuleNotFoundError:
            raise ModuleNotFoundError("offloadd.lightning needs Lightning: pip install lightning") from None

_WEIGHTS = "weights.safetensors"


class Strategy(DDPStrategy):
    """Offloads the LightningModule of `Trainer.fit`.

    `config` is a file or dict with DeepSpeed's keys, ours under "offloadd". The run lies in `run_dir`, else in the key
    offloadd.run_dir, else in the Trainer's `default_root_dir/offloadd`. `fit` begins anew in it; `fit(ckpt_path=...)` resumes from a
    checkpoint of this strategy. The other arguments are those of Lightning's `DDPStrategy`.
    """

    strategy_name = "offloadd"

    def __init__(self, config: Union[str, os.PathLike, Mapping[str, Any]], *, run_dir: Optional[Union[str, os.PathLike]] = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self._config, self._run_dir = read(config), run_dir
        self._run: Optional[Run] = None
        # The positions in the data of the checkpoint that was loaded, for the loaders that Lightning makes next.
        self._positions: list[dict[str, Any]] = []

    # The run

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        fits = trainer.state.fn == "fit"
        if not self._is_open():
            if not fits:
                super().setup(trainer)
                return
        elif fits:
            raise NotSupported("a second Trainer.fit of one model: start the script again, with ckpt_path to resume")
        self.accelerator.setup(trainer)
        if fits:
            self.precision_plugin.convert_module(module)
            self.setup_optimizers(trainer)
            if len(self.optimizers) != 1:
                raise NotSupported(f"configure_optimizers returns {len(self.optimizers)} optimizers: return one, with several groups")
            config = self._config
            if config.get("gradient_accumulation_steps") in (None, "auto"):
                config = {**config, "gradient_accumulation_steps": trainer.accumulate_grad_batches}
            if self.root_device.type == "cuda":
                config = {**config, "offloadd": {"compute_device": str(self.root_device), **(config.get("offloadd") or {})}}
            settings = settings_of(config, schedules=False)
            run_dir = self._run_dir or settings.run_dir or Path(trainer.default_root_dir) / "offloadd"
            self._run = prepare(module, self.optimizers[0], settings, run_dir=run_dir, resume=False)
        if module.automatic_optimization:
            # Lightning then calls its steps as the forward of what it finds here.
            self.model = _WholeModule(module)
        self.setup_precision_plugin()

    def _is_open(self) -> bool:
        return self._run is not None and not self._run.closed and self._run.model is self.lightning_module

    def on_train_end(self) -> None:
        self._run.drain()

    def on_exception(self, exception: BaseException) -> None:
        if self._is_open() and self._run.ranks.count > 1:
            # The others learn why this rank comes to no meeting any more.
            self._run.__exit__(type(exception), exception, None)

    def teardown(self) -> None:
        """Ends what Lightning has set up. The parameters stay in tiles: `test`, `predict` and `save_checkpoint` may follow."""
        self.model = self.lightning_module
        if not self._is_open():
            super().teardown()
            return
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # Data

    def process_dataloader(self, dataloader: Any) -> Any:
        if not self._is_open() or not self.lightning_module.trainer.training:
            return dataloader
        return _Loader(dataloader, self._positions.pop(0) if self._positions else None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for loader in self._loaders():
            loader.begun += 1

    def _loaders(self) -> list["_Loader"]:
        return [one for one in tree_flatten(self.lightning_module.trainer.train_dataloader)[0] if isinstance(one, _Loader)]

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state, whose values are read when they are saved."""
        return self.lightning_module.state_dict(keep_vars=self._is_open())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Union[str, os.PathLike], storage_options: Optional[Any] = None) -> None:
        if not self._is_open():
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        run, trainer = self._run, self.lightning_module.trainer
        if "optimizer_states" not in checkpoint:
            whole = lambda: {**checkpoint, "state_dict": Blocks(run.engine.gathering, checkpoint["state_dict"]).copies()}
            run.on_first(lambda: super(Strategy, self).save_checkpoint(whole(), filepath, storage_options))
            return
        positions = [loader.position(trainer.is_last_batch) for loader in self._loaders()]
        rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        rest["offloadd"] = {"positions": positions, "random": random_state()}

        def add(directory: Path) -> str:
            data, name = io.BytesIO(), f"lightning.{run.ranks.rank}.pt"
            torch.save(rest, data)
            write_flushed(directory / name, data.getvalue())
            return name

        path = Path(filepath)
        save_checkpoint(run.commits, path.parent, path.name, {"ranks": run.ranks.count}, save_latest=False, add=add, weights=_WEIGHTS)

    def remove_checkpoint(self, filepath: Union[str, os.PathLike]) -> None:
        run, path = self._run, Path(filepath)
        if not self._is_open() or not is_separate(run.settings, run.ranks, path.parent):
            super().remove_checkpoint(filepath)
        elif run.ranks.first_of_node and path.exists():
            self.checkpoint_io.remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Union[str, os.PathLike], weights_only: Optional[bool] = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        if self._is_open() and self._run.settings.use_node_local_storage:
            paths = [told.decode() for told in self._run.ranks.meet("compare ckpt_path", os.fsencode(path))]
            if len(set(paths)) > 1:
                raise Error(f"ckpt_path is {' and '.join(sorted(set(paths)))} on different nodes: name the path, and nodes that lack it get a copy")
            restore_here(self._run.settings, self._run.ranks, path.parent, path.name)
        if not path.is_dir():
            if self._is_open():
                raise NotSupported(
                    f"{path}: fit resumes from a checkpoint of offloadd.lightning.Strategy, a directory; load the weights of another one into the model before fit"
                )
            return super().load_checkpoint(checkpoint_path, weights_only)
        rank = 0
        if self._is_open():
            _, kept = load_checkpoint(self._run.commits, path.parent, path.name)
            rank = self._run.ranks.rank if kept["ranks"] == self._run.ranks.count else 0
        checkpoint = torch.load(io.BytesIO(read_file(path, f"lightning.{rank}.pt")), weights_only=bool(weights_only))
        where = checkpoint.pop("offloadd")
        if self._is_open():
            self._positions = where["positions"]
            set_random_state(where["random"])
        else:
            checkpoint["state_dict"] = self._saved_weights(path / _WEIGHTS)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._is_open():
            super().load_model_state_dict(checkpoint, strict)

    def _saved_weights(self, file: Path) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        found, names = load_file(file), {}
        # A file has each tensor once.
        for name, value in self.lightning_module.state_dict(keep_vars=True).items():
            first = names.setdefault(id(value), name)
            if first in found:
                found.setdefault(name, found[first])
        return found


def patch_strategy(module: Any) -> None:
    """Lets Lightning's `DeepSpeedStrategy`, whose module was just imported, make a strategy of ours with the settings it would have."""
    original = module.DeepSpeedStrategy

    class DeepSpeedStrategy(module.DDPStrategy):
        """Makes a `Strategy`. Lightning finds its names, such as "deepspeed_stage_3_offload", in it."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Strategy:
            return Strategy(original(*args, **kwargs).config)

        @classmethod
        def register_strategies(cls, strategy_registry: Any) -> None:
            original.register_strategies.__func__(cls, strategy_registry)

    module.DeepSpeedStrategy = DeepSpeedStrategy


class _WholeModule(nn.Module):
    """A module that calls another one: the engine sees a step of the LightningModule as one pass through all of it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _Loader:
    """A training loader that continues where a checkpoint was made, with the random numbers of then."""

    def __init__(self, loader: Any, position: Optional[dict[str, Any]]) -> None:
        self.loader, self._resumed = loader, position
        # Batches of this epoch that were taken from the loader, and those that training has begun; Lightning may be one ahead.
        self._taken = self.begun = 0
        # The random numbers when the epoch began.
        self._random: Optional[dict[str, Any]] = None

    def position(self, last: bool) -> dict[str, Any]:
        """Returns where training is, after a batch that may be the `last` one of its epoch."""
        return {"batches": 0 if last else min(self._taken, self.begun), "epoch_random": None if last else self._random, "random": random_state()}

    def __iter__(self) -> Iterator:
        # In a generator this runs with the first batch: until then Lightning may make iterators it does not use.
        resumed, self._resumed = self._resumed, None
        self._taken = self.begun = resumed["batches"] if resumed else 0
        if resumed:
            set_random_state(resumed["epoch_random"] or resumed["random"])
        self._random = random_state()
        iterator = iter(self.loader)
        for _ in range(self._taken):
            next(iterator, None)
        if self._taken:
            set_random_state(resumed["random"])
        for batch in iterator:
            self._taken += 1
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "state_dict", "load_state_dict"):
            # Lightning would restore a loader that keeps its position itself, and batches would be skipped twice.
            raise AttributeError(name)
        return getattr(self.loader, name)

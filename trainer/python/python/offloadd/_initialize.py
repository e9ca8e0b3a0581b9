"""DeepSpeed's interface: `initialize`, and the engine it returns."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence, Union

import torch
from torch import nn

from ._checkpoint import load_checkpoint, save_checkpoint
from ._config import Config, Settings, processes, settings_of
from ._console import say
from ._deepspeed_refused import missing_of_engine
from ._deepspeed_utils import optimizer_name
from ._errors import Error, NotSupported
from ._loss_scaling import LossScaling
from ._packed import cast
from ._run import Run, prepare
from ._sequence_attention import attach
from ._sequence_groups import current
from ._schedules import optimizer_of, schedule_of
from ._weights import trained_state
from ._untrained import beside
from ._zero import remember, unused_dir

# DeepSpeed's default since June 2026.
GRADIENT_CLIPPING = 1.0


def initialize(
    args: Any = None,
    model: Optional[nn.Module] = None,
    optimizer: Union[torch.optim.Optimizer, Callable, None] = None,
    model_parameters: Optional[Iterable] = None,
    training_data: Optional[torch.utils.data.Dataset] = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: Optional[bool] = None,
    collate_fn: Optional[Callable] = None,
    config: Optional[Config] = None,
    mesh_param: Any = None,
    config_params: Optional[Config] = None,
    *,
    run_dir: Optional[Union[str, os.PathLike]] = None,
    resume: bool = True,
    track: Sequence[Any] = (),
) -> tuple["TrainingEngine", torch.optim.Optimizer, Any, Any]:
    """Takes over a model as `deepspeed.initialize` does; returns (engine, optimizer, dataloader, lr_scheduler).

    `optimizer` and `lr_scheduler` are objects, functions that make them (of the parameters, of the optimizer), or left
    out for what the sections `optimizer` and `scheduler` of the configuration say. Where bf16 or fp16 is enabled, the
    model is brought to that type. It computes on the process's GPU if there is one. The same `run_dir` (or offloadd.run_dir) resumes after the last
    committed step, unless `resume` is False: the run then begins anew. `track` has further objects whose state is committed with each step.

    Where neither the arguments nor the configuration have an optimizer, nothing is trained, and only the engine is returned: its model
    lies in tiles, or in memory where nothing is offloaded. `initialize` with an optimizer may follow for the same model.
    """
    if model is None:
        raise Error("initialize: pass the model")
    if mesh_param is not None:
        raise NotSupported("initialize: mesh_param: all ranks compute the whole model; leave it out")
    config = config if config is not None else config_params
    if config is None:
        config = getattr(args, "deepspeed_config", None)
    if config is None:
        raise Error("initialize: pass config, a path or a dict")
    if processes() > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    settings = settings_of(config, GRADIENT_CLIPPING, sequence_ranks=_sequence_ranks(mpu))
    if settings.compute_device is None and torch.cuda.is_available():
        # As deepspeed.initialize moves the model.
        index = os.environ.get("LOCAL_RANK", torch.cuda.current_device())
        settings = replace(settings, compute_device=f"cuda:{index}")
    if optimizer is None and settings.optimizer is None:
        return ReadingEngine(model, settings, run_dir, resume), None, None, None
    _end_reading(model)
    run_dir = run_dir or settings.run_dir or unused_dir(settings.default_dir)
    if settings.precision is not None:
        cast(model, getattr(torch, settings.precision))
    parameters = list(model_parameters) if model_parameters is not None else list(model.parameters())
    if optimizer is None:
        optimizer = optimizer_of(settings, model, parameters)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(parameters)
    if lr_scheduler is None:
        lr_scheduler = schedule_of(settings, optimizer)
    elif not hasattr(lr_scheduler, "state_dict"):
        lr_scheduler = lr_scheduler(optimizer)
    engine = TrainingEngine(model, optimizer, lr_scheduler, settings, run_dir, resume, track)
    loader = None
    if training_data is not None:
        loader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    engine.training_dataloader = loader
    return engine, optimizer, loader, lr_scheduler


def _sequence_ranks(mpu: Any) -> Optional[int]:
    """The ranks of a sequence that an object of DeepSpeed's for groups of ranks names; None without one."""
    if mpu is None:
        return None
    size, made = getattr(mpu, "get_sequence_parallel_world_size", lambda: None)(), current()
    if size is None or made is None or made.size != size:
        raise NotSupported(
            "initialize: mpu: groups of ranks are those that UlyssesSPAttentionHF.register_with_transformers returns, for parts of a sequence; leave out others"
        )
    return size


class TrainingEngine(nn.Module):
    """The result of `initialize`: call it like the model, then `backward`, then `step`.

    As DeepSpeed's engine it is a module around the model: names of its parameters and of its state begin with `module.`. Attributes that
    it has not are the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        settings: Settings,
        run_dir: Optional[Union[str, os.PathLike]],
        resume: bool,
        tracked: Sequence[Any],
    ) -> None:
        super().__init__()
        # The configuration as DeepSpeed's engine shows it.
        self.config = settings.json
        self._settings = settings
        self._micro_batch, self._accumulated = settings.micro_batch or 1, settings.micro_batches or 1
        self._scaling = LossScaling(self._accumulated, settings.overflow, scales=settings.precision == "float16")
        self._at_boundary: Optional[bool] = None
        self.tput_timer = _Timer()
        self._losses: list[torch.Tensor] = []
        self.global_steps = self.micro_steps = 0
        self._applied = False
        self.module, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        self.training_dataloader: Any = None
        self._stepping = False
        # Whether a step ends with those of its gradients, as in DeepSpeed.
        self.drops_gradients = True
        counters = _Counters(self)
        track = [counters, *tracked] if lr_scheduler is None else [counters, lr_scheduler, *tracked]
        self.run: Run = prepare(model, optimizer, settings, run_dir=run_dir, track=track, resume=resume)
        if self._scaling.needed:
            self.run.engine.gradients.scaled = self._scaling.of_gradient
        if self._scaling.skips:
            self._refuses_steps = optimizer.register_step_pre_hook(self._refuse_step)
        # DeepSpeed's optimizers say whether they skipped the last step, and have the object that holds the hooks.
        optimizer.overflow, optimizer.parameter_offload = False, _ParameterOffload()
        remember(self.run)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__.get("_modules", ()):
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            if name.startswith("_") or hasattr(type(self.module), name):
                raise
            raise missing_of_engine(name, type(self.module).__name__) from None

    def renew_schedule(self, lr_scheduler: Any) -> Any:
        """Puts a schedule, its maker, or the configured one for None, in place of the last, whose training has ended."""
        if lr_scheduler is None:
            lr_scheduler = schedule_of(self._settings, self.optimizer)
        elif not hasattr(lr_scheduler, "state_dict"):
            lr_scheduler = lr_scheduler(self.optimizer)
        self.run.commits.track = [lr_scheduler if one is self.lr_scheduler else one for one in self.run.commits.track]
        self.lr_scheduler = lr_scheduler
        return lr_scheduler

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    # A step

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Runs the backward pass of `loss`, divided by gradient_accumulation_steps and times the loss scale."""
        if scale_wrt_gas and self._accumulated > 1:
            loss = loss / self._accumulated
        self._losses.append(loss.detach())
        self._scaling.backward(loss, retain_graph)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale of fp16, for a script that calls `backward` of it. Its gradients are divided by gradient_accumulation_steps."""
        return self._scaling.scale_of_script(loss)

    def step(self, lr_kwargs: Any = None) -> None:
        """Updates the weights at the end of an accumulation, and advances the scheduler; otherwise counts a micro-batch."""
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._applied = False
        # Also of a backward that failed.
        self._scaling.forget_scaled()
        if not boundary:
            return
        self.global_steps += 1
        finite, scale = self.run.engine.gradients.are_finite(), self.cur_scale
        self._scaling.step(finite)
        if self._scaling.skips:
            self.optimizer.overflow = not finite
            if not finite:
                why = f"gradients overflow at a loss scale of {scale:g}" if self._scaling.scales else "gradients are not finite"
                say(f"step {self.global_steps}: {why}: the step is skipped")
                self._losses.clear()
                self.optimizer.zero_grad()
                return
            self.run.commits.reports.loss_scale = scale if self._scaling.scales else None
        # The losses of a script's own `loss.backward()` are not known.
        self.run.commits.reports.loss = math.fsum(map(float, self._losses)) if self._losses else math.nan
        self._losses.clear()
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
        self._applied = True
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        if self.drops_gradients:
            self.optimizer.zero_grad()

    def _refuse_step(self, *_: Any) -> None:
        # After the run the optimizer is the script's again, or another engine's.
        if not (self._stepping or self.run.closed):
            raise NotSupported(
                "optimizer.step() of an engine that skips steps whose gradients are not finite: call engine.step(), which also divides them by the loss scale"
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the weights."""
        if self._at_boundary is not None:
            return self._at_boundary
        return (self.micro_steps + 1) % self._accumulated == 0

    @property
    def accumulates(self) -> bool:
        """Whether gradients of a loss have come since the last step."""
        return bool(self._losses)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether the next steps update the weights, instead of counting micro-batches."""
        self._at_boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches within are accumulated; one process has nothing to synchronize."""
        yield

    def allreduce_gradients(self, bucket_size: Optional[int] = None) -> None:
        """Does nothing: ranks add gradients up as they come."""

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated the weights."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that have come."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    # The model

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's state in memory, or what is trained of it."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **how: Any) -> None:
        if how:
            raise NotSupported(f"load_module_state_dict: {', '.join(how)}: leave it out")
        self.module.load_state_dict(state_dict, strict=strict)

    def compile(self, backend: Any = "inductor", compile_kwargs: Optional[dict[str, Any]] = None, **others: Any) -> None:
        """Compiles the model in place, as `torch.compile` does."""
        if others:
            raise NotSupported(f"compile: {', '.join(others)}: DeepSpeed's own passes over the graph are not supported; leave them out")
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    # Figures

    def get_global_grad_norm(self) -> Optional[float]:
        """Norm of the last step's gradients before clipping; None before the first step."""
        return None if self.run is None else self.run.grad_norm

    def _of_groups(self, name: str) -> list[Any]:
        """A setting of each of the optimizer's groups; 0 where one has none, as Muon's have no betas."""
        return [] if self.optimizer is None else [group.get(name, 0.0) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """The betas of each group."""
        return self._of_groups("betas")

    def get_batch_info(self) -> tuple[int, int, int]:
        """train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps."""
        return self.train_batch_size(), self._micro_batch, self._accumulated

    def train_batch_size(self) -> int:
        return self._micro_batch * self._accumulated * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self._accumulated

    def gradient_clipping(self) -> float:
        return self._settings.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return 3

    def zero_optimization(self) -> bool:
        return True

    def fp16_enabled(self) -> bool:
        return self._settings.precision == "float16"

    def bfloat16_enabled(self) -> bool:
        return self._settings.precision == "bfloat16"

    def optimizer_name(self) -> Optional[str]:
        """DeepSpeed's name of the optimizer in the configuration; None where the script made it."""
        return optimizer_name(self._settings)

    def optimizer_params(self) -> Optional[dict[str, Any]]:
        """What the configuration says of the optimizer; None where the script made it."""
        return (self.config.get("optimizer") or {}).get("params")

    def scheduler_params(self) -> Optional[dict[str, Any]]:
        return (self.config.get("scheduler") or {}).get("params")

    def loss_scale(self) -> float:
        """The configured loss scale of fp16, 0 for one that adapts; `cur_scale` is that of the next loss."""
        return (self.config.get("fp16") or {}).get("loss_scale", 0)

    def dynamic_loss_scale(self) -> bool:
        return self.loss_scale() == 0

    def scheduler_name(self) -> Optional[str]:
        """The name of the schedule in the configuration; None where there is none."""
        return self._settings.scheduler and self._settings.scheduler["type"]

    def steps_per_print(self) -> Optional[int]:
        return self._settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self._settings.wall_clock_breakdown

    @property
    def cur_scale(self) -> float:
        """What the next loss is multiplied with."""
        return self._scaling.scale

    @property
    def skipped_steps(self) -> int:
        return self._scaling.skipped

    @property
    def global_samples(self) -> int:
        return self.global_steps * self.train_batch_size()

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def global_rank(self) -> int:
        return torch.distributed.get_rank() if processes() > 1 else 0

    @property
    def local_rank(self) -> int:
        topology = self.run.ranks.topology
        return topology.rank - topology.local.start

    @property
    def world_size(self) -> int:
        return processes()

    @property
    def dp_world_size(self) -> int:
        """Ranks with other samples."""
        return self.world_size // self.sequence_parallel_size

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks with parts of one sequence."""
        return self._settings.sequence_parallel_size

    # Where state is

    def offload_states(self, include: Any = None, device: Any = None, pin_memory: bool = True, non_blocking: bool = False) -> None:
        """Does nothing where the state is in host memory or on drives anyway."""
        if self._settings.parameters_stay:
            raise NotSupported(
                "offload_states: the model stays where it computes: set zero_optimization.offload_param.device, and the state is in host memory or on "
                "drives all the time"
            )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Does nothing: state comes when it is needed."""

    def empty_partition_cache(self) -> None:
        """Does nothing: what is not needed is released."""

    # Data

    def deepspeed_io(
        self,
        dataset: torch.utils.data.Dataset,
        batch_size: Optional[int] = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Optional[torch.utils.data.Sampler] = None,
        collate_fn: Optional[Callable] = None,
        num_local_io_workers: Optional[int] = None,
    ) -> Union["Batches", torch.utils.data.DataLoader]:
        """A loader of micro-batches of each rank's part of the data. For training they are in random order, the same as DeepSpeed's, and a resumed run
        continues in it; for another `route` they are in the order of the data."""
        trains, own = route == "train", None
        if data_sampler is None and not isinstance(dataset, torch.utils.data.IterableDataset):
            own = torch.utils.data.DistributedSampler(dataset, num_replicas=self.world_size, rank=self.global_rank, shuffle=trains)
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=batch_size or self._micro_batch,
            sampler=own if data_sampler is None else data_sampler,
            collate_fn=collate_fn,
            drop_last=self._settings.dataloader_drop_last,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and torch.cuda.is_available(),
        )
        return Batches(self.run, loader, own) if trains and self.optimizer is not None else loader

    # State

    def state_dict(self, *args: Any, **how: Any) -> dict[str, Any]:
        """The model's state in memory."""
        how = {**dict(zip(("destination", "prefix", "keep_vars"), args)), **how}
        return self.module.state_dict(**{**how, "prefix": f"{how.get('prefix', '')}module."})

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the model's weights."""
        return self.module.load_state_dict({name.removeprefix("module."): value for name, value in state_dict.items()}, strict=strict, assign=assign)

    def save_checkpoint(
        self,
        save_dir: Union[str, os.PathLike],
        tag: Optional[str] = None,
        client_state: Optional[dict[str, Any]] = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Copies trained parameters, optimizer state, scheduler and counters into `save_dir/tag`, with `client_state`. Frozen
        parameters are never in a checkpoint."""
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        save_checkpoint(self.run.commits, Path(save_dir), tag, client_state or {}, save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: Union[str, os.PathLike],
        tag: Optional[str] = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Optional[Callable] = None,
    ) -> tuple[Optional[str], Optional[dict[str, Any]]]:
        """Goes back to a checkpoint of `save_checkpoint`. Returns (path, client_state), or (None, None) where there is none."""
        partial = load_module_only or not (load_optimizer_states and load_lr_scheduler_states)
        if partial or custom_load_fn is not None:
            raise NotSupported(
                "load_checkpoint: a checkpoint is loaded whole: leave out load_module_only, load_optimizer_states, load_lr_scheduler_states and custom_load_fn"
            )
        return load_checkpoint(self.run.commits, Path(load_dir), None if tag is None else str(tag))

    def save_16bit_model(
        self,
        save_dir: Union[str, os.PathLike],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the model's weights in their type, for plain PyTorch or transformers; `.safetensors` by the name."""
        write = lambda: self._save_16bit_model(Path(save_dir), save_filename, exclude_frozen_parameters)
        if self.run is not None:
            self.run.on_first(write)
        elif self.global_rank == 0:
            write()
        return True

    def _save_16bit_model(self, directory: Path, save_filename: str, exclude_frozen_parameters: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path, safe = directory / save_filename, save_filename.endswith(".safetensors")
        if safe and not exclude_frozen_parameters and self.run is not None:
            self.run.save_weights(path)
            return
        if exclude_frozen_parameters:
            state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        else:
            state = {name: value.clone() if hasattr(value, "clone") else value for name, value in self.module.state_dict().items()}
        if safe:
            from safetensors.torch import save_file

            save_file(state, str(path), metadata={"format": "pt"})
        else:
            torch.save(state, path)

    save_fp16_model = save_16bit_model

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether the model's weights can be saved: always, whatever the configuration says."""
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's state in memory, or what is trained of it."""
        return trained_state(self.module, self.run.engine.gathering) if exclude_frozen_parameters else self.module.state_dict()

    def destroy(self) -> None:
        """Ends the run in order."""
        self.run.close()


def _end_reading(model: nn.Module) -> None:
    """Ends the run of a model that nothing trained so far."""
    run = getattr(model, "_offloadd_run", None)
    if run is not None and not run.trains:
        run.close(keep=True)


class ReadingEngine(TrainingEngine):
    """The result where no optimizer is passed, as for the reference model of a preference loss: the model, in tiles or in memory."""

    def __init__(self, model: nn.Module, settings: Settings, run_dir: Optional[Union[str, os.PathLike]], resume: bool) -> None:
        nn.Module.__init__(self)
        self.config, self.module, self._settings = settings.json, model, settings
        # One that is trained, or read already, stays as it is.
        self._owns, self._sequences = False, None
        if not settings.parameters_stay and getattr(model, "_offloadd_run", None) is None:
            if settings.precision is not None:
                cast(model, getattr(torch, settings.precision))
            directory = run_dir or unused_dir(beside(settings.run_dir or settings.default_dir))
            self._owns = True
            remember(prepare(model, None, settings, run_dir=directory, resume=resume))
        elif settings.parameters_stay:
            if settings.precision is not None:
                cast(model, getattr(torch, settings.precision))
            if settings.sequence_parallel_size > 1 and getattr(model, "_offloadd_run", None) is None:
                self._sequences = attach(model, settings.sequence_parallel_size)
        self.tput_timer = _Timer()
        self.optimizer = self.lr_scheduler = self.training_dataloader = None
        self._micro_batch, self._accumulated = settings.micro_batch or 1, 1
        self._scaling = LossScaling(1, "stops", scales=False)
        self.global_steps = self.micro_steps = 0
        self._at_boundary, self._applied = None, False

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        raise Error('backward: this engine was initialized without an optimizer: pass one, or name it in the configuration ("optimizer": {"type": "AdamW"})')

    def step(self, lr_kwargs: Any = None) -> None:
        raise Error('step: this engine was initialized without an optimizer: pass one, or name it in the configuration ("optimizer": {"type": "AdamW"})')

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none=set_to_none)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        return self.module.state_dict()

    @property
    def run(self) -> Optional[Run]:
        """The run that has the model; None where it is in memory."""
        return getattr(self.module, "_offloadd_run", None)

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    def destroy(self) -> None:
        """Ends the run that this engine began, unless the model is trained since."""
        if self._sequences is not None:
            self._sequences.detach()
        if self._owns and self.run is not None and not self.run.trains:
            self.run.close()


class _Counters:
    """What of an engine is committed with each step."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        engine = self._engine
        return {"global_steps": engine.global_steps, "micro_steps": engine.micro_steps, "loss_scale": engine._scaling.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        engine = self._engine
        engine.global_steps, engine.micro_steps = state["global_steps"], state["micro_steps"]
        engine._scaling.load_state_dict(state["loss_scale"])


class _WithoutParameters(nn.Module):
    """What scripts find where DeepSpeed has the model: no parameter has DeepSpeed's attributes."""

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())


class _Timer:
    """The timer of DeepSpeed's engines that scripts tell of epochs. The times of steps are in metrics.jsonl."""

    def update_epoch_count(self) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        pass


class _ParameterOffload:
    """The part of DeepSpeed's optimizers whose hooks scripts take away while they generate. Hooks stay here: they bring weights."""

    def __init__(self) -> None:
        self.module = _WithoutParameters()
        self.forward_hooks: list = []
        self.backward_hooks: list = []

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        pass

    _register_hooks_recursively = setup_zero_stage3_hooks = _register_deepspeed_module


class Batches:
    """A loader whose position is committed with each step. The order of `sampler` is another one in each epoch; a script's own sampler stays as it is."""

    def __init__(self, run: Run, loader: torch.utils.data.DataLoader, sampler: Optional[torch.utils.data.DistributedSampler]) -> None:
        self._run, self.loader, self._sampler = run, loader, sampler

    def __iter__(self) -> Iterator:
        if self._sampler is not None:
            self._sampler.set_epoch(self._run.epoch)
        return self._run.batches(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

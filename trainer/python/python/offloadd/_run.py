"""A run: a model and an optimizer whose state the engine keeps, step after step.

    prepare    plans the run and opens it                      _plan, _opening
    Engine     moves units around forward and backward         _engine: _forwards, _gathering, _reading, _gradients
    Steps      what optimizer.step() does                      _steps, for the object of _prepared_optimizer
    Commits    what is committed with each step                _commits
    Rewriting  other weights and moments                       _rewriting, _moments
    Ranks      what several processes agree on                 _ranks: _meetings (who waits for whom), _transfers

Each calls those below it in tests/test_architecture.py, and nothing there calls the run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from pathlib import Path
from typing import Any, Callable, ContextManager, Iterable, Iterator, Mapping, Optional, Sequence, Union

import torch
from torch import nn

from . import _opening
from ._checkpoint import load_checkpoint, save_checkpoint
from ._commits import Commits
from ._config import Config, Settings, settings_of
from ._console import bytes_text, say
from ._engine import Engine
from ._errors import Error, LayoutChanged, NotSupported
from ._experts import Experts
from ._fp8 import Fp8Layers
from ._generation import Meter
from ._gpu_plan import warning_at_start
from ._held import HeldMemory
from ._layout import Layout
from ._loss_chunks import LossChunks
from ._memory import GpuDevice, gpu_of
from ._mlp_chunks import MlpChunks
from ._model_methods import ModelMethods
from ._moments import Moments
from ._muon import check_matrices, ids_of
from ._plan import Plan
from ._prepared_optimizer import OfRun, take_over
from ._ranks import Ranks
from ._reports import Reports
from ._returning import has_room, return_values
from ._rewriting import Rewriting
from ._run_dir import check_name, claim, disclaim, is_untrained, remove_weights
from ._sequence_attention import SequenceAttachment, attach
from ._steps import Steps
from ._supported_optimizers import check_optimizer, with_optimizer
from ._units import Unit, alignment_of, units_of
from ._untrained import NoOptimizer, WeightsDiffer, beside, check_moves
from ._weights import Weights, each_weight, write_weights
from ._whole import Whole
from ._wrappers import bare_model, bare_optimizer, is_prepared, protect, remember, renew, unprotect, watch


def prepare(
    model: nn.Module,
    optimizer: Optional[torch.optim.Optimizer],
    config: Config,
    *,
    run_dir: Optional[Union[str, os.PathLike]] = None,
    track: Sequence[Any] = (),
    units: Optional[Sequence] = None,
    weights: Optional[Union[str, os.PathLike]] = None,
    plan_only: bool = False,
    resume: bool = True,
) -> Any:
    """Takes over the parameters of `model` and the update of `optimizer` (Adam, AdamW, Lion or Muon), and changes both in place. Without an optimizer
    (None) nothing is trained, whatever requires gradients: tiles have the parameters alone and are written once.

    `config` is a file or dict with DeepSpeed's keys, ours under "offloadd". `run_dir` names the run: the same directory
    resumes it after its last committed step. Left out, it is the key offloadd.run_dir, or a directory named after the
    configuration beside it. `track` has objects with `state_dict` and `load_state_dict`, such as schedulers, which are
    committed with each step. `units` names classes or patterns of modules whose parameters move together. `weights` names a
    safetensors file, or a directory of them, with the values of parameters that were built in `offloadd.init()`. Without
    `resume` the run begins with the model's weights, which replace what an earlier run of the same model left in `run_dir`.

    Returns a `Run`; with `plan_only` the `Plan` of one, which `print` shows, and changes nothing. A later start of a model that is not
    trained finds its weights in `run_dir` and compares them with the model's; other weights are refused, and without `resume` they
    replace those.

    Raises `Error` for settings that cannot work, `NotSupported` for what this library does not do, `NoSpace` for drives
    that are too small, `LayoutChanged` for a run that was begun with other parameters. Nothing is changed then.
    """
    watch()
    model, optimizer_of_script, optimizer = bare_model(model), optimizer, bare_optimizer(optimizer)
    if getattr(model, "_offloadd_run", None) is not None:
        raise Error("this model is prepared already: call close() of its run first")
    if is_prepared(model.parameters()):
        raise Error("a parameter of the model belongs to a model that is prepared already: call close() of that run first")
    settings, trains = settings_of(config, schedules=False), optimizer is not None
    if not trains:
        check_moves(settings)
        run_dir, optimizer = run_dir or beside(settings.run_dir or settings.default_dir), NoOptimizer()
    settings = with_optimizer(settings, optimizer)
    if settings.rule == "Muon":
        check_matrices(model.named_parameters(), ids_of(optimizer))
    directory = Path(run_dir or settings.run_dir or settings.default_dir).absolute()
    check_name(directory)
    on_meta = any(param.is_meta for param in model.parameters())
    frozen = not settings.parameters_stay or on_meta
    wanted, ranks, sequences = units or settings.units or None, Ranks(), None
    chunks: list[Union[MlpChunks, LossChunks]] = []
    experts = Experts(model, wanted, None if settings.parameters_stay else settings.unit_bytes_max, with_block=ranks.count > 1)
    try:
        experts.cut_optimizer(optimizer)
        muon = ids_of(optimizer) if settings.rule == "Muon" else set()
        found, modules = units_of(model, wanted, frozen, settings.fp32_gradients, trains, experts.apart, alignment_of(settings.moments), muon)
        if plan_only:
            check_optimizer(optimizer)
            return Plan(settings, directory, found, ranks.topology)
        held = HeldMemory(model, found, experts.wholes)
        if weights is not None and not on_meta:
            raise Error("weights= fills models that are built in offloadd.init(); load the weights of this one before offloadd.prepare")
        sequences = attach(model, settings.sequence_parallel_size) if settings.sequence_parallel_size > 1 else None
        if settings.mlp_chunks > 1:
            chunks.append(MlpChunks(model, settings.mlp_chunks))
        if settings.loss_chunks > 1:
            chunks.append(LossChunks(model, settings.loss_chunks))
        run = _opened(model, optimizer, settings, directory, wanted, found, modules, experts, list(track), weights, ranks, resume)
        run.take_sequences(sequences)
        run.take_chunks(chunks)
        run.take_held(held)
    finally:
        if getattr(model, "_offloadd_run", None) is None:
            experts.undo(optimizer)
            if sequences is not None:
                sequences.detach()
            for one in chunks:
                one.end()
    renew(optimizer_of_script)
    _opening.trim_heap()
    return run


def _opened(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    directory: Path,
    wanted: Optional[Sequence],
    found: list[Unit],
    modules: dict[int, nn.Module],
    experts: Experts,
    track: list,
    weights: Optional[Union[str, os.PathLike]],
    ranks: Ranks,
    resume: bool,
) -> "Run":
    """Opens a run in `directory`."""
    trains = not isinstance(optimizer, NoOptimizer)
    gpu = gpu_of(settings, (param for unit in found for param in unit.params))
    ranks.open(sum(len(unit.params) for unit in found))
    try:
        plan = ranks.on_all_ranks("plan the run", lambda: Plan(settings, directory, found, ranks.topology, gpu))
        fp8 = ranks.on_all_ranks("look for layers in 8 bits", lambda: _fp8_layers(model, settings, wanted, gpu))
        claim(plan.run_dir, type(model).__name__)
        given = None if weights is None else Weights(weights)
        begin = lambda: Run(model, optimizer, plan, found, modules, experts, track, given, ranks, resume, fp8)
        try:
            try:
                return begin()
            except (LayoutChanged, WeightsDiffer):
                if trains or resume or not is_untrained(plan.run_dir):
                    raise
                # Only a copy of the weights of another model.
                ranks.on_all_ranks("remove other weights", lambda: remove_weights(plan.run_dir) if ranks.first_of_node else None)
                return begin()
        except BaseException:
            disclaim(plan.run_dir)
            raise
    except BaseException as error:
        ranks.meetings.end(f"{type(error).__name__}: {error}")
        ranks.meetings.close()
        raise


def _fp8_layers(model: nn.Module, settings: Settings, wanted: Optional[Sequence], gpu: Optional[GpuDevice]) -> Optional[Fp8Layers]:
    if settings.matmuls != "fp8":
        return None
    return Fp8Layers(model, torch.device("cpu") if gpu is None else gpu.device, wanted)


class Run:
    """The result of `prepare`. `close` ends it in order, as does the interpreter's exit."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        found: list[Unit],
        modules: dict[int, nn.Module],
        experts: Experts,
        track: list,
        weights: Optional[Weights],
        ranks: Ranks,
        resume: bool,
        fp8: Optional[Fp8Layers] = None,
    ) -> None:
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.plan, self.settings, self.run_dir = plan, plan.settings, plan.run_dir
        # Whether the run has an optimizer.
        self.trains = not isinstance(optimizer, NoOptimizer)
        # Until it is whole.
        self.closed = True
        self._sequences: Optional[SequenceAttachment] = None
        self._chunks: Sequence[Union[MlpChunks, LossChunks]] = ()
        self._process = os.getpid()
        _opening.check_given(model, optimizer, track, found, self.settings)
        _opening.check_drives(plan, ranks)
        if plan.gpu is not None and (warning := warning_at_start(model, found, modules, self.settings, plan.gpu)):
            say(f"warning: {warning}", None if ranks.count == 1 else ranks.rank)
        state_dir = self.run_dir if ranks.first_of_node else self.run_dir / f"rank-{ranks.rank}"
        self._lock = _opening.take_dir(self.run_dir, state_dir)
        layout = Layout(model, found)
        layout.check_dir(self.run_dir, self.settings, resume)
        self.core, committed = _opening.open_tiles(plan, layout, ranks, state_dir, resume)
        ranks.divide(found, plan.figures["shard_elems"])
        _opening.agree_on_copies(plan, ranks)
        for unit in found:
            if unit.built_on_meta:
                unit.flatten_meta()
        self.engine = Engine(model, found, modules, self.core, keep=self.settings.parameters_stay, ranks=ranks, experts=experts)
        reports = Reports(self.settings, self.run_dir, ranks, self.core, optimizer)
        self.commits = Commits(self.settings, state_dir, layout, reports, ranks, self.core, self.engine, optimizer, track)
        self.engine.before_pass = self.commits.before_pass
        begins = committed is None or self.trains and not resume
        self._open_content(weights, committed, begins)
        if plan.gpu is not None:
            _opening.move_to_gpu(self.engine, plan.gpu)
        _opening.keep_units(self.engine, self.settings, plan.gpu, self.run_dir)
        _opening.move_activations(self.engine, self.settings.activations, plan.gpu)
        if self.engine.gathering.keep:
            self.engine.gathering.refresh()
            for unit in self.engine.gathering.units:
                unit.own_storages()
                # Units that a new run has had from the script did not come.
                unit.watch.begin()
        self._connect(begins)
        reports.open(self.steps_done)
        self._say_how(committed, begins)
        self._protected = [model, *{modules[unit.index]: None for unit in found}]
        self._fp8 = fp8
        self._register()
        if fp8 is not None:
            fp8.begin()

    def _open_content(self, weights: Optional[Weights], committed: Optional[dict[str, Any]], begins: bool) -> None:
        """Gives the tiles their first content where the run begins, and otherwise continues after the step that was `committed`."""
        if committed is not None:
            try:
                if begins or not self.trains:
                    _opening.check_frozen(self.commits, self.run_dir, weights)
                else:
                    _opening.check_continues(self.commits, committed, self.run_dir)
            except BaseException:
                self.engine.detach()
                self.core.close()
                raise
        if not begins:
            _opening.adopt(self.commits, committed)
            return
        _opening.fill(self.commits, weights, replace=committed is not None)
        if self.ranks.first_of_node:
            self.commits.layout.write(self.run_dir)

    def _connect(self, begins: bool) -> None:
        """Lets the script's objects work on the tiles."""
        self.rewriting = Rewriting(self.commits, self.model.load_state_dict)
        self.moments = Moments(self.commits, self.rewriting)
        # Of steps that the script has made before.
        states = {id(param): of_param for param, of_param in self.optimizer.state.items() if of_param}
        take_over(self.optimizer, OfRun(Steps(self.commits), self.moments, self.rewriting))
        self._methods = ModelMethods(self.engine, self.rewriting)
        self.whole = Whole(self.engine, self.plan)
        if not self.trains:
            # Its methods are given back with the others.
            self.generation = Meter(self.engine, self.plan)
        if states and begins:
            self.moments.load(states)

    def _say_how(self, committed: Optional[dict[str, Any]], begins: bool) -> None:
        how = f"resumes after step {self.steps_done}" if self.steps_done else "begins"
        if not self.trains:
            how = "trains nothing and " + ("writes the weights" if begins else "has the weights that an earlier start wrote")
        if committed is not None and begins:
            how += f" anew and replaces an earlier run of {committed['steps_done']} steps"
        say(f"{self.run_dir}: the run {how}; {self.describe()}")

    def _register(self) -> None:
        """Lets others find the run, and ends it with the interpreter."""
        self.model._offloadd_run = self
        protect(self._protected)
        remember(self)
        # Weak: a run whose model was dropped ends.
        at_exit = weakref.WeakMethod(self._close_at_exit)
        self._at_exit = lambda: (at_exit() or bool)()
        atexit.register(self._at_exit)
        self.closed = False

    def take_sequences(self, sequences: Optional[SequenceAttachment]) -> None:
        """Lets another rank's end be named in what the ranks of a sequence exchange, until the run ends."""
        self._sequences = sequences
        if sequences is not None:
            sequences.group.blamed = self.ranks.transfers.failures_blamed

    def take_chunks(self, chunks: Sequence[Union[MlpChunks, LossChunks]]) -> None:
        """Lets MLPs and losses be computed whole again when the run ends."""
        self._chunks = chunks

    def take_held(self, held: HeldMemory) -> None:
        """Lets what the script holds of the memory that parameters had before say what became of them."""
        held.begin(resumed=self.trains and self.steps_done > 0)
        self.engine.reading.held = held

    # Training

    @property
    def steps_done(self) -> int:
        """Steps that the run has made."""
        return self.commits.steps_done

    @property
    def epoch(self) -> int:
        """Times that `batches` was called."""
        return self.commits.epoch

    @property
    def grad_norm(self) -> Optional[float]:
        """The norm of the last step's gradients, before clipping."""
        return self.commits.reports.grad_norm

    def batches(self, loader: Iterable) -> Iterator:
        """Yields from `loader` and remembers how far it is: in a resumed run it continues with the next batch that no committed
        step has seen, with the random numbers it had. Call it once an epoch, or over one endless iterable."""
        return self.commits.batches(loader)

    def drain(self) -> None:
        """Applies pending updates and commits the last step."""
        self.commits.drain()

    def describe(self) -> str:
        """The place of the state, for people."""
        units = self.engine.gathering.units
        params = sum(unit.numel for unit in units)
        where = {"none": "in memory, nothing is released", "cpu": "in host memory", "nvme": f"on drives ({self.core.engine})"}[self.settings.device]
        where += ", parameters stay with the model" * (self.settings.parameters_stay and self.settings.device != "none")
        where += f", weights of {bytes_text(self.resident_bytes)} stay on the GPU" * (self.resident_bytes > 0)
        return (
            f"{params:,} parameters in {len(units)} units, state {where}: "
            f"{bytes_text(self.core.host_bytes)} of host memory, {bytes_text(self.core.device_bytes)} of tiles"
        )

    # Memory

    def gathered(self, headroom_bytes: Optional[int] = None) -> ContextManager[bool]:
        """Brings all weights to where the model computes, and releases them at its end: passes within, such as those of `model.generate`, bring
        none, and each rank may make as many as it likes. Weights are to be read, as elsewhere: one that was changed is an error at the end.

        Where they do not fit beside `headroom_bytes` for a KV cache and activations (a fifth of the free memory, unless given), passes bring the
        weights as they always do, and a line says once what that costs. The value tells which: whether all weights are in memory. All ranks must
        call it."""
        return self.whole.gathered(headroom_bytes)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that stay on the GPU between their uses."""
        return self.engine.resident_bytes

    def release(self) -> None:
        """Frees memory between passes: units that are here, buffers that gradients leave from, and what PyTorch holds of the GPU's. The next pass
        makes them again. All ranks must call it."""
        self.engine.release()

    # Weights and checkpoints

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name and a copy of each tensor of the model's state, with one unit in memory at a time: for another program, such as a
        sampler. A tensor with several names comes once, under the first. All ranks must read all of it."""
        return each_weight(self.engine.gathering)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Gives the model other weights, a unit at a time, and commits them. The optimizer's moments stay. `model.load_state_dict`
        is the same, but refuses in a run that was resumed and has made no step since."""
        return self.rewriting.load_state_dict(state_dict, strict)

    def save_weights(self, path: Union[str, os.PathLike]) -> None:
        """Writes the model's state to one file in safetensors' format, under the names of its state_dict, with the weights of
        one block in memory at a time. Of several names of one parameter the first is written."""
        self.on_first(lambda: write_weights(self.engine.gathering, path))

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Does `work`, which may read any parameter, on the first rank, and returns what it returned there. All ranks must call it."""
        return self.engine.gathering.on_first(work)

    def save_checkpoint(self, save_dir: Union[str, os.PathLike], tag: Optional[str] = None, client_state: Optional[dict[str, Any]] = None) -> None:
        """Copies trained parameters, optimizer state and all that is committed with them into `save_dir/tag`, with `client_state` (plain data). All
        ranks must call it."""
        self._check_trains("save_checkpoint")
        save_checkpoint(self.commits, Path(save_dir), tag or f"step{self.steps_done}", client_state or {}, save_latest=True)

    def load_checkpoint(self, load_dir: Union[str, os.PathLike], tag: Optional[str] = None) -> Optional[dict[str, Any]]:
        """Goes back to a checkpoint of `save_checkpoint`, the newest one without `tag`. Returns its `client_state`, or None where there is none."""
        self._check_trains("load_checkpoint")
        return load_checkpoint(self.commits, Path(load_dir), tag)[1]

    def _check_trains(self, call: str) -> None:
        if not self.trains:
            raise Error(f"{call}: this run trains nothing, so there is no step to keep: write its weights with model.save_pretrained or run.save_weights")

    # The end

    def close(self, keep: Optional[bool] = None) -> None:
        """Commits the last step and ends the run in order. The model and the optimizer are plain ones again, with their values, if `keep`, or if
        the host's memory has room for them; otherwise parameters have no values any more. A second call does nothing.

        A weight that a script has written after the last step is not in that commit. The run ends with what is committed, and raises `NotSupported`."""
        refused = self._close(None, keep)
        if refused is not None:
            raise refused

    def _close_at_exit(self) -> None:
        _say_refused(self._close(getattr(sys, "last_value", None), keep=False))

    def __del__(self) -> None:
        # The script has dropped the model.
        if not self.__dict__.get("closed", True):
            _say_refused(self._close(None, keep=False))

    def _close(self, failed: Optional[BaseException], keep: Optional[bool]) -> Optional[NotSupported]:
        """Ends the run, in which the script has `failed` on this rank unless it is None. Returns the error of a write to a weight that is neither
        committed nor given back, if there was one."""
        if self.closed:
            return None
        self.closed = True
        atexit.unregister(self._at_exit)
        if os.getpid() != self._process:
            return None
        refused = None
        if failed is None:
            for copies in (self.engine.gathering.state_copies, self.optimizer._state_copies):
                copies.warn_of_writes()
        if self.engine.reading.held is not None:
            self.engine.reading.held.end()
        self.model._offloadd_run = None
        unprotect(self._protected)
        self._methods.end()
        if self._fp8 is not None:
            self._fp8.end()
        if self._sequences is not None:
            self._sequences.detach()
            self._sequences.group.blamed = contextlib.nullcontext
        for chunks in self._chunks:
            chunks.end()
        ranks, meetings = self.ranks, self.ranks.meetings
        try:
            if ranks.count > 1 and failed is not None:
                # The others need not wait for what this one does not finish.
                meetings.end(f"{type(failed).__name__}: {failed}")
            if not meetings.broken:
                self.commits.seal()
                ranks.meet("end the run")
                refused = self.engine.gathering.drop_writes()
                self.core.drain()
                if (failed is None or ranks.count == 1) and has_room(self.commits, self.moments, keep):
                    return_values(self.commits, self.moments)
                    self.engine.gathering.experts.end(self.optimizer)
            # The daemon ends with the part of its node's first rank.
            if ranks.first_of_node and not meetings.broken:
                ranks.meet("leave the run")
                meetings.close()
        finally:
            self.engine.gathering.ended = True
            if self.engine.residency is not None:
                # A GPU that has failed keeps no daemon, lock or other rank waiting.
                with contextlib.suppress(Error, RuntimeError):
                    self.engine.residency.close()
            if self.engine.activations is not None:
                self.engine.activations.close()
            with contextlib.suppress(*[Error] * meetings.broken):
                self.core.close()
            if not ranks.first_of_node and not meetings.broken:
                ranks.meet("leave the run")
            meetings.close()
            self._lock.close()
            disclaim(self.run_dir)
        return refused

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        if error is None:
            self.close()
        else:
            _say_refused(self._close(error, None))


def _say_refused(refused: Optional[NotSupported]) -> None:
    """Says what nobody can be told by an error."""
    if refused is not None:
        say(f"warning: {refused}")

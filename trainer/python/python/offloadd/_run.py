"""A run: a model and an optimizer whose state the engine keeps, step after step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import math
import os
import sys
import weakref
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence, Union

import torch
from torch import nn

from . import _offloadd
from ._checkpoint import load_checkpoint, save_checkpoint
from ._console import say
from ._config import Config, settings_of
from ._engine import Engine
from ._errors import Error, LayoutChanged, NotSupported
from ._held import PARTIAL, Held
from ._memory import GpuMemory, gpu_of
from ._plan import Plan, bytes_text, described
from ._prepared_optimizer import MASTER, MOMENTS, ParamStates, States, check_room, checked, give_back, take_over
from ._progress import Progress
from ._ranks import Ranks
from ._run_dir import LAYOUT, InUse, begin_part, check_moments, check_name, check_place, claim, disclaim, lock, writable, write_private
from ._state import from_blob, random_state, same_random, set_random_state, to_blob
from ._supported_optimizers import check_optimizer, check_settings
from ._units import Unit, units_of
from ._weights import Blocks, PartsLoaded, Weights, begin, rewrite, sources_of, stream_save_pretrained, write_safetensors
from ._wrappers import bare_model, bare_optimizer, protect, remember, renew, unprotect, watch


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
    """Takes over the parameters of `model` and the update of `optimizer` (Adam or AdamW), and changes both in place.

    `config` is a file or dict with DeepSpeed's keys, ours under "offloadd". `run_dir` names the run: the same directory
    resumes it after its last committed step. Left out, it is the key offloadd.run_dir, or a directory named after the
    configuration beside it. `track` has objects with `state_dict` and `load_state_dict`, such as schedulers, which are
    committed with each step. `units` names classes or patterns of modules whose parameters move together. `weights` names a
    safetensors file, or a directory of them, with the values of parameters that were built in `offloadd.init()`. Without
    `resume` the run begins with the model's weights, which replace what an earlier run of the same model left in `run_dir`.

    Returns a `Run`; with `plan_only` the `Plan` of one, which `print` shows, and changes nothing.

    Raises `Error` for settings that cannot work, `NotSupported` for what this library does not do, `NoSpace` for drives
    that are too small, `LayoutChanged` for a run that was begun with other parameters. Nothing is changed then.
    """
    watch()
    model, given, optimizer = bare_model(model), optimizer, bare_optimizer(optimizer)
    if getattr(model, "_offloadd_run", None) is not None:
        raise Error("this model is prepared already: call close() of its run first")
    settings = settings_of(config)
    directory = Path(run_dir or settings.run_dir or settings.default_dir).absolute()
    check_name(directory)
    on_meta = any(param.is_meta for param in model.parameters())
    frozen = settings.device != "none" or on_meta
    found, modules = units_of(model, units or settings.units or None, frozen, settings.fp32_gradients)
    ranks = Ranks()
    if plan_only:
        return Plan(settings, directory, found, ranks.places)
    if optimizer is None:
        raise Error("pass the optimizer: offloadd.prepare(model, optimizer, config); without it only plan_only=True works")
    if weights is not None and not on_meta:
        raise Error("weights= fills models that are built in offloadd.init(); load the weights of this one before offloadd.prepare")
    gpu = gpu_of(settings, (param for unit in found for param in unit.params))
    ranks.open(sum(len(unit.params) for unit in found))
    try:
        plan = ranks.together("plan the run", lambda: Plan(settings, directory, found, ranks.places, gpu))
        claim(plan.run_dir, type(model).__name__)
        try:
            run = Run(model, optimizer, plan, found, modules, list(track), Weights(weights) if weights is not None else None, ranks, resume)
        except BaseException:
            disclaim(plan.run_dir)
            raise
    except BaseException as error:
        ranks.meetings.end(f"{type(error).__name__}: {error}")
        ranks.meetings.close()
        raise
    renew(given)
    return run


class Run:
    """The result of `prepare`. `close` ends it in order, as does the interpreter's exit."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        found: list[Unit],
        modules: dict[int, nn.Module],
        track: list,
        weights: Optional[Weights],
        ranks: Ranks,
        resume: bool,
    ) -> None:
        self.ranks = ranks
        check_optimizer(optimizer)
        settings, run_dir = plan.settings, plan.run_dir
        self.settings, self.run_dir = settings, run_dir
        self.model, self.optimizer = model, optimizer
        for one in track:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise Error(f"track has a {type(one).__name__}, which has no state_dict and load_state_dict: leave it out, or add these methods")
        self.track = track
        _check_groups(optimizer, found)
        ranks.together("look for the run's drives", lambda: _offloadd.check_drives([run_dir, *settings.nvme]))
        ranks.together("check the free space", plan.check)
        if settings.without_effect:
            say(f"DeepSpeed's keys without effect here: {', '.join(settings.without_effect)}")
        for line in settings.said:
            say(line)
        for warning in plan.warnings if ranks.first_of_node else ():
            say(f"warning: {warning}", None if ranks.first else ranks.rank)

        self.steps_done = 0
        self._resumed_at = 0
        self._names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(param), []).append(name)
        self._index_of = {id(param): index for index, param in enumerate(param for unit in found for param in unit.params)}
        # Updates so far of the parameter with each index.
        self._updates: dict[int, int] = {}
        self._position = _Position()
        self._resumed: Optional[dict[str, Any]] = None
        self._groups: list[dict[str, Any]] = []
        # The random numbers after the step that was resumed from, and those with which the first pass begins, unless somebody has set them.
        self.resumed_random: Optional[dict[str, Any]] = None
        self._pass_random: Optional[dict[str, Any]] = None
        # The last step's state, and the same until it is committed.
        self._noted: dict[str, Any] = {}
        self._to_seal: Optional[dict[str, Any]] = None
        # The time of the last checkpoint that was saved or loaded.
        self.saved_unix_s = 0
        # Until it is whole.
        self.closed = True
        self._process = os.getpid()
        # Where this rank's state lies if it is large.
        self._state_dir = run_dir if ranks.first_of_node else run_dir / f"rank-{ranks.rank}"
        try:
            with writable():
                self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock = lock(run_dir)
        except InUse:
            raise Error(f"{run_dir} is being deleted: start again when that is done, or name another run_dir") from None
        check_place(run_dir)
        # Names, shapes and kinds of the units' parameters.
        self.layout = [[[self._names[id(param)][0], list(param.shape), _kind_of(unit)] for param in unit.params] for unit in found]
        # Without drives nothing is left of an earlier run that this one begins anew.
        if (run_dir / LAYOUT).exists() and (resume or settings.device == "nvme"):
            self.check_layout(json.loads((run_dir / LAYOUT).read_text()), run_dir)
            if settings.device == "nvme":
                check_moments(run_dir, settings)
        self.core, blob = self._open(plan, resume)
        ranks.divide(found, plan.figures["shard_elems"])
        self._agree_on_copies(plan)
        for unit in found:
            if unit.built_on_meta:
                unit.place_meta()
        self.engine = Engine(model, found, modules, self.core, keep=settings.device == "none", ranks=ranks)
        self.engine.before_pass = self._before_pass
        if blob is not None and not resume:
            try:
                self._check_frozen()
            except Error:
                self.core.close()
                raise
        if blob is None or not resume:
            self._note_step()
            state, self._to_seal = self._to_seal, None
            self._fill(weights, to_blob(state, self._state_dir), replace=blob is not None)
            self.core.begin_step()
            if ranks.first_of_node:
                write_private(run_dir / LAYOUT, json.dumps(self.layout))
        else:
            for unit in found:
                if unit.flat is None:
                    unit.place()
                unit.fresh = False
                if not self.engine.keep:
                    self.engine.take_away(unit)
            self._resume(blob)
            self._resumed_at = self.steps_done
            self.core.begin_step()
        gpu = plan.gpu
        if gpu is not None:
            self.engine.memory = memory = GpuMemory(ranks, found, gpu)
            for unit in found:
                memory.adopt(unit, self.engine.keep)
            _move_rest(model, found, gpu.device)
        if self.engine.keep:
            self.engine.refresh()
        # Of steps that the script has made before.
        states = {id(param): of_param for param, of_param in optimizer.state.items() if of_param}
        take_over(optimizer, self)
        self._patch_model()
        if states and (blob is None or not resume):
            self.load_states(states)
        self._open_reports()
        how = f"resumes after step {self.steps_done}" if self.steps_done else "begins"
        if blob is not None and not resume:
            how += f" anew and replaces an earlier run of {blob['steps_done']} steps"
        say(f"{run_dir}: the run {how}; {self.describe()}")
        model._offloadd_run = self
        self._protected = [model, *{modules[unit.index]: None for unit in found}]
        protect(self._protected)
        remember(self)
        # Weak: a run whose model was dropped ends.
        at_exit = weakref.WeakMethod(self._close_at_exit)
        self._at_exit = lambda: (at_exit() or bool)()
        atexit.register(self._at_exit)
        self.closed = False

    def _open(self, plan: Plan, resume: bool) -> tuple[Any, Optional[dict[str, Any]]]:
        """Opens this rank's tiles, and returns the state of the last committed step: this rank's if as many ranks committed it, else
        that of the first rank of its node, which starts the daemon that the ranks of a node use."""
        ranks, own = self.ranks, self._state_dir
        same, of_node = described(plan.engine_plan)
        ranks.compare(json.dumps([self.layout, same, self.settings.use_node_local_storage]), of_node)
        if ranks.first_of_node:
            ranks.together("look for the run", lambda: begin_part(plan, ranks.places, resume))
        else:
            ranks.meet("look for the run")
        start = lambda: _offloadd.Daemon.start(plan.engine_plan) if ranks.first_of_node else None
        daemon = ranks.together("start the daemon", start)
        socket = ranks.first_of_node_bytes("tell the daemon's socket", os.fsencode(daemon.socket) if daemon is not None else b"")
        exchange = ranks.meetings.link.exchange if ranks.meetings.link is not None else None

        def open_core() -> tuple[Any, Any, Any]:
            try:
                return _offloadd.Core.open(plan.engine_plan, os.fsdecode(socket) if socket else None, daemon, exchange)
            except Error as error:
                if exchange is not None:
                    # The others wait within it for this rank, and not at a meeting.
                    ranks.meetings.end(str(error))
                raise

        core, first_blob, blob = ranks.together("open the run", open_core)
        ranks.meetings.core, core = core, ranks.meetings.watched(core)
        if first_blob is None:
            return core, None
        state = from_blob(first_blob, plan.run_dir)
        if not ranks.first_of_node and state.get("ranks", 1) == ranks.count:
            state = from_blob(blob, own)
        return core, state

    def _agree_on_copies(self, plan: Plan) -> None:
        """Lets the ranks of each node keep a copy of all parameters if all nodes have room for it."""
        ranks = self.ranks
        if plan.why_no_copy is None:
            return
        whys = [why.decode() for why in ranks.meet("agree on copies of the parameters", plan.why_no_copy.encode())]
        why = next(filter(None, whys), "")
        if not why:
            ranks.transfers.copies = {}
        elif set(whys) != {why}:
            why = f"node {ranks.places.node_of(whys.index(why))}: {why}"
        if ranks.first:
            say(f"{self.run_dir}: {plan.network(why)}")

    def _fill(self, weights: Optional[Weights], blob: bytes, replace: bool) -> None:
        """Gives the tiles their first content, a block at a time, and commits it. Where it is to `replace` what an earlier run
        has left, frozen units stay: they are written once."""
        engine, begun = self.engine, set()
        self.ranks.transfers.broadcast("share buffers and parameters outside of units", _rest(self.model, engine.units))
        if replace:
            self.ranks.meet("begin anew")
            self.core.begin_rewrite([unit.index for together in engine.together for unit in together if unit.trained], blob)
        else:
            self.core.begin_fill(blob)
        for together in engine.together:
            with contextlib.ExitStack() as rooms:
                for unit in together:
                    if unit.flat is None:
                        unit.place()
                    else:
                        rooms.enter_context(engine.room(unit))
                        unit.flat.zero_()
                empty = {id(param) for unit in together if unit.built_on_meta for param in unit.params}
                if empty:
                    begin(self.model, empty, begun, weights, self._names)
                for unit in together:
                    self.ranks.transfers.broadcast(f"share {unit.name}", [unit.flat])
                    if unit.trained or not replace:
                        self.core.fill(unit.index, unit.flat.data_ptr())
                    engine.release(unit)
        self.ranks.meet("commit the first content")
        self.core.end_fill()

    def _check_frozen(self) -> None:
        """Refuses frozen parameters whose values are not those that an earlier run has stored."""
        self.core.begin_step()
        for unit in self.engine.units:
            if unit.trained:
                continue
            if not unit.built_on_meta:
                unit.place()
                given = unit.flat.clone()
                unit.fresh = False
                self.engine.take_away(unit)
                with self.engine.gathered(unit):
                    if torch.equal(unit.flat, given):
                        continue
            raise NotSupported(
                f"{self.run_dir} has the frozen parameters of another model ({unit.name or 'outside of blocks'}), and frozen parameters "
                f"are written once: name another run_dir, or delete this one: python -m offloadd delete {self.run_dir}"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Gives the model other weights, a unit at a time, and commits them. The optimizer's moments stay. `model.load_state_dict`
        is the same, but refuses in a run that was resumed and has made no step since."""
        self._check_loadable(anyway=True)
        self._seal()
        sources, answer = sources_of(self.engine, lambda: self._plain_load(state_dict, strict=strict))
        self._replace(sources)
        return answer

    def _check_loadable(self, anyway: bool = False) -> None:
        """Refuses other weights where gradients would be lost and, unless `anyway`, where they would replace what was resumed."""
        if not anyway and self._resumed_at == self.steps_done > 0:
            raise Error(
                f"this run was resumed after step {self.steps_done}, and load_state_dict would replace what was trained: load weights "
                "before offloadd.prepare, where a resumed run replaces them by its own; or load them only if run.steps_done == 0; or "
                "call run.load_state_dict to replace them all the same"
            )
        self.engine.check_between_steps("load_state_dict")

    def _replace(self, sources: Mapping[int, torch.Tensor]) -> None:
        self._seal()
        names = {key: of_one[0] for key, of_one in self._names.items()}
        rewrite(self, sources, names)

    @contextlib.contextmanager
    def rewriting(self, units: Sequence[Unit]) -> Iterator[None]:
        """Lets the caller write the tiles of trained `units` anew meanwhile, each once and in this order, and commits all of them at
        once."""
        self.engine.check_between_steps("other weights or another state of them")
        self._seal()
        self._note_step()
        state, self._to_seal = self._to_seal, None
        self.ranks.meet("load weights")
        self.core.begin_rewrite([unit.index for unit in units], to_blob(self._complete(state), self._state_dir))
        self.engine.order.forget_rest()
        yield
        self.ranks.meet("commit loaded weights")
        self.core.end_fill()
        self.core.begin_step()
        self.engine.updated()

    def allow_load_state_dict(self) -> None:
        """Lets `model.load_state_dict` replace what a resumed run has trained."""
        self._resumed_at = 0

    def keep_changes(self, units: Sequence[Unit]) -> None:
        """Commits the values that a script has given to parameters of `units`, which are in memory."""
        sources: dict[int, torch.Tensor] = {}
        for unit in units:
            given = unit.flat.clone()
            self.ranks.transfers.broadcast(f"share what was given to {unit.name}", [given])
            self.engine.take_away(unit)
            self.engine.gather(unit, record=False)
            for param, offset in zip(unit.params, unit.offsets):
                value = Unit.view_of(given, param, offset)
                if not torch.equal(param.detach(), value):
                    sources[id(param)] = value
        if sources:
            self.engine.check_between_steps("changing parameters")
            self._replace(sources)

    def save_weights(self, path: Union[str, os.PathLike]) -> None:
        """Writes the model's state to one file in safetensors' format, under the names of its state_dict, with the weights of
        one block in memory at a time. Of several names of one parameter the first is written."""
        blocks = Blocks(self.engine, self.model.state_dict(keep_vars=True))
        shapes, seen = {}, set()
        for name, shape in blocks.shapes().items():
            if id(blocks.tensors[name]) not in seen:
                seen.add(id(blocks.tensors[name]))
                shapes[name] = shape
        self.on_first(lambda: write_safetensors(path, shapes, {"format": "pt"}, blocks, lambda state: state))

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Does `work`, which may read any parameter, on the first rank, and returns what it returned there. All ranks must call it."""
        if not self.ranks.first:
            return self.engine.follow()
        if self.ranks.count == 1 or self.engine.leads:
            return work()
        with self.engine.leading():
            return work()

    def batches(self, loader: Iterable) -> Iterator:
        """Yields from `loader` and remembers how far it is: in a resumed run it continues with the next batch that no committed
        step has seen, with the random numbers it had. Call it once an epoch, or over one endless iterable."""
        position = self._position
        position.epoch += 1
        resumed = self._resumed
        if resumed is not None and position.epoch < resumed["epoch"]:
            return
        skip, size = 0, getattr(loader, "batch_size", None) or 1
        if resumed is not None:
            # Another number of ranks, or batches of another size, read other parts of the data: as many samples are skipped.
            self._pass_random = None
            seen = resumed["batches"] * resumed["ranks"] * (resumed["batch_size"] or size)
            skip, self._resumed = seen // (self.ranks.count * size), None
            if resumed["epoch_random"] is not None:
                set_random_state(resumed["epoch_random"])
        position.random, position.batch_size = random_state(), size
        iterator = iter(loader)
        for position.batches in range(1, skip + 1):
            next(iterator, None)
        if skip:
            set_random_state(resumed["random"])
        position.batches = skip
        for batch in iterator:
            position.batches += 1
            yield batch
            if self._to_seal is not None:
                # Before the script draws its next batch and changes what goes with it.
                self._to_seal = self._complete(self._to_seal)
        position.batches, position.random = 0, None

    @property
    def epoch(self) -> int:
        """Times that `batches` was called."""
        return self._position.epoch

    def drain(self) -> None:
        """Applies pending updates and commits the last step."""
        self._seal()
        self.ranks.meet("commit what is done")
        self.core.drain()
        self.engine.order.forget_rest()

    def close(self, keep: Optional[bool] = None) -> None:
        """Commits the last step and ends the run in order. The model and the optimizer are plain ones again, with their values, if `keep`, or if
        the host's memory has room for them; otherwise parameters have no values any more. A second call does nothing."""
        self._close(None, keep)

    def _close_at_exit(self) -> None:
        self._close(getattr(sys, "last_value", None), keep=False)

    def __del__(self) -> None:
        # The script has dropped the model.
        if not self.__dict__.get("closed", True):
            self._close(None, keep=False)

    def _close(self, failed: Optional[BaseException], keep: Optional[bool]) -> None:
        """Ends the run, in which the script has `failed` on this rank unless it is None."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self._at_exit)
        if os.getpid() != self._process:
            return
        self.model._offloadd_run = None
        unprotect(self._protected)
        self._parts_loaded.end()
        for name in ("zero_grad", "state_dict", "load_state_dict", "save_pretrained", "generate"):
            self.model.__dict__.pop(name, None)
        ranks = self.ranks
        try:
            if ranks.count > 1 and failed is not None:
                # The others need not wait for what this one does not finish.
                ranks.meetings.end(f"{type(failed).__name__}: {failed}")
            if not ranks.meetings.broken:
                self._seal()
                ranks.meet("end the run")
                self.core.drain()
                if (failed is None or ranks.count == 1) and self._has_room(keep):
                    self._give_back()
            # The daemon ends with the part of its node's first rank.
            if ranks.first_of_node and not ranks.meetings.broken:
                ranks.meet("leave the run")
                ranks.meetings.close()
        finally:
            self.engine.ended = True
            with contextlib.suppress(*[Error] * ranks.meetings.broken):
                self.core.close()
            if not ranks.first_of_node and not ranks.meetings.broken:
                ranks.meet("leave the run")
            ranks.meetings.close()
            self._lock.close()
            disclaim(self.run_dir)

    def _has_room(self, keep: Optional[bool]) -> bool:
        """Whether the values of model and optimizer are kept: where `keep` does not say it, if they take half of the available memory at most."""
        if keep is None:
            available = _offloadd.host_available_bytes() or 0
            keep = sum(unit.bytes for unit in self.engine.units) + States(self).bytes <= available // 2
        return any(self.ranks.any("keep the values", bytes([keep])))

    def _give_back(self) -> None:
        """Makes model and optimizer plain ones with the values that are in tiles, in host memory where parameters were released."""
        engine, states = self.engine, {}
        grads = {key: held.clone() for key, held in engine.held.items() if not (engine.applied or held.partial)}
        for param, state in States(self).items():
            plain = {name: value.as_subclass(torch.Tensor) for name, value in state.items() if name != MASTER}
            states[param] = {name: value.to("cpu", param.dtype) if name in MOMENTS else value for name, value in plain.items()}
        for unit in engine.units:
            engine.gather(unit, record=False)
            if not engine.keep and unit.flat.device.type != "cpu":
                # All of it may not fit where one block at a time did.
                values = unit.flat.to("cpu", copy=True)
                engine.take_away(unit)
                unit.move(values, copy=False)
                engine.open_for_good(unit)
        engine.detach()
        # What was released on a GPU lies in host memory now, and what belongs to it follows.
        for param, state in states.items():
            states[param] = {name: value.to(param.device) if name in MOMENTS else value for name, value in state.items()}
        give_back(self.optimizer, states)
        for param in engine.params:
            grad = grads.get(id(param))
            param.grad = None if grad is None else grad.to(param.device)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        self._close(error, None)

    def describe(self) -> str:
        """The place of the state, for people."""
        elems = sum(unit.elems for unit in self.engine.units)
        where = {"none": "in memory, nothing is released", "cpu": "in host memory", "nvme": f"on drives ({self.core.engine})"}
        return (
            f"{elems:,} parameters in {len(self.engine.units)} units, state {where[self.settings.device]}: "
            f"{bytes_text(self.core.host_bytes)} of host memory, {bytes_text(self.core.device_bytes)} of tiles"
        )

    def gradients_are_finite(self) -> bool:
        """Whether the gradients that have come since the last step are."""
        return all(map(math.isfinite, self.engine.square_sums.values()))

    def save_checkpoint(self, save_dir: Union[str, os.PathLike], tag: Optional[str] = None, client_state: Optional[dict[str, Any]] = None) -> None:
        """Copies trained parameters, optimizer state and all that is committed with them into `save_dir/tag`, with `client_state` (plain data). All
        ranks must call it."""
        save_checkpoint(self, Path(save_dir), tag or f"step{self.steps_done}", client_state or {}, save_latest=True)

    def load_checkpoint(self, load_dir: Union[str, os.PathLike], tag: Optional[str] = None) -> Optional[dict[str, Any]]:
        """Goes back to a checkpoint of `save_checkpoint`, the newest one without `tag`. Returns its `client_state`, or None where there is none."""
        return load_checkpoint(self, Path(load_dir), tag)[1]

    def state(self) -> dict[str, Any]:
        """The state that is committed with the last step beside the tiles."""
        return self._complete(self._noted)

    def restore(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Brings tiles and everything else to a checkpoint, and commits it as the run's last step."""
        self.engine.forget_gradients()
        self.ranks.meet("load a checkpoint")
        frozen = self.ranks.total("compare frozen parameters", self.core.frozen())
        self.core.load(str(checkpoint), to_blob(state, self._state_dir), frozen)
        self._resume(state)
        if self._position.epoch:
            # The script is in the middle of its data and continues there.
            self._resumed = None
        set_random_state(state["random"])
        self._pass_random, self._to_seal = None, None
        self.engine.stale()
        self.core.begin_step()
        self._open_reports()

    # The optimizer

    def updates_of(self, param: torch.Tensor) -> int:
        """Updates so far of a parameter."""
        return self._updates.get(self._index_of.get(id(param), -1), 0)

    def read_state(self, unit: Unit) -> list[torch.Tensor]:
        """Masters, momentum and variance of a trained unit in fp32, in host memory. All ranks must call it."""
        flats = [torch.zeros(unit.room_elems, dtype=torch.float32, device="cpu") for _ in range(3)]
        self.ranks.meet(f"read the moments of {unit.name}")
        self.core.read_state([(unit.index, [flat.data_ptr() for flat in flats])])
        self.engine.order.forget_rest()
        for flat in flats:
            self.ranks.transfers.complete(f"bring the moments of {unit.name}", flat)
        return flats

    def load_states(self, states: ParamStates) -> None:
        """Gives parameters, by their id, moments and masters in PyTorch's form, a unit at a time, and commits them. Others begin anew."""
        engine = self.engine
        checked(states, self._names, {id(param): param.shape for param in engine.params})
        units = [unit for unit in engine.units if unit.trained]
        self._seal()
        self._updates = {self._index_of[key]: int(state["step"]) for key, state in states.items()}
        self._note_step()
        state, self._to_seal = self._to_seal, None
        present = {}
        for unit in units:
            if any(MASTER in states.get(id(param), ()) for param in unit.params):
                with engine.gathered(unit):
                    present[unit] = unit.flat.to("cpu", copy=True)
        self.ranks.meet("load moments")
        self.core.begin_rewrite([unit.index for unit in units], to_blob(self._complete(state), self._state_dir))
        engine.order.forget_rest()
        for unit in units:
            masters, *moments = (torch.zeros(unit.room_elems, dtype=torch.float32, device="cpu") for _ in range(3))
            exact = []
            for index, (param, offset) in enumerate(zip(unit.params, unit.offsets)):
                of_param = states.get(id(param))
                if of_param is None:
                    continue
                for flat, name in zip(moments, MOMENTS):
                    Unit.view_of(flat, param, offset).copy_(of_param[name])
                master = of_param.get(MASTER)
                # Weights that were loaded since the state was saved have masters of their own.
                if master is not None and torch.equal(Unit.view_of(present[unit], param, offset), master.to("cpu", param.dtype)):
                    Unit.view_of(masters, param, offset).copy_(master)
                    exact.append(index)
            self.core.rewrite_state(unit.index, [flat.data_ptr() for flat in (masters, *moments)], list(range(len(unit.params))), exact)
        self.ranks.meet("commit loaded moments")
        self.core.end_fill()
        self.core.begin_step()
        engine.stale()

    def check_room(self, bytes_: int, what: str) -> None:
        check_room(bytes_, what)

    def check_replaceable(self, call: str, what: str) -> None:
        """Refuses to load what would replace a resumed run's, and what would lose gradients."""
        self.engine.check_between_steps(call)
        if self._resumed_at == self.steps_done > 0:
            raise Error(
                f"this run was resumed after step {self.steps_done}, and {call} would replace its {what}: load them only if run.steps_done == 0, or begin "
                "the run anew with resume=False"
            )

    def _patch_model(self) -> None:
        plain = self.model.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            self.engine.forget_gradients()
            plain(set_to_none)

        self.model.zero_grad = zero_grad
        tied = [of_one for of_one in self._names.values() if len(of_one) > 1]
        whole = self.model.state_dict

        def state_dict(*args: Any, **kwargs: Any) -> Any:
            """The model's state; names of one parameter have one tensor, as in a model that is not prepared."""
            if not (args or kwargs.get("keep_vars") or self.engine.keep):
                state = whole(**{**kwargs, "keep_vars": True})
                state.update(Blocks(self.engine, state).copies())
                return state
            state = whole(*args, **kwargs)
            prefix = kwargs.get("prefix", "")
            for first, *others in tied:
                for name in others:
                    if prefix + name in state:
                        state[prefix + name] = state[prefix + first]
            return state

        self.model.state_dict = state_dict
        self._plain_load = self.model.load_state_dict

        def load_state_dict(state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
            """Loads weights, a unit at a time."""
            if assign:
                raise NotSupported("load_state_dict(assign=True): parameters are in tiles and keep their place; leave assign out")
            self._check_loadable()
            return self.load_state_dict(state_dict, strict)

        self.model.load_state_dict = load_state_dict
        self._parts_loaded = PartsLoaded(self.engine, lambda: self._check_loadable(), self._replace)
        if self.ranks.count > 1:
            _generate_together(self.model)
        stream_save_pretrained(self.model, self.engine)
        if hasattr(self.model, "save_pretrained"):
            save = self.model.save_pretrained
            # Weights that are in memory already need nobody else: the Trainer writes them on the first rank alone.
            alone = lambda kwargs: kwargs.get("state_dict") is not None
            together = lambda *args, **kwargs: save(*args, **kwargs) if alone(kwargs) else self.on_first(lambda: save(*args, **kwargs))
            self.model.save_pretrained = functools.wraps(save)(together)

    def _step(self) -> None:
        engine = self.engine
        if engine.broken or engine.half_backward:
            raise Error("the last backward did not end, so some gradients are missing: call zero_grad() and continue with the next batch")
        engine.refuse_writes()
        dropped, given = engine.looked_at()
        if not given and len(dropped) == len(engine.held):
            # As plain PyTorch: parameters without gradients stay as they are.
            engine.forget_sums()
            return
        if engine.applied:
            raise Error("optimizer.step() twice for one backward: the gradients are gone with the first step; call backward again")
        check_settings(self.optimizer)
        groups, group_of = [], {}
        for index, group in enumerate(self.optimizer.param_groups):
            beta1, beta2 = group["betas"]
            groups.append(tuple(float(one) for one in (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])))
            for param in group["params"]:
                group_of[id(param)] = index
        engine.settle_changes(given)
        came = {key: held for key, held in engine.held.items() if key not in dropped}
        if any(held.partial for key, held in came.items() if key in group_of):
            raise Error(PARTIAL)
        scales = self._scales(came)
        norm = math.sqrt(sum(held.square_sum * held.unscaled**2 for held in came.values())) / (self.loss_scale or 1.0)
        self.ranks.meet(f"make step {self.steps_done + 1}")
        # A script that never calls the whole model begins no pass that would do it.
        self._seal()
        if not self.gradients_are_finite():
            # As torch.optim would, the update makes every parameter nan; a scaler never calls step then.
            say(f"warning: step {self.steps_done + 1}: a gradient is not finite, so parameters become nan, as with torch.optim")
        of_params = []
        for key, index in self._index_of.items():
            if key in scales and key in group_of:
                self._updates[index] = self._updates.get(index, 0) + 1
                of_params.append((group_of[key], self._updates[index], scales[key]))
            else:
                of_params.append((0, 0, 1.0))
        interrupted = None
        try:
            self.core.finish(groups, of_params)
        except Error:
            raise
        except BaseException as error:
            # A signal's handler ended the wait; the engine ends the step all the same.
            interrupted = error
        self.steps_done += 1
        self._note_step()
        self._report(norm)
        engine.updated()
        if interrupted is not None:
            raise interrupted

    def _scales(self, came: Mapping[int, Held]) -> dict[int, float]:
        """The factor of each parameter's gradient: what clipping and scaling made of its handle."""
        # Reading one that lies on a GPU waits for it.
        tensors = {id(held.scale): held.scale for held in came.values()}
        read = {key: float(scale) / (self.loss_scale or 1.0) for key, scale in tensors.items()}
        scales = {key: read[id(held.scale)] for key, held in came.items()}
        if self.settings.gradient_clipping > 0:
            norm = math.sqrt(sum(came[key].square_sum * scale * scale for key, scale in scales.items()))
            if norm > self.settings.gradient_clipping:
                factor = self.settings.gradient_clipping / (norm + 1e-6)
                scales = {key: scale * factor for key, scale in scales.items()}
        return scales

    # Reports

    def _open_reports(self) -> None:
        settings = self.settings
        self._progress = Progress(settings.steps_per_print)
        # The loss of the step, where somebody knows it, and what it was multiplied with.
        self.loss: float = math.nan
        self.loss_scale: Optional[float] = None
        self.grad_norm: Optional[float] = None
        if self.ranks.first:
            older = self.core.open_reports(
                self.steps_done,
                self._samples(),
                settings.monitor_dir("tensorboard", self.run_dir),
                settings.monitor_dir("csv_monitor", self.run_dir),
                settings.wall_clock_breakdown,
            )
            if older:
                say(older)

    def _samples(self) -> int:
        return self.steps_done * (self.settings.train_batch_size or 1)

    def _report(self, norm: float) -> None:
        """The step that ended, in metrics.jsonl, the monitors and on stderr."""
        # Before clipping.
        self.grad_norm = norm
        lr = float(self.optimizer.param_groups[0]["lr"])
        facts = self.core.report(self.steps_done, self._samples(), self.loss, norm, lr, self.loss_scale, False)
        self.loss = math.nan
        self._progress.step(self.steps_done, facts)

    # Commits

    def _note_step(self) -> None:
        """The state of the step that just ended; schedulers may still advance."""
        position = self._position
        self._to_seal = self._noted = {
            "steps_done": self.steps_done,
            "updates": dict(self._updates),
            "random": random_state(),
            "epoch": position.epoch,
            "batches": position.batches,
            "batch_size": position.batch_size,
            "epoch_random": position.random,
            "ranks": self.ranks.count,
        }

    def take_random(self) -> Optional[dict[str, Any]]:
        """The random numbers after the step that was resumed from, for a caller that sets them itself."""
        self._pass_random = None
        return self.resumed_random

    def _before_pass(self) -> None:
        self._seal()
        if self._pass_random is not None and torch.is_grad_enabled():
            # A script that skipped batches by itself goes on where the last step ended.
            set_random_state(self._pass_random)
            self._pass_random = None

    def _seal(self) -> None:
        """Orders the last step's commit: called when the next forward begins, by when schedulers have moved on."""
        if self._to_seal is None:
            return
        state = self._complete(self._to_seal)
        now = random_state()
        if not same_random(now, state["random"]):
            # The script has drawn since the step.
            state = {**state, "pass_random": now}
        blob = to_blob(state, self._state_dir)
        self.ranks.meet(f"commit step {self._to_seal['steps_done']}")
        self.core.seal(blob)
        self._to_seal = None
        self.engine.order.forget_rest()

    def _complete(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with what a script may change after `optimizer.step()`, unless it is there."""
        if "groups" in state:
            return state
        groups = [{key: _plain(value) for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in self.model.named_buffers()}
        return {**state, "groups": groups, "buffers": buffers, "track": [one.state_dict() for one in self.track]}

    def _resume(self, state: dict[str, Any]) -> None:
        self.steps_done = state["steps_done"]
        self._noted = state
        self._updates = dict(state["updates"])
        self.resumed_random = state["random"]
        # Before the first step there is nothing to go on from.
        self._pass_random = (state.get("pass_random") or state["random"]) if self.steps_done else None
        self._resumed = {key: state[key] for key in ("epoch", "batches", "epoch_random", "random")}
        self._resumed.update(ranks=state.get("ranks", 1), batch_size=state.get("batch_size"))
        if "groups" in state:
            self._groups = state["groups"]
            self.restore_groups()
            buffers = dict(self.model.named_buffers())
            for name, kept in state["buffers"].items():
                if name in buffers:
                    buffers[name].copy_(kept)
            for one, kept in zip(self.track, state["track"]):
                one.load_state_dict(kept)

    def restore_groups(self) -> None:
        """Gives the parameter groups what they had at the step that was resumed from: a scheduler made since may have changed it."""
        for group, kept in zip(self.optimizer.param_groups, self._groups):
            group.update(kept)

    def check_layout(self, kept: list, where: Any) -> None:
        """Refuses the units `kept` of another model: parameters of other names, shapes or types, others that are frozen, or other groups
        of them."""
        before = [(name, tuple(shape), kind) for unit in kept for name, shape, kind in unit]
        now = [(name, tuple(shape), kind) for unit in self.layout for name, shape, kind in unit]
        kinds = {(name, shape): kind for name, shape, kind in now}
        for name, shape, old_kind in before:
            kind = kinds.get((name, shape), old_kind)
            if kind != old_kind:
                raise LayoutChanged(
                    f"{where}: it was begun with {name} {old_kind}, and the model has it {kind}; freeze the parameters that were frozen then, in the same "
                    "types, or name another run_dir (for Hugging Face's Trainer another output_dir)"
                )
        for (old_name, old_shape, _), (name, shape, _) in zip(before, now):
            if (old_name, old_shape) != (name, shape):
                raise LayoutChanged(
                    f"{where}: it was begun with {old_name} {old_shape} where the model has {name} {shape}; use the model "
                    "it was begun with, or name another run_dir (for Hugging Face's Trainer another output_dir)"
                )
        if len(before) != len(now) or [len(unit) for unit in kept] != [len(unit) for unit in self.layout]:
            raise LayoutChanged(
                f"{where}: it was begun with {len(before)} parameters in {len(kept)} units, and the model has {len(now)} in "
                f"{len(self.layout)}, or divides them otherwise; use the model and offloadd.units it was begun with, or name another run_dir "
                "(for Hugging Face's Trainer another output_dir)"
            )


class _Position:
    """The script's position in its data."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0
        # Samples of a batch, if the loader says so.
        self.batch_size: Optional[int] = None
        self.random: Optional[dict[str, Any]] = None


def _kind_of(unit: Unit) -> str:
    return ("trained in " if unit.trained else "frozen in ") + str(unit.dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value


def _generate_together(model: nn.Module) -> None:
    """Makes transformers' `generate` compute until all ranks have what they want."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "synced_gpus" not in inspect.signature(getattr(type(base), "generate", _plain)).parameters:
        return
    plain = model.generate
    together = lambda *args, **kwargs: plain(*args, **{**kwargs, "synced_gpus": True})
    model.generate = functools.wraps(plain)(together)


def _move_rest(model: nn.Module, units: list[Unit], device: torch.device) -> None:
    """Moves to `device` what is in no unit."""
    for one in _rest(model, units):
        one.data = one.data.to(device)


def _rest(model: nn.Module, units: list[Unit]) -> list[torch.Tensor]:
    """The tensors in no unit: buffers, and parameters that stay in memory."""
    managed = {id(param) for unit in units for param in unit.params}
    return [one for one in (*model.parameters(), *model.buffers()) if id(one) not in managed]


def _check_groups(optimizer: torch.optim.Optimizer, units: list[Unit]) -> None:
    managed = {id(param) for unit in units for param in unit.params}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.requires_grad and id(param) not in managed:
            raise NotSupported("the optimizer has a parameter that is not the model's: pass the model that holds all of them")

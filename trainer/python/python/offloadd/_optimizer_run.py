"""A run of an optimizer alone: the state of its parameters in tiles, step after step. The parameters stay where they are.

    open_run   plans the run and opens it        as `prepare` does, by the same stages of _opening
    Beside     gradients out, parameters back    _beside, with units of _param_units
    step       hands over, updates, brings back, commits

Who resumes finds the last committed step in the parameters too: those of the script may be any.
"""

from __future__ import annotations

import array
import atexit
import collections
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any, Container, Iterator, Mapping, Optional, Sequence

import torch
from torch import nn

from . import _muon, _opening
from ._backward_step import BackwardStep, Scalars
from ._beside import Beside
from ._commits import Commits
from ._config import Settings
from ._console import bytes_text, say
from ._directions import MomentumStep, give_directions, momentum_step
from ._errors import Error, LayoutChanged, NotSupported
from ._interrupts import Interrupts
from ._layout import Layout
from ._memory import gpu_of
from ._moments import MASTER, ParamState, ParamStates, States, check_states, is_master_of, state_bytes, state_of, updates_in
from ._param_units import (
    ParamUnit,
    Piece,
    check_early,
    check_params,
    flat_like,
    flat_of,
    form_of,
    grad_of,
    is_divided,
    is_dtensor,
    local_of,
    named_params,
    param_units,
)
from ._plan import Plan
from ._ranks import Ranks
from ._reentry import not_reentered
from ._reports import Reports
from ._run_dir import LAYOUT, check_name, claim, disclaim
from ._state import set_random_state
from ._steps import OfParams, scalars_of
from ._supported_optimizers import MOMENTS, check_rules, check_settings, rule_of, with_rule
from ._units import alignment_of, check_memory


# What the name of a later part of a parameter has between the name and its first element.
_CUT = ", elements from "

_WHOLE = "whole on each rank"


def open_run(
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    directory: Optional[Path],
    resume: bool,
    track: Sequence[Any],
    early: bool = False,
    overlap_commit: bool = False,
) -> "OptimizerRun":
    """Opens the run of an optimizer in its directory, or in a temporary one, and begins it or, with `resume`, continues after its last
    committed step. The states of the objects `track` are committed too. `early` takes gradients in backward. With `overlap_commit` a step does not
    wait for its commit. All ranks must call it."""
    _opening.check_track(track)
    check_settings(optimizer)
    named = [(name, param) for name, param in named_params(optimizer.param_groups) if param.numel()]
    ranks = Ranks()
    settings = with_rule(settings, rule_of(optimizer))
    muon = _muon.ids_of(optimizer) if settings.rule == "Muon" else set()
    check_params(named, ranks.count, muon)
    gpu = gpu_of(settings, (local_of(param) for _, param in named))
    ranks.open(len(named))
    try:
        temporary = None
        if directory is None:
            temporary = tempfile.mkdtemp(prefix="offloadd-optimizer-") if ranks.first else None
            directory = Path(os.fsdecode(ranks.first_bytes("name a directory", os.fsencode(temporary or ""))))
            temporary = str(directory) if ranks.first_of_node else None
        check_name(directory)
        units = param_units(named, _elems_of(named, ranks), ranks.rank, muon, alignment_of(settings.moments))
        if early:
            check_early(units, ranks.count, "overlap_backward")
        plan = ranks.on_all_ranks("plan the optimizer's state", lambda: _plan(settings, directory, units, ranks, gpu))
        claim(plan.run_dir, "an optimizer")
        try:
            run = OptimizerRun(optimizer, plan, named, units, ranks, resume, temporary, track, overlap_commit)
        except BaseException:
            disclaim(plan.run_dir)
            raise
        if early:
            run.beside.take_early()
        _opening.trim_heap()
        return run
    except BaseException as error:
        ranks.meetings.end(f"{type(error).__name__}: {error}")
        ranks.meetings.close()
        raise


def _elems_of(named: Sequence[tuple[str, nn.Parameter]], ranks: Ranks) -> list[tuple[int, ...]]:
    """The elements of each parameter that each rank has."""
    own = array.array("q", [local_of(param).numel() for _, param in named])
    told = [array.array("q", data) for data in ranks.meet("compare the parts of parameters", own.tobytes())]
    for rank, theirs in enumerate(told):
        if len(theirs) != len(own):
            raise NotSupported(f"rank {rank} has {len(theirs)} parameters, and rank {ranks.rank} has {len(own)}: all ranks must have the same ones")
    return list(zip(*told))


def _plan(settings: Settings, directory: Path, units: list[ParamUnit], ranks: Ranks, gpu: Any) -> Plan:
    plan = Plan(settings, directory, units, ranks.topology, gpu)
    if any(unit.sharded for unit in units):
        # The parts of ranks are whole tiles, whose size depends on that of the parts.
        for unit in units:
            unit.divide(plan.figures["tile_elems"])
        plan = Plan(settings, directory, units, ranks.topology, gpu, plan.figures["tile_elems"])
    ranks.divide((unit for unit in units if not unit.sharded), (elems for unit, elems in zip(units, plan.figures["shard_elems"]) if not unit.sharded))
    return plan


class OptimizerRun:
    """The state of one optimizer in tiles."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        named: Sequence[tuple[str, nn.Parameter]],
        units: list[ParamUnit],
        ranks: Ranks,
        resume: bool,
        temporary: Optional[str],
        track: Sequence[Any],
        overlap_commit: bool,
    ) -> None:
        self._overlap_commit = overlap_commit
        self.optimizer, self.ranks, self.plan, self.settings, self.run_dir = optimizer, ranks, plan, plan.settings, plan.run_dir
        self.closed, self._process, self._temporary = True, os.getpid(), temporary
        self._muon = {id(piece.param) for unit in units if unit.muon for piece in unit.params}
        self._form_of = {id(param): form_of(param) for _, param in named}
        # Factor of what tiles have as the gradient of each parameter: what clipping has made of it since.
        self._scales: dict[int, float] = {}
        # The step whose updates have begun in backward.
        self._begun: Optional[BackwardStep] = None
        # Steps since the last commit.
        self._uncommitted = 0
        _opening.check_drives(plan, ranks)
        state_dir = self.run_dir if ranks.first_of_node else self.run_dir / f"rank-{ranks.rank}"
        self._lock = _opening.take_dir(self.run_dir, state_dir)
        layout = Layout(_NamedPieces(units), units)
        if plan.settings.device == "nvme" and resume:
            _check_params(self.run_dir / LAYOUT, units)
        layout.check_dir(self.run_dir, plan.settings, resume)
        self.core, committed = _opening.open_tiles(plan, layout, ranks, state_dir, resume)
        self.beside = Beside(named, units, self.core, ranks, plan.gpu)
        reports = Reports(plan.settings, self.run_dir, ranks, self.core, optimizer)
        self.commits = Commits(plan.settings, state_dir, layout, reports, ranks, self.core, self.beside, optimizer, track)
        begins = committed is None or not resume
        if begins:
            self._fill(replace=committed is not None)
            if ranks.first_of_node:
                layout.write(self.run_dir)
        else:
            self.commits.resume(committed)
            self.core.begin_step()
            self.beside.write_back(self.beside.units)
            set_random_state(self.commits.take_random())
        reports.open(self.steps_done)
        self._say_how(committed, begins)
        at_exit = weakref.WeakMethod(self._close_at_exit)
        self._at_exit = lambda: (at_exit() or bool)()
        atexit.register(self._at_exit)
        self.closed = False

    def _fill(self, replace: bool) -> None:
        """Gives the tiles their first content: the parameters, and moments of zero."""
        self.beside.check_same_values(param for _, param in self.beside.named)
        ranks, units, blob = self.ranks, self.beside.units, self.commits.first()
        ranks.meet("begin anew" if replace else "begin")
        self.core.begin_rewrite([unit.index for unit in units], blob) if replace else self.core.begin_fill(blob)
        for unit in self.beside.units:
            flat = self.beside.in_host_memory(unit)
            self.core.fill(unit.index, unit.address(flat.data_ptr(), unit.dtype.itemsize))
        ranks.meet("commit the first content")
        self.core.end_fill()
        self.core.begin_step()
        self.beside.note_written(param for _, param in self.beside.named)

    def _say_how(self, committed: Optional[dict[str, Any]], begins: bool) -> None:
        how = "begins" if begins else f"resumes after step {self.steps_done}"
        if committed is not None and begins:
            how += f" anew and replaces an earlier one of {committed['steps_done']} steps"
        elems = sum(piece.own if unit.sharded else piece.numel() for unit in self.beside.units for piece in unit.params)
        where = "in host memory" if self.settings.device == "cpu" else f"on drives ({self.core.engine})"
        host, tiles = bytes_text(self.core.host_bytes), bytes_text(self.core.device_bytes)
        say(f"{self.run_dir}: the optimizer {how}; {elems:,} parameters stay where they are, state {where}: {host} of host memory, {tiles} of tiles")

    @property
    def steps_done(self) -> int:
        """Steps that were made."""
        return self.commits.steps_done

    @property
    def steps(self) -> int:
        """The same, after which what was read of the state is old."""
        return self.commits.steps_done

    # A step

    def square_sum(self, params: Sequence[nn.Parameter]) -> float:
        """The sum of squares of the gradients of `params` in this step, which are in their tiles then."""
        self._check_open()
        self.check_none_begun("offloadd.optim.clip_grad_norm_")
        self._check_others()
        beside, grads = self.beside, self._came()
        if not beside.is_handed_over(grads):
            self._scales.clear()
            beside.hand_over(grads)
        return sum(beside.square_sums.get(id(param), 0.0) * self._scales.get(id(param), 1.0) ** 2 for param in params)

    def scale(self, params: Sequence[nn.Parameter], factor: float) -> None:
        """Scales the gradients of `params`, once for each time that one is there. Tiles keep them as they are, and the step multiplies them."""
        if factor == 1.0:
            return
        grads = {id(param): grad_of(param, "a parameter") for param in params}
        times = collections.Counter(id(grads[id(param)]) for param in params)
        with self.beside.scaling(grads, factor, times):
            for key, grad in grads.items():
                self._scales[key] = self._scales.get(key, 1.0) * factor ** times[id(grad)]

    def forget_gradients(self) -> None:
        """Forgets gradients that were handed over and not used."""
        if self._begun is None or self._begun.units:
            self.check_none_begun("zero_grad()")
        self._scales.clear()
        self.beside.forget()

    @contextlib.contextmanager
    def updating_in_backward(self) -> Iterator[None]:
        """Begins the updates of the next step in the backward within."""
        self._check_open()
        self.check_none_begun("another update_in_backward()")
        beside = self.beside
        if self.settings.rule == "Muon":
            raise NotSupported("update_in_backward() with Muon, whose directions need whole matrices after their momentum: use overlap_backward=True")
        check_early(beside.units, self.ranks.count, "update_in_backward()")
        self._check_others()
        grouped = self._group_of()
        if gone := next((name for name, param in beside.named if id(param) not in grouped), None):
            raise NotSupported(f"update_in_backward() with {gone}, which was taken out of its group: leave it there, with requires_grad=False")
        check_settings(self.optimizer)
        self._take_changes()
        self.forget_gradients()
        scalars = self._scalars()
        self._begun = BackwardStep(beside, self.core, scalars, self._of_params({id(param) for _, param in beside.named}, scalars))
        try:
            with self._begun.taking():
                yield
        finally:
            if not self._begun.units:
                self._begun = None
                beside.forget()

    def _came(self) -> dict[int, torch.Tensor]:
        """The gradient of each parameter that has one and is in a group."""
        grouped = self._group_of()
        return {key: grad for key, grad in self.beside.came().items() if key in grouped}

    def check_none_begun(self, what: str) -> None:
        """Refuses what would change, drop or see a part of a step."""
        if self._begun is not None:
            raise NotSupported(
                f"{what} before the step() that update_in_backward() has begun: call step() first. Leave update_in_backward() out where a step is clipped or "
                "may be skipped, as GradScaler does after an overflow"
            )

    def step(self) -> None:
        """Updates all parameters that have gradients. Without gradients it does nothing."""
        self._check_open()
        commits, beside, core = self.commits, self.beside, self.core
        self._check_others()
        check_settings(self.optimizer)
        grads, begun, scalars = self._came(), self._begun, self._scalars()
        if begun is not None:
            begun.hand_over(grads, scalars)
        elif not grads:
            return
        else:
            handed_over = beside.is_handed_over(grads)
            if self._take_changes() or not handed_over:
                self._scales.clear()
                beside.hand_over(grads, remember=False)
        norm = math.sqrt(sum(beside.square_sums.values()))
        if not math.isfinite(norm):
            say(f"warning: step {self.steps_done + 1}: a gradient is not finite, so parameters become nan, as with torch.optim")
        units = [unit for unit in beside.units if any(id(piece.param) in grads for piece in unit.params)]
        of_params = self._of_params(grads, scalars)
        self.ranks.meet(f"make step {self.steps_done + 1}")
        interrupts = Interrupts()
        # All of it, or nothing: parameters whose update does not come back would compute the next gradients.
        with interrupts.later():
            if begun is not None and begun.has_all(units):
                interrupts.finish(core.finish_begun)
            else:
                self._finish(units, grads, scalars[0], of_params, interrupts)
            self._begun = None
            self._count_updates(grads)
            commits.steps_done += 1
            commits.note_step()
            commits.seal()
            if begun is not None:
                units = begun.in_order(units)
            interrupts.repeat(lambda: beside.write_back(units))
            beside.forget()
            core.begin_step()
            self._uncommitted += 1
        if self._uncommitted >= self.settings.commit_every:
            if self._overlap_commit:
                # The engine has begun it, and ends it before another step ends.
                self._uncommitted = 0
            else:
                interrupts.repeat(self.drain)
        commits.reports.step(self.steps_done, norm)
        interrupts.end()

    def _finish(self, units: Sequence[ParamUnit], grads: Mapping[int, torch.Tensor], scalars: list, of_params: OfParams, interrupts: Interrupts) -> None:
        """Updates the tiles of `units`."""
        muon = [unit for unit in units if unit.muon]
        if muon:
            groups = self._group_of()
            self.core.begin_directions([unit.index for unit in muon], self._momentum_steps(grads, groups), scalars, of_params)
            give_directions(muon, groups, grads, self.beside.memory, self.ranks)
        interrupts.finish(self.core.finish, scalars, of_params)

    def _momentum_steps(self, grads: Container[int], groups: Mapping[int, Mapping[str, Any]]) -> list[MomentumStep]:
        """The steps of momenta of all pieces, in the order of the plan."""
        found: list[MomentumStep] = []
        for unit in self.beside.units:
            keys = [id(piece.param) for piece in unit.params]
            of_unit = [momentum_step(groups[key], self._scales.get(key, 1.0)) if unit.muon and key in grads else None for key in keys]
            found += of_unit * (unit.ranks if unit.sharded else 1)
        return found

    def _check_others(self) -> None:
        """Refuses gradients of parameters that have no tiles, and parameters whose tiles are those of another rule or of others like them."""
        for name, param in self.beside.named:
            if (now := form_of(param)) != (then := self._form_of[id(param)]):
                raise NotSupported(
                    f"{name} is {now} now, and was {then} when the optimizer began: give parameters their types, shapes and memory formats before the first step, "
                    "or make a new optimizer then"
                )
        for number, group in enumerate(self.optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if id(param) not in self.beside.pieces and param.numel() and grad_of(param, "a parameter") is not None:
                    raise NotSupported(
                        f"parameter {index} of group {number} has a gradient, and required none when the optimizer began, or was not there: give the optimizer all "
                        "parameters before the first step and let them require gradients, with a learning rate of 0 until they are to be trained"
                    )
        check_rules(self.optimizer, self._muon, self.beside.name_of)

    def _rule_of(self, key: int) -> str:
        """The rule that has updated the parameter with an id since the optimizer began."""
        rule = self.settings.rule
        return "AdamW" if rule == "Muon" and key not in self._muon else rule

    def _group_of(self) -> dict[int, dict[str, Any]]:
        return {id(param): group for group in self.optimizer.param_groups for param in group["params"]}

    def _of_params(self, grads: Container[int], scalars: Scalars) -> list[tuple[int, int, float]]:
        """The number of its scalars, that of the update and the factor of the gradient for each piece, in the order of the plan: 0 is no update."""
        updates, index_of, found = self.commits.updates, self.commits.layout.index_of, []
        _, number_of = scalars
        for unit in self.beside.units:
            of_unit = []
            for piece in unit.params:
                key, index = id(piece.param), index_of[id(piece)]
                if key not in grads:
                    of_unit.append((0, 0, 1.0))
                    continue
                of_unit.append((number_of[key], updates.get(index, 0) + 1, 1.0 if unit.muon else self._scales.get(key, 1.0)))
            found += of_unit * (unit.ranks if unit.sharded else 1)
        return found

    def _count_updates(self, grads: Container[int]) -> None:
        updates, index_of = self.commits.updates, self.commits.layout.index_of
        for index in (index_of[id(piece)] for unit in self.beside.units for piece in unit.params if id(piece.param) in grads):
            updates[index] = updates.get(index, 0) + 1

    def _scalars(self) -> Scalars:
        """The scalars of this step's updates, and the number of those of each parameter."""
        return scalars_of(self.optimizer, self._muon)

    def drain(self) -> None:
        """Commits the last step."""
        self._check_open()
        self.check_none_begun("a commit")
        self.commits.drain()
        self._uncommitted = 0

    def _check_open(self) -> None:
        if self.closed:
            raise Error("the optimizer is closed, and its state went with it")

    # Other values

    def _take_changes(self) -> bool:
        """Takes values that a script has given to parameters to their tiles, whose moments stay. Returns whether there were some."""
        beside, ranks = self.beside, self.ranks
        suspects = {id(param) for param in beside.perhaps_changed()}
        flags = ranks.any("look for changed parameters", bytes(id(param) in suspects for _, param in beside.named))
        suspects = {id(param) for (_, param), flag in zip(beside.named, flags) if flag}
        if suspects:
            check_memory((name, local_of(param), True) for name, param in beside.named)
            beside.check_same_values(param for _, param in beside.named if id(param) in suspects)
        changed: dict[ParamUnit, list[int]] = {}
        for unit in beside.units:
            if not any(id(piece.param) in suspects for piece in unit.params):
                continue
            stored, now = beside.stored(unit), beside.in_host_memory(unit)
            parts = zip(unit.views(stored), unit.views(now))
            differs = ranks.any(f"compare {unit.name}", bytes(not _same_bits(one, other) for one, other in parts))
            if any(differs):
                changed[unit] = [index for index, one in enumerate(differs) if one]
        beside.note_written(param for _, param in beside.named if id(param) in suspects)
        if not changed:
            return False
        with self._rewriting(list(changed), "values that the script has given to parameters"):
            for unit, indices in changed.items():
                flat = beside.in_host_memory(unit)
                self.core.rewrite(unit.index, unit.address(flat.data_ptr(), unit.dtype.itemsize), _in_plan(unit, indices))
        beside.forget()
        return True

    @contextlib.contextmanager
    def _rewriting(self, units: Sequence[ParamUnit], what: str) -> Iterator[None]:
        """Lets the caller write the tiles of `units` anew, each once and in this order, and commits all of them at once."""
        self.ranks.meet(f"load {what}")
        self.core.begin_rewrite([unit.index for unit in units], self.commits.again())
        yield
        self.ranks.meet(f"commit {what}")
        self.core.end_fill()
        self.core.begin_step()
        self._uncommitted = 0

    # Moments

    def names_of(self, param: torch.Tensor) -> tuple[str, ...]:
        """The names of a parameter's moments."""
        return MOMENTS[self._rule_of(id(param))]

    def updates_of(self, param: torch.Tensor) -> int:
        """Updates so far of a parameter."""
        pieces = self.beside.pieces.get(id(param))
        return self.commits.updates.get(self.commits.layout.index_of[id(pieces[0][0].params[pieces[0][1]])], 0) if pieces else 0

    def updated(self) -> list[nn.Parameter]:
        """The optimizer's parameters that were updated."""
        return [param for group in self.optimizer.param_groups for param in group["params"] if self.updates_of(param)]

    @property
    def moment_bytes(self) -> int:
        """Bytes of this rank's moments, and of the masters that go with them."""
        return sum(local_of(param).numel() * state_bytes(param, self.names_of(param), self.settings.master) for param in self.updated())

    @not_reentered
    def read(self, unit: ParamUnit) -> list[torch.Tensor]:
        """Masters, momentum and variance of a unit in fp32, in host memory. All ranks must call it."""
        flats = [torch.zeros(unit.room_elems, dtype=torch.float32, device="cpu") for _ in range(3)]
        self.ranks.meet(f"read the moments of {unit.name}")
        self.core.read_state([(unit.index, [unit.address(flat.data_ptr(), 4) for flat in flats])])
        for flat in flats if not unit.sharded else ():
            self.ranks.transfers.complete(f"bring the moments of {unit.name}", flat)
        return flats

    def load(self, states: ParamStates) -> None:
        """Gives parameters, by their id, moments and masters in PyTorch's form, a unit at a time, and commits them. Others begin anew."""
        self.check_none_begun("load_state_dict()")
        self._check_others()
        beside, index_of = self.beside, self.commits.layout.index_of
        names, shapes = {key: [name] for key, name in beside.name_of.items()}, {id(param): param.shape for _, param in beside.named}
        check_states(states, names, shapes, self._rule_of)
        self._take_changes()
        self.forget_gradients()
        self.commits.updates = {}
        # A script that loads a state goes on from there.
        self.commits.steps_done = max(map(updates_in, states.values()), default=0)
        for key, state in states.items():
            for unit, index in beside.pieces[key]:
                self.commits.updates[index_of[id(unit.params[index])]] = updates_in(state)
        with self._rewriting(beside.units, "moments"):
            for unit in beside.units:
                flats, exact = [torch.zeros(unit.room_elems, dtype=torch.float32, device="cpu") for _ in range(3)], []
                views = [unit.views(flat) for flat in flats]
                for index, piece in enumerate(unit.params):
                    state = states.get(id(piece.param))
                    if state is not None and _fill_piece([of_flat[index] for of_flat in views], piece, state, self.names_of(piece.param)):
                        exact.append(index)
                addresses = [unit.address(flat.data_ptr(), 4) for flat in flats]
                self.core.rewrite_state(unit.index, addresses, _in_plan(unit, range(len(unit.params))), _in_plan(unit, exact))

    # The end

    def _close_at_exit(self) -> None:
        self.close(getattr(sys, "last_value", None))

    def __del__(self) -> None:
        if not self.__dict__.get("closed", True):
            self.close()

    def close(self, failed: Optional[BaseException] = None) -> None:
        """Commits the last step, unless another one has begun in backward, and ends the run in order. Parameters keep their values."""
        if self.closed:
            return
        ranks, meetings = self.ranks, self.ranks.meetings
        atexit.unregister(self._at_exit)
        if os.getpid() != self._process:
            self.closed = True
            return
        if failed is None:
            self.optimizer._state_copies.warn_of_writes()
        try:
            if ranks.count > 1 and failed is not None:
                meetings.end(f"{type(failed).__name__}: {failed}")
            if not meetings.broken and self._begun is None:
                self.drain()
            # The daemon ends with the part of its node's first rank.
            if ranks.first_of_node and not meetings.broken:
                ranks.meet("leave the optimizer")
                meetings.close()
        finally:
            self.closed = True
            self.beside.detach()
            with contextlib.suppress(*[Error] * meetings.broken):
                self.core.close()
            if not ranks.first_of_node and not meetings.broken:
                ranks.meet("leave the optimizer")
            meetings.close()
            self._lock.close()
            disclaim(self.run_dir)
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)


class NoStates(States):
    """`optimizer.state` before an optimizer has begun."""

    def __init__(self) -> None:
        pass

    def params(self) -> list[nn.Parameter]:
        return []

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        return ParamState()


class OptimizerStates(States):
    """`optimizer.state` of an optimizer whose parameters stay. Of a DTensor it has DTensors with this rank's part."""

    def __init__(self, run: OptimizerRun) -> None:
        self._run = run
        self._read: Optional[tuple[ParamUnit, list[torch.Tensor]]] = None

    def params(self) -> list[nn.Parameter]:
        return self._run.updated()

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        run = self._run
        updates = run.updates_of(param)
        if not updates:
            return ParamState()
        local = local_of(param)
        flats = [torch.empty(local.numel(), dtype=torch.float32, device="cpu") for _ in range(3)]
        for unit, index in run.beside.pieces[id(param)]:
            if self._read is None or self._read[0] is not unit:
                self._read = unit, run.read(unit)
            for flat, whole in zip(flats, self._read[1]):
                unit.params[index].slice_of(flat).copy_(unit.views(whole)[index])
        values = [flat.as_strided(local.size(), local.stride()) for flat in flats]
        if is_dtensor(param):
            values = [_as_dtensor(value, param) for value in values]
        return state_of(param, updates, values, lambda: run.beside.name_of[id(param)], run, run.names_of(param), run.settings.master)


def _as_dtensor(value: torch.Tensor, param: Any) -> torch.Tensor:
    """A DTensor like `param` with this rank's part, which stays in host memory."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(param.shape, param.stride(), value.dtype)
    return type(param.data)(value, DTensorSpec(param.device_mesh, param.placements, meta), requires_grad=False)


def _fill_piece(views: list[torch.Tensor], piece: Piece, state: dict[str, Any], names: Sequence[str]) -> bool:
    """Copies a parameter's state to the `views` of a piece. Returns whether it has a master that belongs to the values of the parameter."""
    local = local_of(piece.param)
    part = lambda value: piece.slice_of(flat_like(_part_of(value, piece.param).to("cpu", torch.float32), local))
    for view, name in zip(views[1:], names):
        view.copy_(part(state[name]))
    if MASTER not in state:
        return False
    master = part(state[MASTER])
    # Weights that were loaded since the state was saved have masters of their own.
    if not is_master_of(master, piece.slice_of(flat_of(local)).to("cpu")):
        return False
    views[0].copy_(master)
    return True


def _part_of(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is like `param`."""
    if is_dtensor(value):
        like = is_dtensor(param) and value.placements == param.placements
        return (value if like or not is_dtensor(param) else value.redistribute(param.device_mesh, param.placements)).to_local()
    if not is_divided(param):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, param.device_mesh, param.placements).to_local()


class _NamedPieces:
    """The pieces of parameters with their names, as a model has parameters."""

    def __init__(self, units: list[ParamUnit]) -> None:
        self._units = units

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Piece]]:
        for unit in self._units:
            for piece in unit.params:
                yield piece.name + f"{_CUT}{piece.start}" * (piece.start > 0), piece


def _check_params(layout: Path, units: list[ParamUnit]) -> None:
    """Refuses parameters that differ from those that a run was begun with, the first one by its name."""
    if not layout.exists():
        return
    stored = [one for unit in json.loads(layout.read_text()) for one in unit]
    before = {name.partition(_CUT)[0]: (shape, kind.partition(", ")[2]) for name, shape, kind in stored}
    now = {piece.name: (list(piece.shape), unit.division) for unit in units for piece in unit.params}
    other = "give the optimizer the parameters that it was begun with, or name another directory"
    for name in (*before, *now):
        if name not in now:
            raise LayoutChanged(f"{layout.parent}: it was begun with {name}, which the optimizer does not have now: {other}")
        if name not in before:
            raise LayoutChanged(f"{layout.parent}: it was begun without {name}: {other}")
        (old_shape, old_division), (shape, division) = before[name], now[name]
        if old_shape != shape:
            raise LayoutChanged(f"{layout.parent}: it was begun with {name} {tuple(old_shape)}, which is {tuple(shape)} now: {other}")
        if old_division != division:
            raise LayoutChanged(
                f"{layout.parent}: it was begun with {name} {old_division or _WHOLE}, which is {division or _WHOLE} now: start as many ranks, with parameters "
                "divided alike; or save a checkpoint with torch.distributed.checkpoint there, and load it with another directory"
            )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _in_plan(unit: ParamUnit, indices: Any) -> list[int]:
    """The numbers that pieces of this rank have in the plan."""
    first = unit.rank * len(unit.params) if unit.sharded else 0
    return [first + index for index in indices]

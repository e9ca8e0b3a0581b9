"""The start of a run, in stages that all ranks pass together: its drives and directory, its tiles, their first content or what a commit left."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
from pathlib import Path
from typing import IO, Any, Mapping, Optional, Sequence

import torch
from torch import nn

from . import _offloadd
from ._buffers import extra_states
from ._commits import Commits, check_of_script
from ._config import Settings
from ._console import say
from ._engine import Engine
from ._errors import Error, NotSupported
from ._layout import Layout
from ._memory import GpuDevice, GpuMemory
from ._moments import check_known
from ._packed import PackedParam, find_packed, is_wrapper, users_of, wrap_again
from ._plan import Plan, described
from ._ranks import Ranks
from ._residency import Residency
from ._run_dir import InUse, begin_part, check_place, lock, writable
from ._state import from_blob
from ._storage import can_forbid
from ._supported_optimizers import check_optimizer
from ._tile_copies import TileCopies
from ._units import Unit
from ._untrained import WeightsDiffer, same_bits
from ._weights import Weights, begin


def check_given(model: nn.Module, optimizer: torch.optim.Optimizer, track: Sequence[Any], units: Sequence[Unit], settings: Settings) -> None:
    """Refuses what a script passes that cannot be trained or committed."""
    check_optimizer(optimizer)
    check_track(track)
    if settings.device == "nvme":
        extra = extra_states(model) if any(unit.trained for unit in units) else {}
        # Loaders begin to draw batches when they are asked before a script does.
        others = [one for one in track if not hasattr(one, "__iter__")]
        check_of_script(optimizer, others, [one.state_dict() for one in others], extra)
    check_known([id(param) for param, state in optimizer.state.items() if state], {id(param) for unit in units if unit.trained for param in unit.params})
    managed = {id(param) for unit in units for param in unit.params}
    others = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad and id(param) not in managed]
    if others:
        shapes = ", ".join(str(tuple(param.shape)) for param in others[:4]) + ", ..." * (len(others) > 4)
        raise NotSupported(
            f"the optimizer has a parameter that is not the model's ({len(others)} of them, with shapes {shapes}), such as those of a loss or of another "
            "model: pass a module that holds all of them, as nn.ModuleList([model, loss]) does; or update them with an optimizer of their own; or freeze them by "
            "requires_grad_(False) if nothing trains them, as those of a guide or a teacher. With a Trainer, which has one optimizer, take a loss that trains "
            "no parameters of its own"
        )


def trim_heap() -> None:
    """Returns to the system what the C library keeps of freed memory: that of weights, which are in tiles now, and of what they came from."""
    # Only glibc has it.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def check_track(track: Sequence[Any]) -> None:
    """Refuses objects whose state cannot be committed."""
    for one in track:
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise Error(f"track has a {type(one).__name__}, which has no state_dict and load_state_dict: leave it out, or add these methods")


def check_drives(plan: Plan, ranks: Ranks) -> None:
    """Refuses drives that are missing or too small, and says what a script should know before it starts."""
    settings = plan.settings
    ranks.on_all_ranks("look for the run's drives", lambda: _offloadd.check_drives([plan.run_dir, *settings.nvme]))
    ranks.on_all_ranks("check the free space", plan.check)
    if settings.without_effect:
        say(f"DeepSpeed's keys without effect here: {', '.join(settings.without_effect)}")
    for line in settings.said:
        say(line)
    for warning in plan.warnings if ranks.first_of_node else ():
        say(f"warning: {warning}", None if ranks.first else ranks.rank)


def take_dir(run_dir: Path, state_dir: Path) -> IO[Any]:
    """Makes the run's directory and this rank's within it. Returns what marks the run as in use until it is closed."""
    try:
        with writable():
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = lock(run_dir)
    except InUse:
        raise Error(f"{run_dir} is being deleted: start again when that is done, or name another run_dir") from None
    check_place(run_dir)
    return held


def open_tiles(plan: Plan, layout: Layout, ranks: Ranks, state_dir: Path, resume: bool) -> tuple[Any, Optional[dict[str, Any]]]:
    """Opens this rank's tiles, and returns the state of the last committed step: this rank's if as many ranks committed it, else
    that of the first rank of its node, which starts the daemon that the ranks of a node use."""
    same, of_node = described(plan.engine_plan)
    ranks.compare(json.dumps([layout.units, same, plan.settings.use_node_local_storage]), of_node)
    if ranks.first_of_node:
        ranks.on_all_ranks("look for the run", lambda: begin_part(plan, ranks.topology, resume))
    else:
        ranks.meet("look for the run")
    start = lambda: _offloadd.Daemon.start(plan.engine_plan) if ranks.first_of_node else None
    daemon = ranks.on_all_ranks("start the daemon", start)
    socket = ranks.first_of_node_bytes("tell the daemon's socket", os.fsencode(daemon.socket) if daemon is not None else b"")
    meetings = ranks.meetings
    exchange = meetings.link.exchange if meetings.link is not None else None

    def open_core() -> tuple[Any, Any, Any]:
        if plan.gpu is not None:
            # The script may have filled the allocator's cache before.
            plan.gpu.give_back()
        try:
            return _offloadd.Core.open(plan.engine_plan, os.fsdecode(socket) if socket else None, daemon, exchange)
        except Error as error:
            if exchange is not None:
                # The others wait within it for this rank, and not at a meeting.
                meetings.end(str(error))
            raise

    core, first_blob, blob = ranks.on_all_ranks("open the run", open_core)
    meetings.core, core = core, meetings.watched(core)
    if first_blob is None:
        return core, None
    state = from_blob(first_blob, plan.run_dir)
    if not ranks.first_of_node and state.get("ranks", 1) == ranks.count:
        state = from_blob(blob, state_dir)
    return core, state


def agree_on_copies(plan: Plan, ranks: Ranks) -> None:
    """Lets the ranks of each node keep a copy of all parameters if all nodes have room for it."""
    if plan.why_no_copy is None:
        return
    whys = [why.decode() for why in ranks.meet("agree on copies of the parameters", plan.why_no_copy.encode())]
    why = next(filter(None, whys), "")
    if not why:
        ranks.transfers.copies = {}
    elif set(whys) != {why}:
        why = f"node {ranks.topology.node_of(whys.index(why))}: {why}"
    if ranks.first:
        say(f"{plan.run_dir}: {plan.network(why)}")


def fill(commits: Commits, weights: Optional[Weights], replace: bool) -> None:
    """Gives the tiles their first content, a block at a time, and commits it. Where it is to `replace` what an earlier run
    has left, frozen units stay: they are written once."""
    gathering, model, core, ranks = commits.engine.gathering, commits.model, commits.core, commits.ranks
    begun: set[int] = set()
    blob = commits.first()
    ranks.transfers.broadcast("share buffers and parameters outside of units", outside_of_units(model, gathering.units))
    if replace:
        ranks.meet("begin anew")
        core.begin_rewrite([unit.index for group in gathering.unit_groups for unit in group if unit.trained], blob)
    else:
        core.begin_fill(blob)
    for group in gathering.unit_groups:
        with contextlib.ExitStack() as rooms:
            for unit in group:
                if unit.flat is None:
                    unit.flatten()
                else:
                    rooms.enter_context(gathering.room(unit))
                    unit.flat.zero_()
            empty = {id(param) for unit in group if unit.built_on_meta for param in unit.params}
            if empty:
                begin(model, empty, begun, weights, commits.layout.names)
            for unit in group:
                ranks.transfers.broadcast(f"share {unit.name}", [unit.flat])
                if unit.trained or not replace:
                    core.fill(unit.index, unit.flat.data_ptr())
                gathering.release(unit)
        gathering.experts.free_wholes()
    ranks.meet("commit the first content")
    core.end_fill()
    core.begin_step()


def check_continues(commits: Commits, state: dict[str, Any], run_dir: Path) -> None:
    """Refuses an optimizer that has made other steps than the run whose commit has `state`: a script that loads a checkpoint of its own continues after
    that one, with numbers and batches of its own, and the run's weights are not those."""
    of_params = {id(param): of_param for param, of_param in commits.optimizer.state.items() if of_param}
    check_known(of_params, commits.layout.index_of)
    made = {commits.layout.index_of[key]: of_param.get("step") for key, of_param in of_params.items()}
    # Of no steps: a script that makes states before it loads them.
    made = {index: step and int(step) for index, step in made.items() if step is None or step}
    if not made or made == {index: updates for index, updates in state["updates"].items() if updates}:
        return
    steps = max((step for step in made.values() if step is not None), default=None)
    raise Error(
        f"the optimizer has {'made steps' if steps is None else f'made {steps} steps'} before offloadd.prepare, and the run in {run_dir} would resume after step "
        f"{state['steps_done']} with its own weights and moments: if the script resumes from a checkpoint of its own, pass resume=False to begin with what it "
        "has loaded, which replaces the run; if it is to continue after the run's last step, load no state of the optimizer, or call optimizer.state.clear()"
    )


def adopt(commits: Commits, state: dict[str, Any]) -> None:
    """Continues with the tiles as the commit with `state` left them."""
    gathering = commits.engine.gathering
    for unit in gathering.units:
        if unit.flat is None:
            unit.flatten()
        unit.fresh = False
        if not gathering.keep:
            gathering.take_away(unit)
        gathering.experts.free_wholes()
    commits.resume(state)
    commits.core.begin_step()


def check_frozen(commits: Commits, run_dir: Path, weights: Optional[Weights]) -> None:
    """Refuses frozen parameters whose values on the first rank are not those that an earlier run has stored."""
    core, ranks, units = commits.core, commits.ranks, commits.engine.gathering.units
    core.begin_step()
    frozen = [unit for unit in units if not unit.trained]
    core.announce([(False, unit.index) for unit in frozen])
    # A model that nothing trains and that has no values begins with random ones: those of its first start count.
    has_values = weights is not None or commits.engine.gathering.trains
    for unit in frozen:
        stored = torch.zeros(unit.room_elems, dtype=unit.dtype, device="cpu")
        core.gather(unit.index, stored.data_ptr())
        ranks.transfers.complete(f"compare {unit.name}", stored)
        compared = ranks.first and (has_values or not unit.built_on_meta)
        differs = _first_difference(unit, stored, weights, commits.layout.names) if compared else ""
        if name := ranks.first_bytes(f"compare {unit.name}", differs.encode()).decode():
            raise WeightsDiffer(
                f"{run_dir} has the frozen parameters of another model ({name} differs), and frozen parameters are written once: name another run_dir, or "
                f"delete this one: python -m offloadd delete {shlex.quote(str(run_dir))}"
            )


def _first_difference(unit: Unit, stored: torch.Tensor, weights: Optional[Weights], names: Mapping[int, list[str]]) -> str:
    """The name of the first parameter of a unit that differs in a bit from the `stored` ones; empty if none does. Its values are in its
    parameters still, or in `weights`."""
    for param, part, offset in zip(unit.params, unit.parts, unit.offsets):
        given = part if not unit.built_on_meta else weights and weights.value_of(param, names[id(param)])
        if given is None or not same_bits(Unit.view_of(stored, part, offset), given.detach().to("cpu", unit.dtype)):
            return names[id(param)][0]
    return ""


def move_to_gpu(engine: Engine, gpu: GpuDevice) -> None:
    """Lets units come to a GPU from now on, and moves to it what is in no unit."""
    gathering = engine.gathering
    gathering.memory = memory = GpuMemory(gathering.ranks, gathering.units, gpu)
    for unit in gathering.units:
        memory.adopt(unit, gathering.keep)
    for one in outside_of_units(engine.model, gathering.units):
        one.data = one.data.to(gpu.device)
    for unit in gathering.units:
        gathering.wrap_again(unit)
    for param in engine.model.parameters():
        if id(param) not in gathering.unit_of and is_wrapper(param):
            wrap_again(param)


def keep_units(engine: Engine, settings: Settings, gpu: Optional[GpuDevice], run_dir: Path) -> None:
    """Lets units stay on a GPU that computes, where what a script has kept of a released one cannot be written to."""
    if gpu is None:
        why = "the model computes on the processor"
    elif engine.gathering.keep:
        why = "all parameters stay with the model"
    elif not can_forbid():
        why = f"torch {torch.__version__} does not tell how to refuse access to memory of released weights (2.11 does)"
    else:
        engine.residency = Residency(engine.gathering, gpu, settings.gpu_resident_fraction, run_dir)
        return
    if settings.gpu_resident_fraction:
        say(f"offloadd.gpu_resident_fraction = {settings.gpu_resident_fraction:g} has no effect: {why}")


def move_activations(engine: Engine, where: str, gpu: Optional[GpuDevice]) -> None:
    """Lets inputs of checkpointed blocks wait in host memory ("cpu"), where a GPU computes, or on drives ("nvme")."""
    if where == "nvme" and engine.gathering.trains:
        engine.move_activations(TileCopies(engine.gathering.ranks.meetings, gpu))
    elif where == "cpu" and gpu is None:
        say('offloadd.activations = "cpu" has no effect: the model computes on the processor, so they are in host memory anyway')
    elif where == "cpu" and engine.gathering.trains:
        engine.move_activations(gpu.copies())


def outside_of_units(model: nn.Module, units: Sequence[Unit]) -> list[torch.Tensor]:
    """The tensors in no unit: buffers, parameters that stay in memory, and what belongs to quantized ones."""
    managed, users = {id(param) for unit in units for param in unit.params}, users_of(model)
    found = [*model.buffers(), *(one for unit in units for packed in unit.packed for one in packed.rest)]
    for param in model.parameters():
        if id(param) not in managed:
            packed = find_packed(param, users[id(param)]) or PackedParam(param)
            found += [packed.part, *packed.rest]
    return list({id(one): one for one in found}.values())

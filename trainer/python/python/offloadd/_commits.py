"""What is committed with a step beside its tiles, and where a resumed script continues: counts of updates, random numbers, the position in the
data, parameter groups, buffers, tracked objects.

    step ends -> noted -> schedulers move on -> next forward begins: completed and sealed -> committed with the tiles
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

import torch
from torch import nn

from ._buffers import Buffers
from ._config import Settings
from ._console import say
from ._engine import Engine, count_changes
from ._layout import Layout
from ._ranks import Ranks
from ._reentry import not_reentered
from ._reports import Reports
from ._state import check_readable, random_state, same_random, set_random_state, to_blob

State = dict[str, Any]

# Settings that a resumed run may have other ones of, and that change what it computes.
_CHANGE_RESULTS = ("matmuls", "mlp_chunks", "loss_chunks")


class Commits:
    """Those of one run."""

    def __init__(
        self,
        settings: Settings,
        state_dir: Path,
        layout: Layout,
        reports: Reports,
        ranks: Ranks,
        core: Any,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        track: Sequence[Any],
    ) -> None:
        self.settings, self.layout, self.reports = settings, layout, reports
        self.ranks, self.core, self.engine = ranks, core, engine
        self.optimizer, self.track = optimizer, track
        self._buffers = Buffers(engine.model)
        # Where this rank's state lies if it is large.
        self._state_dir = state_dir
        self.steps_done = 0
        # Updates so far of the parameter with each index.
        self.updates: dict[int, int] = {}
        # The time of the last checkpoint that was saved or loaded.
        self.saved_unix_s = 0
        self._position = _Position()
        self._resumed: Optional[State] = None
        self._groups: list[dict[str, Any]] = []
        # The random numbers after the step that was resumed from, and those with which the first pass begins, unless somebody has set them.
        self.resumed_random: Optional[State] = None
        self._pass_random: Optional[State] = None
        # The last step's state, and the same until it is committed.
        self._noted: State = {}
        self._to_seal: Optional[State] = None

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    @property
    def _data_ranks(self) -> int:
        """Ranks that have other samples."""
        return self.ranks.count // self.settings.sequence_parallel_size

    # A step's end

    def note_step(self) -> None:
        """The state of the step that just ended; schedulers may still advance."""
        position = self._position
        self._to_seal = self._noted = {
            "steps_done": self.steps_done,
            "updates": dict(self.updates),
            "random": random_state(),
            "epoch": position.epoch,
            "batches": position.batches,
            "batch_size": position.batch_size,
            "epoch_random": position.random,
            "ranks": self.ranks.count,
            "data_ranks": self._data_ranks,
            **{key: getattr(self.settings, key) for key in _CHANGE_RESULTS},
        }

    def first(self) -> bytes:
        """What goes with the first content: the script has not begun."""
        self.note_step()
        state, self._to_seal = self._to_seal, None
        return to_blob(state, self._state_dir)

    def again(self) -> bytes:
        """What goes with other content of the tiles: the state as it is now."""
        self.note_step()
        state, self._to_seal = self._to_seal, None
        return to_blob(self._committed(state), self._state_dir)

    def state(self) -> State:
        """The state that is committed with the last step beside the tiles."""
        return self._complete(self._noted)

    def _complete(self, state: State) -> State:
        """The state with what a script may change after `optimizer.step()`, unless it is there."""
        if "groups" in state:
            return state
        groups = [{key: _plain(value) for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        return {**state, "groups": groups, **self._buffers.state(), "track": [one.state_dict() for one in self.track]}

    def _committed(self, state: State) -> State:
        """The state as it is committed. No later start reads it where the tiles are in memory."""
        if self.settings.device != "nvme" or "groups" in state:
            return state
        state = self._complete(state)
        check_of_script(self.optimizer, self.track, state["track"], state["extra"])
        return state

    def before_pass(self) -> None:
        """A pass of the model begins."""
        self.seal()
        if self._pass_random is not None and torch.is_grad_enabled():
            # A script that skipped batches by itself goes on where the last step ended.
            set_random_state(self._pass_random)
            self._pass_random = None

    def seal(self) -> None:
        """Orders the last step's commit: called when the next forward begins, by when schedulers have moved on."""
        if self._to_seal is None:
            return
        state = self._committed(self._to_seal)
        now = random_state()
        if not same_random(now, state["random"]):
            # The script has drawn since the step.
            state = {**state, "pass_random": now}
        self._seal(to_blob(state, self._state_dir))

    @not_reentered
    def _seal(self, blob: bytes) -> None:
        if self._to_seal is None:
            # A handler of a signal has made a checkpoint meanwhile.
            return
        self.ranks.meet(f"commit step {self._to_seal['steps_done']}")
        self.core.seal(blob)
        self._to_seal = None
        self.engine.gathering.order.forget_rest()

    def drain(self) -> None:
        """Applies pending updates and commits the last step."""
        # First: objects of the script's tell their states, and may read weights.
        self.seal()
        self._drain()

    @not_reentered
    def _drain(self) -> None:
        self.ranks.meet("commit what is done")
        self.core.drain()
        self.engine.gathering.order.forget_rest()

    # Where a script continues

    def resume(self, state: State) -> None:
        """Continues after the step of `state`."""
        self.steps_done = state["steps_done"]
        for key in _CHANGE_RESULTS if self.ranks.first else ():
            now = getattr(self.settings, key)
            # Commits that are older than a key do not have it.
            was = state.get(key, now)
            if self.steps_done and was != now:
                say(f"note: offloadd.{key} was {was} up to step {self.steps_done}, and is {now} from now on")
        self._noted = state
        self.updates = dict(state["updates"])
        self.resumed_random = state["random"]
        # Before the first step there is nothing to go on from.
        self._pass_random = (state.get("pass_random") or state["random"]) if self.steps_done else None
        self._resumed = {key: state[key] for key in ("epoch", "batches", "epoch_random", "random")}
        self._resumed.update(ranks=state.get("data_ranks", state.get("ranks", 1)), batch_size=state.get("batch_size"))
        if "groups" in state:
            self._groups = state["groups"]
            self.restore_groups()
            if lost := self._buffers.restore(state):
                say(f"note: the last step had buffers that the model does not have before its first pass, and they begin anew: {', '.join(lost)}")
            for one, kept in zip(self.track, state["track"]):
                one.load_state_dict(kept)

    def restore_groups(self) -> None:
        """Gives the parameter groups what they had at the step that was resumed from: a scheduler made since may have changed it."""
        for group, kept in zip(self.optimizer.param_groups, self._groups):
            group.update(kept)

    def take_random(self) -> Optional[State]:
        """The random numbers after the step that was resumed from, for a caller that sets them itself."""
        self._pass_random = None
        return self.resumed_random

    def restore(self, checkpoint: Path, state: State) -> None:
        """Brings tiles and everything else to a checkpoint, and commits it as the run's last step."""
        self.engine.forget_gradients()
        self.ranks.meet("load a checkpoint")
        frozen = self.ranks.total("compare frozen parameters", self.core.frozen())
        self.core.load(str(checkpoint), to_blob(state, self._state_dir), frozen)
        self.resume(state)
        if self._position.epoch:
            # The script is in the middle of its data and continues there.
            self._resumed = None
        set_random_state(state["random"])
        self._pass_random, self._to_seal = None, None
        for unit in self.engine.gathering.units:
            # What a script has written is replaced.
            unit.watch.end()
        count_changes(param for unit in self.engine.gathering.units if unit.trained for param in unit.params)
        self.engine.stale()
        self.core.begin_step()
        self.reports.open(self.steps_done)

    # The position in the data

    @property
    def epoch(self) -> int:
        """Times that `batches` was called."""
        return self._position.epoch

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
            skip, self._resumed = seen // (self._data_ranks * size), None
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
            if (left := self._to_seal) is not None:
                # Before the script draws its next batch and changes what goes with it.
                complete = self._committed(left)
                if self._to_seal is left:
                    self._to_seal = complete
        position.batches, position.random = 0, None


class _Position:
    """The script's position in its data."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0
        # Samples of a batch, if the loader says so.
        self.batch_size: Optional[int] = None
        self.random: Optional[dict[str, Any]] = None


def check_of_script(optimizer: torch.optim.Optimizer, track: Sequence[Any], states: Sequence[Any], extra: Mapping[str, Any]) -> None:
    """Refuses parameter groups, states of tracked objects and extra states of modules that a later start could not read."""
    for number, group in enumerate(optimizer.param_groups):
        check_readable({key: _plain(value) for key, value in group.items() if key != "params"}, f"parameter group {number} of the optimizer")
    for one, state in zip(track, states):
        check_readable(state, f"the state_dict of the {type(one).__name__} in track")
    for path, state in extra.items():
        check_readable(state, f"what get_extra_state() of {path or 'the model'} gives")


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value

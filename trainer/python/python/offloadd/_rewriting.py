"""Other contents for a run's tiles: weights that a script loads, values that it has written, moments. Each is committed as a whole."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Container, Iterator, Mapping, Sequence

import torch

from ._commits import Commits
from ._engine import count_changes
from ._errors import Error, NotSupported
from ._packed import same_numbers
from ._released import ReadOnlyCopy
from ._units import Unit
from ._weights import recording


class Rewriting:
    """Rewrites the tiles of one run."""

    def __init__(self, commits: Commits, plain_load: Callable[..., Any]) -> None:
        """`plain_load` is the model's own `load_state_dict`."""
        self._commits, self._engine, self._gathering = commits, commits.engine, commits.engine.gathering
        self._core, self._ranks, self._plain_load = commits.core, commits.ranks, plain_load
        # The step after which the run was resumed.
        self._resumed_at = commits.steps_done

    # What is allowed

    def allow(self) -> None:
        """Lets the model's `load_state_dict` replace what a resumed run has trained."""
        self._resumed_at = 0

    @property
    def _replaces_resumed(self) -> bool:
        return self._resumed_at == self._commits.steps_done > 0

    def check_loadable(self, anyway: bool = False) -> None:
        """Refuses other weights where gradients would be lost and, unless `anyway`, where they would replace what was resumed."""
        if not anyway and self._replaces_resumed:
            raise Error(
                f"this run was resumed after step {self._commits.steps_done}, and load_state_dict would replace what was trained: if the script resumes from a "
                "checkpoint of its own, begin the run anew with resume=False; if these are the weights that training begins with, load them before "
                "offloadd.prepare, or only if run.steps_done == 0; run.load_state_dict replaces what was trained all the same"
            )
        self._engine.check_between_steps("load_state_dict")

    def check_replaceable(self, call: str, what: str) -> None:
        """Refuses to load what would replace a resumed run's, and what would lose gradients."""
        self._engine.check_between_steps(call)
        if self._replaces_resumed:
            raise Error(
                f"this run was resumed after step {self._commits.steps_done}, and {call} would replace its {what}: load them only if "
                "run.steps_done == 0, or begin the run anew with resume=False"
            )

    # Tiles

    @contextlib.contextmanager
    def committing(self, units: Sequence[Unit], what: str) -> Iterator[None]:
        """Lets the caller write the tiles of trained `units` anew meanwhile, each once and in this order, and commits all of them at
        once."""
        self._commits.seal()
        self._ranks.meet(f"load {what}")
        self._core.begin_rewrite([unit.index for unit in units], self._commits.again())
        self._gathering.order.forget_rest()
        yield
        self._ranks.meet(f"commit loaded {what}")
        self._core.end_fill()
        self._core.begin_step()

    @contextlib.contextmanager
    def weights(self, units: Sequence[Unit], replaced: Container[int] = ()) -> Iterator[None]:
        """`committing`, for other weights of `units`. What is in memory comes from tiles again: what a script has written there, but to parameters whose
        ids are `replaced`, is refused."""
        self._engine.check_between_steps("other weights or another state of them")
        self._gathering.refuse_writes_in_memory(replaced=replaced)
        with self.committing(units, "weights"):
            yield
        count_changes(param for unit in units for param in unit.params)
        self._engine.updated()

    # Weights

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Gives the model other weights, a unit at a time, and commits them. The optimizer's moments stay."""
        self.check_loadable(anyway=True)
        self._commits.seal()
        # What would be copied to each parameter, by id. Buffers are copied at once.
        with recording(self._gathering.params) as sources:
            try:
                answer = self._plain_load(state_dict, strict=strict)
            except RuntimeError as error:
                # PyTorch says what does not fit after it has copied the rest.
                answer = error
        self.replace(sources)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def replace(self, sources: Mapping[int, torch.Tensor]) -> None:
        """Gives parameters, by their id, other values, a unit at a time, and commits all of them at once. Moments stay."""
        self._commits.seal()
        self._gathering.state_copies.loaded(sources)
        self._check_frozen(sources)
        for source in sources.values():
            if isinstance(source, ReadOnlyCopy):
                # Once tiles are being written, it is too late.
                source.origin.check(torch.nn.Module.load_state_dict)
        units = [unit for unit in self._gathering.units if unit.trained and any(id(param) in sources for param in unit.params)]
        if not units:
            return
        with self.weights(units, replaced=sources):
            for unit in units:
                flat = torch.zeros(unit.elems, dtype=unit.dtype)
                changed = [index for index, param in enumerate(unit.params) if id(param) in sources]
                for index in changed:
                    with torch.no_grad():
                        Unit.view_of(flat, unit.params[index], unit.offsets[index]).copy_(sources[id(unit.params[index])])
                self._core.rewrite(unit.index, flat.data_ptr(), changed)

    def _check_frozen(self, sources: Mapping[int, torch.Tensor]) -> None:
        """Refuses other values of frozen parameters."""
        for unit in self._gathering.units:
            changed = [param for param in unit.params if id(param) in sources]
            if unit.trained or not changed:
                continue
            with self._gathering.gathered(unit):
                for param in changed:
                    if not same_numbers(param, sources[id(param)]):
                        raise NotSupported(
                            f"{self._commits.layout.names[id(param)][0]} is frozen, and frozen parameters are written once: load other values before "
                            f"offloadd.prepare, with another run_dir"
                        )

    def keep_changes(self, units: Sequence[Unit]) -> None:
        """Commits the values that a script has given to parameters of `units`, which are in memory."""
        if sources := self.changes(units):
            self._engine.check_between_steps("changing parameters")
            self.replace(sources)

    def changes(self, units: Sequence[Unit]) -> dict[int, torch.Tensor]:
        """The values that a script has given to parameters of `units` on the first rank, by the parameters' ids. What is in memory are the tiles'
        again."""
        sources: dict[int, torch.Tensor] = {}
        for unit in units:
            given = unit.flat.clone()
            self._ranks.transfers.broadcast(f"share what was given to {unit.name}", [given])
            self._gathering.take_away(unit)
            self._gathering.gather(unit, record=False)
            for param, offset in zip(unit.params, unit.offsets):
                value = Unit.view_of(given, param, offset)
                if not torch.equal(param.detach(), value):
                    sources[id(param)] = value
        return sources

"""A step: what `optimizer.step()` does with the gradients that have come."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Container, Iterator, Mapping

import torch

from . import _muon
from ._commits import Commits
from ._console import say
from ._directions import give_directions, momentum_step
from ._errors import Error
from ._interrupts import Interrupts
from ._tile_gradients import GradientInTile
from ._supported_optimizers import check_added, check_rules, check_settings

# lr, beta1, beta2, eps and weight_decay of updates, each once.
Scalars = list[tuple[float, ...]]

# The number of its scalars, that of its update and the factor of its gradient, for each parameter in the order of the units.
OfParams = list[tuple[int, int, float]]


class Steps:
    """Those of one run."""

    def __init__(self, commits: Commits) -> None:
        self._commits, self.engine = commits, commits.engine
        units = [unit for unit in self.engine.gathering.units if unit.trained]
        # The ids of parameters that Muon updates, and the names of all that are trained.
        self._muon = {id(param) for unit in units if unit.muon for param in unit.params}
        self._names = {id(param): commits.layout.names[id(param)][0] for unit in units for param in unit.params}

    def make(self) -> None:
        """Orders the update of all parameters that have gradients. Without gradients it does nothing."""
        with self.engine.forwards.alone():
            self._make()

    def _make(self) -> None:
        commits, gradients = self._commits, self.engine.gradients
        if gradients.broken or gradients.half_backward:
            raise Error("the last backward did not end, so some gradients are missing: call zero_grad() and continue with the next batch")
        self.engine.gathering.refuse_writes()
        check_added(commits.optimizer, self.engine.gathering.unit_of)
        dropped, given = gradients.looked_at()
        if not given and len(dropped) == len(gradients.handles):
            # As plain PyTorch: parameters without gradients stay as they are.
            gradients.forget_sums()
            return
        if gradients.applied:
            raise Error("optimizer.step() twice for one backward: the gradients are gone with the first step; call backward again")
        check_rules(commits.optimizer, self._muon, self._names)
        check_settings(commits.optimizer)
        scalars, number_of = scalars_of(commits.optimizer, self._muon)
        gradients.settle_changes(given)
        came = {key: held for key, held in gradients.handles.items() if key not in dropped}
        if why := next((held.partial for key, held in came.items() if held.partial and key in number_of), None):
            raise Error(why)
        scales = self._scales(came)
        norm = math.sqrt(sum(held.square_sum * held.unscaled**2 for held in came.values())) / (commits.reports.loss_scale or 1.0)
        commits.ranks.meet(f"make step {commits.steps_done + 1}")
        # A script that never calls the whole model begins no pass that would do it.
        commits.seal()
        if not gradients.are_finite():
            # As torch.optim would, the update makes every parameter nan; a scaler never calls step then.
            say(f"warning: step {commits.steps_done + 1}: a gradient is not finite, so parameters become nan, as with torch.optim")
        interrupts = Interrupts()
        # All of it, or nothing: a step that is made and not counted would be made again, and parameters that stay would be of two steps.
        with interrupts.later():
            of_params, updates = self._of_params(scales, number_of)
            with self._directions(scales, scalars, of_params):
                interrupts.finish(commits.core.finish, scalars, of_params)
            commits.updates = updates
            commits.steps_done += 1
            commits.note_step()
            commits.reports.step(commits.steps_done, norm, self.engine.resident_bytes)
            self.engine.updated()
            self.engine.step_ended()
        interrupts.end()

    @contextlib.contextmanager
    def _directions(self, scales: Mapping[int, float], scalars: Scalars, of_params: OfParams) -> Iterator[None]:
        """Puts directions in place of the gradients of matrices, where Muon updates them. The step must be finished within."""
        groups = {id(param): group for group in self._commits.optimizer.param_groups for param in group["params"]}
        came = self._muon & scales.keys() & groups.keys()
        # Blocks from the last to the first, which the next forward begins with.
        units = [unit for unit in reversed(self.engine.gathering.units) if any(id(param) in came for param in unit.params)]
        if not units:
            yield
            return
        momenta = [momentum_step(groups[key], scales[key]) if key in came else None for key in self._commits.layout.index_of]
        self._commits.core.begin_directions([unit.index for unit in units], momenta, scalars, of_params)
        give_directions(units, groups, came, self.engine.gathering.memory, self._commits.ranks)
        yield

    def _of_params(self, scales: Mapping[int, float], number_of: Mapping[int, int]) -> tuple[OfParams, dict[int, int]]:
        """The number of its scalars, that of the update and the factor of what is in place of its gradient for each parameter: 0 is no update. And the numbers
        of updates after the step."""
        updates, found = dict(self._commits.updates), []
        for key, index in self._commits.layout.index_of.items():
            if key in scales and key in number_of:
                updates[index] = updates.get(index, 0) + 1
                found.append((number_of[key], updates[index], 1.0 if key in self._muon else scales[key]))
            else:
                found.append((0, 0, 1.0))
        return found, updates

    def _scales(self, came: Mapping[int, GradientInTile]) -> dict[int, float]:
        """The factor of each parameter's gradient: what clipping and scaling made of its handle."""
        clipping, loss_scale = self._commits.settings.gradient_clipping, self._commits.reports.loss_scale or 1.0
        # Reading one that lies on a GPU waits for it.
        tensors = {id(held.scale): held.scale for held in came.values()}
        read = {key: float(scale) / loss_scale for key, scale in tensors.items()}
        scales = {key: read[id(held.scale)] for key, held in came.items()}
        if clipping > 0:
            norm = math.sqrt(sum(came[key].square_sum * scale * scale for key, scale in scales.items()))
            if norm > clipping:
                factor = clipping / (norm + 1e-6)
                scales = {key: scale * factor for key, scale in scales.items()}
        return scales


def scalars_of(optimizer: torch.optim.Optimizer, muon: Container[int]) -> tuple[Scalars, dict[int, int]]:
    """The scalars of updates, and the number of those of each parameter. Muon updates those with the ids `muon`."""
    numbers: dict[tuple[float, ...], int] = {}
    number_of = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            found = _muon.scalars_of(group, param.shape) if id(param) in muon else _scalars_of(group)
            number_of[id(param)] = numbers.setdefault(found, len(numbers))
    return list(numbers), number_of


def _scalars_of(group: Mapping[str, Any]) -> tuple[float, ...]:
    """The settings of a group, as the engine takes them."""
    beta1, beta2 = group["betas"]
    return tuple(float(one) for one in (group["lr"], beta1, beta2, group.get("eps", 0), group["weight_decay"]))

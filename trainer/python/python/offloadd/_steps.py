"""A step: what `optimizer.step()` does with the gradients that have come."""

from __future__ import annotations

import math
from typing import Any, Mapping

import torch

from ._commits import Commits
from ._console import say
from ._errors import Error
from ._tile_gradients import PARTIAL, GradientInTile
from ._supported_optimizers import check_settings


class Steps:
    """Those of one run."""

    def __init__(self, commits: Commits) -> None:
        self._commits, self.engine = commits, commits.engine

    def make(self) -> None:
        """Orders the update of all parameters that have gradients. Without gradients it does nothing."""
        commits, gradients = self._commits, self.engine.gradients
        if gradients.broken or gradients.half_backward:
            raise Error("the last backward did not end, so some gradients are missing: call zero_grad() and continue with the next batch")
        self.engine.gathering.refuse_writes()
        dropped, given = gradients.looked_at()
        if not given and len(dropped) == len(gradients.handles):
            # As plain PyTorch: parameters without gradients stay as they are.
            gradients.forget_sums()
            return
        if gradients.applied:
            raise Error("optimizer.step() twice for one backward: the gradients are gone with the first step; call backward again")
        check_settings(commits.optimizer)
        groups, group_of = groups_of(commits.optimizer)
        gradients.settle_changes(given)
        came = {key: held for key, held in gradients.handles.items() if key not in dropped}
        if any(held.partial for key, held in came.items() if key in group_of):
            raise Error(PARTIAL)
        scales = self._scales(came)
        norm = math.sqrt(sum(held.square_sum * held.unscaled**2 for held in came.values())) / (commits.reports.loss_scale or 1.0)
        commits.ranks.meet(f"make step {commits.steps_done + 1}")
        # A script that never calls the whole model begins no pass that would do it.
        commits.seal()
        if not gradients.are_finite():
            # As torch.optim would, the update makes every parameter nan; a scaler never calls step then.
            say(f"warning: step {commits.steps_done + 1}: a gradient is not finite, so parameters become nan, as with torch.optim")
        of_params = self._of_params(scales, group_of)
        interrupted = None
        try:
            commits.core.finish(groups, of_params)
        except Error:
            raise
        except BaseException as error:
            # A signal's handler ended the wait; the engine ends the step all the same.
            interrupted = error
        commits.steps_done += 1
        commits.note_step()
        commits.reports.step(commits.steps_done, norm, self.engine.resident_bytes)
        self.engine.updated()
        self.engine.step_ended()
        if interrupted is not None:
            raise interrupted

    def _of_params(self, scales: Mapping[int, float], group_of: Mapping[int, int]) -> list[tuple[int, int, float]]:
        """Group, number of the update and factor of the gradient for each parameter: 0 is no update."""
        updates, found = self._commits.updates, []
        for key, index in self._commits.layout.index_of.items():
            if key in scales and key in group_of:
                updates[index] = updates.get(index, 0) + 1
                found.append((group_of[key], updates[index], scales[key]))
            else:
                found.append((0, 0, 1.0))
        return found

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


def groups_of(optimizer: torch.optim.Optimizer) -> tuple[list[tuple[float, ...]], dict[int, int]]:
    """The settings of each parameter group, and the group of each parameter."""
    groups, group_of = [], {}
    for index, group in enumerate(optimizer.param_groups):
        groups.append(scalars_of(group))
        for param in group["params"]:
            group_of[id(param)] = index
    return groups, group_of


def scalars_of(group: Mapping[str, Any]) -> tuple[float, ...]:
    """The settings of a group, as the engine takes them."""
    beta1, beta2 = group["betas"]
    return tuple(float(one) for one in (group["lr"], beta1, beta2, group.get("eps", 0), group["weight_decay"]))

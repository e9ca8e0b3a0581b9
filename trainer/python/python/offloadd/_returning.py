"""Gives a run's model and optimizer back as plain ones with their values, in host memory where parameters were released."""

from __future__ import annotations

from typing import Any, Optional

import torch

from . import _offloadd
from ._commits import Commits
from ._engine import Engine
from ._moments import MASTER, Moments, States
from ._prepared_optimizer import give_back


def has_room(commits: Commits, moments: Moments, keep: Optional[bool]) -> bool:
    """Whether the values are kept: where `keep` does not say it, if they take half of the available memory at most."""
    if keep is None:
        available = _offloadd.host_available_bytes() or 0
        keep = sum(unit.bytes for unit in commits.engine.gathering.units) + moments.bytes <= available // 2
    return any(commits.ranks.any("keep the values", bytes([keep])))


def return_values(commits: Commits, moments: Moments) -> None:
    """Makes model and optimizer plain ones with the values that are in tiles."""
    engine = commits.engine
    grads = engine.gradients.take_known()
    states: dict[Any, dict[str, Any]] = {}
    for param, state in States(moments).items():
        plain = {name: value.as_subclass(torch.Tensor) for name, value in state.items() if name != MASTER}
        states[param] = {name: value.to("cpu", param.dtype) if name in moments.names_of(param) else value for name, value in plain.items()}
    _return_parameters(engine)
    # What was released on a GPU lies in host memory now, and what belongs to it follows.
    for param, state in states.items():
        states[param] = {name: value.to(param.device) if name in moments.names_of(param) else value for name, value in state.items()}
    give_back(commits.optimizer, states)
    # Those of a model that nothing trains are the script's own.
    for param in engine.gathering.params if engine.gathering.trains else ():
        grad = grads.get(id(param))
        param.grad = None if grad is None else grad.to(param.device)


def _return_parameters(engine: Engine) -> None:
    gathering = engine.gathering
    for unit in gathering.units:
        gathering.gather(unit, record=False)
        if not gathering.keep and unit.flat.device.type != "cpu":
            # All of it may not fit where one block at a time did.
            values = unit.flat.to("cpu", copy=True)
            gathering.take_away(unit)
            unit.move(values, copy=False)
            gathering.open_for_good(unit)
            for one in (one for packed in unit.packed for one in packed.rest):
                one.data = one.data.to("cpu")
            gathering.wrap_again(unit)
    engine.detach()
    for unit in gathering.units:
        unit.own_storages()
        # The parameters alone have it from now on, whoever keeps the run.
        unit.flat, unit.access = unit.flat.new_empty(0), None

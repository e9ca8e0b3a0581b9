"""Muon between backward and the update: the gradients of matrices become directions, which need whole matrices.

    tiles    momentum, gradient -> new momentum, mixture      element by element, where the tile is
    buffer   mixture -> other ranks' parts -> direction       matrix by matrix, where the model computes
    tiles    direction -> in place of the gradient            the update subtracts it

A unit goes through all three, in the buffer that its gradients left from, before the next one. Every rank makes each matrix orthogonal: equal inputs
give equal bits.
"""

from __future__ import annotations

from typing import Any, Container, Mapping, Optional, Sequence

import torch

from . import _muon
from ._memory import Memory
from ._param_units import is_divided, part_of, whole_of
from ._ranks import Ranks
from ._units import Unit

# Decay of a momentum, whether Nesterov's mixture is made orthogonal, and the factor of the gradient; None where no momentum changes.
MomentumStep = Optional[tuple[float, bool, float]]


def momentum_step(group: Mapping[str, Any], factor: float) -> MomentumStep:
    """The step of the momentum of a parameter in `group`, whose gradient has a factor."""
    return float(group["momentum"]), bool(group["nesterov"]), factor


@torch.no_grad()
def give_directions(units: Sequence[Unit], group_of: Mapping[int, Mapping[str, Any]], came: Container[int], memory: Memory, ranks: Ranks) -> None:
    """Makes the directions of `units`, which `begin_directions` has announced in this order, of the parameters whose ids are in `came`, and begins to update
    them. All ranks must call it."""
    for unit in units:
        buffer = memory.mixtures(unit)
        if not unit.sharded:
            ranks.transfers.complete(f"bring the matrices of {unit.name}", buffer)
        for param, matrix in unit.tensors(buffer):
            if id(param) not in came:
                continue
            mixture = matrix.bfloat16()
            if is_divided(param):
                mixture = ranks.transfers.run_collective(f"bring the parts of a matrix of {unit.name}", lambda: whole_of(mixture, param))
            matrix.copy_(part_of(_muon.orthogonal(mixture.to(matrix.device), group_of[id(param)]), param))
        memory.give_directions(unit)

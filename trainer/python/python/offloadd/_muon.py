"""Muon, whose step of a matrix needs all of it: its direction is the momentum with all singular values near 1 (Jordan et al., "Muon: An optimizer
for hidden layers in neural networks", 2024). As `torch.optim.Muon` computes it.

Both halves of a step are means or sums of single elements, and tiles make them; between them is a product of whole matrices:

    momentum  = momentum - (1 - mu) (momentum - g)            a tile of its own, with SGD's rule: a decay of 1, and -g for a gradient
    direction = orthogonal(g + mu (momentum - g))             here
    master    = master - lr (decay master + direction)        a tile without moments, with SGD's rule

The direction comes before the tiles' update, from the momentum before it: so a step ends with one update and one commit, as with other rules. Bytes
between host memory and drives, of a bf16 parameter, gradients not counted: reads 12 (momentum twice, parameter and residual), writes 8; AdamW 12 and 12.
Measured with 25 M parameters and 64 MiB of staging: 13.5 and 8.0.
"""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

import torch

from ._errors import NotSupported


class _NoMuon(torch.optim.Optimizer):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotSupported(f"torch {torch.__version__} has no torch.optim.Muon: install torch 2.9 or newer")


Muon = getattr(torch.optim, "Muon", _NoMuon)

# (lr, beta1, beta2, eps, weight_decay) of the engine's update of a parameter.
Scalars = tuple[float, float, float, float, float]


def rule_of(group: Mapping[str, Any]) -> str:
    """The rule that updates a group of parameters: Muon's, if it does not say otherwise."""
    return "Muon" if group.get("use_muon", True) else "AdamW"


def ids_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the parameters that Muon updates."""
    return {id(param) for group in optimizer.param_groups if rule_of(group) == "Muon" for param in group["params"]}


def scalars_of(group: Mapping[str, Any], shape: Sequence[int]) -> Scalars:
    """The update of a matrix by its direction."""
    lr = float(group["lr"])
    rate = lr * _factor(group["adjust_lr_fn"], *shape)
    # Its decay has the rate before it was adjusted.
    return rate, 0.0, 0.0, 0.0, lr * float(group["weight_decay"]) / rate if rate else 0.0


def momentum_scalars_of(group: Mapping[str, Any]) -> Scalars:
    """The update of a momentum by gradients whose factor is negative."""
    return 1 - float(group["momentum"]), 0.0, 0.0, 0.0, 1.0


def _factor(rule: Any, rows: int, columns: int) -> float:
    """What the learning rate of a matrix is multiplied by."""
    if rule in (None, "original"):
        return math.sqrt(max(1, rows / columns))
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    raise NotSupported(f'torch.optim.Muon with adjust_lr_fn={rule!r}: use "original" or "match_rms_adamw"')


def mixed(grad: torch.Tensor, momentum: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """What is to be made orthogonal, element by element, of a gradient and the momentum before it, which is changed. Both are fp32."""
    momentum.lerp_(grad, 1 - group["momentum"])
    return (grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).bfloat16()


def orthogonal(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """A bf16 matrix with its singular values brought near 1 by Newton and Schulz's iteration: the operations of `torch.optim.Muon`, in their order."""
    (a, b, c), tall = group["ns_coefficients"], matrix.size(0) > matrix.size(1)
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide

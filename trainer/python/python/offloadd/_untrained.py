"""Models that nothing trains: a reference, a teacher, a model that generates. A tile has the parameters alone and is written once.

The run is one whose optimizer has no parameters: what it commits is what `offloadd.prepare` has written first.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ._config import Settings
from ._errors import Error, NotSupported


class WeightsDiffer(NotSupported):
    """A run has the frozen parameters of another model."""


class NoOptimizer(torch.optim.AdamW):
    """The optimizer of a run that trains nothing."""

    def __init__(self) -> None:
        super().__init__([{"params": []}])


def check_moves(settings: Settings) -> None:
    """Refuses a place for parameters that are not trained where they are not moved either."""
    if settings.parameters_stay:
        raise Error(
            'without an optimizer parameters are only moved, and zero_optimization.offload_param.device is "none": set it to "cpu" or "nvme", use the model '
            "as it is, or pass the optimizer: offloadd.prepare(model, optimizer, config)"
        )


def beside(run_dir: Path) -> Path:
    """The directory of a model that is not trained, beside that of one that is trained with the same configuration."""
    return run_dir.with_name(f"{run_dir.name}-frozen")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type and shape have the same bits: numbers that are equal may differ, and none is equal to a nan."""
    return torch.equal(*(value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other)))

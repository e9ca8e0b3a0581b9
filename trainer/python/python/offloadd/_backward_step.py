"""A step of an optimizer alone whose updates begin in its backward: each unit's as soon as its gradients are in their tiles.

    with block     settings and values are taken; each unit that has come begins to be updated
    step           refuses what has changed since, updates the rest, brings parameters back

What has begun cannot be undone: all that would change the step, drop it or see a part of it is refused by name.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Iterator, Optional

import torch

from ._beside import Beside
from ._errors import Error, NotSupported
from ._param_units import ParamUnit

# What a step is updated with: scalars, and of each parameter their number.
Scalars = tuple[list[tuple[float, ...]], dict[int, int]]

_LOST = "close() the optimizer and resume() a new one after its last commit, or load a checkpoint"


class BackwardStep:
    """The updates of one step."""

    def __init__(self, beside: Beside, core: Any, scalars: Scalars, of_params: list[tuple[int, int, float]]) -> None:
        self._beside, self._core, self._scalars, self._of_params = beside, core, scalars, of_params
        # Those that are being updated, in the order in which their gradients came.
        self.units: list[ParamUnit] = []
        self._taking = False
        # Why the step cannot be made.
        self._failed: Optional[str] = None

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Lets units be updated in backward."""
        self._taking = True
        try:
            with self._beside.beginning(self._begin):
                yield
        except BaseException as error:
            self._failed = f"{type(error).__name__} has ended the backward of a step whose updates had begun"
            raise
        finally:
            self._taking = False

    def _begin(self, unit: ParamUnit) -> None:
        first = not self.units
        self.units.append(unit)
        self._core.begin_updates((self._scalars[0], self._of_params) if first else None)

    def hand_over(self, grads: dict[int, torch.Tensor], scalars: Scalars) -> None:
        """Takes the gradients to tiles that have not come in backward. Refuses a step that would be another one than that which has begun."""
        found: Optional[Error] = None
        try:
            self._check(grads, scalars)
        except Error as error:
            found = error
        # All ranks make the step, or none.
        (elsewhere,) = self._beside.ranks.any("look for what changed since updates began", bytes([found is not None]))
        if found is not None:
            raise found
        if elsewhere:
            raise Error(f"another rank cannot make the step whose updates have begun in backward, and names why: {_LOST}")
        # Unless it is made.
        self._failed = "a step whose updates had begun in backward was interrupted"
        self._beside.hand_over(grads, remember=False, begun=True)
        if not math.isfinite(sum(self._beside.square_sums.values())):
            self._failed = "a gradient is not finite in a step whose updates have begun in backward"
            raise Error(f"{self._failed}, and nothing of it is committed: {_LOST}")

    def _check(self, grads: dict[int, torch.Tensor], scalars: Scalars) -> None:
        if self._taking:
            raise NotSupported("step() within update_in_backward(): call it after the with block")
        if self._beside.interrupted:
            self._failed = "an exception has ended the backward of a step whose updates had begun"
        if self._failed is not None:
            raise Error(f"{self._failed}: {_LOST}")
        if scalars != self._scalars:
            raise NotSupported(
                "the learning rate or another setting of a group was changed after update_in_backward(), which has begun the step with those of before: "
                "call schedulers after step()"
            )
        taken = {id(piece.param): piece.name for unit in self.units for piece in unit.params}
        name = next((name for key, name in taken.items() if key not in grads), None) or self._beside.changed_since_backward(grads)
        if name is not None:
            self._failed = f"the gradient of {name} was changed or dropped after update_in_backward() had begun to update it"
            raise NotSupported(
                f"{self._failed}: a step that is clipped, that GradScaler scales, or that has a second backward cannot begin within it, nor one of DistributedDataParallel, "
                f"also with one rank, which gives each gradient other memory. To go on, {_LOST}"
            )
        changed = self._beside.perhaps_changed()
        if changed:
            self._failed = f"{self._beside.name_of[id(changed[0])]} was written after update_in_backward() had begun to update it"
            raise NotSupported(f"{self._failed}: change parameters after step(). To go on, {_LOST}")

    def has_all(self, units: list[ParamUnit]) -> bool:
        """Whether all of `units` are being updated."""
        return len(units) == len(self.units)

    def in_order(self, units: list[ParamUnit]) -> list[ParamUnit]:
        """`units` in the order in which they are updated."""
        place = {unit.index: at for at, unit in enumerate(self.units)}
        return sorted(units, key=lambda unit: place.get(unit.index, len(place)))

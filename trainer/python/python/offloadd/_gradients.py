"""Gradients of a step, from autograd to the tiles: what came, what of it `param.grad` shows until the step, and what a script changed there."""

from __future__ import annotations

import math
import weakref
from typing import Any, Callable, Mapping, Optional

import torch
from torch import nn

from ._errors import NotSupported
from ._forwards import in_backward
from ._gathering import Gathering
from ._given import take_given
from ._reentry import not_reentered
from ._tile_gradients import CLOSED, PARTIAL, PARTIAL_OUTSIDE, BackwardGradients, GradientInTile
from ._released import AS_TENSORS, by_other_optimizer
from ._units import Unit


class Gradients:
    """Those of one model."""

    def __init__(self, gathering: Gathering, core: Any) -> None:
        self._gathering, self._core, self._ranks = gathering, core, gathering.ranks
        # The kind of pass that is under way.
        self.kind: Any = None
        # Scales each gradient before it is added to those of the step; None where the losses are scaled already.
        self.scaled: Optional[Callable[[torch.Tensor], torch.Tensor]] = None
        # Of several ranks: times a unit's part of this backward was over, the gradients it had then, and whether it has all of them,
        # by the kind of pass, the unit and that time.
        self._times: dict[Unit, int] = {}
        self._had: dict[Unit, int] = {}
        self._complete: dict[tuple, bool] = {}
        # Whether a backward did not end, so that gradients are missing.
        self.broken = False
        # Sums of squares by parameter, of the gradients that have come in this step.
        self.square_sums: dict[int, float] = {}
        # Parameters whose gradients were handed over in this step, and the units of this backward: their sums come at its end.
        self._summed: set[int] = set()
        self._handed_over: set[Unit] = set()
        # `param.grad` between backward and step, by parameter.
        self.handles: dict[int, GradientInTile] = {}
        # Views of the buffers that gradients leave from, by unit and buffer.
        self._gradient_views: dict[tuple[Unit, int], dict[int, torch.Tensor]] = {}
        # Those that scripts may hold, and what is in the tiles as long as they show it.
        self._shown: dict[int, weakref.ref[GradientInTile]] = {}
        self._content = object()
        # Whether step() has used the gradients that `param.grad` still shows.
        self.applied = False
        # Parameters whose gradients a script has made zero: where none come, the step is one with zeros.
        self._zeroed: set[int] = set()
        # Parameters whose gradients lack what plain PyTorch would still have of an earlier step, and what is said where they are used.
        self._partial: dict[int, str] = {}
        # The unit whose gradients were read last, and these.
        self._read: Optional[tuple[Unit, torch.Tensor]] = None

    # A backward

    @property
    def under_way(self) -> bool:
        """Whether a backward is, or did not end."""
        return self._gathering.forwards.backward

    @under_way.setter
    def under_way(self, is_under_way: bool) -> None:
        self._gathering.forwards.backward = is_under_way

    @property
    def half_backward(self) -> bool:
        """Whether the last backward did not end."""
        return self.under_way and not in_backward()

    def drop_half(self) -> None:
        """Drops what a backward brought that did not end: it is no gradient of anything."""
        self.under_way, self.broken = False, True
        self._times.clear()
        self._had.clear()
        for unit in self._gathering.units:
            unit.gradients.clear()
        self.drop()

    def left(self) -> list[int]:
        """Takes what is left at the end of a backward. Returns for each unit 1 where gradients are left on any rank, and 2 or 3 where some came after the
        unit's part of the backward was over."""
        for unit in self._gathering.units:
            if unit.trained:
                self.take_all(unit)
        of_unit = lambda unit: (len(unit.gradients) > 0) + 2 * (len(unit.gradients) > self._had.get(unit, 0))
        return list(self._ranks.any("end the backward", bytes(map(of_unit, self._gathering.units))))

    def hand_over_left(self, unit: Unit, left: int) -> None:
        """Hands over what is `left` of a unit."""
        # Where experts got nothing on any rank, the unit need not wait for them the next time.
        self._complete[self.kind, unit, self._times.get(unit)] = left == 1
        self.hand_over(unit)

    def hand_over_unused(self) -> None:
        """Hands over zeros for groups of experts that got no tokens, where others of their layer did: in plain PyTorch all of them are one
        parameter, whose gradient is zero there."""
        layers = [[unit for unit in cut.units if unit.trained] for cut in self._gathering.experts.cuts]
        units = [unit for of_layer in layers for unit in of_layer]
        came = [any(id(param) in self._summed for param in unit.params) for unit in units]
        came_of = dict(zip(units, self._ranks.any("end the backward", bytes(came)))) if units else {}
        for of_layer in layers:
            for unit in of_layer:
                if not came_of[unit] and any(came_of[other] for other in of_layer):
                    self.hand_over(unit)
                    self._summed.update(map(id, unit.params))

    def forget_buffers(self) -> None:
        """Drops what refers to the buffers that gradients leave from."""
        self._gradient_views.clear()

    def end_backward(self) -> None:
        """All gradients were handed over."""
        self._times.clear()
        self._had.clear()
        self.under_way = False
        self._collect_sums()

    def begin_backward(self) -> None:
        """Takes away what `param.grad` has: autograd would add to it."""
        self.under_way = True
        self._put_away()
        take_given((param for unit in self._gathering.units if unit.trained for param in unit.params), self._gathering.name)

    def _put_away(self) -> None:
        if not self.handles:
            self.applied = False
            return
        dropped, given = self.looked_at()
        if self.applied:
            # Other ways to write zero_grad(), too.
            emptied = {key for key, grad in given.items() if not grad.any()}
            given = {key: grad for key, grad in given.items() if key not in emptied}
        else:
            emptied = set()
        zeros = {key for key, held in self.handles.items() if held.zero and key not in dropped} | emptied
        # Zeros to which nothing has come change nothing.
        changed = given or dropped or any(key in self.square_sums for key in zeros) or any(held.value is not None for held in self.handles.values())
        settled = dropped | zeros
        self._partial = {key: why for key, why in self._partial.items() if key not in settled}
        # Those go on to be the gradients.
        shown = {key: held for key, held in self._shown.items() if key in zeros}
        if len(settled) == len(self.handles) and not given:
            # Other ways to write zero_grad().
            self.forget_sums()
        elif self.applied:
            # An error when somebody uses them, and none where zero_grad() comes first: a critic's gradients of the generator's loss.
            self._partial.update(dict.fromkeys((self.handles.keys() | given.keys()) - settled, PARTIAL))
            self.forget_sums()
        elif changed:
            raise NotSupported(
                "some gradients were dropped or changed and more came: drop all of them, as optimizer.zero_grad() does, or change them after the last "
                "backward of a step"
            )
        elif any(held.scaled and float(held.scale) != 1.0 for held in self.handles.values()):
            raise NotSupported("gradients were clipped or scaled and more came: clip after the last backward of a step")
        self._zeroed = zeros
        self._shown.update(shown)
        self.drop()
        self.handles.clear()

    def take_known(self) -> dict[int, torch.Tensor]:
        """What `param.grad` has when the run ends, by parameter: the script's own tensors, and copies of what is in tiles. What a step has used, or what
        lacks a part of an earlier step, is in none. The script's handles can be used no more."""
        with AS_TENSORS():
            grads = {id(param): param.grad for param in self._gathering.params if param.grad is not None}
        gone = lambda one: (self.applied or one.partial) and not one.zero and one.value is None
        copied = lambda one: None if gone(one) else one.clone()
        found = {key: copied(one) if isinstance(one, GradientInTile) else one for key, one in grads.items()}
        for one in grads.values():
            if isinstance(one, GradientInTile):
                one.partial = CLOSED
        return {key: one for key, one in found.items() if one is not None}

    def drop(self) -> None:
        with AS_TENSORS():
            for param in self._gathering.params:
                param.grad = None

    def looked_at(self) -> tuple[set[int], dict[int, torch.Tensor]]:
        """Parameters whose gradients the script has dropped since they came, and those to which it has given others."""
        dropped, given = set(), {}
        with AS_TENSORS():
            for param in self._gathering.params:
                held, grad = self.handles.get(id(param)), param.grad
                if grad is None:
                    if held is not None:
                        dropped.add(id(param))
                elif grad is not held:
                    given[id(param)] = grad
        return dropped, given

    @property
    def changed(self) -> bool:
        """Whether the script has dropped, replaced or changed gradients that have come."""
        dropped, given = self.looked_at()
        return bool(dropped or given) or any(held.scaled or held.zero or held.value is not None for held in self.handles.values())

    def collect(self, unit: Unit, param: nn.Parameter) -> None:
        """Takes what autograd, and hooks after it, have left in `param.grad`."""
        with AS_TENSORS():
            grad = param.grad
            if grad is None or type(grad) is GradientInTile:
                return
            param.grad = None
            hooks = param._post_accumulate_grad_hooks
        if hooks and id(param) in self._summed:
            raise NotSupported(
                f"{self._gathering.name(param)} has a hook that runs after gradients were accumulated, and this is not the first pass of the step: it would "
                "see the sum in plain PyTorch, and sees the last part here. Use param.register_hook, or one pass a step"
            )
        grad = grad if self.scaled is None else self.scaled(grad)
        before = unit.gradients.get(id(param))
        if before is not None and id(param) in self._summed and self._ranks.count == 1:
            # In the order autograd accumulates: each is added to the sum of the step.
            self.hand_over(unit)
            before = None
        unit.gradients[id(param)] = grad if before is None else before + grad

    def take_all(self, unit: Unit) -> None:
        for param in unit.params:
            self.collect(unit, param)

    def has_all(self, unit: Unit) -> bool:
        """Whether the gradients of the unit have come, on all ranks. They agree once on each time in a kind of pass: which parameters
        have gradients may differ by rank, as where experts do, and all must hand over at the same place."""
        complete = len(unit.gradients) == len(unit.params)
        if self._ranks.count == 1:
            return complete
        self._times[unit] = time = self._times.get(unit, 0) + 1
        self._had[unit] = len(unit.gradients)
        key = (self.kind, unit, time)
        if key not in self._complete:
            missing = self._ranks.any(f"agree on the gradients of {unit.name}", bytes([not complete]))
            self._complete[key] = not missing[0]
        return self._complete[key]

    def _collect_sums(self) -> None:
        """Adds up the squares of the gradients that were handed over, on all ranks."""
        square_sums = self._gathering.memory.square_sums() if self._handed_over else {}
        came = [(param, sum) for unit in self._gathering.units if unit in self._handed_over for param, sum in zip(unit.params, square_sums[unit.index])]
        used = self._ranks.any("end the backward", bytes(id(param) in self._summed for param, _ in came))
        sums = self._ranks.sum("sum up the gradients' squares", [square_sum for _, square_sum in came])
        for (param, _), is_used, square_sum in zip(came, used, sums):
            if is_used:
                self._summed.add(id(param))
                self.square_sums[id(param)] = square_sum
        self._handed_over.clear()

    def show(self) -> None:
        """Gives `param.grad` what stands for gradients that have come, that a script has made zero, or that plain PyTorch would still have of an earlier
        step."""
        siblings, self.applied = BackwardGradients(self.read, self._content), False
        without_sums = self._zeroed | self._partial.keys()
        with AS_TENSORS():
            for param in self._gathering.params:
                square_sum = self.square_sums.get(id(param))
                if square_sum is None and id(param) not in without_sums:
                    continue
                # As in plain PyTorch, what a script holds goes on to be the gradient while backwards add to it.
                held = self._shown.get(id(param), lambda: None)()
                if held is None:
                    held = GradientInTile(param, square_sum or 0.0, siblings)
                    self._shown[id(param)] = weakref.ref(held)
                else:
                    held.begin(square_sum or 0.0, siblings)
                param.grad = self.handles[id(param)] = held
                held.partial = self._partial.get(id(param))
                held.zero = square_sum is None and held.partial is None

    def read(self, param: nn.Parameter, content: Any) -> torch.Tensor:
        """The values of a parameter's gradient of this step before anything was scaled, on the parameter's device and in its type. Those of another
        `content` of the tiles are gone."""
        if self.applied:
            name = self._gathering.name(param)
            raise by_other_optimizer(name) or NotSupported(
                f"the gradient of {name} after the step, which optimizer.step() makes, with Accelerate's DeepSpeed plugin accelerator.backward() already: its values "
                "are gone with the step; read them before, or leave out what uses them, and call zero_grad() to begin anew"
            )
        if content is not self._content:
            raise NotSupported(
                f"a gradient of {self._gathering.name(param)} from before zero_grad() or optimizer.step(): its values are gone; keep a clone() of it"
            )
        unit = self._gathering.unit_of[id(param)]
        flat = self.of_unit(unit)
        found = Unit.view_of(flat, param, unit.offsets[_index(unit, param)])
        return found.to(device=param.device, dtype=param.dtype, copy=True)

    @not_reentered
    def of_unit(self, unit: Unit) -> torch.Tensor:
        """A copy of all gradients of a unit, in host memory."""
        if self._read is None or self._read[0] is not unit:
            flat = torch.zeros(unit.room_elems, dtype=unit.gradient_dtype, device="cpu")
            self._gathering.order.outside((True, unit.index))
            self._core.read_gradients(unit.index, flat.data_ptr())
            self._ranks.transfers.complete(f"read the gradients of {unit.name}", flat)
            self._read = unit, flat
        return self._read[1]

    def settle_changes(self, given: Mapping[int, torch.Tensor]) -> None:
        """Takes gradients to their tiles that a script has `given`, or changed in place, and zeros where it made them zero."""
        # Values of other gradients, before their tiles change.
        changed = {key: one.clone() if isinstance(one, GradientInTile) else one for key, one in given.items()}
        for key, held in self.handles.items():
            if key not in given and (held.value is not None or held.zero):
                changed[key] = held.value
        if given and self._ranks.count > 1:
            raise NotSupported(
                "param.grad was set by the script: with several ranks each has a part of it; change the gradient that came in place, or scale the loss"
            )
        for unit in self._gathering.units_with([param for param in self._gathering.params if id(param) in changed]):
            if not unit.trained:
                raise NotSupported(f"param.grad of {unit.name}, which was frozen when the model was prepared")
            has_some = any(id(param) in self._summed for param in unit.params)
            flat = self.of_unit(unit).clone() if has_some else torch.zeros(unit.room_elems, dtype=unit.gradient_dtype, device="cpu")
            for param, offset in zip(unit.params, unit.offsets):
                if id(param) in changed:
                    value, view = changed[id(param)], Unit.view_of(flat, param, offset)
                    view.zero_() if value is None else view.copy_(value)
            self._read = None
            self._gathering.order.outside((True, unit.index))
            squares = self._ranks.sum(f"change the gradients of {unit.name}", list(self._core.write_gradients(unit.index, flat.data_ptr())))
            siblings = BackwardGradients(self.read, self._content)
            for param, square_sum in zip(unit.params, squares):
                if id(param) in changed:
                    self._summed.add(id(param))
                    self.square_sums[id(param)] = square_sum
                    if id(param) in given:
                        self.handles[id(param)] = GradientInTile(param, square_sum, siblings)
                    else:
                        # What a script holds goes on to be the gradient.
                        self.handles[id(param)].begin(square_sum, siblings)
                    self.handles[id(param)].zero = changed[id(param)] is None

    @not_reentered
    def hand_over(self, unit: Unit) -> None:
        """Takes the unit's gradients to its tiles, adding to those of earlier passes of the step."""
        self._read = None
        buffer = self._gathering.memory.gradient_buffer(unit)
        buffer.zero_()
        key = (unit, buffer.data_ptr())
        if key not in self._gradient_views:
            self._gradient_views[key] = {id(param): Unit.view_of(buffer, param, offset) for param, offset in zip(unit.params, unit.offsets)}
        views = self._gradient_views[key]
        came = [one if one.layout is torch.strided else one.to_dense() for one in unit.gradients.values()]
        if came:
            # Of several ranks only some may have gradients.
            with torch.no_grad():
                torch._foreach_copy_([views[param] for param in unit.gradients], came)
        self._ranks.transfers.reduce(unit, buffer)
        self._gathering.order.next((True, unit.index))
        self._gathering.memory.hand_over(unit)
        self._handed_over.add(unit)
        self._summed.update(unit.gradients)
        unit.gradients.clear()
        self._had[unit] = 0

    def forget_sums(self) -> None:
        """Drops the gradients that were handed over in this step."""
        if self._summed or self.broken:
            self._core.begin_step()
            self._gathering.order.forget_rest()
        self._clear_sums()
        self.broken = False

    def _clear_sums(self) -> None:
        self._forget_what_came()
        self.handles.clear()
        self.applied = False

    def _forget_what_came(self) -> None:
        self.square_sums.clear()
        self._summed.clear()
        self._handed_over.clear()
        self._zeroed.clear()
        self._read = None
        self._shown.clear()
        self._content = object()

    def are_finite(self) -> bool:
        """Whether the gradients that have come since the last step are."""
        return all(map(math.isfinite, self.square_sums.values()))

    def forget(self, zero: bool = False, of: Optional[set[int]] = None) -> None:
        """Drops this step's gradients, or makes them `zero`: a parameter that gets none is then updated with zeros. Where they are to be those `of`
        some parameters alone, the others' lack something from now on."""
        dropped, given = self.looked_at()
        left = set(self.handles) - dropped
        shown = {key: held for key, held in self._shown.items() if zero and key in left and (of is None or key in of)}
        if self.half_backward:
            self.drop_half()
        self.forget_sums()
        self.drop()
        if of is None:
            self._partial = {}
        else:
            outside = {id(param): self._gathering.name(param) for param in self._gathering.params if id(param) in left - of}
            self._partial.update({key: PARTIAL_OUTSIDE.format(name) for key, name in outside.items()})
            self._partial = {key: why for key, why in self._partial.items() if key not in of}
        if zero and (left or given):
            of = of if of is not None else set(map(id, self._gathering.params))
            self._zeroed = left & of - given.keys()
            self._shown.update(shown)
            self.show()
            # The script may have those, too.
            with torch.no_grad(), AS_TENSORS():
                for param in self._gathering.params:
                    if id(param) in given.keys() & of:
                        given[id(param)].zero_()
                        param.grad = given[id(param)]

    def used(self) -> None:
        """The step's update was ordered. What stands for gradients stays until it is dropped, and goes on to be the gradient where it is made zero."""
        shown = dict(self._shown)
        self._forget_what_came()
        self._shown, self.applied = shown, True


def _index(unit: Unit, param: nn.Parameter) -> int:
    return next(index for index, one in enumerate(unit.params) if one is param)

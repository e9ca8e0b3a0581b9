"""Moves units in and out around a model's forward and backward. Nothing is inserted into the autograd graph.

A unit's storage is resized to nothing and back; parameters stay views of it, so whatever autograd saved of a weight is right
again when backward comes. A unit's backward is over when autograd works on a node made before the unit's forward began.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import sys
import time
from typing import Any, Iterator, Mapping, Optional

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ._errors import Error, NotSupported
from ._held import Held, Together
from ._memory import HostMemory, Memory
from ._order import Order
from ._ranks import Ranks
from ._units import Unit

_Tensor = torch.Tensor

# Where the program is, for the seconds of a step's parts.
ELSEWHERE, FORWARD, BACKWARD = 0, 1, 2

# Action of several ranks while one of them reads or writes weights.
_LEADS = "save weights"

# Within it released parameters are plain tensors, whose gradients are reached without a detour through Python.
_AS_TENSORS = torch._C.DisableTorchFunctionSubclass

# What torch.compile(fullgraph=True) tells of the hooks.
_NO_FULL_GRAPH = "offloadd brings and releases parameters here: leave fullgraph=True out, or compile forwards of blocks, as in "
_NO_FULL_GRAPH += "block.forward = torch.compile(block.forward, fullgraph=True) before offloadd.prepare"
# Older versions of torch take no reason.
_REASON = {"reason": _NO_FULL_GRAPH} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}
_outside_of_graphs = functools.partial(torch.compiler.disable, **_REASON)

# Attributes that a released parameter answers by itself.
_METADATA = {
    getattr(_Tensor, name).__get__
    for name in (
        *("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "grad_fn", "layout", "ndim", "names"),
        *("is_sparse", "is_cuda", "is_meta", "is_quantized", "itemsize", "is_cpu", "is_mps", "is_xpu"),
        *("is_sparse_csr", "is_nested", "is_mkldnn", "_backward_hooks", "_version"),
    )
    if hasattr(getattr(_Tensor, name, None), "__get__")
} | {
    _Tensor.requires_grad.__set__,
    _Tensor.requires_grad_,
    _Tensor.grad.__set__,
    _Tensor.size,
    _Tensor.numel,
    _Tensor.dim,
    _Tensor.__hash__,
    _Tensor.is_floating_point,
    _Tensor.is_complex,
    _Tensor.stride,
    _Tensor.is_contiguous,
    _Tensor.element_size,
    _Tensor.nelement,
    _Tensor.storage_offset,
    _Tensor.register_hook,
    _Tensor.register_post_accumulate_grad_hook,
    _Tensor.__len__,
}


class Released(nn.Parameter):
    """A parameter whose values are in tiles. Its metadata answers at once; anything else gathers its unit."""

    engine: "Engine"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        away = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Released)]
        if not away:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return away[0].engine.read_released(away, func, args, kwargs)

    def __deepcopy__(self, memo):
        raise NotSupported("a prepared model cannot be copied: copy it before offloadd.prepare, or save and load its state_dict")

    def __reduce_ex__(self, protocol):
        raise NotSupported("a prepared model cannot be pickled: save its state_dict")

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"Parameter in tiles: {tuple(self.shape)}, {self.dtype}"


class Copied(_Tensor):
    """Stands for `param.data` of a released parameter: its values, to read. Changing them would change nothing."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if _in_place(func) and args and isinstance(args[0], Copied):
            raise NotSupported(f"{func.__name__} on the data of a parameter whose values are in tiles: it is a copy; {_BEFORE}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo):
        return self.as_subclass(_Tensor).clone()

    def __reduce_ex__(self, protocol):
        return self.as_subclass(_Tensor).__reduce_ex__(protocol)


_BEFORE = "change parameters before offloadd.prepare, or load weights with the load_state_dict of the whole model"


def _in_place(func) -> bool:
    name = getattr(func, "__name__", str(func))
    return name.endswith("_") and not name.endswith("__") or name in ("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


def tensors_in(value: Any, depth: int = 8) -> Iterator[_Tensor]:
    """The tensors in a module's output, in dataclasses and other plain objects too."""
    if isinstance(value, _Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif hasattr(value, "__dict__") and not callable(value):
        parts = vars(value).values()
    else:
        return
    for part in list(parts) if depth else ():
        yield from tensors_in(part, depth - 1)


class Engine:
    """The units of one model and the hooks that move them."""

    def __init__(self, model: nn.Module, units: list[Unit], modules: dict[int, nn.Module], core: Any, keep: bool, ranks: Optional[Ranks] = None) -> None:
        self.model, self.units, self.core, self.keep, self.ranks = model, units, core, keep, ranks or Ranks()
        # What the engine does, and what the model needs: the same where nothing comes ahead.
        self.order, self.needs = Order(core.announce), Order(lambda _: None, tells=False)
        self.params = [param for unit in units for param in unit.params]
        self.unit_of = {id(param): unit for unit in units for param in unit.params}
        # Modules in forward: their units, units gathered on their behalf, and autograd's number when they began.
        self._stack: list[tuple[list[Unit], list[Unit], int]] = []
        # Units whose backward has begun: for each use of them the graph task and the number of the use's first node.
        self._active: dict[Unit, list[tuple[int, int]]] = {}
        # Whether the other ranks bring what this one reads, without a script's telling them.
        self.leads = False
        self._in_backward = False
        self._kind: Any = None
        # Of several ranks: times a unit's part of this backward was over, the gradients it had then, and whether it has all of them,
        # by the kind of pass, the unit and that time.
        self._times: dict[Unit, int] = {}
        self._had: dict[Unit, int] = {}
        self._complete: dict[tuple, bool] = {}
        self.broken = False
        # Sums of squares by parameter, of the gradients that have come in this step.
        self.square_sums: dict[int, float] = {}
        # Parameters whose gradients were handed over in this step, and the units of this backward: their sums come at its end.
        self._summed: set[int] = set()
        self._handed_over: set[Unit] = set()
        # `param.grad` between backward and step, by parameter.
        self.held: dict[int, Held] = {}
        # Views of the buffers that gradients leave from, by unit and buffer.
        self._gradient_views: dict[tuple[Unit, int], dict[int, _Tensor]] = {}
        self._released = type("Released", (Released,), {"engine": self})
        self.before_pass = lambda: None
        of_module: dict[nn.Module, list[Unit]] = {model: []}
        for unit in units:
            of_module.setdefault(modules[unit.index], []).append(unit)
            for param in unit.params if unit.trained else ():
                # Before the gradient is accumulated: by then no handle may be there to add to.
                param.register_hook(self._start_backward)
                param.register_post_accumulate_grad_hook(functools.partial(self._gradient_came, unit))
        for module, together in of_module.items():
            self._hook(module, together)
        # Units by the module with which they come and go, in the units' order.
        self.together = sorted((units for units in of_module.values() if units), key=lambda units: units[0].index)
        self.memory: Memory = HostMemory(core, units)

    # Moving

    def gather(self, unit: Unit, record: bool = True) -> None:
        """Brings the unit's newest parameters to where they belong."""
        if unit.here and (unit.fresh or not self.keep):
            self._open(unit)
            return
        began = time.perf_counter()
        if self.leads:
            self.ranks.first_bytes(_LEADS, unit.index.to_bytes(4, "little"))
        if record:
            self.needs.next((False, unit.index))
        deviates = self._expect(unit, record)
        if record:
            for index in self.needs.gathers(self.memory.ahead):
                if not self.units[index].here:
                    self._expect(self.units[index])
        self.memory.ready(unit)
        self.ranks.gather(unit, self._pass, changed=not unit.fresh)
        if deviates:
            self.order.waited_s += time.perf_counter() - began
        unit.expected, unit.fresh, unit.here = False, True, True
        self._open(unit)

    def _pass(self) -> str:
        """The position of the program, for people."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        if not self._stack:
            return "outside of forward and backward"
        return "forward" if torch.is_grad_enabled() else "forward without gradients"

    def _open(self, unit: Unit) -> None:
        if unit.guarded:
            for param in unit.params:
                param.__class__ = nn.Parameter
            unit.guarded = False

    def _guard(self, unit: Unit) -> None:
        """Sees to it that uses of the unit's parameters are noticed."""
        if not unit.guarded and not self.keep:
            for param in unit.params:
                param.__class__ = self._released
            unit.guarded = True

    def _expect(self, unit: Unit, record: bool = True) -> bool:
        """Begins to bring the unit, unless it is on its way. Returns whether the order did not foresee it."""
        if unit.expected:
            return False
        deviates = bool((self.order.next if record else self.order.outside)((False, unit.index)))
        self.memory.expect(unit)
        unit.expected = True
        return deviates

    def release(self, unit: Unit) -> None:
        """Gives the unit's memory back, unless it is pinned and not stale."""
        if not self.keep and (unit.here or unit.expected) and not (unit.pins and unit.fresh):
            self.take_away(unit)

    def take_away(self, unit: Unit) -> None:
        """Gives the unit's memory back, whatever is kept."""
        self.memory.release(unit)
        self._guard(unit)
        unit.here = unit.expected = False

    @contextlib.contextmanager
    def room(self, unit: Unit) -> Iterator[None]:
        """The unit's memory, for new values; it is released afterwards if it was."""
        absent = not unit.here
        if absent:
            unit.flat.untyped_storage().resize_(unit.bytes)
            unit.here = True
            self._open(unit)
        try:
            yield
        finally:
            if absent:
                self.release(unit)

    @contextlib.contextmanager
    def gathered(self, unit: Unit) -> Iterator[None]:
        """The unit's parameters; they are released afterwards if they were, within a forward together with the module that is under
        way."""
        absent = not unit.here
        self.gather(unit, record=bool(self._stack))
        if absent and self._stack:
            self._stack[-1][1].append(unit)
        try:
            yield
        finally:
            if absent and not self._stack:
                self.release(unit)

    @contextlib.contextmanager
    def pinned(self, unit: Unit) -> Iterator[None]:
        """The unit's parameters, which stay in memory through passes of the model until they change."""
        with self.gathered(unit):
            unit.pins += 1
            try:
                yield
            finally:
                unit.pins -= 1

    def units_with(self, params: list[_Tensor]) -> list[Unit]:
        """The units that have some of `params`."""
        return list(dict.fromkeys(self.unit_of[id(param)] for param in params if id(param) in self.unit_of))

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """On the first rank, reads parameters meanwhile that the others `follow` to bring."""
        self.leads = True
        try:
            yield
        finally:
            self.leads = False
            if not self.ranks.broken:
                self.ranks.first_bytes(_LEADS, b"")

    def follow(self) -> None:
        """Brings this rank's parts of what the first rank reads."""
        while index := self.ranks.first_bytes(_LEADS, b""):
            with self.gathered(self.units[int.from_bytes(index, "little")]):
                pass

    def release_all(self) -> None:
        """Gives back what is still here, after a pass that did not end in order too."""
        for unit in self.units:
            self.release(unit)

    def read_released(self, params: list[nn.Parameter], func, args, kwargs):
        """Calls `func`, which takes released parameters."""
        units = self.units_with(params)
        if _in_place(func) and not (torch.is_grad_enabled() and self._stack):
            raise NotSupported(f"{func.__name__} on a parameter whose values are in tiles: {_BEFORE}")
        gathered = [unit for unit in units if not unit.here]
        for unit in gathered:
            self.gather(unit, record=bool(self._stack))
        if self._stack:
            # Released with the module that used them, and gathered again for that module's backward.
            self._stack[-1][1].extend(gathered)
        number = torch.autograd._get_sequence_nr()
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                if self._stack:
                    return result
                ours = {unit.flat.untyped_storage().data_ptr() for unit in units}
                if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() in ours:
                    result = result.clone()
                if torch.is_grad_enabled():
                    self._hook_made(result, number, units, 0)
            return result.as_subclass(Copied) if func == _Tensor.data.__get__ else result
        finally:
            task = torch._C._current_graph_task_id()
            for unit in gathered if not self._stack else ():
                if task == -1:
                    self.release(unit)
                else:
                    # Computed again for this backward, which may need the values.
                    self._active.setdefault(unit, []).append((task, 0))

    # Hooks

    def _hook(self, module: nn.Module, units: list[Unit]) -> None:
        root = module is self.model
        before = _outside_of_graphs(functools.partial(self._before_forward, units, root))
        after = _outside_of_graphs(functools.partial(self._after_forward, units, root))
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)

    def _before_forward(self, units: list[Unit], root: bool, module, args, kwargs):
        if root and self._stack and not self._within_itself():
            # An interrupt ended the forward before: no hook told.
            self._stack.clear()
        begins = not self._stack and torch._C._current_graph_task_id() == -1
        number = torch.autograd._get_sequence_nr()
        # First: the hook after the forward comes even if gathering fails.
        self._stack.append((units, [], number))
        if begins:
            self._begin_pass(units[0].index if units else -1)
        for unit in units:
            self.gather(unit)
            unit.start = 0 if unit.root else number
        return args, kwargs

    def _within_itself(self) -> bool:
        """Whether a forward of the model is under way, other than the one that begins."""
        frame, calls = sys._getframe(), 0
        while frame is not None:
            calls += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is self.model
            frame = frame.f_back
        return calls > 1

    def _begin_pass(self, first: int) -> None:
        if self.half_backward:
            self._drop_half()
            self.broken = True
        self.core.phase(FORWARD)
        self.release_all()
        self.before_pass()
        pinned = any(unit.pins for unit in self.units)
        kind = self._kind = ("train" if torch.is_grad_enabled() else "read", self.model.training, first, pinned)
        self.order.begin(kind)
        self.needs.begin(kind)

    @property
    def half_backward(self) -> bool:
        """Whether the last backward did not end."""
        return self._in_backward and torch._C._current_graph_task_id() == -1

    def _drop_half(self) -> None:
        """Drops what a backward brought that did not end: it is no gradient of anything."""
        self._in_backward = False
        self._active.clear()
        self._times.clear()
        self._had.clear()
        for unit in self.units:
            unit.gradients.clear()
        self._drop_grads()

    def _after_forward(self, units: list[Unit], root: bool, module, args, kwargs, output):
        _, companions, number = self._stack.pop()
        with_grad = torch.is_grad_enabled()
        if not self._stack and not with_grad:
            self.core.phase(ELSEWHERE)
        if with_grad and output is not None:
            self._hook_made(output, number, units + companions, min([number, *(unit.start for unit in units)]))
        if torch._C._current_graph_task_id() != -1:
            return output
        for unit in units + companions:
            if unit.here and self._stack and self._returned(unit, output):
                # The caller computes with a view of the weights.
                self._stack[-1][1].append(unit)
            elif not (unit.root and with_grad):
                self.release(unit)
            elif not self._stack:
                self._guard(unit)
        return output

    @staticmethod
    def _returned(unit: Unit, output) -> bool:
        """Whether a forward's output has a view of the unit's parameters."""
        address = unit.flat.untyped_storage().data_ptr()
        return any(one.layout is torch.strided and one.untyped_storage().data_ptr() == address for one in tensors_in(output))

    def _hook_made(self, output, number: int, units: list[Unit], first: int) -> None:
        """Brings `units` for the backward of what was made since `number`: what is handed through belongs to an older node."""
        for one in tensors_in(output):
            if one.requires_grad and one.grad_fn is not None:
                made = one.grad_fn._sequence_nr()
                if made >= number:
                    one.register_hook(functools.partial(self._before_backward, units, made, first))

    def _before_backward(self, units: list[Unit], made: int, first: int, grad) -> None:
        if torch.is_grad_enabled() and not self.keep:
            raise NotSupported("create_graph=True: gradients of gradients need all weights in memory; train this model with offload device none")
        self._start_backward()
        task = torch._C._current_graph_task_id()
        for unit, uses in list(self._active.items()):
            # A task within this one is over; the one around it continues.
            uses[:] = [(of_task, began) for of_task, began in uses if of_task < task or of_task == task and made >= began]
            if not uses and unit not in units and not unit.root:
                self._settle(unit)
        for unit in units:
            self.gather(unit)
            uses = self._active.setdefault(unit, [])
            if (task, first) not in uses:
                uses.append((task, first))

    def _start_backward(self, grad=None) -> None:
        if not self._in_backward:
            self._in_backward = True
            self.core.phase(BACKWARD)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
            self._put_away()

    def _put_away(self) -> None:
        """Takes handles away: autograd would add to them."""
        if not self.held:
            return
        dropped = self.dropped()
        if len(dropped) == len(self.held):
            # Another way to write zero_grad().
            self.forget_sums()
        elif dropped:
            raise NotSupported("some gradients were set to None and more came: drop all of them, as optimizer.zero_grad() does")
        elif any(held.scaled and float(held.scale) != 1.0 for held in self.held.values()):
            raise NotSupported("gradients were clipped or scaled and more came: clip after the last backward of a step")
        self._drop_grads()
        self.held.clear()

    def _drop_grads(self) -> None:
        with _AS_TENSORS():
            for param in self.params:
                param.grad = None

    def dropped(self) -> set[int]:
        """Parameters whose gradients the script has dropped since they came."""
        found = set()
        with _AS_TENSORS():
            for param in self.params:
                held, grad = self.held.get(id(param)), param.grad
                if held is not None and grad is None:
                    found.add(id(param))
                elif grad is not held:
                    raise NotSupported("param.grad was set by the script: gradients lie in tiles, and can be scaled, clipped or set to None")
        return found

    def _gradient_came(self, unit: Unit, param: nn.Parameter) -> None:
        if param.grad is None:
            return
        before = unit.gradients.get(id(param))
        if before is not None and id(param) in self._summed and self.ranks.count == 1:
            # In the order autograd accumulates: each is added to the sum of the step.
            self._hand_over(unit)
            before = None
        unit.gradients[id(param)] = param.grad if before is None else before + param.grad
        param.grad = None

    def _settle(self, unit: Unit) -> None:
        """The unit's part of the backward is over."""
        self._active.pop(unit, None)
        self.release(unit)
        if unit.trained and self._has_all(unit):
            self._hand_over(unit)

    def _has_all(self, unit: Unit) -> bool:
        """Whether the gradients of the unit have come, on all ranks. They agree once on each time in a kind of pass: which parameters
        have gradients may differ by rank, as where experts do, and all must hand over at the same place."""
        complete = len(unit.gradients) == len(unit.params)
        if self.ranks.count == 1:
            return complete
        self._times[unit] = time = self._times.get(unit, 0) + 1
        self._had[unit] = len(unit.gradients)
        key = (self._kind, unit, time)
        if key not in self._complete:
            missing = self.ranks.any(f"agree on the gradients of {unit.name}", bytes([not complete]))
            self._complete[key] = not missing[0]
        return self._complete[key]

    def _backward_ended(self) -> None:
        # 1: gradients are left; 2: some came after the unit's part of the backward was over.
        left = lambda unit: (len(unit.gradients) > 0) + 2 * (len(unit.gradients) > self._had.get(unit, 0))
        for unit, flags in zip(self.units, self.ranks.any("end the backward", bytes(map(left, self.units)))):
            if flags:
                # Where experts got nothing on any rank, the unit need not wait for them the next time.
                self._complete[self._kind, unit, self._times.get(unit)] = flags == 1
                self._hand_over(unit)
            self.release(unit)
        self._active.clear()
        self._times.clear()
        self._had.clear()
        self._in_backward = False
        square_sums = self.memory.square_sums() if self._handed_over else {}
        came = [(param, sum) for unit in self.units if unit in self._handed_over for param, sum in zip(unit.params, square_sums[unit.index])]
        used = self.ranks.any("end the backward", bytes(id(param) in self._summed for param, _ in came))
        sums = self.ranks.sum("sum up the gradients' squares", [square_sum for _, square_sum in came])
        for (param, _), is_used, square_sum in zip(came, used, sums):
            if is_used:
                self._summed.add(id(param))
                self.square_sums[id(param)] = square_sum
        self._handed_over.clear()
        self.core.phase(ELSEWHERE)
        together = Together()
        with _AS_TENSORS():
            for param in self.params:
                square_sum = self.square_sums.get(id(param))
                if square_sum is not None:
                    param.grad = self.held[id(param)] = Held(param, square_sum, together)

    def _hand_over(self, unit: Unit) -> None:
        """Takes the unit's gradients to its tiles, adding to those of earlier passes of the step."""
        buffer = self.memory.gradient_buffer(unit)
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
        self.ranks.reduce(unit, buffer)
        self.order.next((True, unit.index))
        self.memory.hand_over(unit)
        self._handed_over.add(unit)
        self._summed.update(unit.gradients)
        unit.gradients.clear()
        self._had[unit] = 0

    def forget_gradients(self) -> None:
        """Drops this step's gradients."""
        self._stack.clear()
        if self.half_backward:
            self._drop_half()
            self.release_all()
            self.broken = True
        self.forget_sums()
        self._drop_grads()

    def forget_sums(self) -> None:
        """Drops the gradients that were handed over in this step."""
        if self._summed or self.broken:
            self.core.begin_step()
            self.order.forget_rest()
        self._clear_sums()
        self.broken = False

    def _clear_sums(self) -> None:
        self.square_sums.clear()
        self._summed.clear()
        self._handed_over.clear()
        self.held.clear()

    def updated(self) -> None:
        """The step's update was ordered: parameters that are here are stale."""
        self._stack.clear()
        for unit in self.units:
            unit.fresh = unit.fresh and not unit.trained
        with _AS_TENSORS():
            for param in self.params:
                if param.grad is not None:
                    # Autograd then refuses graphs that saved the weight of before. Older versions of torch take no list here.
                    torch.autograd.graph.increment_version(param)
        self._drop_grads()
        self._clear_sums()
        self.order.forget_rest()
        if self.keep:
            self.refresh()
        else:
            self.release_all()

    def stale(self) -> None:
        """Drops the units in memory, which no longer equal the tiles."""
        for unit in self.units:
            unit.fresh = False
        self.release_all()
        self.order.forget_rest()
        if self.keep:
            self.refresh()

    def refresh(self) -> None:
        """Brings every unit up to date, where nothing is released and a script may look at any parameter."""
        for unit in self.units:
            self.gather(unit, record=False)

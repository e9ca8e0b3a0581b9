"""Moves units in and out around a model's forward and backward. Nothing is inserted into the autograd graph.

A unit's storage is resized to nothing and back; parameters stay views of it, so whatever autograd saved of a weight is right
again when backward comes. A unit's backward is over when autograd works on a node made before the unit's forward began.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ._errors import Error, NotSupported
from ._held import Held
from ._order import Order
from ._units import Unit

_Tensor = torch.Tensor

# What a released parameter answers by itself.
_METADATA = {
    getattr(_Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "grad_fn", "layout", "ndim", "is_sparse", "is_cuda", "names", "is_meta", "is_quantized", "itemsize", "is_cpu", "is_mps", "is_xpu", "is_sparse_csr", "is_nested", "is_mkldnn", "_backward_hooks", "_version")
    if hasattr(getattr(_Tensor, name, None), "__get__")
} | {
    _Tensor.requires_grad.__set__,
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


class Engine:
    """The units of one model and the hooks that move them."""

    def __init__(self, model: nn.Module, units: list[Unit], modules: dict[int, nn.Module], core: Any, keep: bool) -> None:
        self.model, self.units, self.core, self.keep = model, units, core, keep
        self.order = Order(core.announce)
        self.unit_of = {id(param): unit for unit in units for param in unit.params}
        self.root = next((unit for unit in units if modules[unit.index] is model), None)
        self.grad_buffer: Optional[torch.Tensor] = None
        # Modules in forward: their units, units gathered on their behalf, and autograd's number when they began.
        self._stack: list[tuple[list[Unit], list[Unit], int]] = []
        # Units whose backward has begun: the graph task and the number of the unit's first node.
        self._active: dict[Unit, tuple[int, int]] = {}
        self._in_backward = False
        self.broken = False
        # Sums of squares by parameter, of the gradients that have come in this step.
        self.square_sums: dict[int, float] = {}
        self._released = type("Released", (Released,), {"engine": self})
        self.before_pass = lambda: None
        for unit in units:
            unit.elems or unit.place()
            for param in unit.params:
                param.register_post_accumulate_grad_hook(functools.partial(self._gradient_came, unit))
            self._hook(modules[unit.index], [unit])
        if self.root is None:
            self._hook(model, [])

    # Moving

    def gather(self, unit: Unit, record: bool = True) -> None:
        """Brings the unit's newest parameters to where they belong."""
        if unit.here and not self.keep:
            return
        if unit.here and unit.fresh:
            return
        storage = unit.flat.untyped_storage()
        if not unit.here:
            storage.resize_(unit.elems * unit.flat.element_size())
        (self.order.next if record else self.order.outside)((False, unit.index))
        self.core.gather(unit.index, storage.data_ptr())
        unit.fresh = True
        if not unit.here:
            for param in unit.params:
                param.__class__ = nn.Parameter
        unit.here = True

    def release(self, unit: Unit) -> None:
        """Gives the unit's memory back."""
        if not unit.here or self.keep:
            return
        unit.flat.untyped_storage().resize_(0)
        for param in unit.params:
            param.__class__ = self._released
        unit.here = False

    def release_all(self) -> None:
        """Gives back what is still here, after a pass that did not end in order too."""
        for unit in self.units:
            self.release(unit)

    def read_released(self, params: list[nn.Parameter], func, args, kwargs):
        """Calls `func`, which takes released parameters."""
        units = list(dict.fromkeys(self.unit_of[id(param)] for param in params))
        name = getattr(func, "__name__", str(func))
        in_place = name.endswith("_") and not name.endswith("__") or name in ("__setitem__", "__set__", "__iadd__", "__imul__")
        if in_place and not (torch.is_grad_enabled() and self._stack):
            raise NotSupported(f"{name} on a parameter whose values are in tiles: change parameters and load weights before offloadd.prepare")
        if self._stack:
            for unit in units:
                if not unit.here:
                    self.gather(unit)
                    # Released with the module that used it, and gathered again for that module's backward.
                    self._stack[-1][1].append(unit)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        gathered = [unit for unit in units if not unit.here]
        for unit in gathered:
            self.gather(unit, record=False)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            ours = {unit.flat.untyped_storage().data_ptr() for unit in units}
            shared = lambda one: isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() in ours
            if shared(result):
                result = result.clone()
            return result
        finally:
            for unit in gathered:
                self.release(unit)

    # Hooks

    def _hook(self, module: nn.Module, units: list[Unit]) -> None:
        root = module is self.model
        before = torch.compiler.disable(functools.partial(self._before_forward, units, root))
        after = torch.compiler.disable(functools.partial(self._after_forward, units, root))
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)

    def _before_forward(self, units: list[Unit], root: bool, module, args, kwargs):
        if root and not self._stack and torch._C._current_graph_task_id() == -1:
            self._begin_pass()
        number = torch.autograd._get_sequence_nr()
        # First: the hook after the forward comes even if gathering fails.
        self._stack.append((units, [], number))
        for unit in units:
            self.gather(unit)
            unit.start = 0 if unit is self.root else number
        return args, kwargs

    def _begin_pass(self) -> None:
        if self._in_backward:
            # The last backward did not end: what it brought is no gradient of anything.
            self._in_backward, self.broken = False, True
        self._active.clear()
        self.release_all()
        for unit in self.units:
            unit.gradients.clear()
        self._clear_grads()
        self.before_pass()
        self.order.begin(("train" if torch.is_grad_enabled() else "read", self.model.training))

    def _after_forward(self, units: list[Unit], root: bool, module, args, kwargs, output):
        _, companions, number = self._stack.pop()
        with_grad = torch.is_grad_enabled()
        if with_grad and output is not None:
            needed = units + companions
            first = min([number, *(unit.start for unit in units)])
            for one in tree_flatten(output)[0]:
                # Only what was made in this forward: what is handed through belongs to an older node.
                if isinstance(one, torch.Tensor) and one.requires_grad and one.grad_fn is not None:
                    made = one.grad_fn._sequence_nr()
                    if made >= number:
                        one.register_hook(functools.partial(self._before_backward, needed, made, first))
        if torch._C._current_graph_task_id() == -1:
            for unit in units:
                if unit is not self.root or not with_grad:
                    self.release(unit)
            for unit in companions:
                if unit is not self.root:
                    self.release(unit)
        return output

    def _before_backward(self, units: list[Unit], made: int, first: int, grad) -> None:
        self._start_backward()
        task = torch._C._current_graph_task_id()
        for unit, (of_task, began) in list(self._active.items()):
            if unit not in units and unit is not self.root and (of_task != task or made < began):
                self._settle(unit)
        for unit in units:
            self.gather(unit)
            self._active[unit] = (task, first)

    def _start_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._clear_grads()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _gradient_came(self, unit: Unit, param: nn.Parameter) -> None:
        if param.grad is None:
            return
        self._start_backward()
        before = unit.gradients.get(id(param))
        # In the order autograd accumulates.
        unit.gradients[id(param)] = param.grad if before is None else before + param.grad
        param.grad = None

    def _settle(self, unit: Unit) -> None:
        """The unit's part of the backward is over."""
        self._active.pop(unit, None)
        self.release(unit)
        if len(unit.gradients) == len(unit.params):
            self._hand_over(unit)

    def _backward_ended(self) -> None:
        for unit in self.units:
            if unit.gradients:
                self._hand_over(unit)
            self.release(unit)
        self._active.clear()
        self._in_backward = False
        for unit in self.units:
            for param in unit.params:
                square_sum = self.square_sums.get(id(param))
                if square_sum is not None:
                    param.grad = Held(param, square_sum)

    def _hand_over(self, unit: Unit) -> None:
        """Takes the unit's gradients to its tiles, adding to those of earlier passes of the step."""
        if self.grad_buffer is None:
            self.grad_buffer = torch.empty(max(one.elems for one in self.units), dtype=unit.flat.dtype)
        buffer = self.grad_buffer[: unit.elems]
        buffer.zero_()
        with torch.no_grad():
            for param, offset in zip(unit.params, unit.offsets):
                gradient = unit.gradients.get(id(param))
                if gradient is not None:
                    if gradient.layout is not torch.strided:
                        gradient = gradient.to_dense()
                    Unit.view_of(buffer, param, offset).copy_(gradient)
        self.order.next((True, unit.index))
        square_sums = self.core.scatter(unit.index, buffer.data_ptr())
        for param, square_sum in zip(unit.params, square_sums):
            if id(param) in unit.gradients or id(param) in self.square_sums:
                self.square_sums[id(param)] = square_sum
        unit.gradients.clear()

    def _clear_grads(self) -> None:
        """Takes handles away: autograd would add to them."""
        for unit in self.units:
            for param in unit.params:
                if isinstance(param.grad, Held):
                    param.grad = None

    def forget_gradients(self) -> None:
        """Drops this step's gradients."""
        if self.square_sums or self.broken:
            self.core.begin_step()
            self.order.forget_rest()
        self.square_sums.clear()
        self.broken = False
        for unit in self.units:
            unit.gradients.clear()
            for param in unit.params:
                param.grad = None

    def updated(self) -> None:
        """The step's update was ordered: parameters that are here are stale."""
        self.square_sums.clear()
        self.order.forget_rest()
        for unit in self.units:
            unit.fresh = False
            for param in unit.params:
                param.grad = None
        if self.keep:
            self.refresh()

    def refresh(self) -> None:
        """Brings every unit up to date, where nothing is released and a script may look at any parameter."""
        for unit in self.units:
            self.gather(unit, record=False)

"""Gradients that lie in tiles: `param.grad` shows their shape, norm and scale, which is what clipping and scaling need. Values are read
from the tile when somebody asks for them, and go back there if they were changed."""

from __future__ import annotations

import math
import weakref
from typing import Any, Callable, Iterator, Optional

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ._errors import Error, NotSupported

aten = torch.ops.aten

# The scale of a gradient that nothing has scaled.
UNSCALED = torch.ones(())


class BackwardGradients:
    """The gradients of one backward. What they share is computed once, since each computation on a GPU is waited for."""

    def __init__(self, read: Optional[Callable[[torch.Tensor, Any], torch.Tensor]] = None, content: Any = None) -> None:
        # Stands for what is in the tiles until other gradients are.
        self.content = content
        # Reads the unscaled values of a parameter's gradient, of this content. Weak, as the gradient's parameter is: the collector of cycles does not see what
        # `param.grad` holds.
        self.read = weakref.WeakMethod(read) if read is not None else lambda: None
        # Weak, so that each goes with its last user and not with the next collection of cycles.
        self.handles: list[weakref.ref[GradientInTile]] = []
        self._product: tuple = (None, None, None, None)

    def product(self, scale: torch.Tensor, factor: Any) -> torch.Tensor:
        """A scale times a factor of one value, the same tensor as long as both are the same."""
        # Tensors of inference mode do not count their changes.
        counts = not (isinstance(factor, torch.Tensor) and factor.is_inference())
        version = getattr(factor, "_version", None) if counts else None
        before, by, its_version, product = self._product
        if before is not scale or by is not factor or its_version != version or not counts:
            product = (scale * factor).reshape(())
            self._product = (scale, factor, version, product)
        return product


class GradientInTile(torch.Tensor):
    """A gradient in a tile. `square_sum` is of its values before `scale`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    siblings: BackwardGradients
    param: "weakref.ref[torch.Tensor]"
    # Computed with those of the others, for the next who asks.
    found_norm: Optional[torch.Tensor]
    square_sum: float
    scale: torch.Tensor
    scaled: bool
    # The part of `scale` that a loss scaler set.
    unscaled: float
    # The values, scaled, once a script has changed them.
    value: Optional[torch.Tensor]
    # Whether a script has made it zero.
    zero: bool
    # What an error says where plain PyTorch would have added it to a gradient that is gone.
    partial: Optional[str]

    @staticmethod
    def __new__(cls, param: torch.Tensor, square_sum: float, siblings: BackwardGradients) -> "GradientInTile":
        held = torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        held.param = weakref.ref(param)
        held.begin(square_sum, siblings)
        return held

    def begin(self, square_sum: float, siblings: BackwardGradients) -> None:
        """A backward has made the gradient, or added to it: nothing has changed it since."""
        self.siblings, self.found_norm, self.square_sum = siblings, None, square_sum
        self.scale, self.scaled, self.unscaled = UNSCALED, False, 1.0
        self.value, self.zero, self.partial = None, False, None
        # Last: the others look at those.
        siblings.handles.append(weakref.ref(self))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Held({tuple(self.shape)}, partial)" if self.partial else f"Held({tuple(self.shape)}, norm={float(_norms([self])[0]):.6g})"

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self:
            return
        if value.shape != self.shape:
            raise Error(f"param.grad.data of shape {tuple(self.shape)} is assigned a tensor of shape {tuple(value.shape)}: assign one of the parameter's shape")
        value = value.detach()
        # Of another gradient its values, and not its handle.
        value = value.clone() if isinstance(value, GradientInTile) else value
        self.value, self.found_norm, self.zero, self.partial = value.to(self.device, self.dtype), None, False, None

    # What asks for memory below PyTorch's dispatcher.

    def numpy(self, *, force: bool = False) -> Any:
        return _not_writeable(self.clone().numpy(force=force))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return _not_writeable(self.clone().__array__(*args, **kwargs))

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise NotSupported("dlpack of a gradient, whose values are in a tile: what is written to them would be lost; pass a clone() of it")

    def resize_(self, *_: Any, **__: Any) -> Any:
        raise NotSupported("resize_ of a gradient, which has its parameter's shape: give param.grad a tensor of that shape")

    def share_memory_(self) -> Any:
        raise NotSupported("share_memory_ of a gradient, whose values are in a tile: share a clone() of it")

    def apply_(self, *args: Any) -> torch.Tensor:
        return self.copy_(self.clone().apply_(*args))

    def map_(self, *args: Any) -> torch.Tensor:
        return self.copy_(self.clone().map_(*args))

    def map2_(self, *args: Any) -> torch.Tensor:
        return self.copy_(self.clone().map2_(*args))

    def tolist(self) -> Any:
        return self.clone().tolist()

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.detach.default:
            return args[0]
        if func not in _MAKES_ZERO and (why := next((one.partial for one in _handles_in(args, kwargs) if one.partial), None)):
            raise Error(why)
        found = _KNOWN[func](args, kwargs) if func in _KNOWN else _BY_VALUES
        return _on_values(func, args, kwargs) if found is _BY_VALUES else found


def _not_writeable(array: Any) -> Any:
    """An array of numpy's with copies of values: nobody would see what is written to it."""
    array.flags.writeable = False
    return array


def _handles_in(args: Any, kwargs: Any) -> Iterator[GradientInTile]:
    """The gradients among an operation's arguments. Quicker than tree_flatten: operations have no deeper lists."""
    for one in (*args, *kwargs.values()):
        if isinstance(one, GradientInTile):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from (part for part in one if isinstance(part, GradientInTile))


PARTIAL = (
    "a gradient is to be used that plain PyTorch would have added to that of an earlier step, which is gone with its step: call zero_grad() of the model or "
    "the optimizer after each optimizer.step()"
)

# Of a parameter with this name.
PARTIAL_OUTSIDE = (
    "the gradient of {0}, which is in no group of the optimizer, is to be used: optimizer.zero_grad() leaves it, so plain PyTorch would have added it to those "
    "of all earlier steps, which are gone; freeze the parameter with requires_grad_(False), or call model.zero_grad() after each optimizer.step()"
)

# Of one that is held over the end of its run.
CLOSED = "a gradient of before close() is to be used, and the run is closed: read param.grad again, or keep a clone() of it"

_MAKES_ZERO = (aten.zero_.default, aten.fill_.Scalar, aten._foreach_zero_.default)

# What the functions of `_KNOWN` return where an operation needs values all the same.
_BY_VALUES = object()


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls `func` with the values of gradients in their place. Keeps those that it changes, and those of which it returns views, through
    which they may be changed."""
    found: dict[int, tuple[GradientInTile, torch.Tensor]] = {}

    def values(one: Any) -> Any:
        if not isinstance(one, GradientInTile):
            return one
        if id(one) not in found:
            found[id(one)] = one, _values(one)
        return found[id(one)][1]

    result = func(*tree_map(values, args), **tree_map(values, kwargs))
    changed = {id(one) for one in tree_flatten(_written(func, args, kwargs))[0]}
    returned = {one.untyped_storage().data_ptr() for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor) and one.layout is torch.strided}
    for held, value in found.values():
        if id(held) in changed or value.untyped_storage().data_ptr() in returned:
            held.value, held.found_norm, held.zero = value, None, False
    handle_of = {id(value): held for held, value in found.values()}
    return tree_map(lambda one: handle_of.get(id(one), one), result)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes to. Below autograd no version counter tells."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _values(held: GradientInTile) -> torch.Tensor:
    if held.value is not None:
        return held.value
    if held.zero:
        return torch.zeros(held.shape, dtype=held.dtype, device=held.device)
    read, param = held.siblings.read(), held.param()
    if read is None or param is None:
        raise Error(CLOSED)
    value = read(param, held.siblings.content)
    return value if held.scale is UNSCALED else value.mul_(held.scale.to(value.device))


def _norm_of_several(args: Any, kwargs: Any) -> Any:
    return _norms(args[0]) if _order(args, kwargs) == 2 else _BY_VALUES


def _norm_of_one(args: Any, kwargs: Any) -> Any:
    one = args[0]
    if _order(args, kwargs) != 2 or len(args) > 2 or kwargs.keys() - {"ord"}:
        return _BY_VALUES
    if one.found_norm is None:
        handles = [held for held in (handle() for handle in one.siblings.handles) if held is not None]
        for held, norm in zip(handles, _norms(handles)):
            held.found_norm = norm
    norm, one.found_norm = one.found_norm, None
    return norm


def _norms(grads: Any) -> list[torch.Tensor]:
    """The 2-norms, scaled, on the gradients' device: in one copy, as each would wait for it."""
    device = grads[0].device
    norms = torch.tensor([math.sqrt(one.square_sum) for one in grads], dtype=torch.float32, device=device)
    if any(one.scale is not UNSCALED for one in grads):
        norms = norms * torch.stack([one.scale.to(device) for one in grads]).abs()
    found = list(norms.unbind())
    for index, one in enumerate(grads):
        if one.value is not None or one.zero:
            found[index] = torch.linalg.vector_norm(_values(one)).float()
    return found


def _scale(grads: Any, factor: Any, result: Any = None) -> Any:
    """Multiplies the scales; gradients that share one share the product, so that it is read once. Returns `result`."""
    if (
        not all(isinstance(one, GradientInTile) for one in grads)
        or isinstance(factor, GradientInTile)
        or isinstance(factor, torch.Tensor)
        and factor.numel() != 1
    ):
        return _BY_VALUES
    for one in grads:
        if one.value is not None:
            one.value.mul_(factor)
            one.found_norm = None
        elif not one.zero:
            one.scale, one.scaled, one.found_norm = one.siblings.product(one.scale, factor), True, None
    return result


def _unscale(args: Any, kwargs: Any) -> None:
    """What a loss scaler does: looks whether all are finite, and takes the scale of the loss from them."""
    grads, found_inf, inverse_scale = args
    finite = all(math.isfinite(one.square_sum) if one.value is None else bool(one.value.isfinite().all()) for one in grads)
    if not finite:
        found_inf.fill_(1.0)
    _scale(grads, inverse_scale)
    unscaled = float(inverse_scale)
    for one in grads:
        one.unscaled *= unscaled


def _make_zero(grads: Any, result: Any = None) -> Any:
    if not all(isinstance(one, GradientInTile) for one in grads):
        return _BY_VALUES
    for one in grads:
        one.zero, one.partial, one.value, one.found_norm = True, None, None, None
    return result


def _order(args: Any, kwargs: Any) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2))


# Operations that need no values.
_KNOWN = {
    aten._foreach_norm.Scalar: _norm_of_several,
    aten.linalg_vector_norm.default: _norm_of_one,
    aten._foreach_mul_.Tensor: lambda args, kwargs: _scale(args[0], args[1]),
    aten._foreach_mul_.Scalar: lambda args, kwargs: _scale(args[0], args[1]),
    aten.mul_.Tensor: lambda args, kwargs: _scale(args[:1], args[1], args[0]),
    aten.mul_.Scalar: lambda args, kwargs: _scale(args[:1], args[1], args[0]),
    aten.div_.Tensor: lambda args, kwargs: _scale(args[:1], _inverse(args[1]), args[0]),
    aten.div_.Scalar: lambda args, kwargs: _scale(args[:1], 1.0 / args[1], args[0]),
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.zero_.default: lambda args, kwargs: _make_zero(args[:1], args[0]),
    aten.fill_.Scalar: lambda args, kwargs: _BY_VALUES if args[1] else _make_zero(args[:1], args[0]),
    aten._foreach_zero_.default: lambda args, kwargs: _make_zero(args[0]),
}


def _inverse(factor: Any) -> Any:
    return factor if isinstance(factor, GradientInTile) else 1.0 / factor

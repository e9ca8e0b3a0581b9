"""Gradients that lie in tiles: `param.grad` shows their shape, norm and scale, which is what clipping and scaling need."""

from __future__ import annotations

import math
import weakref
from typing import Any, Optional

import torch

from ._errors import NotSupported

aten = torch.ops.aten

# The scale of a gradient that nothing has scaled.
UNSCALED = torch.ones(())


class Together:
    """The gradients of one backward. What they share is computed once, since each computation on a GPU is waited for."""

    def __init__(self) -> None:
        # Weak, so that each goes with its last user and not with the next collection of cycles.
        self.handles: list[weakref.ref[Held]] = []
        self._product: tuple = (None, None, None, None)

    def product(self, scale: torch.Tensor, factor: Any) -> torch.Tensor:
        """A scale times a factor, the same tensor as long as both are the same."""
        # Tensors of inference mode do not count their changes.
        counts = not (isinstance(factor, torch.Tensor) and factor.is_inference())
        version = getattr(factor, "_version", None) if counts else None
        before, by, its_version, product = self._product
        if before is not scale or by is not factor or its_version != version or not counts:
            product = scale * factor
            if product.numel() != 1:
                raise NotSupported("a gradient times a tensor of several values: gradients lie in tiles; scale each with one number")
            product = product.reshape(())
            self._product = (scale, factor, version, product)
        return product


class Held(torch.Tensor):
    """A gradient in a tile. `square_sum` is of its values before `scale`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    together: Together
    # Computed with those of the others, for the next who asks.
    found_norm: Optional[torch.Tensor]
    square_sum: float
    scale: torch.Tensor
    scaled: bool
    # The part of `scale` that a loss scaler set.
    unscaled: float

    @staticmethod
    def __new__(cls, param: torch.Tensor, square_sum: float, together: Together) -> "Held":
        held = torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        together.handles.append(weakref.ref(held))
        held.together, held.found_norm = together, None
        held.square_sum = square_sum
        held.scale = UNSCALED
        held.scaled = False
        held.unscaled = 1.0
        return held

    def __repr__(self) -> str:
        return f"Held({tuple(self.shape)}, norm={math.sqrt(self.square_sum) * float(self.scale):.6g})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._foreach_norm.Scalar and _order(args, kwargs) == 2:
            return _norms(args[0])
        if func is aten.linalg_vector_norm.default and _order(args, kwargs) == 2:
            return _norm(args[0])
        if func in (aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar):
            _scale(args[0], args[1])
            return None
        if func in (aten.mul_.Tensor, aten.mul_.Scalar):
            _scale(args[:1], args[1])
            return args[0]
        if func in (aten.div_.Tensor, aten.div_.Scalar):
            _scale(args[:1], 1.0 / args[1])
            return args[0]
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            grads, found_inf, inverse_scale = args
            if not all(math.isfinite(one.square_sum) for one in grads):
                found_inf.fill_(1.0)
            _scale(grads, inverse_scale)
            unscaled = float(inverse_scale)
            for one in grads:
                one.unscaled *= unscaled
            return None
        if func is aten.detach.default:
            return args[0]
        raise NotSupported(
            f"{func} on a gradient: gradients lie in tiles after backward, and only clip_grad_norm_ (2-norm), scaling, "
            "GradScaler and zero_grad reach them; to look at one, register a hook on the parameter before prepare"
        )


def _norm(one: Held) -> torch.Tensor:
    if one.found_norm is None:
        handles = [held for held in (handle() for handle in one.together.handles) if held is not None]
        for held, norm in zip(handles, _norms(handles)):
            held.found_norm = norm
    norm, one.found_norm = one.found_norm, None
    return norm


def _norms(grads) -> list[torch.Tensor]:
    """The 2-norms, scaled, on the gradients' device: in one copy, as each would wait for it."""
    device = grads[0].device
    norms = torch.tensor([math.sqrt(one.square_sum) for one in grads], dtype=torch.float32, device=device)
    if any(one.scale is not UNSCALED for one in grads):
        norms = norms * torch.stack([one.scale.to(device) for one in grads]).abs()
    return list(norms.unbind())


def _scale(grads, factor) -> None:
    """Multiplies the scales; gradients that share one share the product, so that it is read once."""
    for one in grads:
        one.scale, one.scaled, one.found_norm = one.together.product(one.scale, factor), True, None


def _order(args, kwargs) -> float:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return float(order)

"""Gradients that lie in tiles: `param.grad` shows their shape, norm and scale, which is what clipping and scaling need."""

from __future__ import annotations

import math

import torch

from ._errors import NotSupported

aten = torch.ops.aten


class Held(torch.Tensor):
    """A gradient in a tile. `square_sum` is of its values before `scale`."""

    square_sum: float
    scale: torch.Tensor
    scaled: bool
    # The part of `scale` that a loss scaler set.
    unscaled: float

    @staticmethod
    def __new__(cls, param: torch.Tensor, square_sum: float) -> "Held":
        held = torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        held.square_sum = square_sum
        held.scale = torch.ones(())
        held.scaled = False
        held.unscaled = 1.0
        return held

    def __repr__(self) -> str:
        return f"Held({tuple(self.shape)}, norm={math.sqrt(self.square_sum) * float(self.scale):.6g})"

    def norm_2(self) -> torch.Tensor:
        """The 2-norm, scaled."""
        return torch.tensor(math.sqrt(self.square_sum), dtype=torch.float32) * self.scale.abs()

    def multiply(self, factor) -> None:
        """Scales the gradient."""
        self.scale, self.scaled = self.scale * factor, True

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._foreach_norm.Scalar and _order(args, kwargs) == 2:
            return [one.norm_2() for one in args[0]]
        if func is aten.linalg_vector_norm.default and _order(args, kwargs) == 2:
            return args[0].norm_2()
        if func in (aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar):
            for one in args[0]:
                one.multiply(args[1])
            return None
        if func in (aten.mul_.Tensor, aten.mul_.Scalar):
            args[0].multiply(args[1])
            return args[0]
        if func in (aten.div_.Tensor, aten.div_.Scalar):
            args[0].multiply(1.0 / args[1])
            return args[0]
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            grads, found_inf, inverse_scale = args
            for one in grads:
                if not math.isfinite(one.square_sum):
                    found_inf.fill_(1.0)
                one.multiply(inverse_scale.to(one.scale.device))
                one.unscaled *= float(inverse_scale)
            return None
        if func is aten.detach.default:
            return args[0]
        raise NotSupported(
            f"{func} on a gradient: gradients lie in tiles after backward, and only clip_grad_norm_ (2-norm), scaling, "
            "GradScaler and zero_grad reach them; to look at one, register a hook on the parameter before prepare"
        )


def _order(args, kwargs) -> float:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return float(order)

"""Products of Linear layers in 8 bits (`offloadd.matmuls = "fp8"`), as docs/design.md defines them for the trainer too.

Each factor is converted with a scale of its own, a power of two: weights and activations to E4M3, gradients to E5M2. The trainer's kernels convert;
in a compiled block PyTorch's operators do, with the same bits, because it fuses them with what is around them.
"""

from __future__ import annotations

import collections
import functools
from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from . import _offloadd
from ._console import say
from ._errors import NotSupported
from ._replaced_forwards import Layer, ReplacedForwards, is_given_by_others
from ._released import in_transform
from ._units import blocks_of

_WEIGHTS, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
# Sizes of factors are multiples of it.
_UNIT = _offloadd.FP8_UNIT
# A layer with a smaller side stays as it is. Routers and adapters have one.
SIDE_MIN = _offloadd.FP8_SIDE_MIN


class Fp8Layers:
    """Linear layers of a model's blocks that compute in 8 bits between `begin` and `end`. Which ones depends on the model and on what its
    blocks are, and not on what is trained or moved."""

    def __init__(self, model: nn.Module, device: torch.device, wanted: Optional[Sequence] = None) -> None:
        """Finds them; `wanted` names the blocks, as in `prepare`. Raises `NotSupported` if the device cannot compute in 8 bits, or no layer can."""
        if why := why_not(device):
            raise NotSupported(f'offloadd.matmuls is "fp8", but products cannot be computed in 8 bits: {why}: leave it out, or set it to "dtype"')
        # A layer that is a unit by itself, such as a head, is no block.
        blocks = [block for _, block in blocks_of(model, wanted) if not isinstance(block, nn.Linear)]
        linear = {module: None for block in blocks for module in block.modules() if isinstance(module, nn.Linear)}
        left_out = collections.Counter(why for module in linear if (why := _why_left_out(module)))
        self._layers = [module for module in linear if not _why_left_out(module)]
        self._left_out = ", ".join(f"{count} {why}" for why, count in left_out.items())
        if not self._layers:
            raise NotSupported(
                f'offloadd.matmuls is "fp8", but no Linear layer of the model\'s blocks can compute in 8 bits ({self._left_out or "there is none"}): '
                'leave it out, or set it to "dtype"'
            )

    def begin(self) -> None:
        self._replaced = ReplacedForwards(Layer.PRODUCTS, {layer: functools.partial(_in_place_of, layer) for layer in self._layers})
        say(f"{len(self._layers)} Linear layers multiply in 8 bits" + f"; left out: {self._left_out}" * bool(self._left_out))

    def end(self) -> None:
        """Makes them plain layers again."""
        self._replaced.end()


def why_not(device: torch.device) -> Optional[str]:
    """Why products cannot be computed in 8 bits there; None where they can."""
    if device.type != "cuda":
        return "the model does not compute on a GPU"
    return _offloadd.fp8_refusal(device.index)


def _why_left_out(layer: nn.Linear) -> Optional[str]:
    own = [layer.weight, *([] if layer.bias is None else [layer.bias])]
    if type(layer) is not nn.Linear or is_given_by_others(layer):
        return "with a forward of their own"
    if any(type(param) is not nn.Parameter for param in own):
        return "quantized"
    if any(param.dtype != torch.bfloat16 for param in own):
        return "not in bfloat16"
    if min(layer.in_features, layer.out_features) < SIDE_MIN:
        return f"with a side below {SIDE_MIN}"
    if layer.in_features % _UNIT or layer.out_features % _UNIT:
        return f"with a side that is no multiple of {_UNIT}"
    return None


def _in_place_of(layer: nn.Linear, below: Any, input: torch.Tensor) -> torch.Tensor:
    return _forward(layer, input)


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.bfloat16 and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.bfloat16)
    if x.dtype != torch.bfloat16 or x.numel() == 0:
        # An error of types, or nothing to multiply, is PyTorch's own.
        return nn.functional.linear(x, layer.weight, layer.bias)
    # Matrix units take rows that lie one after another.
    rows = x.reshape(-1, layer.in_features).contiguous()
    count = rows.shape[0]
    if missing := -count % _UNIT:
        # Rows of zeros change no scale and no sum.
        rows = nn.functional.pad(rows, (0, 0, 0, missing))
    return _Linear.apply(rows, layer.weight, layer.bias)[:count].view(*x.shape[:-1], layer.out_features)


class _Numbers(NamedTuple):
    """A matrix in 8 bits as it lies, with rows and columns exchanged in memory, or both, and what its numbers are to be multiplied by. Matrix units
    take factors only along the dimension that is summed."""

    straight: Optional[torch.Tensor]
    transposed: Optional[torch.Tensor]
    inverse_scale: torch.Tensor


def _converted(x: torch.Tensor, dtype: torch.dtype, straight: bool = True, transposed: bool = False) -> _Numbers:
    """Converts with the largest power of two as scale with which the largest number stays in the format. A matrix that is not finite becomes NaN."""
    # A compiled block fuses PyTorch's operators into what is around them; otherwise each of them would read and write the matrix.
    if not torch.compiler.is_compiling() and (converter := _converter_for(x)) is not None:
        return _converted_on_gpu(converter, x, dtype, straight, transposed)
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest)).clamp(max=126.0))
    numbers = (x * scale.to(x.dtype)).to(dtype)
    return _Numbers(numbers if straight else None, numbers.t().contiguous() if transposed else None, scale.reciprocal())


def _converter_for(x: torch.Tensor) -> Optional[_offloadd.Fp8Converter]:
    """The kernels of the GPU that `x` is on, if they can convert it. A tensor of another class may have no memory of its own."""
    return _compiled(x.device.index) if x.is_cuda and _is_plain(x) else None


def _is_plain(x: torch.Tensor) -> bool:
    """Whether `x` is bf16 numbers one after another in memory of its own; PyTorch's operators convert everything else."""
    return type(x) in (torch.Tensor, nn.Parameter) and x.dtype == torch.bfloat16 and x.is_contiguous() and not in_transform()


@functools.lru_cache(maxsize=None)
def _compiled(index: int) -> _offloadd.Fp8Converter:
    return _offloadd.Fp8Converter(index)


def _converted_on_gpu(converter: _offloadd.Fp8Converter, x: torch.Tensor, dtype: torch.dtype, straight: bool, transposed: bool) -> _Numbers:
    rows, columns = x.shape
    if x.data_ptr() % converter.align():
        x = x.clone()
    scratch = x.new_empty(converter.scratch_elems(x.numel()), dtype=torch.int32)
    found = _Numbers(
        x.new_empty((rows, columns), dtype=dtype) if straight else None,
        x.new_empty((columns, rows), dtype=dtype) if transposed else None,
        x.new_empty((), dtype=torch.float32),
    )
    to = tuple(0 if one is None else one.data_ptr() for one in found)
    converter.convert(x.data_ptr(), (rows, columns), dtype == _GRADIENTS, scratch.data_ptr(), to, _stream_of(x))
    return found


def _stream_of(x: torch.Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


def _product(
    a: Optional[torch.Tensor], a_scale: torch.Tensor, b: Optional[torch.Tensor], b_scale: torch.Tensor, bias: Optional[torch.Tensor] = None, fast: bool = False
) -> torch.Tensor:
    """`a` [n, k] times the transposed `b` [m, k], in bf16. `fast` sums in fewer bits than fp32."""
    assert a is not None and b is not None
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)


class _Linear(torch.autograd.Function):
    """`x` [rows, inputs] times the transposed weight [outputs, inputs], plus the bias."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
        x8, weight8 = _converted(x, _WEIGHTS), _converted(weight.contiguous(), _WEIGHTS)
        return _product(x8.straight, x8.inverse_scale, weight8.straight, weight8.inverse_scale, bias, fast=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        x, weight, _ = inputs
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Optional[torch.Tensor], ...]:
        x, weight = ctx.saved_tensors
        of_bias = grad.sum(0, dtype=torch.float32).to(grad.dtype) if ctx.needs_input_grad[2] else None
        if x is None and weight is None:
            return None, None, of_bias
        grad8 = _converted(grad.contiguous(), _GRADIENTS, straight=weight is not None, transposed=x is not None)
        of_x = of_weight = None
        if weight is not None:
            weight8 = _converted(weight.contiguous(), _WEIGHTS, straight=False, transposed=True)
            of_x = _product(grad8.straight, grad8.inverse_scale, weight8.transposed, weight8.inverse_scale)
        if x is not None:
            x8 = _converted(x, _WEIGHTS, straight=False, transposed=True)
            of_weight = _product(grad8.transposed, grad8.inverse_scale, x8.transposed, x8.inverse_scale)
        return of_x, of_weight, of_bias

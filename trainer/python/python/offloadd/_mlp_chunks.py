"""The MLP of each block, computed for one chunk of the tokens after the other, so that the intermediate results of one chunk are in memory.

    forward     chunk 1 -> its rows of the output, chunk 2 -> its rows, ...     what is in between is dropped (torch's checkpointing)
    backward    chunk 2 computed again, its gradients; chunk 1 computed again, its gradients

Rows of an MLP depend on no other rows: that is known of the MLPs of transformers that consist of the layers below, and others are refused. Autograd adds up
the gradients that a weight gets from the chunks before it hands them over, so that each weight has one gradient, as without chunks.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

import torch
from torch import nn
from torch.utils import checkpoint

from ._activations import staying
from ._dependencies import Dependencies
from ._errors import NotSupported
from ._released import in_transform
from ._replaced_forwards import Layer, ReplacedForwards, is_given_by_others
from ._units import blocks_of

_KEY = "offloadd.mlp_chunks"

# The name of a block's MLP.
_MLP = "mlp"

# Layers that compute each row by itself, by their classes and, where another library has them, by module and name. Not 8-bit ones, whose scales
# and outliers depend on all rows.
_ROWWISE = {nn.Linear, nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.ModuleDict, nn.ParameterDict}
_ROWWISE_NAMES = {
    ("bitsandbytes.nn.modules", "Linear4bit"),
    ("transformers.models.falcon.modeling_falcon", "FalconLinear"),
    ("transformers.pytorch_utils", "Conv1D"),
}
# Those of these files along other dimensions than the last, as `dim` of a Softmax says, are not, nor these.
_MIXING = {nn.MultiheadAttention, nn.Softmax2d}
_ROWWISE_FILES = ("torch.nn.modules.activation", "transformers.activations")
# Adapters of LoRA, PEFT's and those of a plan.
_ADAPTERS = ("peft.tuners.lora.", f"{__package__}.")

# A module's tables of hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class MlpChunks:
    """The MLPs of a model, in chunks until `end`. Raises `NotSupported` for a model whose MLPs are not known to compute each token by itself."""

    def __init__(self, model: nn.Module, count: int) -> None:
        # Blocks may share one.
        found = {getattr(block, _MLP): f"{name}.{_MLP}" for name, block in blocks_of(model, None) if hasattr(block, _MLP)}
        if not found:
            raise NotSupported(f"{_KEY} = {count}: the blocks of {type(model).__name__} have no module {_MLP}: leave the key out")
        for mlp, name in found.items():
            _check(name, mlp)
        in_chunks = torch.compiler.disable(_in_chunks)
        self._replaced = ReplacedForwards(Layer.MLP_CHUNKS, {mlp: functools.partial(in_chunks, mlp, count, name) for mlp, name in found.items()})

    def end(self) -> None:
        """The MLPs are computed whole again."""
        self._replaced.end()


def _check(name: str, mlp: nn.Module) -> None:
    """Refuses an MLP whose rows may depend on each other, or that has more than one input or output."""
    leave_out = f"leave {_KEY} out"
    kind = type(mlp)
    own = next((inner for inner, module in mlp.named_modules() if is_given_by_others(module)), None)
    if own is not None:
        raise NotSupported(f"{_KEY}: {'.'.join(filter(None, (name, own)))} was given a forward of its own, which may mix tokens: {leave_out}")
    if not kind.__module__.startswith("transformers.models."):
        raise NotSupported(f"{_KEY}: {name} is a {kind.__name__}, which is not an MLP of transformers, and may mix tokens: {leave_out}")
    inputs = list(inspect.signature(mlp.forward).parameters)
    if len(inputs) != 1:
        raise NotSupported(f"{_KEY}: {name}, a {kind.__name__}, is given {', '.join(inputs)} and not only hidden states: {leave_out}")
    for inner, module in mlp.named_modules():
        if module is not mlp and not is_rowwise(module):
            raise NotSupported(
                f"{_KEY}: {name}, a {kind.__name__}, has a {type(module).__name__} ({inner}), which is not known to compute each token by itself "
                f"(mixtures of experts choose for each token): {leave_out}"
            )


def is_rowwise(module: nn.Module) -> bool:
    """Whether a layer is known to compute each row by itself."""
    kind = type(module)
    if kind.__module__.startswith("torch.nn."):
        sizes = len(getattr(module, "normalized_shape", (1,))), getattr(module, "num_parameters", 1)
        if kind in _MIXING or getattr(module, "dim", -1) != -1 or max(sizes) > 1:
            return False
    named = (kind.__module__, kind.__name__) in _ROWWISE_NAMES or kind.__module__ in _ROWWISE_FILES or kind.__module__.startswith(_ADAPTERS)
    return kind in _ROWWISE or named or kind.__module__.startswith("transformers.models.") and kind.__name__.endswith(("RMSNorm", "LayerNorm"))


def _in_chunks(mlp: nn.Module, count: int, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of an MLP, in place of the one below, `forward`."""
    for inner, module in mlp.named_modules():
        if module is not mlp and any(getattr(module, hooks) for hooks in HOOKS):
            raise NotSupported(f"{_KEY}: {name}.{inner} has a hook or is a unit of its own, and would see chunks: hook {name} itself, or leave the key out")
    (states,) = (*args, *kwargs.values())
    # One token for each sequence, as in generation, is not divided. torch's transforms take no checkpoints.
    if states.dim() < 2 or states.shape[-2] == 1 or in_transform():
        return forward(states)
    rows = states.reshape(1, -1, states.shape[-1])
    parts = rows.split(-(-rows.shape[1] // count), dim=1)
    if torch.is_grad_enabled():
        depends_on: list[Dependencies] = []

        def of_chunk(part: torch.Tensor) -> torch.Tensor:
            # None yet in the forward, which may set what a layer chooses at its first call.
            for one in depends_on:
                one.check()
            return forward(part)

        # They are parts of a block's results, which stay where the block computes.
        with staying():
            results = [checkpoint.checkpoint(of_chunk, part, use_reentrant=False) for part in parts]
        depends_on.append(Dependencies(_KEY, name, mlp, {"its input": states}))
    else:
        results = [forward(part) for part in parts]
    return torch.cat(results, dim=1).reshape(*states.shape[:-1], -1)

"""The mean of a loss over all tokens of a sequence whose parts lie on several ranks."""

from __future__ import annotations

from typing import Any

import torch

from ._errors import Error
from ._sequence_attention import check_divided
from ._sequence_groups import IGNORED, SequenceGroup, the_group


def mean(loss: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """The mean of a loss over all tokens of a sequence that count: call `backward` on it on all ranks. `loss` has the loss of each token, in the
    shape of `shift_labels`, or is their mean over this rank's part. `shift_labels` has this part's labels, -100 for tokens that do not count."""
    check_divided("sequence_parallel.mean", passes=True)
    counts = (shift_labels != IGNORED).to(loss.device)
    counted = counts.sum()
    if loss.ndim > 0:
        if loss.shape != counts.shape:
            raise Error(f"sequence_parallel.mean: the loss has the shape {list(loss.shape)} and shift_labels {list(counts.shape)}: pass their mean, or all")
        loss = torch.where(counts, loss, 0.0).sum() / counted.clamp(min=1)
    return _Mean.apply(loss, counted, the_group())


class _Mean(torch.autograd.Function):
    """The mean over all counted tokens of a sequence. Its gradient is that of the sum over the ranks, which each have the same value: a run
    takes the mean of gradients over all ranks."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, counted: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        own = torch.where(counted > 0, loss.detach().double() * counted, 0.0)
        # The gradient of a division of nothing by nothing is no number, whatever it is multiplied by. That of cross_entropy is 0.
        divides = loss.grad_fn is not None and loss.grad_fn.name().startswith("Div")
        undefined = (counted == 0) & loss.detach().isnan()
        told = group.gather(torch.stack([own, counted.double(), undefined.double()]))
        # In the order of ranks: the same bits on all of them.
        total, tokens, nothing = (sum(of_ranks) for of_ranks in zip(*told))
        if divides and bool(nothing):
            raise Error(
                "sequence_parallel.mean: a part has no token that counts, and its loss is divided by their number: pass the loss of each token, "
                "or divide by number.clamp(min=1)"
            )
        ctx.factor = counted * group.size / tokens.clamp(min=1)
        return (total / tokens.clamp(min=1)).to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (grad * ctx.factor).to(grad.dtype), None, None

"""Lion, which torch.optim does not have: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2."""

from __future__ import annotations

from typing import Any, Callable, Optional, Union

import torch


class Lion(torch.optim.Optimizer):
    """With the arguments, the values and the state of `lion_pytorch.Lion`. What is computed here is what tiles are updated with."""

    def __init__(self, params: Any, lr: Union[float, torch.Tensor] = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        if not (lr >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"lr {lr} and weight_decay {weight_decay} must not be negative, and betas {betas} must be at least 0 and less than 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates the parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                direction = momentum.mul(beta1).add_(param.grad, alpha=1 - beta1).sign_()
                param.mul_(1 - lr * group["weight_decay"]).sub_(direction.mul_(lr))
                momentum.mul_(beta2).add_(param.grad, alpha=1 - beta2)
        return loss

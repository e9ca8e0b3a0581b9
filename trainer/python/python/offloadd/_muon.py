"""Muon, whose step of a matrix needs all of it: its direction is the momentum with all singular values near 1 (Jordan et al., "Muon: An optimizer
for hidden layers in neural networks", 2024). As `torch.optim.Muon` computes it. What is made element by element is made where the tiles are, between
backward and the update (`_directions`); here is what needs whole matrices, and a plain optimizer of both rules.

    momentum  = lerp(momentum, g, 1 - mu)                 tiles
    direction = orthogonal(lerp(g, momentum, mu))         tiles, then here
    master    = master - lr (decay master + direction)    tiles, in the update
"""

from __future__ import annotations

import math
from typing import Any, Callable, Container, Iterable, Mapping, Optional, Sequence

import torch
from torch import nn

from ._errors import Error, NotSupported
from ._packed import users_of
from ._units import blocks_of


class _NoMuon(torch.optim.Optimizer):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotSupported(f"torch {torch.__version__} has no torch.optim.Muon: install torch 2.9 or newer")


TorchMuon = getattr(torch.optim, "Muon", _NoMuon)

# What `torch.optim.AdamW` has for a group that does not say it.
_AUX = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}

# (lr, beta1, beta2, eps, weight_decay) of the engine's update of a parameter.
Scalars = tuple[float, float, float, float, float]


def rule_of(group: Mapping[str, Any]) -> str:
    """The rule that updates a group of parameters: Muon's, if it does not say otherwise."""
    return "Muon" if group.get("use_muon", True) else "AdamW"


class MuonWithAdamW(TorchMuon):
    """`torch.optim.Muon` with groups of `use_muon=False`, as the reference implementation has them, which are updated as by `torch.optim.AdamW`. What is
    computed here is what tiles are updated with."""

    def __init__(self, params: Any, **given: Any) -> None:
        groups = [params] if isinstance(params, torch.Tensor) else list(params)
        by_muon = [not isinstance(group, dict) or rule_of(group) == "Muon" for group in groups]
        rest = [group for group, muon in zip(groups, by_muon) if not muon]
        super().__init__([group for group, muon in zip(groups, by_muon) if muon], **given)
        if rest:
            matrices, count = iter(self.param_groups[:]), len(self.param_groups)
            for group in rest:
                self.add_param_group(group)
            others = iter(self.param_groups[count:])
            self.param_groups[:] = [next(matrices if muon else others) for muon in by_muon]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group with `use_muon=False` has what `torch.optim.AdamW` has where it says nothing."""
        super().add_param_group(completed(param_group))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for number, (own, loaded) in enumerate(zip(self.param_groups, state_dict["param_groups"])):
            ours, theirs = rule_of(own), rule_of(loaded)
            if ours != theirs:
                raise NotSupported(
                    f"group {number} of the optimizer's state is updated by {theirs}, and this optimizer's by {ours}: load the state of one with use_muon=False "
                    "in the same groups"
                )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates the parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = _by_muon if rule_of(group) == "Muon" else _by_adamw
            for param in group["params"]:
                if param.grad is not None:
                    update(param, group, self.state[param])
        return loss


def _by_muon(param: torch.Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    momentum = state.setdefault("momentum_buffer", torch.zeros_like(param))
    direction = orthogonal(mixed(param.grad, momentum, group), group)
    lr = float(group["lr"])
    param.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr * _factor(group["adjust_lr_fn"], *param.shape))


def _by_adamw(param: torch.Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
    step = float(state.get("step", 0)) + 1
    state["step"] = torch.tensor(step)
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    mean = state.setdefault("exp_avg", torch.zeros_like(param)).lerp_(param.grad, 1 - beta1)
    square = state.setdefault("exp_avg_sq", torch.zeros_like(param)).mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
    root = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    param.mul_(1 - lr * group["weight_decay"]).addcdiv_(mean, root, value=-lr / (1 - beta1**step))


def completed(group: dict[str, Any]) -> dict[str, Any]:
    """A group with what `torch.optim.AdamW` has where it says nothing, if that updates it."""
    return group if rule_of(group) == "Muon" else {**_AUX, **group}


def ids_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the parameters that Muon updates."""
    return {id(param) for group in optimizer.param_groups if rule_of(group) == "Muon" for param in group["params"]}


def check_matrices(named: Iterable[tuple[str, torch.Tensor]], muon: Container[int]) -> None:
    """Refuses parameters with the ids `muon` that are no matrices."""
    for name, param in named:
        if id(param) in muon and param.dim() != 2:
            raise NotSupported(f"{name} has the shape {tuple(param.shape)}, and Muon updates matrices: put it into a group with use_muon=False")


def grouped(model: nn.Module, wanted: Optional[Sequence], params: Iterable[Any], lr: float, aux_lr: float) -> list[dict[str, Any]]:
    """Groups of `params`, which may be groups themselves: the matrices of the model's blocks, and after them all else, with the rates of both. What a group
    says of itself, such as its rate or `use_muon`, stays, as in torch.optim."""
    matrices = block_matrices(model, wanted)
    params = list(params)
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    # As torch.optim takes them: also a tensor alone, and what can be gone through once.
    members = [[given] if isinstance(given := group["params"], torch.Tensor) else list(given) for group in groups]
    found = []
    for muon, rate in ((True, lr), (False, aux_lr)):
        for group, of_group in zip(groups, members):
            own = [one for one in of_group if group.get("use_muon", id(one[1] if isinstance(one, tuple) else one) in matrices) == muon]
            if own:
                found.append({"lr": rate, **group, "params": own, "use_muon": muon})
    return found


def block_matrices(model: nn.Module, wanted: Optional[Sequence]) -> set[int]:
    """The ids of the matrices of a model's blocks that are trained: parameters of two dimensions that only their block uses, and no embedding. Raises
    `Error` if there are none."""
    users = users_of(model)
    found = set()
    for _, block in blocks_of(model, wanted):
        inside = set(map(id, block.modules()))
        for param in block.parameters():
            own = users[id(param)]
            of_block = all(id(user) in inside and not isinstance(user, (nn.Embedding, nn.EmbeddingBag)) for user in own)
            if param.requires_grad and param.dim() == 2 and of_block:
                found.add(id(param))
    if not found:
        raise Error(
            'optimizer.type = "Muon" is for the matrices of blocks, and the model has none that is trained: name its blocks in offloadd.units, or use "AdamW"'
        )
    return found


def scalars_of(group: Mapping[str, Any], shape: Sequence[int]) -> Scalars:
    """The update of a matrix by its direction."""
    lr = float(group["lr"])
    rate = lr * _factor(group["adjust_lr_fn"], *shape)
    # Its decay has the rate before it was adjusted.
    return rate, 0.0, 0.0, 0.0, lr * float(group["weight_decay"]) / rate if rate else 0.0


def _factor(rule: Any, rows: int, columns: int) -> float:
    """What the learning rate of a matrix is multiplied by."""
    if rule in (None, "original"):
        return math.sqrt(max(1, rows / columns))
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    raise NotSupported(f'torch.optim.Muon with adjust_lr_fn={rule!r}: use "original" or "match_rms_adamw"')


def mixed(grad: torch.Tensor, momentum: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """What is to be made orthogonal, element by element, of a gradient and the momentum before it, which is changed. Both are fp32."""
    momentum.lerp_(grad, 1 - group["momentum"])
    return (grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).bfloat16()


def orthogonal(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """A bf16 matrix with its singular values brought near 1 by Newton and Schulz's iteration: the operations of `torch.optim.Muon`, in their order."""
    (a, b, c), tall = group["ns_coefficients"], matrix.size(0) > matrix.size(1)
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide

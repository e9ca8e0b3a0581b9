"""Units made of an optimizer's parameters. These stay where they are: a unit passes through a flat tensor of its own, from and to which its
parameters are copied.

A whole parameter is the same on all ranks, as DistributedDataParallel keeps it, and the ranks divide its state. Of a DTensor each rank has
its local part and the state of it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, Container, Iterable, Iterator, Optional, Sequence

import torch
from torch import nn

from ._errors import Error, NotSupported
from ._muon import check_matrices
from ._units import ALIGN_ELEMS, Unit, check_memory, gradient_dtype, is_dense, memory_order

# Elements of a unit: large transfers, and little memory of a GPU for the few units that are on their way. Larger parameters are cut.
UNIT_ELEMS = 32 << 20

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Piece:
    """The elements of a parameter that lie in one unit, in the order of its memory."""

    param: nn.Parameter
    name: str
    # First element in this rank's part of the parameter, and how many each rank has in its part.
    start: int
    elems_of: tuple[int, ...]
    own: int

    def __post_init__(self) -> None:
        self.dtype, self.shape, self.is_meta = self.param.dtype, tuple(self.param.shape), self.param.is_meta

    def numel(self) -> int:
        """The room that each rank has for it."""
        return max(self.elems_of)

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its elements in all of this rank's, which are `flat`."""
        return flat[self.start : self.start + self.own]


@dataclass(eq=False, repr=False)
class ParamUnit(Unit):
    """Pieces of one type that come and go together, in a flat tensor beside the parameters."""

    # Ranks that have a part of it each, where it is divided.
    ranks: int = 1
    rank: int = 0
    params: list[Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of one rank.
        self._part_elems = self.elems
        self.divide(1)

    @property
    def numel(self) -> int:
        return sum(piece.numel() for piece in self.params)

    def divide(self, tile_elems: int) -> None:
        """Gives each rank's part whole tiles."""
        if self.sharded:
            self.shard_elems = self.room_elems = -(-self._part_elems // tile_elems) * tile_elems
            self.elems = self.shard_elems * self.ranks

    @property
    def division(self) -> str:
        return f"divided over {self.ranks} ranks" if self.sharded else ""

    @property
    def plan_params(self) -> list[dict[str, int]]:
        if not self.sharded:
            return super().plan_params
        of_rank = lambda rank: zip(self.params, self.offsets)
        return [{"offset": rank * self.shard_elems + offset, "elems": piece.elems_of[rank]} for rank in range(self.ranks) for piece, offset in of_rank(rank)]

    def address(self, start: int, item_bytes: int) -> int:
        """Only this rank's part has memory, and nobody reaches the others'."""
        return start - self.rank * self.shard_elems * item_bytes if self.sharded else start

    @property
    def memory_orders(self) -> list[str]:
        return [memory_order(local_of(piece.param)) for piece in self.params]

    def move(self, flat: torch.Tensor, copy: bool) -> None:
        self._lie_in(flat)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of `flat` that hold the pieces."""
        return [flat[offset : offset + piece.own] for piece, offset in zip(self.params, self.offsets)]

    def tensors(self, flat: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """The parameters, none of which is cut, each with the tensor like this rank's part of it whose numbers `flat` has in its place."""
        for piece, view in zip(self.params, self.views(flat)):
            local = local_of(piece.param)
            yield piece.param, view.as_strided(local.size(), local.stride())


def is_dtensor(one: Any) -> bool:
    """Whether a tensor is a DTensor; where nobody has imported them, none is."""
    module = sys.modules.get("torch.distributed.tensor") or sys.modules.get("torch.distributed._tensor")
    return isinstance(one, getattr(module, "DTensor", ()))


def local_of(param: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter: its own memory."""
    return param._local_tensor if is_dtensor(param) else param.detach()


def main_grad_of(param: torch.Tensor) -> Optional[torch.Tensor]:
    """Where Megatron's DistributedDataParallel sums the gradient of a parameter: a part of its buffer."""
    return getattr(param, "main_grad", None)


def grad_of(param: torch.Tensor, name: str) -> Optional[torch.Tensor]:
    """The gradient of a parameter, called `name` in the error: `main_grad` where there is one, as Megatron moves each gradient there. A frozen
    parameter, for which the buffer has zeros, has none."""
    main_grad = main_grad_of(param)
    if main_grad is None:
        return param.grad
    if param.grad is not None:
        raise NotSupported(f"{name} has gradients in grad and in main_grad, where Megatron's DistributedDataParallel sums them: set its grad to None")
    return main_grad if param.requires_grad else None


def _gradient_dtype_of(param: torch.Tensor) -> torch.dtype:
    """The type in which gradients of a parameter come."""
    main_grad = main_grad_of(param)
    return param.dtype if main_grad is None else main_grad.dtype


def is_divided(param: torch.Tensor) -> bool:
    """Whether the ranks have parts of a parameter."""
    return is_dtensor(param) and not all(one.is_replicate() for one in param.placements)


def whole_of(local: torch.Tensor, param: Any) -> torch.Tensor:
    """The whole tensor of which each rank has the part `local`, as of a parameter that is divided. All ranks must call it."""
    kind = type(param.data)
    return kind.from_local(local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()).full_tensor()


def part_of(whole: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have."""
    if not is_divided(param):
        return whole
    from torch.distributed.tensor import Replicate

    kind, mesh = type(param.data), param.device_mesh
    return kind.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(mesh, param.placements).to_local()


def form_of(param: torch.Tensor) -> str:
    """The type of a parameter, and the shape and the order in memory of this rank's part, which are to stay."""
    local = local_of(param)
    order = memory_order(local) if is_dense(local) else "with gaps"
    return " ".join(filter(None, (str(param.dtype), str(tuple(local.shape)), order)))


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order of its memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def flat_like(values: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The elements of `values` in the order in which those of `local` lie in memory."""
    values = values.detach() if values.layout is torch.strided else values.detach().to_dense()
    if local.is_contiguous():
        return values.contiguous().view(-1)
    if values.stride() != local.stride():
        values = torch.empty_strided(local.size(), local.stride(), dtype=values.dtype, device=values.device).copy_(values)
    return flat_of(values)


def named_params(groups: Iterable[dict[str, Any]]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of an optimizer that are trained, with the names that the script has given it."""
    for number, group in enumerate(groups):
        names = group.get("param_names") or [f"parameter {index} of group {number}" for index in range(len(group["params"]))]
        for name, param in zip(names, group["params"]):
            if param.requires_grad:
                yield name, param


def check_params(named: Sequence[tuple[str, nn.Parameter]], ranks: int, muon: Container[int] = ()) -> None:
    """Refuses parameters that cannot be updated where they are. Those with the ids `muon` must be matrices."""
    if not named:
        raise Error("no parameter of the optimizer requires a gradient: there is nothing to train")
    devices = {}
    for name, param in named:
        if param.is_meta:
            raise Error(f"{name} has no values yet (meta): give the model its weights before the optimizer's first step")
        if param.dtype not in _TYPES:
            raise NotSupported(f"{name} is {param.dtype}: a trained parameter can be float32, bfloat16 or float16")
        check_matrices([(name, param)], muon)
        if _gradient_dtype_of(param) not in (param.dtype, torch.float32):
            raise NotSupported(f"{name} is {param.dtype}, and its main_grad {param.main_grad.dtype}: gradients can have the parameter's type, or float32")
        local = local_of(param)
        if not is_dense(local):
            raise NotSupported(f"{name} has elements that share memory, or gaps between them: pass a contiguous parameter")
        devices.setdefault(local.device, name)
        if is_divided(param):
            _check_mesh(name, param, ranks)
    check_memory((name, local_of(param), True) for name, param in named)
    if len(devices) > 1:
        (one, first), (other, second) = list(devices.items())[:2]
        raise NotSupported(f"{first} is on {one} and {second} on {other}: move the model to one device")


def _check_mesh(name: str, param: Any, ranks: int) -> None:
    mesh = param.device_mesh
    if mesh.size() != ranks:
        raise NotSupported(f"{name} is divided over {mesh.size()} of {ranks} ranks: the optimizer needs one mesh of all ranks, without pipeline stages")
    copied = [one for one, size in zip(param.placements, mesh.shape) if size > 1 and not one.is_shard()]
    if copied:
        raise NotSupported(
            f"{name} has the placements {tuple(param.placements)}, and each of its elements must be on one rank: use a mesh of one dimension for fully_shard, "
            "without replicas (HSDP)"
        )


def check_early(units: Sequence[ParamUnit], ranks: int, what: str) -> None:
    """Refuses to take gradients in backward, as `what` does, where they are not final there."""
    summed = next((piece.name for unit in units for piece in unit.params if main_grad_of(piece.param) is not None), None)
    if summed is not None:
        raise NotSupported(
            f"{what} with {summed}, whose gradient Megatron's DistributedDataParallel sums in main_grad, where it is complete after backward: leave it out"
        )
    whole = next((piece.name for unit in units if not unit.sharded for piece in unit.params), None)
    if ranks > 1 and whole is not None:
        raise NotSupported(
            f"{what} with {whole}, which is whole on each rank: gradients are added up after backward has made them; leave it out, or "
            "divide the parameters with fully_shard"
        )


def param_units(
    named: Sequence[tuple[str, nn.Parameter]], elems_of: Sequence[tuple[int, ...]], rank: int, muon: Container[int] = (), align_elems: int = ALIGN_ELEMS
) -> list[ParamUnit]:
    """Units of the parameters, in their order, by their type, that of their gradients and whether they are divided. `elems_of` has the elements of each
    parameter that each rank has. Those with the ids `muon` are not cut."""
    units: list[ParamUnit] = []
    open_: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[Piece]] = {}

    def end(key: tuple[torch.dtype, torch.dtype, bool, bool]) -> None:
        pieces = open_.pop(key, None)
        if pieces:
            _, gradient_dtype, sharded, is_muon = key
            name = pieces[0].name if len(pieces) == 1 else f"{pieces[0].name} to {pieces[-1].name}"
            same = dict(sharded=sharded, ranks=len(pieces[0].elems_of), rank=rank, muon=is_muon, align_elems=align_elems)
            units.append(ParamUnit(len(units), name, pieces, **same))
            units[-1].gradient_dtype = gradient_dtype

    for (name, param), elems in zip(named, elems_of):
        is_muon = id(param) in muon
        key = (param.dtype, gradient_dtype(_gradient_dtype_of(param), is_muon), is_divided(param) and len(elems) > 1, is_muon)
        step = max(UNIT_ELEMS, *elems) if is_muon else UNIT_ELEMS
        for start in range(0, max(max(elems), 1), step):
            of_ranks = tuple(min(max(count - start, 0), step) for count in elems)
            own = of_ranks[rank]
            if sum(piece.numel() for piece in open_.get(key, ())) + max(of_ranks) > UNIT_ELEMS:
                end(key)
            open_.setdefault(key, []).append(Piece(param, name, start, of_ranks, own))
    for key in list(open_):
        end(key)
    return units

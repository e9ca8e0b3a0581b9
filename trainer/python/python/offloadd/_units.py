"""Units: the parts of a model whose parameters are moved together, found in its module tree."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Iterable, Optional, Sequence

import torch
from torch import nn

from ._errors import Error, NotSupported

# Parameters start at multiples of so many elements: whole cache lines of every type.
ALIGN_ELEMS = 64

# A block that holds less than this part of the largest one is not worth moving alone.
SMALL_PART = 64

# Lists of so many modules of one class are taken for a model's blocks.
BLOCKS_MIN = 3


@dataclass(eq=False)
class Unit:
    """Parameters that lie in one flat tensor and are gathered and released together."""

    index: int
    name: str
    params: list[nn.Parameter]
    offsets: list[int] = field(default_factory=list)
    elems: int = 0
    flat: Optional[torch.Tensor] = None
    here: bool = True
    # Whether its parameters are of the class that notices their use.
    guarded: bool = False
    # Whether what is here is the newest.
    fresh: bool = True
    # Autograd's sequence number when the unit's forward began.
    start: int = 0
    # Gradients of this backward that are not handed over yet.
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    def place(self) -> None:
        """Moves the parameters into one flat tensor, of which they become views."""
        at = 0
        for param in self.params:
            self.offsets.append(at)
            at += -(-param.numel() // ALIGN_ELEMS) * ALIGN_ELEMS
        self.elems = at
        first = self.params[0]
        flat = torch.zeros(at, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for param, offset in zip(self.params, self.offsets):
                view = self.view_of(flat, param, offset)
                view.copy_(param.data)
                param.data = view
        self.flat = flat

    @staticmethod
    def view_of(flat: torch.Tensor, param: torch.Tensor, offset: int) -> torch.Tensor:
        """The part of `flat` that holds a tensor like `param`, with its strides where they are dense."""
        if param.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(param):
            return flat[offset : offset + param.numel()].view(param.shape)
        return flat.as_strided(param.size(), param.stride(), offset)


def blocks_of(model: nn.Module, wanted: Optional[Sequence]) -> list[tuple[str, nn.Module]]:
    """The modules that become units, outermost first, with their names.

    `wanted` has classes, names of classes, or patterns of module names. Without it: the model's `_no_split_modules`, else the
    members of lists of three or more modules of one class.
    """
    if wanted:
        names = {one if isinstance(one, str) else one.__name__ for one in wanted}
        found = [
            (name, module)
            for name, module in model.named_modules()
            if type(module).__name__ in names or any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
        ]
        if not found:
            raise Error(f"units: no module of the model is one of {', '.join(sorted(names))}; name classes or patterns of module names")
        return _outermost(found)
    classes = set(getattr(model, "_no_split_modules", None) or ())
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]
    if found:
        return _outermost(found)
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            members = list(module.named_children())
            if len(members) >= BLOCKS_MIN and len({type(member) for _, member in members}) == 1:
                found += [(f"{name}.{key}" if name else key, member) for key, member in members]
    return _outermost(found)


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    kept: list[tuple[str, nn.Module]] = []
    within: set[int] = set()
    for name, module in found:
        if name and id(module) not in within:
            kept.append((name, module))
            within.update(map(id, module.modules()))
    return kept


def units_of(model: nn.Module, wanted: Optional[Sequence]) -> tuple[list[Unit], dict[int, nn.Module]]:
    """The model's units and the module of each; the last unit, if it belongs to the model itself, holds what is in no block."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                users.setdefault(id(param), []).append(module)
    trained = [param for param in model.parameters() if param.requires_grad]
    _check(trained)

    taken: set[int] = set()
    candidates = []
    for name, module in blocks_of(model, wanted):
        inside = set(map(id, module.modules()))
        # What others use too belongs to the root: it must be there for all of them.
        own = [
            param
            for param in dict.fromkeys(module.parameters())
            if param.requires_grad and id(param) not in taken and all(id(user) in inside for user in users[id(param)])
        ]
        taken.update(map(id, own))
        candidates.append((name, module, own))
    largest = max((_elems(own) for _, _, own in candidates), default=0)
    units: list[Unit] = []
    modules: dict[int, nn.Module] = {}
    in_blocks: set[int] = set()
    for name, module, own in candidates:
        if own and _elems(own) * SMALL_PART >= largest:
            modules[len(units)] = module
            units.append(Unit(len(units), name, own))
            in_blocks.update(map(id, own))
    rest = [param for param in dict.fromkeys(trained) if id(param) not in in_blocks]
    if rest:
        modules[len(units)] = model
        units.append(Unit(len(units), "(root)", rest))
    return units, modules


def _elems(params: Iterable[torch.Tensor]) -> int:
    return sum(param.numel() for param in params)


def _check(trained: list[nn.Parameter]) -> None:
    if not trained:
        raise Error("no parameter of the model requires a gradient: there is nothing to train")
    for param in trained:
        if param.device.type != "cpu":
            raise NotSupported(f"a parameter is on {param.device}: this version trains models in the processor's memory; for GPUs use the trainer")
        if type(param) is not nn.Parameter:
            raise NotSupported(f"a parameter is a {type(param).__name__}: only plain torch.nn.Parameter can be offloaded")
    types = {str(param.dtype).removeprefix("torch.") for param in trained}
    if len(types) > 1:
        raise NotSupported(f"trained parameters have several types ({', '.join(sorted(types))}): bring them to one, as model.to(torch.float32) does")

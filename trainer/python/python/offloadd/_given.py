"""Gradients that a script gives to parameters before a backward: views of one buffer, zeros, or what `torch.autograd.grad` returned.

Plain PyTorch adds to these tensors in place. Here the sum goes to a tile, and the script's tensor would keep the values of before:

    nobody else has it          its values go to the tile, and it is gone
    somebody else may have it   its values are copied, and each later access to its memory raises an error that names the parameter
    numpy may have its memory   refused before the backward, since nothing tells of its use

What is only left over, as the last value of a loop's variable, is never accessed.
"""

from __future__ import annotations

import functools
import sys
from typing import Callable, Iterable

import torch
from torch import nn

from ._errors import NotSupported
from ._held import Place, address_range, has_memory, place_of_array, storages_of_others
from ._released import AS_TENSORS
from ._storage import can_forbid, forbid_for_good

_OWN = "is a tensor of the script's own, such as a part of a buffer for all gradients"

_INSTEAD = "here gradients go to tiles: set param.grad to None before backward, and give it a tensor after it"


def take_given(params: Iterable[nn.Parameter], name_of: Callable[[nn.Parameter], str]) -> None:
    """Takes the values of gradients that were given to parameters before a backward, and forbids their memory where a script may use it."""
    with torch.no_grad(), AS_TENSORS():
        given = [param for param in params if type(param.grad) is torch.Tensor and has_memory(param.grad)]
        if not given:
            return
        _check_apart(given, name_of)
        held = {param.grad.untyped_storage()._cdata for param in given if _is_held(param)}
        grads = [param.grad for param in given]
        held.update(storage._cdata for storage in storages_of_others(grads, grads))
        taken: dict[int, tuple[torch.UntypedStorage, nn.Parameter]] = {}
        for param, grad in zip(given, grads):
            storage = grad.untyped_storage()
            if storage._cdata in held:
                taken.setdefault(storage._cdata, (storage, param))
        if not taken:
            return
        # Arrays that `numpy()` makes leave a storage that cannot be resized, and those of dlpack do not.
        refused = [name_of(param) for storage, param in taken.values() if not can_forbid() or not storage.resizable()]
        on_cpu = ((storage, param) for storage, param in taken.values() if storage.device.type == "cpu")
        places = [Place(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name_of(param), True) for storage, param in on_cpu]
        if not refused and (place := place_of_array(places)):
            refused = [place.name]
        if refused:
            raise NotSupported(f"the gradient of {refused[0]} {_OWN}, and backward would add to it in plain PyTorch; {_INSTEAD}")
        for param, grad in zip(given, grads):
            if grad.untyped_storage()._cdata in taken:
                param.grad = grad.clone()
        for storage, param in taken.values():
            forbid_for_good(
                storage,
                f"a tensor is used that was the gradient of {name_of(param)} before a backward: it {_OWN}, to which plain PyTorch has added; {_INSTEAD}",
            )


def _check_apart(given: Iterable[nn.Parameter], name_of: Callable[[nn.Parameter], str]) -> None:
    """Refuses gradients of several parameters in the same memory: in plain PyTorch it would have the sum of all."""
    by_address = sorted(((*address_range(param.grad), param) for param in given), key=lambda one: one[:2])
    # Those whose ranges meet, such as columns of one buffer, and the end of these ranges.
    met, until = [], 0
    for start, end, param in by_address:
        if start >= until:
            _check_bytes(met, name_of)
            met = []
        met.append((start, end, param))
        until = max(until, end)
    _check_bytes(met, name_of)


def _check_bytes(met: list[tuple[int, int, nn.Parameter]], name_of: Callable[[nn.Parameter], str]) -> None:
    """Refuses gradients with a byte in common."""
    if len(met) < 2:
        return
    first, until = met[0][0], max(end for _, end, _ in met)
    owners = torch.full((until - first,), -1, dtype=torch.int32, device="cpu")
    for number, (start, _, param) in enumerate(met):
        size = param.grad.element_size()
        own = owners.as_strided((*param.grad.size(), size), (*(size * stride for stride in param.grad.stride()), 1), start - first)
        if (other := int(own.max())) >= 0:
            names = f"{name_of(met[other][2])} and {name_of(param)}"
            raise NotSupported(f"the gradients of {names} were given the same memory before backward: give each a tensor of its own")
        own.fill_(number)


def _is_held(param: nn.Parameter) -> bool:
    """Whether somebody else has the tensor that is a parameter's gradient."""
    return any(count > least for count, least in zip(_references(param), _least_references()))


def _references(param: nn.Parameter) -> tuple[int, int]:
    """References to a parameter's gradient by Python, and by others, such as arrays that have it by dlpack."""
    grad = param.grad
    return sys.getrefcount(grad), grad._use_count() if hasattr(grad, "_use_count") else 0


@functools.lru_cache(maxsize=None)
def _least_references() -> tuple[int, int]:
    """References to a gradient that nobody else has."""
    param = nn.Parameter(torch.zeros(1, device="cpu"))
    param.grad = torch.zeros(1, device="cpu")
    return _references(param)

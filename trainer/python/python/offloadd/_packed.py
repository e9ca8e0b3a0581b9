"""Parameters of quantized models: where each has its bytes, by the class that a library has given it.

    torch.nn.Parameter                     the parameter itself
    bitsandbytes: Params4bit, Int8Params   the parameter itself, in packed bytes; its scales are attributes of it and of its layer
    HQQ                                    a torch.nn.Parameter of packed bytes; its scales are attributes of its layer
    torchao                                the largest of the plain tensors around which the parameter is wrapped

The packed bytes go into tiles as those of any frozen parameter do. What belongs to them (scales, codes, zero points) is small and stays in memory.
A parameter keeps its identity, its attributes and, while its bytes are in memory, its class.
"""

from __future__ import annotations

import hashlib
from typing import Any, Iterable, Iterator, NamedTuple, Optional

import torch
from torch import nn

from ._errors import NotSupported

_INSTEAD = (
    "load the model in bf16, or quantized with bitsandbytes (4 or 8 bits) or torchao; to leave it in memory as it is, set "
    'zero_optimization.offload_param.device to "none"'
)


class PackedParam(NamedTuple):
    """Where one parameter has its bytes."""

    # The plain tensor whose memory has them.
    part: torch.Tensor
    # Others that share this memory.
    shares: tuple[torch.Tensor, ...] = ()
    # What belongs to the bytes and stays in memory.
    rest: tuple[torch.Tensor, ...] = ()
    # How the bytes are to be read, where `rest` does not say it.
    format: str = ""
    # That of the numbers, where the parameter has that of its bytes.
    shape: Optional[torch.Size] = None

    def fingerprint(self) -> str:
        """Tells apart what the same bytes mean; empty where they are plain numbers."""
        if not (self.rest or self.format):
            return ""
        found = hashlib.blake2b(self.format.encode(), digest_size=8)
        for one in self.rest:
            found.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return found.hexdigest()


def packed_of(name: str, param: nn.Parameter, users: Iterable[nn.Module]) -> PackedParam:
    """Where the parameter `name` has its bytes; `users` are the modules that have it. Refuses a class that is not known."""
    if type(param) is nn.Parameter:
        return find_packed(param, users)
    if getattr(getattr(param, "quant_state", None), "packing_format_for_cpu", False):
        raise NotSupported(f"{name} was packed for this processor alone when the model was evaluated: call model.state_dict(), which unpacks it, first")
    found = None if param.is_meta or param.requires_grad else find_packed(param, users)
    if found is None and _is_of(param, "bitsandbytes"):
        raise NotSupported(f'{name} is a {type(param).__name__} that is not quantized yet: move the model to a device first, as in model.to("cpu")')
    if found is None:
        raise NotSupported(f"{name} is a frozen {type(param).__name__} of {type(param).__module__}, whose bytes cannot be moved: {_INSTEAD}")
    return found


def find_packed(param: Any, users: Iterable[nn.Module]) -> Optional[PackedParam]:
    """Where a parameter has its bytes; None where its class is not known, or it is not quantized yet."""
    if type(param) is nn.Parameter:
        return _plain(param, users)
    if _is_of(param, "bitsandbytes", "Params4bit"):
        return _in_4_bits(param)
    if _is_of(param, "bitsandbytes", "Int8Params"):
        return _in_8_bits(param, users)
    return _wrapped(param) if _is_of(param, "torchao") else None


def users_of(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that have each parameter of a model, by its id."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                found.setdefault(id(param), []).append(module)
    return found


def _is_of(param: Any, library: str, name: Optional[str] = None) -> bool:
    return any(one.__module__.partition(".")[0] == library and name in (None, one.__name__) for one in type(param).__mro__)


def stand_in(shape: torch.Size, bits: int) -> nn.Parameter:
    """A frozen parameter of the meta device that takes the bytes of one of this shape with so many bits a number."""
    param = nn.Parameter(torch.empty(-(-shape.numel() * bits // 8), dtype=torch.uint8, device="meta"), requires_grad=False)
    param._offloadd_shape = shape
    return param


def _plain(param: nn.Parameter, users: Iterable[nn.Module]) -> PackedParam:
    metas = [user.meta for user in users if _is_of(user, "hqq") and isinstance(getattr(user, "meta", None), dict)]
    rest = tuple(value for meta in metas for value in meta.values() if isinstance(value, torch.Tensor))
    shape = metas[0].get("shape") if metas and not param.is_floating_point() else getattr(param, "_offloadd_shape", None)
    return PackedParam(param, (), rest, "", shape)


def _in_4_bits(param: Any) -> Optional[PackedParam]:
    state = param.quant_state
    if state is None:
        return None
    states = [state] if state.state2 is None else [state, state.state2]
    rest = [value for one in states for value in (one.absmax, one.code, one.offset) if isinstance(value, torch.Tensor)]
    return PackedParam(param, (), tuple(rest), f"{state.quant_type} {state.dtype} {tuple(state.shape)} {[one.blocksize for one in states]}", state.shape)


def _in_8_bits(param: Any, users: Iterable[nn.Module]) -> Optional[PackedParam]:
    # Before the first forward the parameter has them, afterwards its layer.
    holders = [param, *(user.state for user in users if hasattr(user, "state"))]
    attributes = lambda name: tuple(value for one in holders if isinstance(value := getattr(one, name, None), torch.Tensor))
    if param.dtype != torch.int8 or not attributes("SCB"):
        return None
    return PackedParam(param, attributes("CB"), attributes("SCB"))


def is_wrapper(param: torch.Tensor) -> bool:
    """Whether a parameter has no memory itself."""
    return hasattr(type(param), "__tensor_flatten__")


def _wrapped(param: Any) -> Optional[PackedParam]:
    found = list(_plain_tensors(param))
    if not found or any(type(one) is not torch.Tensor or one.layout is not torch.strided for one in found):
        return None
    part = max(found, key=lambda one: one.numel() * one.element_size())
    return PackedParam(part, (), tuple(one for one in found if one is not part), type(param).__name__)


def _plain_tensors(wrapper: Any) -> Iterator[torch.Tensor]:
    for name in wrapper.__tensor_flatten__()[0] if is_wrapper(wrapper) else ():
        value = getattr(wrapper, name)
        if is_wrapper(value):
            yield from _plain_tensors(value)
        else:
            yield value


def same_numbers(param: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a parameter in memory has the numbers of `value`, in its own type."""
    if not is_wrapper(param):
        return not is_wrapper(value) and torch.equal(param.detach(), value.to(param.dtype))
    ours, theirs = list(_plain_tensors(param)), list(_plain_tensors(value))
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def wrap_again(param: Any) -> None:
    """Lets a wrapper whose tensors have moved to another device be on this one too. It stays the same object."""
    names, context = param.__tensor_flatten__()
    inner = {name: getattr(param, name) for name in names}
    for value in inner.values():
        if is_wrapper(value):
            wrap_again(value)
    wrapper = type(param).__tensor_unflatten__(inner, context, param.size(), param.stride())
    wrapper._is_param = getattr(param, "_is_param", False)
    torch.utils.swap_tensors(param, wrapper)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Brings a model's numbers to a type. Packed bytes of bitsandbytes keep theirs, which transformers refuses to be asked for."""
    if not any(_is_of(param, "bitsandbytes") for param in model.parameters()):
        model.to(dtype)
        return
    for one in (*model.parameters(), *model.buffers()):
        if type(one) in (nn.Parameter, torch.Tensor) and one.is_floating_point():
            one.data = one.data.to(dtype)


def keep_format(model: nn.Module) -> list[nn.Module]:
    """Lets layers of bitsandbytes leave their bytes as they are: where a processor has bf16 in AVX-512, an evaluation changes their order in
    place. Returns the layers that would have."""
    found = [module for module in model.modules() if vars(module).get("support_avx512bf16_for_cpu")]
    for module in found:
        module.support_avx512bf16_for_cpu = False
    return found


def free_format(modules: Iterable[nn.Module]) -> None:
    """The inverse of `keep_format`."""
    for module in modules:
        module.support_avx512bf16_for_cpu = True

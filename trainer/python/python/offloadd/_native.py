"""Functions of torch that reach a tensor's memory below `__torch_function__`: they take copies of released parameters, or refuse them.

A name that a script took before is not changed here. Where torch looks a function up when it is called, that one is changed, so that it does not
matter; otherwise the memory itself refuses (`_storage`).
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ._errors import NotSupported
from ._released import ReleasedParam, in_tiles, outside_transforms, replaced, written

_Tensor = torch.Tensor

# Whether the functions are wrapped.
_done = False


def take_copies() -> None:
    """Lets functions that take tensors below `__torch_function__` take copies of released parameters. A second call does nothing."""
    global _done
    if _done:
        return
    _done = True
    from torch._functorch import eager_transforms, vmap
    from torch.utils import _device

    # `with torch.device(...)` knows functions by their identity, from its first use on: it must know those that are called within.
    _device._device_constructors()
    sparse = [f"sparse_{kind}_tensor" for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed")]
    for owner, name in (
        *((torch, name) for name in ("tensor", *sparse)),
        (_Tensor, "new_tensor"),
        *((torch._C.ScriptFunction, "__call__"), (torch._C.ScriptMethod, "__call__")),
        *((eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim"), (torch.nested, "nested_tensor")),
    ):
        if hasattr(owner, name):
            setattr(owner, name, _taking_copies(getattr(owner, name)))
    _functionalize_copies(eager_transforms)
    for owner, name in ((torch.utils, "swap_tensors"), (torch._C, "_swap_tensor_impl")):
        setattr(owner, name, _refusing_released("swap_tensors", getattr(owner, name)))
    if torch.distributed.is_available():
        for name in _COLLECTIVES:
            if hasattr(torch.distributed.ProcessGroup, name):
                setattr(torch.distributed.ProcessGroup, name, _refusing_to_send(getattr(torch.distributed.ProcessGroup, name)))


def _taking_copies(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, which gets copies in place of released parameters, those in lists too."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(map(_has_released, args)) or any(map(_has_released, kwargs.values())):
            with outside_transforms():
                args, kwargs = tree_map(_copy, (args, kwargs))
        return plain(*args, **kwargs)

    return call


def _functionalize_copies(transforms: Any) -> None:
    """Lets functions of torch.func.functionalize work on copies. They compare what they were given with what they have made of it, and write to it
    what was changed."""
    wrap, compare, propagate = transforms._wrap_functional_tensor, transforms._assert_wrapped_functional, transforms._propagate_functional_input_mutation

    def wrap_copy(tensor: Any, level: int) -> Any:
        if not isinstance(tensor, ReleasedParam):
            return wrap(tensor, level)
        with outside_transforms():
            copy = tensor.clone()
        wrapped = wrap(copy, level)
        wrapped._offloadd_copy = tensor, copy, copy._version
        return wrapped

    def compare_with_copy(given: Any, wrapped: Any) -> None:
        compare(getattr(wrapped, "_offloadd_copy", (None, given))[1], wrapped)

    def propagate_to_copy(given: Any, wrapped: Any) -> None:
        param, copy, version = getattr(wrapped, "_offloadd_copy", (None, given, None))
        propagate(copy, wrapped)
        if param is not None and copy._version != version:
            raise written("functionalize", in_tiles(param))

    transforms._wrap_functional_tensor, transforms._assert_wrapped_functional = wrap_copy, compare_with_copy
    transforms._propagate_functional_input_mutation = propagate_to_copy


def _refusing_released(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that refuses released parameters."""

    @functools.wraps(plain)
    def call(*tensors: Any) -> Any:
        for one in tensors:
            if isinstance(one, ReleasedParam):
                raise replaced(name, one)
        return plain(*tensors)

    return call


def _has_released(one: Any) -> bool:
    """Whether this is a released parameter, or a list of some. Lists of numbers, which may be long, are told by their first one."""
    while isinstance(one, (list, tuple)) and one:
        if isinstance(one[0], _Tensor):
            return any(isinstance(each, ReleasedParam) for each in one)
        one = one[0]
    return isinstance(one, ReleasedParam)


def _copy(one: Any) -> Any:
    return one.clone() if isinstance(one, ReleasedParam) else one


# Methods of a process group that move tensors.
_COLLECTIVES = ("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "_allgather_base", "allgather_into_tensor_coalesced")
_COLLECTIVES += ("allgather_coalesced", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced")
_COLLECTIVES += ("alltoall_base", "alltoall", "send", "recv", "recv_anysource")


def _refusing_to_send(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A process group's method that refuses released parameters."""

    @functools.wraps(plain)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        for one in tree_flatten((args, kwargs))[0]:
            if isinstance(one, ReleasedParam):
                raise NotSupported(
                    f"torch.distributed's {plain.__name__} of {one.reader.name(one)}, whose values are in tiles: all ranks have the same values already; "
                    "send a clone() of it to others"
                )
        return plain(group, *args, **kwargs)

    return call

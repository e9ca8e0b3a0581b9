"""Parameters whose values are in tiles, and copies of them: what a script may read of them, and how a write is noticed.

A released parameter keeps its identity and metadata, and its storage has no memory. An operation on it works on a copy, so that
nothing it returns (views, arrays, handles of the storage) can reach memory that is gone. A write would change the copy alone, so it is
refused; the copy's version counter tells, whatever the operation is called.

    released      Released -> copy -> operation            writes to the copy, or to views of it, are refused
    in memory     nn.Parameter, plain                      versions are compared when the unit is released: see `Watch`
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import pickle
import sys
import weakref
from typing import Any, Callable, ContextManager, NamedTuple, Optional, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from ._errors import NotSupported

_Tensor = torch.Tensor

# Within it subclasses are plain tensors, which are reached without a detour through Python.
AS_TENSORS = torch._C.DisableTorchFunctionSubclass

_version = operator.attrgetter("_version")

BEFORE = "change parameters before offloadd.prepare or after close() of the run, or between steps with run.load_state_dict({name: value}, strict=False)"

# What a released parameter answers by itself: it needs no values, or the parameter and not its values.
ITSELF = {
    getattr(_Tensor, name).__get__
    for name in (
        *("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "grad_fn", "layout", "ndim", "names"),
        *("is_sparse", "is_cuda", "is_meta", "is_quantized", "itemsize", "nbytes", "is_cpu", "is_mps", "is_xpu", "output_nr", "retains_grad"),
        *("is_sparse_csr", "is_nested", "is_mkldnn", "_backward_hooks", "_version", "_is_view", "_post_accumulate_grad_hooks", "_cdata", "grad_dtype"),
    )
    if hasattr(getattr(_Tensor, name, None), "__get__")
} | {
    *(_Tensor.grad.__set__, _Tensor.grad.__delete__, _Tensor.size, _Tensor.numel, _Tensor.nelement, _Tensor.dim, _Tensor.ndimension, _Tensor.__hash__),
    *(_Tensor.is_floating_point, _Tensor.is_complex, _Tensor.is_signed, _Tensor.stride, _Tensor.is_contiguous, _Tensor.element_size),
    *(_Tensor.storage_offset, _Tensor.get_device, _Tensor.register_hook, _Tensor.register_post_accumulate_grad_hook, _Tensor.__len__),
    *(_Tensor.retain_grad, _Tensor.is_same_size, _Tensor.is_set_to, _Tensor.is_inference, _Tensor.dim_order),
    *(_Tensor.new_zeros, _Tensor.new_ones, _Tensor.new_empty, _Tensor.new_full),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.result_type, torch.is_same_size),
}

# Operations that give a parameter another storage, or gradients of another type.
REPLACES = {
    _Tensor.data.__set__: "assigning .data",
    _Tensor.resize_: "resize_",
    _Tensor.share_memory_: "share_memory_",
    _Tensor.__setstate__: "__setstate__",
}
if hasattr(_Tensor, "grad_dtype"):
    # Tiles have gradients in types of their own: see `_check` in _units.py.
    REPLACES[_Tensor.grad_dtype.__set__] = "assigning .grad_dtype"

_GRAPH = (_Tensor.view_as, _Tensor.expand_as)

# Functions that run Python in their turn: hooks, functions of a script's own, checkpoints' forwards.
BACKWARD = (torch.autograd.grad, torch.autograd.backward, _Tensor.backward)

# Their arguments with gradients.
_GRADIENTS = ("grad_tensors", "gradient", "grad_outputs")

_REQUIRES_GRAD = (_Tensor.requires_grad.__set__, _Tensor.requires_grad_)

# Functions that ask for the class, and answer for plain tensors only.
_SHOW = (_Tensor.__format__, _Tensor.__repr__)


class HasSteps(Protocol):
    """What tells copies of weights that they are old."""

    # Times that weights were replaced, by a step or otherwise.
    steps: int


class Reader(HasSteps, Protocol):
    """What released parameters of one model ask of it: `Reading` in _reading.py."""

    # Copies whose addresses a script has asked for since, by parameter.
    addressed: dict[int, _Tensor]

    @property
    def under_way(self) -> bool:
        """Whether a forward or a backward is."""

    def name(self, param: _Tensor) -> str:
        """The name of a parameter in the model."""

    def read(self, params: list[nn.Parameter], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls `func`, which takes released parameters."""

    def is_same(self, param: nn.Parameter, value: _Tensor) -> bool:
        """Whether a released parameter has this value, type and device already."""

    def check_trainable(self, param: nn.Parameter, requires_grad: bool = True) -> None:
        """Refuses to train what was frozen when the model was prepared."""


@torch.compiler.disable
def _beside_graphs(func, args, kwargs):
    """Calls a function of released parameters between two graphs: the class of a parameter changes when its unit comes."""
    return func(*args, **kwargs or {})


class ReleasedParam(nn.Parameter):
    """A parameter whose values are in tiles. Its metadata answers at once; anything else gathers its unit."""

    # Weak: the collector of cycles does not see the class of a parameter.
    reader_ref: "weakref.ref[Reader]"

    @property
    def reader(self) -> Reader:
        return self.reader_ref()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if torch.compiler.is_dynamo_compiling():
            return _beside_graphs(func, args, kwargs)
        kwargs = kwargs or {}
        if func in ITSELF:
            with AS_TENSORS():
                return func(*args, **kwargs)
        if func in BACKWARD:
            return _backward(func, args, kwargs)
        if func in _ADDRESSES and not args[0].reader.under_way:
            copy = args[0].detach()
            found = _address_of(func, copy)
            if id(args[0]) not in copy.origin.reader.addressed:
                raise NotSupported(
                    f"{func.__name__} of parameters of more than {_ADDRESSED_MAX >> 30} GiB, whose values are in tiles: compare parameters by `is`, or read "
                    "param.detach()"
                )
            return found
        away = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, ReleasedParam)]
        if not away:
            with AS_TENSORS():
                return func(*args, **kwargs)
        reader = away[0].reader
        if any(one.reader is not reader for one in away):
            others = lambda one: one.view(one.shape) if isinstance(one, ReleasedParam) and one.reader is not reader else one
            return func(*tree_map(others, args), **tree_map(others, kwargs))
        if func is _Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            raise NotSupported(
                f"a new parameter made of {reader.name(args[0])}, whose values are in tiles: build it before offloadd.prepare, or of a clone() of it"
            )
        if func in _REQUIRES_GRAD:
            reader.check_trainable(args[0], *args[1:], **kwargs)
            with AS_TENSORS():
                return func(*args, **kwargs)
        if func in REPLACES and isinstance(args[0], ReleasedParam):
            if func == _Tensor.data.__set__ and reader.is_same(args[0], args[1]):
                return None
            raise replaced(REPLACES[func], args[0])
        return reader.read(away, func, args, kwargs)

    # PyTorch hands these to no __torch_function__.

    def set_(self, *args, **kwargs):
        raise replaced("set_", self)

    def as_subclass(self, cls):
        return self.clone().as_subclass(cls)

    def __deepcopy__(self, memo):
        # Modules of a prepared model refuse it themselves: see `protect` in _wrappers.py.
        memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol):
        raise NotSupported("a prepared model cannot be pickled: save its state_dict")

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"Parameter in tiles: {tuple(self.shape)}, {self.dtype}"


# What a script asks for to tell whether memory is shared, or to read it below PyTorch.
_ADDRESSES = (_Tensor.data_ptr, _Tensor.untyped_storage, _Tensor.storage, _Tensor._typed_storage)

# Bytes of the copies that are kept because their addresses were asked for.
_ADDRESSED_MAX = 2 << 30


def _address_of(func: Callable[..., Any], copy: "ReadOnlyCopy") -> Any:
    """The address or storage of a parameter's copy. Until the next step that of the first one that was asked for: parameters differ, and two
    copies of one do not."""
    param, reader = copy.origin.param, copy.origin.reader
    with AS_TENSORS():
        if param is None:
            return func(copy)
        kept = reader.addressed.get(id(param))
        if kept is None:
            if sum(one.untyped_storage().nbytes() for one in reader.addressed.values()) + copy.untyped_storage().nbytes() > _ADDRESSED_MAX:
                return func(copy)
            kept = reader.addressed[id(param)] = copy.as_subclass(_Tensor)
        if func is _Tensor.data_ptr:
            return kept.untyped_storage().data_ptr() + copy.storage_offset() * copy.element_size()
        return func(kept)


def replaced(what: str, param: ReleasedParam) -> NotSupported:
    return NotSupported(f"{what} on {in_tiles(param)}")


class ReadOnlyCopy(_Tensor):
    """Values of a released parameter, or a view of them, to read. Changing them would change nothing, and is refused."""

    origin: "Origin"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if any(issubclass(one, ReleasedParam) for one in types):
            return ReleasedParam.__torch_function__(func, types, args, kwargs)
        if func in BACKWARD:
            return _backward(func, args, kwargs or {})
        if func in _ADDRESSES:
            args[0].origin.check(func)
            return _address_of(func, args[0])
        with AS_TENSORS():
            if func in ITSELF:
                return func(*args, **(kwargs or {}))
            if func in _SHOW:
                args = (args[0].as_subclass(_Tensor), *args[1:])
            return _on_copies([], func, args, kwargs or {})

    def __deepcopy__(self, memo):
        self.origin.check(copy.deepcopy)
        return self.as_subclass(_Tensor).clone()

    def __reduce_ex__(self, protocol):
        self.origin.check(pickle.dumps)
        return self.as_subclass(_Tensor).__reduce_ex__(protocol)


class ReadOnlyParam(ReadOnlyCopy, nn.Parameter):
    """The same for a parameter of another module."""


def _backward(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a function of autograd's with nothing released or copied in its arguments, so that `AS_TENSORS` does not last until it ends:
    what it calls reads released parameters too."""
    given = inspect.signature(func).bind(*args, **kwargs)
    inputs = given.arguments.get("inputs")
    inputs = [inputs] if isinstance(inputs, _Tensor) else list(inputs or ())
    zeros = given.arguments.pop("materialize_grads", False)
    values = lambda one: one.clone() if isinstance(one, (ReleasedParam, ReadOnlyCopy)) else one
    given.arguments.update(tree_map(values, {name: one for name, one in given.arguments.items() if name in _GRADIENTS}))
    with AS_TENSORS():
        plain = lambda one: one.view_as(one) if isinstance(one, (ReleasedParam, ReadOnlyCopy)) else one
        given.arguments.update(tree_map(plain, {name: one for name, one in given.arguments.items() if name not in ("inputs", *_GRADIENTS)}))
        if inputs:
            given.arguments["inputs"] = [
                torch.autograd.graph.get_gradient_edge(one) if isinstance(one, (ReleasedParam, ReadOnlyCopy)) else one for one in inputs
            ]
        if zeros:
            given.arguments["allow_unused"] = True
    found = func(*given.args, **given.kwargs)
    return tuple(torch.zeros_like(of) if one is None else one for one, of in zip(found, inputs)) if zeros else found


class Origin(NamedTuple):
    """What a copy was made of."""

    # Names it, and says how to change it.
    what: Callable[[], str]
    # Steps, of which a later one makes the copy stale.
    reader: HasSteps
    steps: int
    # None unless copies of it are kept.
    param: Optional[nn.Parameter] = None
    # Told of a write that is refused: the version before it, and after it.
    refused: Callable[[int, int], None] = lambda before, after: None

    def check(self, func: Callable[..., Any]) -> None:
        """Refuses to read a copy that is stale."""
        if self.steps != self.reader.steps:
            raise NotSupported(
                f"{getattr(func, '__name__', func)} on values of {self.what().partition(',')[0]} that were read before the last optimizer.step(), and plain "
                "PyTorch would use the new ones: read them again, or keep a clone() of them"
            )


def written(func: Callable[..., Any], what: str) -> NotSupported:
    """The error for an operation that writes to `what`, which says what to do instead."""
    return by_other_optimizer(what.partition(",")[0]) or NotSupported(f"{getattr(func, '__name__', func)} changes {what}")


def by_other_optimizer(name: str) -> Optional[NotSupported]:
    """The error where another optimizer than the prepared one is at work on a parameter."""
    frame = sys._getframe()
    while frame is not None:
        optimizer = frame.f_locals.get("self")
        if isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "_offloadd_run"):
            return NotSupported(
                f"{type(optimizer).__name__}.step() of an optimizer that was not given to offloadd.prepare updates {name}, whose values are in tiles: give "
                "prepare one optimizer, with parameter groups for what is updated differently"
            )
        frame = frame.f_back
    return None


def in_tiles(param: ReleasedParam) -> str:
    return _in_tiles(param.reader.name, param)


def _in_tiles(name: Callable[[Any], str], param: nn.Parameter) -> str:
    return f"{name(param)}, whose values are in tiles: {BEFORE}"


def read_only(result: Any, copies: list[_Tensor]) -> Any:
    """A result of an operation on `copies`, in which what shares their memory refuses to be written."""
    if result is None or in_transform():
        # Storages cannot be looked at within a transform.
        return result
    origin_of = {_address(one): one.origin for one in copies}
    # Nothing can be written to an empty one.
    origin_of.pop(None, None)

    def guard(one: Any) -> Any:
        if isinstance(one, _Tensor):
            origin = origin_of.get(_address(one))
            if origin is not None:
                # Not by an operation, which would be one more node of autograd's.
                one.__class__ = ReadOnlyCopy
                one.origin = origin
            return one
        if hasattr(one, "flags") and hasattr(one.flags, "writeable") and type(one).__module__ == "numpy":
            one.flags.writeable = False
        return one

    return tree_map(guard, result)


def _address(one: _Tensor) -> Optional[int]:
    """Where a tensor's memory lies, if it has some."""
    if type(one) not in (_Tensor, ReadOnlyCopy) or one.layout is not torch.strided or one.is_meta or not one.numel():
        return None
    storage = one.untyped_storage()
    # That of a released unit has none, and is not to be looked at.
    return storage.data_ptr() if storage.nbytes() else None


def _copy_of(param: nn.Parameter) -> _Tensor:
    return param.clone() if torch.is_grad_enabled() and param.requires_grad else param.detach().clone()


def on_copies(
    reader: Reader, params: list[nn.Parameter], func: Callable[..., Any], args: Any, kwargs: Any, copy_of: Callable[[Any], _Tensor] = _copy_of
) -> Any:
    """Calls `func` with copies in place of released parameters, whose units are in memory. Gradients reach the parameters."""
    copies: dict[int, _Tensor] = {}
    with torch.inference_mode(False):
        for param in params:
            if id(param) not in copies:
                # Copies of inference mode would not count their changes.
                copies[id(param)] = copy = copy_of(param)
                copy.origin = Origin(functools.partial(_in_tiles, reader.name, param), reader, reader.steps, param)
    if func in _GRAPH and len(args) == 2 and args[0] is args[1]:
        # A way to ask for the node that accumulates the gradient: the next one of the copy's.
        return read_only(copies[id(args[0])], list(copies.values()))
    taken = lambda one: copies.get(id(one), one)
    result = _on_copies(list(copies.values()), func, tree_map(taken, args), tree_map(taken, kwargs))
    # What gives back its argument, as `w.to(w.device)` and `w.contiguous()` do, gives back the parameter.
    itself = {id(copies[id(param)]): param for param in params}
    return tree_map(lambda one: itself.get(id(one), one), result)


def _on_copies(copies: list[_Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `func`, which takes `copies` and other copies, and refuses what it writes to them."""
    copies = copies + [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, ReadOnlyCopy)]
    for one in copies:
        one.origin.check(func)
    if copies and getattr(func, "__name__", "").startswith("_fused_"):
        # Updates of an optimizer, which no version counter tells.
        raise written(func, copies[0].origin.what())
    before = list(map(_version, copies))
    result = func(*args, **kwargs)
    for one, version in zip(copies, before):
        if one._version != version:
            one.origin.refused(version, one._version)
            raise written(func, one.origin.what())
    return read_only(result, copies) if copies else result


def outside_transforms() -> ContextManager:
    """Within it, operations are none of the transforms of torch.func that are under way."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def in_transform() -> bool:
    """Whether a transform of torch.func is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None

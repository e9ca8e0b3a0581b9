"""Parameters whose values are in tiles, and copies of them: what a script may read of them, and how a write is noticed.

A released parameter keeps its identity and metadata, and its storage has no memory. An operation on it works on a copy, so that
nothing it returns (views, arrays, handles of the storage) can reach memory that is gone. A write would change the copy alone, so it is
refused; the copy's version counter tells, whatever the operation is called.

    released      Released -> copy -> operation            writes to the copy, or to views of it, are refused
    in memory     nn.Parameter, plain                      versions are compared when the unit is released: see `Watch`
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import weakref
from typing import Any, Callable, ContextManager, NamedTuple, Optional

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from ._errors import NotSupported
from ._units import Unit

_Tensor = torch.Tensor

# Within it subclasses are plain tensors, which are reached without a detour through Python.
AS_TENSORS = torch._C.DisableTorchFunctionSubclass

_version = operator.attrgetter("_version")

_BEFORE = "change parameters before offloadd.prepare or after close() of the run, or between steps with run.load_state_dict({name: value}, strict=False)"

# What a released parameter answers by itself: it needs no values, or the parameter and not its values.
_ITSELF = {
    getattr(_Tensor, name).__get__
    for name in (
        *("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "grad_fn", "layout", "ndim", "names"),
        *("is_sparse", "is_cuda", "is_meta", "is_quantized", "itemsize", "nbytes", "is_cpu", "is_mps", "is_xpu", "output_nr", "retains_grad"),
        *("is_sparse_csr", "is_nested", "is_mkldnn", "_backward_hooks", "_version", "_is_view", "_post_accumulate_grad_hooks"),
    )
    if hasattr(getattr(_Tensor, name, None), "__get__")
} | {
    *(_Tensor.grad.__set__, _Tensor.grad.__delete__, _Tensor.size, _Tensor.numel, _Tensor.nelement, _Tensor.dim, _Tensor.ndimension, _Tensor.__hash__),
    *(_Tensor.is_floating_point, _Tensor.is_complex, _Tensor.is_signed, _Tensor.stride, _Tensor.is_contiguous, _Tensor.element_size),
    *(_Tensor.storage_offset, _Tensor.get_device, _Tensor.register_hook, _Tensor.register_post_accumulate_grad_hook, _Tensor.__len__),
    *(_Tensor.retain_grad, _Tensor.is_same_size, _Tensor.is_set_to, _Tensor.is_inference, _Tensor.is_pinned, _Tensor.dim_order),
    *(_Tensor.new_zeros, _Tensor.new_ones, _Tensor.new_empty, _Tensor.new_full),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.result_type, torch.is_same_size),
}

# Operations that give a parameter another storage.
_REPLACES = {
    _Tensor.data.__set__: "assigning .data",
    _Tensor.resize_: "resize_",
    _Tensor.share_memory_: "share_memory_",
    _Tensor.__setstate__: "__setstate__",
}

_GRAPH = (_Tensor.view_as, _Tensor.expand_as)

# Functions that run Python in their turn: hooks, functions of a script's own, checkpoints' forwards.
_BACKWARD = (torch.autograd.grad, torch.autograd.backward, _Tensor.backward)

# Their arguments with gradients.
_GRADIENTS = ("grad_tensors", "gradient", "grad_outputs")

_REQUIRES_GRAD = (_Tensor.requires_grad.__set__, _Tensor.requires_grad_)

# Functions that ask for the class, and answer for plain tensors only.
_SHOW = (_Tensor.__format__, _Tensor.__repr__)


class Released(nn.Parameter):
    """A parameter whose values are in tiles. Its metadata answers at once; anything else gathers its unit."""

    # Weak: the collector of cycles does not see the class of a parameter.
    engine_ref: "weakref.ref[Any]"

    @property
    def engine(self) -> Any:
        return self.engine_ref()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ITSELF:
            with AS_TENSORS():
                return func(*args, **kwargs)
        if func in _BACKWARD:
            return _backward(func, args, kwargs)
        if func in _ADDRESSES and not args[0].engine.under_way:
            copy = args[0].detach()
            found = _address_of(func, copy)
            if id(args[0]) not in copy.origin.engine.addressed:
                raise NotSupported(
                    f"{func.__name__} of parameters of more than {_ADDRESSED_MAX >> 30} GiB, whose values are in tiles: compare parameters by `is`, or read "
                    "param.detach()"
                )
            return found
        away = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Released)]
        if not away:
            with AS_TENSORS():
                return func(*args, **kwargs)
        engine = away[0].engine
        if any(one.engine is not engine for one in away):
            others = lambda one: one.view(one.shape) if isinstance(one, Released) and one.engine is not engine else one
            return func(*tree_map(others, args), **tree_map(others, kwargs))
        if func is _Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            raise NotSupported(f"a new parameter made of {engine.name(args[0])}, whose values are in tiles: build it before offloadd.prepare, or of a clone() of it")
        if func in _REQUIRES_GRAD:
            engine.check_trainable(args[0], *args[1:], **kwargs)
            with AS_TENSORS():
                return func(*args, **kwargs)
        if func in _REPLACES and isinstance(args[0], Released):
            if func == _Tensor.data.__set__ and engine.is_same(args[0], args[1]):
                return None
            raise _replaced(_REPLACES[func], args[0])
        return engine.read_released(away, func, args, kwargs)

    # PyTorch hands these to no __torch_function__.

    def set_(self, *args, **kwargs):
        raise _replaced("set_", self)

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


def _address_of(func: Callable[..., Any], copy: "Copied") -> Any:
    """The address or storage of a parameter's copy. Until the next step that of the first one that was asked for: parameters differ, and two
    copies of one do not."""
    param, engine = copy.origin.param, copy.origin.engine
    with AS_TENSORS():
        if param is None:
            return func(copy)
        kept = engine.addressed.get(id(param))
        if kept is None:
            if sum(one.untyped_storage().nbytes() for one in engine.addressed.values()) + copy.untyped_storage().nbytes() > _ADDRESSED_MAX:
                return func(copy)
            kept = engine.addressed[id(param)] = copy.as_subclass(_Tensor)
        if func is _Tensor.data_ptr:
            return kept.untyped_storage().data_ptr() + copy.storage_offset() * copy.element_size()
        return func(kept)


def _replaced(what: str, param: Released) -> NotSupported:
    return NotSupported(f"{what} on {param.engine.name(param)}, whose values are in tiles: {_BEFORE}")


class Copied(_Tensor):
    """Values of a released parameter, or a view of them, to read. Changing them would change nothing, and is refused."""

    origin: "Origin"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if any(issubclass(one, Released) for one in types):
            return Released.__torch_function__(func, types, args, kwargs)
        if func in _BACKWARD:
            return _backward(func, args, kwargs or {})
        if func in _ADDRESSES:
            return _address_of(func, args[0])
        with AS_TENSORS():
            if func in _SHOW:
                args = (args[0].as_subclass(_Tensor), *args[1:])
            return _on_copies([], func, args, kwargs or {})

    def __deepcopy__(self, memo):
        return self.as_subclass(_Tensor).clone()

    def __reduce_ex__(self, protocol):
        return self.as_subclass(_Tensor).__reduce_ex__(protocol)


def _backward(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a function of autograd's with nothing released or copied in its arguments, so that `AS_TENSORS` does not last until it ends:
    what it calls reads released parameters too."""
    given = inspect.signature(func).bind(*args, **kwargs)
    inputs = given.arguments.get("inputs")
    inputs = [inputs] if isinstance(inputs, _Tensor) else list(inputs or ())
    zeros = given.arguments.pop("materialize_grads", False)
    values = lambda one: one.clone() if isinstance(one, (Released, Copied)) else one
    given.arguments.update(tree_map(values, {name: one for name, one in given.arguments.items() if name in _GRADIENTS}))
    with AS_TENSORS():
        plain = lambda one: one.view_as(one) if isinstance(one, (Released, Copied)) else one
        given.arguments.update(tree_map(plain, {name: one for name, one in given.arguments.items() if name not in ("inputs", *_GRADIENTS)}))
        if inputs:
            given.arguments["inputs"] = [torch.autograd.graph.get_gradient_edge(one) if isinstance(one, (Released, Copied)) else one for one in inputs]
        if zeros:
            given.arguments["allow_unused"] = True
    found = func(*given.args, **given.kwargs)
    return tuple(torch.zeros_like(of) if one is None else one for one, of in zip(found, inputs)) if zeros else found


class Origin(NamedTuple):
    """What a copy was made of."""

    # Names it, and says how to change it.
    what: Callable[[], str]
    # Steps, of which a later one makes the copy stale.
    engine: Any
    steps: int
    param: Optional[nn.Parameter] = None


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


def _in_tiles(name: Callable[[Any], str], param: nn.Parameter) -> str:
    return f"{name(param)}, whose values are in tiles: {_BEFORE}"


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
                one.__class__ = Copied
                one.origin = origin
            return one
        if hasattr(one, "flags") and hasattr(one.flags, "writeable") and type(one).__module__ == "numpy":
            one.flags.writeable = False
        return one

    return tree_map(guard, result)


def _address(one: _Tensor) -> Optional[int]:
    """Where a tensor's memory lies, if it has some."""
    if type(one) not in (_Tensor, Copied) or one.layout is not torch.strided or one.is_meta or not one.numel():
        return None
    return one.untyped_storage().data_ptr()


def on_copies(engine: Any, params: list[nn.Parameter], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `func` with copies in place of released parameters, whose units are in memory. Gradients reach the parameters."""
    copies: dict[int, _Tensor] = {}
    with torch.inference_mode(False):
        for param in params:
            if id(param) not in copies:
                # Copies of inference mode would not count their changes.
                copies[id(param)] = copy = param.clone() if torch.is_grad_enabled() and param.requires_grad else param.detach().clone()
                copy.origin = Origin(functools.partial(_in_tiles, engine.name, param), engine, engine.steps, param)
    if func in _GRAPH and len(args) == 2 and args[0] is args[1]:
        # A way to ask for the node that accumulates the gradient: the next one of the copy's.
        return read_only(copies[id(args[0])], list(copies.values()))
    taken = lambda one: copies.get(id(one), one)
    return _on_copies(list(copies.values()), func, tree_map(taken, args), tree_map(taken, kwargs))


def _on_copies(copies: list[_Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `func`, which takes `copies` and other copies, and refuses what it writes to them."""
    copies = copies + [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Copied)]
    for one in copies:
        if one.origin.steps != one.origin.engine.steps:
            raise NotSupported(
                f"{getattr(func, '__name__', func)} on values of {one.origin.what().partition(',')[0]} that were read before the last optimizer.step(), and plain "
                "PyTorch would use the new ones: read them again, or keep a clone() of them"
            )
    if copies and getattr(func, "__name__", "").startswith("_fused_"):
        # Updates of an optimizer, which no version counter tells.
        raise written(func, copies[0].origin.what())
    before = list(map(_version, copies))
    result = func(*args, **kwargs)
    for one, version in zip(copies, before):
        if one._version != version:
            raise written(func, one.origin.what())
    return read_only(result, copies) if copies else result


# Times that a unit comes for which sums are compared: two passes with their backwards.
_SUMMED_TIMES = 4


class Watch:
    """Notices that a script writes to parameters of a unit while they are in memory: in a forward, in a hook, or where nothing is
    ever released. Version counters tell, also those of what `param.data` gave. What writes below PyTorch (numpy, kernels of others) changes
    no counter; sums of the bits tell in the first passes."""

    def __init__(self, unit: Unit) -> None:
        self._params = unit.params
        self._versions: list[int] = []
        # What `param.data` gave since the unit came: it counts its changes by itself.
        self._given: list[tuple[nn.Parameter, _Tensor]] = []
        self._on = False
        # Sums of the parameters' bits when the unit came, and how many times more they are wanted.
        self._sums: Optional[list[_Tensor]] = None
        self._sums_left = _SUMMED_TIMES

    def begin(self) -> None:
        """What is in memory now are the unit's values."""
        self._versions = list(map(_version, self._params))
        self._given.clear()
        self._on = True
        if self._sums_left and not _observed():
            self._sums_left -= 1
            self._sums = _sums(self._params)

    def end(self) -> Optional[nn.Parameter]:
        """Ends the watch. Returns a parameter that was written since it began, if there is one."""
        if not self._on:
            return None
        self._on = False
        found = None
        if self._versions != list(map(_version, self._params)):
            found = next(param for param, version in zip(self._params, self._versions) if param._version != version)
        for param, given in self._given:
            if given._version:
                found = param
        self._given.clear()
        sums, self._sums = self._sums, None
        if found is None and sums is not None and not _observed():
            changed = (param for param, before, now in zip(self._params, sums, _sums(self._params)) if not torch.equal(before, now))
            found = next(changed, None)
        return found

    def gave(self, param: nn.Parameter, data: _Tensor) -> None:
        if self._on:
            self._given.append((param, data))

    def drop_unheld(self) -> None:
        """Lets go of what `param.data` gave and nobody else has."""
        given, self._given = self._given, []
        for _ in range(len(given)):
            param, data = given.pop()
            # This name and the argument.
            if sys.getrefcount(data) > 2:
                self._given.append((param, data))


def _observed() -> bool:
    """Whether somebody records or changes the operations that are made, as torch.func and tracers do."""
    return in_transform() or bool(torch._C._len_torch_dispatch_stack())


def _sums(params: list[nn.Parameter]) -> list[_Tensor]:
    """The sum of each parameter's bits, on its device."""
    with torch.no_grad(), AS_TENSORS():
        return [one.detach().view(_BITS[one.element_size()]).sum() for one in params]


# Whole numbers of so many bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Watches by the id of each parameter of a prepared model.
_watches: "weakref.WeakValueDictionary[int, Watch]" = weakref.WeakValueDictionary()

_data = _Tensor.data


def watch(unit: Unit) -> Watch:
    """Begins to notice writes to a unit's parameters."""
    made = Watch(unit)
    for param in unit.params:
        _watches[id(param)] = made
    if "data" not in nn.Parameter.__dict__:
        nn.Parameter.data = property(_get_data, _set_data)
        _wrap_copies()
    return made


def _wrap_copies() -> None:
    """Lets functions that take tensors below `__torch_function__` take copies of released parameters."""
    from torch._functorch import eager_transforms, vmap

    sparse = [f"sparse_{kind}_tensor" for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed")]
    for owner, name in (
        *((torch, name) for name in ("tensor", *sparse)),
        (_Tensor, "new_tensor"),
        *((torch._C.ScriptFunction, "__call__"), (torch._C.ScriptMethod, "__call__")),
        *((eager_transforms, "_wrap_for_grad"), (eager_transforms, "_wrap_functional_tensor"), (vmap, "_add_batch_dim")),
    ):
        if hasattr(owner, name):
            setattr(owner, name, _taking_copies(getattr(owner, name)))
    for module in (eager_transforms, torch.func):
        module.functionalize = _functionalize(module.functionalize)
    if torch.distributed.is_available():
        for name in _COLLECTIVES:
            if hasattr(torch.distributed.ProcessGroup, name):
                setattr(torch.distributed.ProcessGroup, name, _refusing_released(getattr(torch.distributed.ProcessGroup, name)))


def _taking_copies(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, which gets copies in place of released parameters, those in lists too."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(map(_has_released, args)) or any(map(_has_released, kwargs.values())):
            with outside_transforms():
                args, kwargs = tree_map(_copy, (args, kwargs))
        return plain(*args, **kwargs)

    return call


def _functionalize(plain: Callable[..., Any]) -> Callable[..., Any]:
    """torch.func.functionalize, whose functions compare what they are given with what they have made of it."""
    return functools.wraps(plain)(lambda *args, **kwargs: _taking_copies(plain(*args, **kwargs)))


def _has_released(one: Any) -> bool:
    """Whether this is a released parameter, or a list of some. Lists of numbers, which may be long, are told by their first one."""
    while isinstance(one, (list, tuple)) and one:
        if isinstance(one[0], _Tensor):
            return any(isinstance(each, Released) for each in one)
        one = one[0]
    return isinstance(one, Released)


def _copy(one: Any) -> Any:
    return one.clone() if isinstance(one, Released) else one


# Methods of a process group that move tensors.
_COLLECTIVES = ("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "_allgather_base", "allgather_into_tensor_coalesced")
_COLLECTIVES += ("allgather_coalesced", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced")
_COLLECTIVES += ("alltoall_base", "alltoall", "send", "recv", "recv_anysource")


def _refusing_released(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A process group's method that refuses released parameters."""

    @functools.wraps(plain)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        for one in tree_flatten((args, kwargs))[0]:
            if isinstance(one, Released):
                raise NotSupported(
                    f"torch.distributed's {plain.__name__} of {one.engine.name(one)}, whose values are in tiles: all ranks have the same values already; send a "
                    "clone() of it to others"
                )
        return plain(group, *args, **kwargs)

    return call


def outside_transforms() -> ContextManager:
    """Within it, operations are none of the transforms of torch.func that are under way."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def in_transform() -> bool:
    """Whether a transform of torch.func is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def unwatch(unit: Unit) -> None:
    """The inverse of `watch`."""
    for param in unit.params:
        _watches.pop(id(param), None)


def _get_data(param: nn.Parameter) -> _Tensor:
    data = _data.__get__(param)
    found = _watches.get(id(param))
    if found is not None:
        found.gave(param, data)
    return data


def _set_data(param: nn.Parameter, value: _Tensor) -> None:
    found = _watches.get(id(param))
    if found is not None and found._on and not isinstance(param, Released) and value.data_ptr() != param.data_ptr():
        raise NotSupported(f"assigning .data of a parameter of shape {tuple(param.shape)}, whose values are in tiles: {_BEFORE}")
    _data.__set__(param, value)


def set_data(param: nn.Parameter, value: _Tensor) -> None:
    """`param.data = value`, for the engine."""
    with AS_TENSORS():
        _data.__set__(param, value)



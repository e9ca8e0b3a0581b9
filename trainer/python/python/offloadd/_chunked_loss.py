"""Cross entropy without logits: the head's product and the loss of a few tokens at a time, in forward and again in backward.

    head(hidden)                 Logits: the numbers are not there, only where they come from
    rows, casts, scalings        Logits still: of fewer rows, scaled as they come
    cross_entropy(Logits, ...)   a chunk of rows at a time, each checkpointed
    anything else                the numbers, computed once

A model's own code runs, so that labels are shifted, ignored and counted as it does it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, ContextManager, NamedTuple, Sequence

import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint
from torch.utils._pytree import tree_map

from ._errors import Error, NotSupported
from ._released import AS_TENSORS, ITSELF

_Tensor = torch.Tensor

# Operations of each number by itself: they need no number of another row.
_ELEMENTWISE = {
    *(_Tensor.float, _Tensor.bfloat16, _Tensor.half, _Tensor.to, _Tensor.mul, _Tensor.div, _Tensor.__mul__, _Tensor.__rmul__, _Tensor.__truediv__),
    *(_Tensor.tanh, torch.tanh, torch.mul, torch.div, _Tensor.true_divide),
}

_SAME = {_Tensor.contiguous}

# What logits answer without being read.
_METADATA = {func for func in ITSELF if not func.__name__.startswith("new_") and not func.__name__.endswith("_like")}

# The gradient of logits is only there in chunks, and writes to their memory would not be noticed.
_REFUSED = {_Tensor.retain_grad: "retain_grad", _Tensor.register_hook: "register_hook", _Tensor.data.__get__: ".data"}


class Logits(_Tensor):
    """Logits that are computed when they are read. Shape, type and device are those of the numbers."""

    origin: "Origin"
    hidden: torch.Tensor
    # Operations on the head's results.
    done: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    # The numbers, with and without a graph, if they were read.
    read: dict[bool, torch.Tensor]

    @classmethod
    def of(cls, origin: "Origin", hidden: torch.Tensor, dtype: torch.dtype, done: tuple = ()) -> "Logits":
        shape = (*hidden.shape[:-1], origin.head.wide)
        made = cls._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device, requires_grad=True)
        made.origin, made.hidden, made.done, made.read = origin, hidden, done, {}
        return made

    def with_rows(self, hidden: torch.Tensor) -> "Logits":
        return Logits.of(self.origin, hidden, self.dtype, self.done)

    def with_operation(self, func: Callable[..., Any], args: Any, kwargs: Any) -> "Logits":
        more = args[1:]
        operation = lambda one: func(one, *more, **kwargs)
        dtype = operation(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return Logits.of(self.origin, self.hidden, dtype, (*self.done, operation))

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The numbers of some rows."""
        with self.origin.context():
            found = self.origin.head.compute(hidden)
        for operation in self.done:
            found = operation(found)
        if found.dtype is not self.dtype:
            raise NotSupported(f"the model's head computes {found.dtype} where {self.dtype} was expected: leave offloadd.loss_chunk_tokens out")
        return found

    def numbers(self) -> torch.Tensor:
        """All numbers, as a plain tensor."""
        grad = torch.is_grad_enabled()
        if grad not in self.read:
            if self.origin.versions != self.origin.head.versions(self.origin.source):
                raise Error(
                    "logits were read after a step has changed the model's head: read them before optimizer.step(), or leave offloadd.loss_chunk_tokens out"
                )
            self.read[grad] = self.rows(self.hidden)
        return self.read[grad]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REFUSED:
            raise NotSupported(f"{_REFUSED[func]} of logits that are computed in chunks: leave offloadd.loss_chunk_tokens out")
        if func in _METADATA:
            with AS_TENSORS():
                return func(*args, **kwargs)
        found = _in_chunks(func, args, kwargs)
        if found is not None:
            return found
        read: list[tuple[Logits, torch.Tensor, int]] = []

        def numbers(one: Any) -> Any:
            if not isinstance(one, Logits):
                return one
            values = one.numbers()
            read.append((one, values, values._version))
            return values

        result = func(*tree_map(numbers, args), **tree_map(numbers, kwargs))
        changed = [one for one, values, version in read if values._version != version]
        for one in changed:
            one.read.clear()
        if changed:
            raise NotSupported(f"{func.__name__} changes logits that are computed in chunks: change a copy, or leave offloadd.loss_chunk_tokens out")
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotSupported(f"{func} takes logits as they are, which are computed in chunks: leave offloadd.loss_chunk_tokens out")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"logits that are computed when they are read: {tuple(self.shape)}, {self.dtype}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers().detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.numbers().detach().clone()


def _in_chunks(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation that needs no numbers now; None where it needs them."""
    if func is functional.cross_entropy:
        return _cross_entropy(*args, **kwargs)
    one = args[0] if args and isinstance(args[0], Logits) else None
    others = [other for other in (*args[1:], *kwargs.values()) if isinstance(other, torch.Tensor)]
    if one is None or others:
        return None
    if func in _SAME and len(args) == 1 and not kwargs:
        return one
    if func in _ELEMENTWISE and not isinstance(kwargs.get("out"), torch.Tensor):
        return one.with_operation(func, args, kwargs)
    if func in (_Tensor.view, _Tensor.reshape) and not kwargs:
        sizes = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
        if sizes and all(isinstance(size, int) for size in sizes) and sizes[-1] == one.shape[-1]:
            return one.with_rows(one.hidden.reshape(*sizes[:-1], one.hidden.shape[-1]))
    if func is _Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        leading = all(part is Ellipsis or isinstance(part, (slice, int)) for part in index)
        if leading and (Ellipsis in index and index[-1] == slice(None) or Ellipsis not in index and len(index) < one.dim()):
            return one.with_rows(one.hidden[index])
    return None


def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None, *more: Any, **kwargs: Any
):
    """Cross entropy of rows of logits, a chunk at a time. None where it is of another kind."""
    reduction = more[0] if more else kwargs.pop("reduction", "mean")
    smoothing = more[1] if len(more) > 1 else kwargs.pop("label_smoothing", 0.0)
    wanted = isinstance(input, Logits) and input.dim() == 2 and isinstance(target, torch.Tensor) and target.dim() == 1 and not target.is_floating_point()
    if not wanted or reduction not in ("mean", "sum") or weight is not None or size_average is not None or reduce is not None or kwargs:
        return None

    def of_rows(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(input.rows(hidden), labels, ignore_index=ignore_index, reduction="sum", label_smoothing=smoothing)

    tokens = input.origin.head.chunk_tokens
    sums = [
        checkpoint.checkpoint(of_rows, hidden, labels, use_reentrant=False, preserve_rng_state=False)
        for hidden, labels in zip(input.hidden.split(tokens), target.split(tokens))
    ]
    total = torch.stack(sums).sum() if sums else input.hidden.sum().float() * 0
    # No counted token: not a number, as plain PyTorch.
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def head_of(model: nn.Module) -> nn.Module:
    """The layer that makes a model's logits. Raises `NotSupported` where it is not found."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if not isinstance(head, nn.Module) or not isinstance(getattr(head, "out_features", None), int):
        raise NotSupported(
            f"offloadd.loss_chunk_tokens: {type(model).__name__} has no linear layer that its get_output_embeddings() returns: leave the key out"
        )
    return head


class Origin(NamedTuple):
    """Where logits come from: the head and what it got, the mixed precision of their forward, and what is the same as long as no step has changed
    the head."""

    head: "Head"
    source: torch.Tensor
    context: Callable[[], ContextManager[Any]]
    versions: tuple[int, ...]


class Head:
    """The head of a model, which returns `Logits` in a forward that computes a loss."""

    def __init__(self, model: nn.Module, chunk_tokens: int) -> None:
        self.chunk_tokens, head = chunk_tokens, head_of(model)
        self._head, self._plain, self.wide = head, head.forward, head.out_features
        self._active = self._computes = False
        ref = weakref.ref(self)
        self._handles = [
            model.register_forward_pre_hook(functools.partial(_begins, ref), with_kwargs=True),
            model.register_forward_hook(functools.partial(_ends, ref), always_call=True),
        ]
        head.forward = self._forward

    def close(self) -> None:
        """Gives the model its head back."""
        for handle in self._handles:
            handle.remove()
        del self._head.forward

    def versions(self, hidden: torch.Tensor) -> tuple[int, ...]:
        """What changes when a step changes the head's parameters, or somebody what it got."""
        with AS_TENSORS():
            return (hidden._version, *(param._version for param in self._head.parameters()))

    def begin(self, labels: Any) -> None:
        self._active = labels is not None and torch.is_grad_enabled() and self._head.training

    def end(self) -> None:
        self._active = False

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's results, by its own code and with its hooks."""
        before, self._computes = self._computes, True
        try:
            return self._head(hidden)
        finally:
            self._computes = before

    def _forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._active or self._computes or torch.compiler.is_compiling() or args or kwargs or type(hidden) is not torch.Tensor:
            return self._plain(hidden, *args, **kwargs)
        kind, dtype, context = hidden.device.type, hidden.dtype, contextlib.nullcontext
        if torch.amp.is_autocast_available(kind):
            enabled = torch.is_autocast_enabled(kind)
            context = functools.partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), enabled=enabled)
            dtype = torch.get_autocast_dtype(kind) if enabled else dtype
        return Logits.of(Origin(self, hidden, context, self.versions(hidden)), hidden, dtype)


def _begins(head: "weakref.ref[Head]", module: nn.Module, args: Any, kwargs: Any) -> None:
    found = head()
    if found is not None:
        found.begin(kwargs.get("labels"))


def _ends(head: "weakref.ref[Head]", module: nn.Module, args: Any, output: Any) -> None:
    found = head()
    if found is not None:
        found.end()

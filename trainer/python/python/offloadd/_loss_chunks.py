"""The head of a language model and its cross entropy, computed for one chunk of the tokens after the other, so that the logits of one chunk are in memory.

    head(hidden states)             -> Logits, which have a shape and no values; what the model does to them is noted: scaling, soft-capping, types, shapes
    cross_entropy(Logits, labels)   -> chunk 1: product, what was noted, loss; chunk 2: ...        logits are dropped (torch's checkpointing)
    backward                           chunk 2 computed again, its gradients; chunk 1 computed again, its gradients

The model's own code and the loss of its library run as they are, so that shifted labels, labels that do not count and the number by which a sum is divided
are theirs. Whatever else asks for logits is refused by name. Passes without gradients and in evaluation have all logits, as without chunks.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, ContextManager, NamedTuple, NoReturn, Optional, Sequence

import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map

from ._activations import staying
from ._dependencies import Dependencies
from ._errors import NotSupported
from ._forwards import is_of_engine
from ._mlp_chunks import HOOKS, is_rowwise
from ._released import in_transform
from ._replaced_forwards import Layer, ReplacedForwards, is_given_by_others

_KEY = "offloadd.loss_chunks"

# What PEFT puts around a head that is trained whole.
_WRAPPER = ("peft.utils.other", "ModulesToSaveWrapper")

# Functions of tensors, by their names: what tells of logits without their values; what computes each number by itself; what changes the shape.
_READ = frozenset("shape dtype device is_cuda ndim requires_grad size dim numel is_floating_point __len__".split())
_NOTED = frozenset("mul __mul__ __rmul__ multiply div __div__ __truediv__ divide true_divide tanh float double half bfloat16 to type contiguous".split())
_RESHAPED = frozenset("view reshape flatten".split())

Note = Callable[[torch.Tensor], torch.Tensor]


class LossChunks:
    """The head of a model, whose logits are computed in chunks until `end`. Raises `NotSupported` for a model whose head is not found or not known to compute
    each token by itself."""

    def __init__(self, model: nn.Module, count: int) -> None:
        name, head = _head_of(model, count)
        _check(name, head)
        self._replaced = ReplacedForwards(Layer.LOSS_CHUNKS, {head: functools.partial(_in_place_of, head, count, name)})

    def end(self) -> None:
        """Logits are computed whole again."""
        self._replaced.end()


def _head_of(model: nn.Module, count: int) -> tuple[str, nn.Module]:
    heads = (one.get_output_embeddings() for one in model.modules() if hasattr(type(one), "get_output_embeddings"))
    head = next((one for one in heads if one is not None), None)
    if not isinstance(head, nn.Module):
        raise NotSupported(f"{_KEY} = {count}: {type(model).__name__} has no head of a language model (get_output_embeddings): leave the key out")
    return next(name for name, one in model.named_modules() if one is head), head


def _check(name: str, head: nn.Module) -> None:
    """Refuses a head whose rows may depend on each other."""
    for inner, module in head.named_modules():
        of = ".".join(filter(None, (name, inner)))
        if is_given_by_others(module):
            raise NotSupported(f"{_KEY}: {of} was given a forward of its own, which may mix tokens: leave {_KEY} out")
        if not is_rowwise(module) and (type(module).__module__, type(module).__name__) != _WRAPPER:
            raise NotSupported(f"{_KEY}: {of} is a {type(module).__name__}, which is not known to compute each token by itself: leave {_KEY} out")


def _check_hooks(name: str, head: nn.Module) -> None:
    for inner, module in head.named_modules():
        hooks = [one for kind in HOOKS for one in getattr(module, kind).values()]
        if any(module is not head or not is_of_engine(one) for one in hooks):
            of = ".".join(filter(None, (name, inner)))
            raise NotSupported(f"{_KEY}: {of} has a hook{' or is a unit of its own' * bool(inner)}, and would see chunks: leave {_KEY} out")


def _in_place_of(head: nn.Module, count: int, name: str, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a head, in place of the one below."""
    given, *others = *args, *kwargs.values()
    if isinstance(given, _Loss):
        return given.compute(below, count)
    if others or not head.training or not torch.is_grad_enabled() or in_transform():
        return below(*args, **kwargs)
    _check_hooks(name, head)
    none = below(given.reshape(-1, given.shape[-1])[:0])
    called = _Call(head, _autocast_of(given.device.type), Dependencies(_KEY, name, head, {"its input": given}))
    return Logits(called, given, none.detach(), (), none.requires_grad)


class _Call(NamedTuple):
    """A call of a head, whose product is computed later."""

    head: nn.Module
    # What the product is computed within, as the script has called the head.
    autocast: Callable[[], ContextManager]
    depends_on: Dependencies


@torch.compiler.disable
def _autocast_of(device: str) -> Callable[[], ContextManager]:
    """The autocast that is under way, to be entered again."""
    if not torch.amp.is_autocast_available(device):
        # That of a plan.
        return contextlib.nullcontext
    how = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device), "cache_enabled": torch.is_autocast_cache_enabled()}
    return functools.partial(torch.autocast, device, **how)


class Logits(torch.Tensor):
    """Logits of a training forward: their values are never in memory together."""

    _call: _Call
    # The input of the head, with the rows that the logits have.
    _states: torch.Tensor
    # Logits of no token, on which everything is done at once that is noted.
    _none: torch.Tensor
    _notes: Sequence[Note]

    @staticmethod
    def __new__(cls, call: _Call, states: torch.Tensor, none: torch.Tensor, notes: Sequence[Note], trained: bool) -> "Logits":
        how = {"dtype": none.dtype, "device": none.device, "requires_grad": trained}
        made = torch.Tensor._make_wrapper_subclass(cls, (*states.shape[:-1], none.shape[-1]), **how)
        made._call, made._states, made._none, made._notes = call, states, none, notes
        return made

    # torch calls it instead of each function that is given one.
    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, owner = kwargs or {}, getattr(func, "__self__", None)
        # Attributes are functions too.
        name = getattr(owner, "__name__", "") if func.__name__ == "__get__" else func.__name__
        if name in _READ:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        own = args[0] if args else None
        if isinstance(own, Logits):
            if name in _RESHAPED:
                return own._reshaped(name, args[1:], kwargs)
            if name == "__getitem__":
                return own._part(args[1])
            if name in _NOTED and all(_is_number(one) for one in (*args[1:], *kwargs.values())):
                return own._with_numbers(func, args[1:], kwargs)
        _refuse(name)

    # What reaches torch otherwise.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(str(func))

    @property
    def made_of(self) -> torch.Tensor:
        """What the loss depends on."""
        return self._states

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Logits(without values: {_KEY}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def _with_numbers(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """What `func` makes of these logits and of numbers."""
        call = self._call
        given = tree_map(lambda one: one.detach().clone() if isinstance(one, torch.Tensor) and not one.requires_grad else one, (args, kwargs))
        for one in tree_leaves(given):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                # It has a gradient, and no copy of it would.
                call = call._replace(depends_on=call.depends_on.with_given(f"a number given to {func.__name__}", one))
        note = lambda values: func(values, *given[0], **given[1])
        told = note(self._none)
        # The name of a type, for one.
        return self._noted(note, call) if isinstance(told, torch.Tensor) else told

    def _noted(self, note: Note, call: Optional[_Call] = None) -> "Logits":
        return self._like(self._states, note(self._none), (*self._notes, note), call)

    def _like(
        self, states: torch.Tensor, none: Optional[torch.Tensor] = None, notes: Optional[Sequence[Note]] = None, call: Optional[_Call] = None
    ) -> "Logits":
        return Logits(call or self._call, states, self._none if none is None else none, self._notes if notes is None else notes, self.requires_grad)

    def _reshaped(self, name: str, args: tuple, kwargs: dict[str, Any]) -> "Logits":
        *rows, width = getattr(_shaped(*self.shape), name)(*args, **kwargs).shape
        if width != self.shape[-1] or not rows:
            _refuse(name)
        return self._like(self._states.reshape(*rows, self._states.shape[-1]))

    def _part(self, key: Any) -> "Logits":
        """Some of the tokens, or of the words."""
        key = list(key) if isinstance(key, tuple) else [key]
        if any(one is not Ellipsis and not isinstance(one, slice) for one in key) or key.count(Ellipsis) > 1:
            _refuse("__getitem__ with anything but slices")
        # Too many are PyTorch's to refuse.
        _shaped(*self.shape)[tuple(key)]
        place = key.index(Ellipsis) if Ellipsis in key else len(key)
        full = [slice(None)] * (self.dim() - len(key) + (Ellipsis in key))
        *rows, words = key[:place] + full + key[place + 1 :]
        part = self._like(self._states[tuple(rows)])
        return part if words == slice(None) else part._noted(lambda values: values[..., words])


def _shaped(*shape: int) -> torch.Tensor:
    """A tensor without memory. A plan counts the bytes of those on its device."""
    return torch.empty((), device="meta").expand(shape)


def _is_number(one: Any) -> bool:
    return not isinstance(one, Logits) and (not isinstance(one, torch.Tensor) or one.dim() == 0)


def _refuse(what: str) -> NoReturn:
    raise NotSupported(
        f"{_KEY}: logits of a training forward have no values, and {what} needs them: only cross_entropy of all tokens is computed in chunks, also of logits "
        f"that are multiplied, divided, soft-capped (tanh), converted, sliced or reshaped before: leave {_KEY} out, or compute them in model.eval()"
    )


def _cross_entropy(
    input: Logits,
    target: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    size_average: Optional[bool] = None,
    ignore_index: int = -100,
    reduce: Optional[bool] = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy of logits without values."""
    others = {"weight": weight, "size_average": size_average, "reduce": reduce}
    if given := [name for name, value in others.items() if value is not None]:
        _refuse(f"cross_entropy with {' and '.join(given)}")
    if not isinstance(input, Logits) or input.dim() != 2 or target.is_floating_point():
        _refuse("cross_entropy of anything but [tokens, words] and labels that are numbers of words")
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    # What is wrong with the arguments is PyTorch's to say.
    functional.cross_entropy(_shaped(len(input), 1), target.to("meta"), reduction=reduction, **options)
    # It is a call of the head, whose weights may have to come.
    return input._call.head(_Loss(input, target, reduction, options))


class _Loss:
    """What a head is given to compute a loss of its logits."""

    def __init__(self, logits: Logits, labels: torch.Tensor, reduction: str, options: dict[str, Any]) -> None:
        self._logits, self._labels, self._reduction, self._options = logits, labels, reduction, options

    # What torch calls where a plain head is given one.
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotSupported(f"{_KEY}: the run has ended, and the loss of logits of its last forward was not computed: compute it before")

    def compute(self, product: Callable[..., torch.Tensor], count: int) -> torch.Tensor:
        states, labels = self._logits._states, self._labels
        # An error within a checkpoint would leave its hooks to what follows, as long as somebody holds the traceback.
        self._logits._call.depends_on.check()
        rows = max(1, -(-len(states) // count))
        of_chunk = functools.partial(checkpoint.checkpoint, functools.partial(self._of_chunk, product), use_reentrant=False)
        with staying():
            results = [of_chunk(part, own) for part, own in zip(states.split(rows), labels.split(rows))]
        if self._reduction == "none":
            return torch.cat(results)
        result = torch.stack(results).sum()
        if self._reduction == "mean":
            counted = (labels != self._options["ignore_index"]).sum()
            # Of no token it is no number, and has gradients of 0.
            result = torch.where(counted > 0, result / counted.clamp(min=1), torch.nan)
        # As for no token.
        return result.to(functional.cross_entropy(self._logits._none, labels[:0], reduction="sum").dtype)

    def _of_chunk(self, product: Callable[..., torch.Tensor], states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        call = self._logits._call
        call.depends_on.check()
        with call.autocast():
            logits = product(states)
        for note in self._logits._notes:
            logits = note(logits)
        losses = functional.cross_entropy(logits, labels, reduction="none", **self._options)
        # As kernels of PyTorch add: the sum of many tokens is more than fp16 has, and their number more than bf16 counts.
        return losses if self._reduction == "none" else losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))

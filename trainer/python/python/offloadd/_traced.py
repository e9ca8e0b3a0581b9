"""What a step of a model takes in memory beside its weights, found by running it without memory: on PyTorch's meta device tensors have sizes alone.

    forward, backward  ──▶  every tensor that operations make, from its making to its end  ──▶  the highest sum

The model's own code runs, so what it finds holds for its family, its attention and its loss. Attention is that of fused kernels, which keep
queries, keys, values, results and one number a row.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, Iterator, Optional, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ._activations import Activations
from ._copies import Form
from ._errors import Error
from ._units import Unit

_SCALAR = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True)
class TracedMemory:
    """Bytes of a step, or of a pass that trains nothing, beside weights and what holds gradients of whole units."""

    # At the highest point of the step.
    peak_bytes: int
    # Of these, tensors with a number for each word of the vocabulary.
    logits_bytes: int
    # What the forward leaves for the backward, and the keys and values that it leaves for the next token.
    kept_bytes: int
    cache_bytes: int
    # Inputs of checkpointed blocks that leave the GPU and come back, and the host memory that they take.
    moved_bytes: int = 0
    moved_host_bytes: int = 0
    # Sizes of these inputs.
    moved_sizes: tuple[int, ...] = ()


def trace(model: nn.Module, units: Sequence[Unit], shape: tuple[int, int], trains: bool, checkpoints: bool = False, moves: bool = False) -> TracedMemory:
    """Runs a step with inputs of `shape`, sequences and their length; with `checkpoints` blocks keep their inputs alone, and with `moves` in host
    memory. The model and its units are on the meta device. Raises `Error` where the model's code needs values."""
    try:
        with _checkpointing(model, checkpoints), _moving(moves) as activations:
            return _traced(model.train(trains), units, shape, trains, activations)
    except Error:
        raise
    except Exception as error:
        raise Error(f"{type(model).__name__} does not run without memory ({type(error).__name__}: {str(error).splitlines()[0]})") from error


class _NoCopies:
    """Tensors without memory leave and come back."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def pin(self, size: int) -> Any:
        return types.SimpleNamespace(nbytes=size)

    def unpin(self, buffer: Any) -> None:
        pass

    def leave(self, one: torch.Tensor, buffer: Any) -> Any:
        self.sizes.append(one.nbytes)
        return self

    def bring_back(self, buffer: Any, form: Form) -> tuple[torch.Tensor, Any]:
        return torch.empty_strided(form.size, form.stride, dtype=form.dtype, device="meta"), self

    def wait(self) -> None:
        pass

    forget = wait


@contextlib.contextmanager
def _moving(wanted: bool) -> Iterator[Optional[Activations]]:
    activations = Activations(_NoCopies(), set, bool) if wanted else None
    try:
        yield activations
    finally:
        if activations is not None:
            activations.close()


def _traced(model: nn.Module, units: Sequence[Unit], shape: tuple[int, int], trains: bool, activations: Optional[Activations] = None) -> TracedMemory:
    ids = torch.zeros(shape, dtype=torch.long, device="meta")
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", 0)
    live = _Live([ids, *model.parameters(), *model.buffers()], vocabulary)
    with _gradients_leave(units), torch.set_grad_enabled(trains), _fused_attention(), live:
        out, cache_bytes = model(input_ids=ids, **_inputs(model, ids, trains)), 0
        if activations is not None:
            activations.pass_ended()
        if trains:
            loss = _loss(out)
            # Loops keep the loss alone.
            del out
            kept_bytes = live.now
            loss.backward()
        else:
            kept_bytes, cache_bytes = live.now, _cache_bytes(getattr(out, "past_key_values", None))
    moved = (0, 0) if activations is None else (activations.moved_bytes, activations.pool.nbytes, tuple(activations.copies.sizes))
    return TracedMemory(live.peak, live.logits_at_peak, kept_bytes, cache_bytes, *moved)


def _inputs(model: nn.Module, ids: torch.Tensor, trains: bool) -> dict[str, Any]:
    """What a script gives the model beside `input_ids`."""
    wanted = {"labels": ids, "use_cache": False} if trains else {"use_cache": True, "logits_to_keep": 1, "decoder_input_ids": ids}
    takes = inspect.signature(model.forward).parameters
    return {name: value for name, value in wanted.items() if name in takes}


def _loss(out: Any) -> torch.Tensor:
    found = getattr(out, "loss", None)
    return found if found is not None else next(one for one in tree_leaves(tuple(out.values())) if one.requires_grad).float().sum()


def _cache_bytes(cache: Any) -> int:
    own = [getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")]
    return sum(one.nbytes for one in own if isinstance(one, torch.Tensor))


@contextlib.contextmanager
def _checkpointing(model: nn.Module, wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise Error(f"{type(model).__name__} has no gradient checkpointing")
    with warnings.catch_warnings():
        # Newer versions of transformers call it otherwise.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()


@contextlib.contextmanager
def _gradients_leave(units: Sequence[Unit]) -> Iterator[None]:
    """Lets gradients of a unit go when all have come, as the engine takes them away."""
    handles: list[Any] = []
    try:
        for unit in units:
            handles += _leaving(unit) if unit.trained else []
        yield
    finally:
        for handle in handles:
            handle.remove()
        for unit in units:
            for param in unit.params:
                param.grad = None


def _leaving(unit: Unit) -> list[Any]:
    came: set[int] = set()

    def release_gradients(param: torch.Tensor) -> None:
        came.add(id(param))
        if len(came) == len(unit.params):
            came.clear()
            for one in unit.params:
                one.grad = None

    return [param.register_post_accumulate_grad_hook(release_gradients) for param in unit.params]


class _Live(TorchDispatchMode):
    """Counts the memory of tensors that operations make."""

    def __init__(self, outside: Sequence[torch.Tensor], vocabulary: int) -> None:
        super().__init__()
        self.now = self.peak = self.logits_at_peak = self._logits = 0
        self._vocabulary = vocabulary
        self._known: dict[int, Any] = {one.untyped_storage()._cdata: one for one in outside}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _SCALAR and args[0].is_meta and args[0].dtype is torch.bool:
            # Models ask whether no token is padding, and whether a row has one text.
            return True
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._count(one)
        return result

    def _count(self, one: torch.Tensor) -> None:
        storage = one.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        logits = size if self._vocabulary and one.shape[-1:] == (self._vocabulary,) and one.dim() > 1 else 0
        # The storage holds no reference to this, which would keep it.
        self._known[key] = weakref.ref(storage, lambda _, live=weakref.ref(self): live() and live()._gone(key, size, logits))
        self.now += size
        self._logits += logits
        if self.now > self.peak:
            self.peak, self.logits_at_peak = self.now, self._logits

    def _gone(self, key: int, size: int, logits: int) -> None:
        del self._known[key]
        self.now -= size
        self._logits -= logits


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    """Computes attention as fused kernels do, which keep no matrix of scores. A mode of torch would not hold within backward."""
    functional = torch.nn.functional
    plain = functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Optional[torch.Tensor] = None, *_: Any, **__: Any) -> torch.Tensor:
        return _Attention.apply(query, key, value, attn_mask)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


class _Attention(torch.autograd.Function):
    """The memory of a fused attention."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
        # In the layout of kernels and of what follows: heads beside each other.
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        # Kernels add up the gradient of queries in fp32.
        sums = torch.empty_like(query, dtype=torch.float32)
        del sums
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None

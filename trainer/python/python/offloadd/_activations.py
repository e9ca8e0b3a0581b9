"""Inputs of checkpointed blocks, which wait in pinned host memory or on drives between forward and backward.

    forward     block 3 begins     its input stays; that of block 2 begins to leave; that of block 1 has left, and its memory goes
    backward    block 2 begins     its input has come; that of block 1 begins to come

torch's checkpointing lets autograd save a block's inputs in two functions of its own, for use_reentrant=True and False. Within calls of these, and
nowhere else, torch's hooks of saved tensors are those of this file: what else a forward saves, weights above all, passes no hook.

Each input is copied once and freed once its copy has been waited for, at the next block or at the forward's end. A buffer, in host memory or on drives,
comes back when autograd drops what it saved, whatever became of the forward.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional, Union

import torch
from torch import nn
from torch.utils import checkpoint

from ._console import say
from ._copies import Buffer, Copies, Copy, Form, Pool
from ._tile_copies import TileCopies
from ._errors import Error

# Functions by which torch's checkpointing lets autograd save the inputs of a block, by their names there.
_SAVERS = ("CheckpointFunction", "_NoopSaveInputs")

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: an input of a checkpointed block, of shape {}, "
    "was changed after the block had begun"
)


class _KeptTensor(NamedTuple):
    """A saved tensor that stays where it is. Autograd compares no versions of what passes hooks."""

    one: torch.Tensor
    version: int


class _Inputs:
    """The inputs of a call of one checkpointed block. They live as long as autograd's graph has them."""

    def __init__(self, before: Optional["weakref.ref[_Inputs]"]) -> None:
        self.members: list[weakref.ref[_Input]] = []
        # Those of the block that ran before, whose backward comes next.
        self.before = before

    def each(self) -> "Iterable[_Input]":
        return [one for member in self.members if (one := member()) is not None]


class _Input:
    """A saved tensor that leaves and comes back."""

    def __init__(self, activations: "Activations", one: torch.Tensor, inputs: _Inputs) -> None:
        self._activations, self.inputs = activations, inputs
        self._form, self._version = Form.from_tensor(one), one._version
        # Sees changes as long as the script has the tensor.
        self._of_script = weakref.ref(one)
        # On the device, until it has left; the version counter is the tensor's.
        self._source: Optional[torch.Tensor] = one.detach()
        self._buffer: Optional[Buffer] = None
        self._leaving: Optional[Copy] = None
        self._coming: Optional[tuple[torch.Tensor, Copy]] = None
        self._changed = False

    def leave(self) -> None:
        """Begins to copy it to a buffer. Does nothing where it has: after a block that failed, the one before it is the last one again."""
        if self._buffer is not None:
            return
        self._compare(self._source)
        self._buffer = self._activations.pool.lend(self._source.nbytes)
        self._leaving = self._activations.copies.leave(self._source, self._buffer)
        self._activations.moved_bytes += self._source.nbytes

    def has_left(self) -> None:
        """Lets its memory on the device go."""
        if self._leaving is not None:
            self._compare(self._source)
            self._leaving.wait()
            self._leaving = self._source = None

    def begin_to_return(self) -> None:
        """Begins to bring it, unless it is here or on its way."""
        if self._source is None and self._coming is None:
            self._coming = self._activations.copies.bring_back(self._buffer, self._form)

    def tensor(self) -> torch.Tensor:
        """The tensor, on the device."""
        self._compare(self._of_script())
        if self._source is not None:
            self._compare(self._source)
        if self._changed:
            raise RuntimeError(_CHANGED.format(tuple(self._form.size)))
        if self._source is not None:
            return self._source
        self.begin_to_return()
        one, copy = self._coming
        copy.wait()
        self._coming = None
        return one

    def _compare(self, one: Optional[torch.Tensor]) -> None:
        self._changed = self._changed or one is not None and one._version != self._version

    def __del__(self) -> None:
        # A forward that failed, a loss that nobody used, a backward that ended in between: copies may be under way.
        for copy in (self._leaving, self._coming and self._coming[1]):
            if copy is not None:
                copy.forget()
        if self._buffer is not None:
            self._activations.pool.give(self._buffer)


class Activations:
    """The inputs of the checkpointed blocks of one model."""

    def __init__(self, copies: "Copies | TileCopies", storages: Callable[[], set[int]], under_way: Callable[[], bool]) -> None:
        """`storages` returns where the model's weights and buffers lie, by the addresses of the storages' objects; `under_way` whether a forward of the
        model is."""
        self.copies, self.under_way = copies, under_way
        self.pool = copies.pool() if isinstance(copies, TileCopies) else Pool(copies)
        # Bytes that have left the device.
        self.moved_bytes = 0
        self._find_storages = storages
        self._storages: Optional[set[int]] = None
        self._last: Optional[weakref.ref[_Inputs]] = None
        self._leaving: Optional[weakref.ref[_Inputs]] = None
        self._told = False
        _open.append(weakref.ref(self))
        _take_calls()

    def close(self) -> None:
        """Frees host memory: that of a graph that a script still has when it drops the graph. What waits on drives is lost."""
        _open[:] = [one for one in _open if one() not in (None, self)]
        if not _open:
            _give_calls_back()
        self.pool.close()
        if isinstance(self.copies, TileCopies):
            self.copies.close()

    def wants(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of a block's inputs that are to be moved. None where one is a weight: hooks would hide from a block that it is."""
        if any(type(one) is not torch.Tensor or self._is_weight(one) for one in tensors):
            return []
        return [one for one in tensors if one.requires_grad and one.device == self.copies.device and _is_dense(one)]

    def _is_weight(self, one: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of a weight."""
        if isinstance(one._base, nn.Parameter):
            return True
        if self._storages is None:
            self._storages = self._find_storages()
        return one.layout is torch.strided and one.untyped_storage()._cdata in self._storages

    def begin_pass(self) -> None:
        """Weights may lie elsewhere than in the pass before."""
        self._storages = None

    def begin_block(self) -> _Inputs:
        """The inputs of a block that begins: those of the block before begin to leave."""
        self.pass_ended()
        before = self._last and self._last()
        for one in before.each() if before is not None else ():
            one.leave()
        self._leaving = self._last
        return _Inputs(self._last)

    def hooks(self, inputs: _Inputs, wanted: list[torch.Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Hooks within which autograd saves inputs of a block, of which those `wanted` are to be moved."""
        ids = set(map(id, wanted))

        def pack(one: torch.Tensor) -> Union[_KeptTensor, _Input]:
            if id(one) not in ids:
                return _KeptTensor(one, one._version)
            found = _Input(self, one, inputs)
            inputs.members.append(weakref.ref(found))
            self._last = weakref.ref(inputs)
            return found

        return pack, self._unpack

    def pass_ended(self) -> None:
        """What is on its way has left."""
        leaving, self._leaving = self._leaving and self._leaving(), None
        for one in leaving.each() if leaving is not None else ():
            one.has_left()

    def _unpack(self, packed: Union[_KeptTensor, _Input]) -> torch.Tensor:
        if isinstance(packed, _KeptTensor):
            if packed.one._version != packed.version:
                raise RuntimeError(_CHANGED.format(tuple(packed.one.shape)))
            return packed.one
        found, before = packed.tensor(), packed.inputs.before and packed.inputs.before()
        for one in before.each() if before is not None else ():
            one.begin_to_return()
        return found

    def backward_ended(self) -> None:
        """Tells once that there is nothing to move."""
        if not self.moved_bytes and not self._told:
            say("offloadd.activations: no input of a checkpointed block left the GPU: call model.gradient_checkpointing_enable(), or leave the key out")
        self._told = True


def _is_dense(one: torch.Tensor) -> bool:
    # A copy of one that is conjugated or negated only when it is read ends on the processor, before the bytes have come.
    return one.layout is torch.strided and one.numel() > 0 and torch.ops.aten.is_non_overlapping_and_dense(one) and not one.is_conj() and not one.is_neg()


# Those of open runs, and what their first one has put into torch's classes, by name.
_open: "list[weakref.ref[Activations]]" = []
_apply: dict[str, Any] = {}


def _take_calls() -> None:
    """Lets calls of the functions that save inputs pass through here."""
    for name in () if _apply else _SAVERS:
        saver = getattr(checkpoint, name, None)
        if saver is None:
            raise Error(f"offloadd.activations: torch {torch.__version__} has no {name}: leave the key out, or take torch 2.4 to 2.11")
        _apply[name] = saver.apply = _saving(saver.apply)


def _give_calls_back() -> None:
    for name, ours in _apply.items():
        saver = getattr(checkpoint, name)
        # The class's own again, which its base has; not where another library has put its own over ours, which then calls ours without effect.
        if vars(saver).get("apply") is ours:
            del saver.apply
    _apply.clear()


class _UnhookedBlock:
    """A block whose forward, while autograd is about to save its inputs, does not see the hooks."""

    def __init__(self, block: Callable[..., Any], hooks: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
        self._block, self._hooks = block, hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks, self._hooks = self._hooks, None
        if hooks is None:
            # In backward.
            return self._block(*args, **kwargs)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            return self._block(*args, **kwargs)
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _saving(apply: Callable[..., Any]) -> Callable[..., Any]:
    def saving(*args: Any, **kwargs: Any) -> Any:
        found = _of_inputs([one for one in args if isinstance(one, torch.Tensor) and one.numel()])
        if found is None:
            return apply(*args, **kwargs)
        activations, wanted = found
        hooks = activations.hooks(activations.begin_block(), wanted)
        if callable(args[0]):
            args = (_UnhookedBlock(args[0], hooks), *args[1:])
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            return apply(*args, **kwargs)

    return saving


def _of_inputs(tensors: list[torch.Tensor]) -> Optional[tuple[Activations, list[torch.Tensor]]]:
    """Who moves some of a block's inputs, and which; of several models that whose forward is under way, else the newest."""
    if not torch.is_grad_enabled() or _staying.now or _hooked() or torch._C._are_functorch_transforms_active():
        return None
    found = [one for ref in _open if (one := ref()) is not None]
    for activations in sorted(reversed(found), key=lambda one: not one.under_way()):
        if wanted := activations.wants(tensors):
            return activations, wanted
    return None


class _Staying(threading.local):
    """Whether inputs of what a thread checkpoints stay where they are."""

    now = False


_staying = _Staying()


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Within it, inputs of checkpoints stay where they are: for checkpoints of parts of a block."""
    before, _staying.now = _staying.now, True
    try:
        yield
    finally:
        _staying.now = before


def _hooked() -> bool:
    """Whether others have hooks of saved tensors, such as those of a checkpoint around this one, or refuse them."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return not torch._C._autograd._saved_tensors_hooks_is_enabled() or top is not None and top(True) is not None

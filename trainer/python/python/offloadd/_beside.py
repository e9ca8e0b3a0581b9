"""Moves the parameters of an optimizer's units between where they stay and tiles: gradients out before a step, parameters back after it.

The counterpart of `_engine` without hooks: nothing moves in forward and backward. What is committed and rewritten sees the same names.
"""

from __future__ import annotations

import array
import contextlib
import weakref
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import nn

from ._console import say
from ._errors import NotSupported
from ._memory import GpuDevice, GpuMemory, HostMemory, Memory
from ._order import Order
from ._param_units import ParamUnit, Piece, flat_like, flat_of, grad_of, is_dtensor, local_of, main_grad_of
from ._ranks import Ranks
from ._reentry import not_reentered
from ._watch import bit_sums


class Mark(NamedTuple):
    """A tensor as it was: a gradient when it was handed over, or a parameter when its values were those of its tiles."""

    tensor: Callable[[], Optional[torch.Tensor]]
    state: tuple[int, ...]
    # The sum of its bits: what GradScaler, `.data`, numpy and others that have the memory write changes no version.
    bits: torch.Tensor

    @classmethod
    def of_gradient(cls, grad: torch.Tensor) -> "Mark":
        return cls(weakref.ref(grad), _state_of(grad), _bits(grad))

    @classmethod
    def of_param(cls, param: nn.Parameter) -> "Mark":
        # The parameter stays anyway, and torch.utils.swap_tensors takes no tensor with weak references.
        return cls(lambda: param, _state_of(param), _bits(param))

    def may_be_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is this one, unless its bits tell otherwise."""
        return self.tensor() is tensor and self.state == _state_of(tensor)


class Beside:
    """The parameters of one optimizer."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], units: list[ParamUnit], core: Any, ranks: Ranks, gpu: Optional[GpuDevice]) -> None:
        self.named, self.core, self.ranks = named, core, ranks
        self.units = units
        self.order = Order(core.announce)
        # What commits ask of a model and its units.
        self.gathering, self.model = self, nn.Module()
        # Pieces of each parameter, by its id, with their units.
        self.pieces: dict[int, list[tuple[ParamUnit, int]]] = {}
        for unit in self.units:
            for index, piece in enumerate(unit.params):
                self.pieces.setdefault(id(piece.param), []).append((unit, index))
        self.name_of = {id(param): name for name, param in named}
        # The gradients of this step that were handed over, and the sum of squares of each parameter's, over all ranks.
        self.seen: dict[int, Mark] = {}
        self.square_sums: dict[int, float] = {}
        # Gradients that have come in this step's backward, and the units whose gradients were handed over there.
        self._came: dict[int, Mark] = {}
        self._early: set[int] = set()
        self._came_again = self._said = False
        # Whether an exception has ended the way of a unit's gradients to its tiles.
        self.interrupted = False
        # Called for each of these units, where their updates begin there.
        self._begin: Optional[Callable[[ParamUnit], None]] = None
        self._hooks: list[Any] = []
        self._written: dict[int, Mark] = {}
        self.memory: Memory = HostMemory(core, units) if gpu is None else GpuMemory(ranks, units, gpu)
        for unit in units:
            if gpu is not None:
                self.memory.adopt(unit, keep=False)
                continue
            unit.move(torch.empty(unit.room_elems, dtype=unit.dtype, device="cpu"), copy=False)
            unit.flat.untyped_storage().resize_(0)
            unit.access.forbid()
            unit.here = False

    # Gradients

    def came(self) -> dict[int, torch.Tensor]:
        """The gradient of each parameter that has one."""
        grads = ((id(param), grad_of(param, name)) for name, param in self.named)
        found = {key: grad for key, grad in grads if grad is not None}
        flags = bytes(id(param) in found for _, param in self.named)
        for rank, told in enumerate(self.ranks.meet("compare which parameters have gradients", flags)):
            if told != flags:
                name = next(name for (name, _), ours, theirs in zip(self.named, flags, told) if ours != theirs)
                raise NotSupported(
                    f"{name} has a gradient on one of ranks {self.ranks.rank} and {rank} only: all ranks must have gradients of the same parameters"
                )
        return found

    def is_handed_over(self, grads: dict[int, torch.Tensor]) -> bool:
        """Whether these gradients, unchanged, were handed over already."""
        return bool(self.seen) and self.seen.keys() == grads.keys() and not _changed(self.seen, grads)

    def changed_since_backward(self, grads: dict[int, torch.Tensor]) -> Optional[str]:
        """The name of a parameter whose gradient was taken in backward and is another one in `grads`."""
        changed = _changed(self._came, {key: grads[key] for key in self._taken_early()})
        return self.name_of[changed[0]] if changed else None

    def _taken_early(self) -> set[int]:
        return {id(piece.param) for unit in self.units if unit.index in self._early for piece in unit.params}

    @not_reentered
    def hand_over(self, grads: dict[int, torch.Tensor], remember: bool = True, begun: bool = False) -> None:
        """Takes gradients to their tiles, as far as they are not there since backward, and adds up their squares. What comes next finds out
        what was changed since then, if it is to `remember`. Where updates have `begun`, nothing was."""
        copied = self.ranks.count > 1 and not all(is_dtensor(param) for _, param in self.named)
        marks = {key: Mark.of_gradient(grad) for key, grad in grads.items()} if remember or copied else {}
        if copied:
            self._check_copies(marks)
        early = self._early if begun or self._is_early(grads) else set()
        self.forget()
        if not early:
            self.core.begin_step()
        units = [unit for unit in self.units if any(id(piece.param) in grads for piece in unit.params)]
        late = [unit for unit in units if unit.index not in early]
        self.core.announce([(True, unit.index) for unit in late])
        flats: dict[int, torch.Tensor] = {}
        for unit in late:
            self._take(unit, grads, flats)
        squares = self.memory.square_sums()
        sums = dict.fromkeys(grads, 0.0)
        for unit in units:
            count = len(unit.params)
            for index, piece in enumerate(unit.params):
                if id(piece.param) in grads:
                    sums[id(piece.param)] += sum(squares[unit.index][index::count])
        totals = self.ranks.sum("add up the squares of gradients", list(sums.values()))
        self.square_sums = dict(zip(sums, totals))
        self.seen = marks if remember else {}

    @contextlib.contextmanager
    def scaling(self, grads: Mapping[int, torch.Tensor], factor: float, times: Mapping[int, int]) -> Iterator[None]:
        """Multiplies gradients that were handed over, by their parameters' ids, by a factor so many `times`, by the gradients' ids. Their tiles stay as
        they are: within it the caller notes that they are to be multiplied too."""
        # Until all is done: what an interrupt leaves is handed over anew.
        seen, self.seen = self.seen, {}
        # What another optimizer has scaled, with a parameter that has the same gradient, is handed over anew.
        same = [key for key, grad in grads.items() if key in seen and seen[key].may_be_of(grad)]
        distinct = {id(grad): grad for grad in grads.values()}
        with torch.no_grad():
            for number in range(max(times.values(), default=0)):
                torch._foreach_mul_([local_of(grad) for key, grad in distinct.items() if times[key] > number], factor)
        seen.update((key, Mark.of_gradient(grads[key])) for key in same)
        yield
        self.seen = seen

    def _check_copies(self, marks: Mapping[int, Mark]) -> None:
        """Refuses gradients that differ between ranks where a parameter is whole on each of them: each rank takes a part of its own gradient."""
        name, param, rank = self._first_different("compare gradients", {key: mark.bits for key, mark in marks.items()})
        if param is not None:
            raise NotSupported(
                f"the gradient of {name} differs between ranks {self.ranks.rank} and {rank}, and the parameter is whole on each of them: "
                + (
                    "call finish_grad_sync() before the step, on a DistributedDataParallel with use_distributed_optimizer=False, and without tensor, pipeline and "
                    "expert parallelism"
                    if main_grad_of(param) is not None
                    else "average gradients over all ranks before the step, as DistributedDataParallel does"
                )
            )

    def check_same_values(self, params: Iterable[nn.Parameter]) -> None:
        """Refuses parameters whose values differ between ranks where they are whole on each of them: each rank takes a part of its own values."""
        if self.ranks.count == 1:
            return
        name, param, rank = self._first_different("compare parameters", {id(param): _bits(param) for param in params})
        if param is not None:
            raise NotSupported(
                f"{name} has other values on rank {rank} than on rank {self.ranks.rank}, and is whole on each of them: give all ranks those of one, as "
                "DistributedDataParallel does when it is made, or torch.distributed.broadcast"
            )

    def _first_different(self, what: str, bits: Mapping[int, torch.Tensor]) -> tuple[str, Optional[nn.Parameter], int]:
        """The first parameter that is whole on each rank and of whose sums of bits, by the parameters' ids, another rank has other ones: its name, itself and
        the rank. All ranks must call it with the same parameters."""
        whole = [(name, param) for name, param in self.named if id(param) in bits and not is_dtensor(param)]
        if whole:
            own = array.array("q", torch.stack([bits[id(param)] for _, param in whole]).tolist())
            for rank, data in enumerate(self.ranks.meet(what, own.tobytes())):
                for (name, param), ours, theirs in zip(whole, own, array.array("q", data)):
                    if ours != theirs:
                        return name, param, rank
        return "", None, 0

    def _take(self, unit: ParamUnit, grads: dict[int, torch.Tensor], flats: dict[int, torch.Tensor]) -> None:
        """Takes the gradients of a unit to its tiles. `flats` keeps those of which other units have parts."""
        buffer = self.memory.gradient_buffer(unit)
        to, come = [], []
        for piece, view in zip(unit.params, unit.views(buffer)):
            grad = grads.get(id(piece.param))
            if grad is None or not piece.own:
                continue
            if piece.start == 0 or id(piece.param) not in flats:
                flats[id(piece.param)] = self._flat_grad(piece, grad, unit.gradient_dtype)
            to.append(view)
            come.append(piece.slice_of(flats[id(piece.param)]))
            if piece.start + piece.own == len(flats[id(piece.param)]):
                del flats[id(piece.param)]
        if to:
            torch._foreach_copy_(to, come)
        self.memory.hand_over(unit)

    def take_early(self) -> None:
        """Takes the gradients of each unit in backward, as soon as all of them are there. What changes them afterwards makes them be taken again."""
        # The parameters outlive the optimizer.
        weak = weakref.WeakMethod(self._gradient_arrived)

        def arrived(param: torch.Tensor) -> None:
            call = weak()
            if call is not None:
                call(param)

        self._hooks = [param.register_post_accumulate_grad_hook(arrived) for _, param in self.named]

    @contextlib.contextmanager
    def beginning(self, begin: Callable[[ParamUnit], None]) -> Iterator[None]:
        """Takes gradients in backward as with `take_early`, and calls `begin` when those of a unit are in its tiles."""
        lasting = bool(self._hooks)
        if not lasting:
            self.take_early()
        self._begin, self.interrupted = begin, False
        try:
            yield
        finally:
            self._begin = None
            if not lasting:
                self._end_hooks()

    def _end_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @not_reentered
    @torch.no_grad()
    def _gradient_arrived(self, param: torch.Tensor) -> None:
        """Backward has made the gradient of a parameter."""
        again = id(param) in self._came
        if self._begin is not None:
            if again and any(unit.index in self._early for unit, _ in self.pieces[id(param)]):
                raise NotSupported(
                    f"{self.name_of[id(param)]} gets a second gradient after update_in_backward() has begun to update it: run only the last backward of a "
                    "step in it, and no checkpoint with use_reentrant=True around what others use too"
                )
        elif again or self.seen:
            self._came_again = True
        if self._came_again or param.grad is None:
            # A hook of the script may have taken it.
            return
        if not self._came:
            self.core.begin_step()
        if torch.cuda.is_initialized() and local_of(param.grad).device.type == "cpu":
            # FSDP2's CPUOffloadPolicy comes here while the gradient is still being copied to pinned memory.
            torch.cuda.current_stream().synchronize()
        self._came[id(param)] = Mark.of_gradient(param.grad)
        for unit, _ in self.pieces[id(param)]:
            if all(id(piece.param) in self._came for piece in unit.params):
                # Until it ends: what an interrupt leaves is not used.
                self._came_again = self.interrupted = True
                self.core.announce([(True, unit.index)])
                self._take(unit, {id(piece.param): piece.param.grad for piece in unit.params}, {})
                self._early.add(unit.index)
                self._came_again = False
                if self._begin is not None:
                    self._begin(unit)
                self.interrupted = False

    def _is_early(self, grads: dict[int, torch.Tensor]) -> bool:
        """Whether what was taken in backward is what `grads` has of it."""
        taken = self._taken_early()
        holds = not self._came_again and taken <= grads.keys() and not _changed(self._came, {key: grads[key] for key in taken})
        if self._hooks and not holds and not self._said:
            self._said = True
            say(
                "overlap_backward: gradients were changed after backward had made them (by a second backward, a scaler, or clipping in place), and are taken "
                "to tiles once more in each such step: leave overlap_backward out, or clip with offloadd.optim.clip_grad_norm_"
            )
        return holds and bool(taken)

    def _flat_grad(self, piece: Piece, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """This rank's elements of a gradient, in the order of the parameter's memory. `dtype` is that of its tiles."""
        param = piece.param
        if is_dtensor(param):
            if not is_dtensor(grad):
                raise NotSupported(f"the gradient of {piece.name} is a whole tensor, and the parameter a DTensor: give it a DTensor")
            if grad.placements != param.placements:
                grad = grad.redistribute(param.device_mesh, param.placements)
            grad = grad.to_local()
        if grad.dtype not in (param.dtype, dtype):
            raise NotSupported(
                f"the gradient of {piece.name} is {grad.dtype}, and the parameter {param.dtype}: they must have one type; give the model to Megatron's "
                "DistributedDataParallel before the optimizer's first call"
            )
        return flat_like(grad, local_of(param))

    def forget(self) -> None:
        """Forgets what was handed over."""
        self.seen, self.square_sums = {}, {}
        self._came, self._early, self._came_again = {}, set(), False

    # Parameters

    def write_back(self, units: Iterable[ParamUnit]) -> None:
        """Writes the newest values into the parameters of `units`; those that come next are on their way meanwhile."""
        units = list(units)
        self.core.announce([(False, unit.index) for unit in units])
        for at, unit in enumerate(units):
            for coming in units[at : at + 1 + self.memory.ahead]:
                if not coming.expected:
                    self.memory.expect(coming)
                    coming.expected = True
            self.memory.ready(unit)
            if not unit.sharded:
                self.ranks.transfers.gather(unit, lambda: "after a step")
            to = [piece.slice_of(flat_of(local_of(piece.param))) for piece in unit.params]
            torch._foreach_copy_(to, unit.views(unit.flat))
            self.memory.release(unit)
            unit.expected = False
        self.order.forget_rest()
        self.note_written(piece.param for unit in units for piece in unit.params)

    def note_written(self, params: Iterable[nn.Parameter]) -> None:
        """What `params` have now is in their tiles."""
        for param in {id(param): param for param in params}.values():
            self._written[id(param)] = Mark.of_param(param)

    def perhaps_changed(self) -> list[nn.Parameter]:
        """Parameters that the script may have changed since their values were those of the tiles."""
        params = {id(param): param for _, param in self.named}
        return [params[key] for key in _changed(self._written, params)]

    def in_host_memory(self, unit: ParamUnit) -> torch.Tensor:
        """A copy of the values that the parameters of a unit have, in host memory."""
        flat = torch.zeros(unit.room_elems, dtype=unit.dtype, device="cpu")
        for piece, view in zip(unit.params, unit.views(flat)):
            view.copy_(piece.slice_of(flat_of(local_of(piece.param))))
        return flat

    def stored(self, unit: ParamUnit) -> torch.Tensor:
        """A copy of the values that a unit has in tiles, in host memory."""
        flat = torch.zeros(unit.room_elems, dtype=unit.dtype, device="cpu")
        self.order.outside((False, unit.index))
        self.core.gather(unit.index, unit.address(flat.data_ptr(), unit.dtype.itemsize))
        if not unit.sharded:
            self.ranks.transfers.complete(f"read {unit.name}", flat)
        return flat

    def detach(self) -> None:
        """Lets the parameters and their gradients be."""
        self._end_hooks()


def _version(tensor: torch.Tensor) -> tuple[int, ...]:
    """What changes where somebody writes to a tensor. An operation on a DTensor counts at the DTensor alone, one on its local part there."""
    return (tensor._version, tensor._local_tensor._version) if is_dtensor(tensor) else (tensor._version,)


def _changed(marks: Mapping[int, Mark], tensors: Mapping[int, torch.Tensor]) -> list[int]:
    """The keys of `tensors` that are not those of `marks`, unchanged. A GPU is waited for once."""
    found = [key for key, tensor in tensors.items() if not marks[key].may_be_of(tensor)]
    others = set(found)
    same = [key for key in tensors if key not in others]
    by_device: dict[torch.device, list[int]] = {}
    for key in same:
        by_device.setdefault(marks[key].bits.device, []).append(key)
    for keys in by_device.values():
        differs = torch.stack([marks[key].bits for key in keys]) != torch.stack([_bits(tensors[key]) for key in keys])
        found += [key for key, other in zip(keys, differs.tolist()) if other]
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    return bit_sums([local if local.layout is torch.strided else local._values()])[0]


def _state_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where a tensor lies, and what changes where somebody writes to it."""
    local = local_of(tensor)
    return local.data_ptr() if local.layout is torch.strided else 0, *_version(tensor)

"""Moves units in and out around a model's forward and backward. Nothing is inserted into the autograd graph.

Parameters stay views of their unit's storage, so whatever autograd saved of a weight is right again when backward comes. A unit's backward
is over when autograd works on a node made before the unit's forward began.

    Forwards    modules in forward
    Gathering   units that are in memory             what a forward, a backward or a script needs is gathered, and released after it
    Reading     released parameters                  what a script asks of them
    Gradients   from autograd to the tiles           what `param.grad` shows until the step
    Engine      the hooks of the model's modules, which call those above; nothing of them calls the engine
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any, Iterable, Optional

import torch
from torch import nn

from . import _native
from ._activations import Activations
from ._copies import Copies
from ._errors import Error, NotSupported
from ._experts import Experts
from ._forwards import Forward, Forwards, calls_of, in_backward, of_engine, returned, tensors_in
from ._gathering import Gathering
from ._gradients import Gradients
from ._memory import KEPT_MAX
from ._packed import free_format, keep_format
from ._ranks import Ranks
from ._reading import Reading
from ._released import AS_TENSORS, in_transform
from ._residency import Residency
from ._tile_copies import TileCopies
from ._units import Unit
from ._watch import unwatch

# Where the program is, for the seconds of a step's parts.
ELSEWHERE, FORWARD, BACKWARD = 0, 1, 2

# What torch.compile(fullgraph=True) tells of the hooks.
_NO_FULL_GRAPH = "offloadd brings and releases parameters here: leave fullgraph=True out, or compile forwards of blocks, as in "
_NO_FULL_GRAPH += "block.forward = torch.compile(block.forward, fullgraph=True) before offloadd.prepare"
# Older versions of torch take no reason.
_REASON = {"reason": _NO_FULL_GRAPH} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}
_outside_of_graphs = functools.partial(torch.compiler.disable, **_REASON)


class Engine:
    """The hooks of one model, which move its units."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        modules: dict[int, nn.Module],
        core: Any,
        keep: bool,
        ranks: Optional[Ranks] = None,
        experts: Optional[Experts] = None,
    ) -> None:
        self.model, self.core = model, core
        self.forwards = Forwards()
        self.gathering = Gathering(model, units, modules, core, keep, ranks or Ranks(), self.forwards, experts)
        # Units whose backward has begun: for each use of them the graph task and the number of the use's first node.
        self._active: dict[Unit, list[tuple[int, int]]] = {}
        # Experts that a checkpoint's forward has brought, whose backward has not begun.
        self._kept: list[Unit] = []
        # The function holds no engine, which holds the reading.
        active = self._active
        self.reading = Reading(self.gathering, self.forwards, lambda unit, task: active.setdefault(unit, []).append((task, 0)))
        for cut in self.gathering.experts.cuts:
            cut.reading = self.reading
        self.gradients = Gradients(self.gathering, core)
        # Which units stay on the GPU, if one computes.
        self.residency: Optional[Residency] = None
        # Where inputs of checkpointed blocks are moved, to host memory or to drives.
        self.activations: Optional[Activations] = None
        # Forwards of the model, or of parts of it by themselves, that have begun.
        self.passes = 0
        self.before_pass = lambda: None
        self._handles: list[Any] = []
        for unit in units:
            for index, param in enumerate(unit.params if unit.trained else ()):
                # Before the gradient is accumulated: by then no handle may be there to add to.
                self._handles.append(param.register_hook(functools.partial(_before_gradient, weakref.ref(self), unit.index, index)))
        for module, group in self.gathering.of_module.items():
            self._hook(module, group)
        self._changed_layers = keep_format(model)
        _native.take_copies()

    def _hook(self, module: nn.Module, units: list[Unit]) -> None:
        root = module is self.model
        before = of_engine(_outside_of_graphs(functools.partial(self._before_forward, units, root)))
        after = of_engine(_outside_of_graphs(functools.partial(self._after_forward, units, root)))
        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def move_activations(self, copies: "Copies | TileCopies") -> None:
        """Lets inputs of checkpointed blocks wait elsewhere from now on."""
        # A graph that a script keeps holds no engine.
        gathering, forwards = weakref.ref(self.gathering), self.forwards
        self.activations = Activations(copies, lambda: _storages(gathering()), lambda: bool(forwards))

    def detach(self) -> None:
        """Takes the engine's hooks from the model, whose units are in memory or have none any more."""
        for handle in self._handles:
            handle.remove()
        free_format(self._changed_layers)
        for unit in self.gathering.units:
            unwatch(unit.params)
        if self.gathering.trains:
            self.gradients.drop()

    # Forward

    def _before_forward(self, units: list[Unit], root: bool, module, args, kwargs):
        self.forwards.check_thread()
        if root and self.forwards and calls_of(self.model) < 2:
            # An interrupt ended the forward before: no hook told.
            self.forwards.clear()
        begins = not self.forwards and not in_backward()
        # First: the hook after the forward comes even if gathering fails.
        forward = self.forwards.begin(units)
        if begins:
            self._begin_pass(units[0].index if units else -1, args, kwargs)
        for unit in units:
            self.gathering.gather(unit)
            unit.start = 0 if unit.root else forward.number
        return args, kwargs

    def _begin_pass(self, first: int, args: Any, kwargs: Any) -> None:
        gathering, gradients = self.gathering, self.gradients
        if torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", bool)():
            raise NotSupported("a prepared model cannot be traced or exported: do it before offloadd.prepare, or after close() of its run")
        if gradients.half_backward:
            self._active.clear()
            self._kept.clear()
            gradients.drop_half()
        self.passes += 1
        self.core.phase(FORWARD)
        gathering.refuse_writes()
        gathering.release_before_pass()
        self.before_pass()
        if self.activations is not None:
            self.activations.begin_pass()
        if self.residency is not None:
            self.residency.begin_pass(args, kwargs)
        gathering.with_gradients = torch.is_grad_enabled()
        kind = gradients.kind = ("train" if gathering.with_gradients else "read", self.model.training, first, gathering.staying)
        gathering.begin_order(kind)

    def _after_forward(self, units: list[Unit], root: bool, module, args, kwargs, output):
        forward = self.forwards.end()
        if forward is None:
            return output
        try:
            return self._end_forward(units, forward, output)
        finally:
            self.forwards.leave(forward.use)

    def _end_forward(self, units: list[Unit], forward: Forward, output):
        companions, number = forward.companions, forward.number
        if self.activations is not None and not self.forwards:
            self.activations.pass_ended()
        if in_transform():
            # Its backward is its own, and asks nobody for units: they stay until the next pass.
            return output
        with_grad = torch.is_grad_enabled()
        if not self.forwards and not with_grad:
            self.core.phase(ELSEWHERE)
        comes_again = False
        if with_grad and output is not None:
            comes_again = self._hook_made(output, number, units + companions, min([number, *(unit.start for unit in units)]))
        if in_backward():
            if comes_again:
                self._keep_last([unit for unit in units if unit.apart])
            return output
        for unit in units + companions:
            if unit.here and self.forwards and returned(unit, output):
                # The caller computes with a view of the weights.
                self.forwards.release_with_innermost([unit])
            elif not (unit.root and with_grad):
                self.gathering.release(unit)
            elif not self.forwards:
                self.gathering.guard(unit)
        self.gathering.refuse_noted()
        return output

    def _keep_last(self, experts: list[Unit]) -> None:
        """Releases experts that a checkpoint's forward has passed, but for the last ones: all of a layer's would come before the first one's backward,
        which begins with the last ones."""
        self._kept += experts
        while len(self._kept) > KEPT_MAX:
            unit = self._kept.pop(0)
            if unit not in self._active:
                self.gathering.release(unit)

    def _hook_made(self, output, number: int, units: list[Unit], first: int) -> bool:
        """Brings `units` for the backward of what was made since `number`: what is handed through belongs to an older node. Returns whether
        something was made."""
        found = False
        for one in tensors_in(output):
            if one.requires_grad and one.grad_fn is not None:
                made = one.grad_fn._sequence_nr()
                if made >= number:
                    one.register_hook(functools.partial(self._before_backward, units, made, first))
                    found = True
        return found

    # Backward

    def _before_backward(self, units: list[Unit], made: int, first: int, grad) -> None:
        if torch.is_grad_enabled() and not self.gathering.keep:
            raise NotSupported("create_graph=True: gradients of gradients need all weights in memory; train this model with offload device none")
        self._start_backward()
        task = torch._C._current_graph_task_id()
        for unit, uses in list(self._active.items()):
            # A task within this one is over; the one around it continues.
            uses[:] = [(of_task, began) for of_task, began in uses if of_task < task or of_task == task and made >= began]
            if not uses and unit not in units and not unit.root:
                self._settle(unit)
        for unit in units:
            self.gathering.gather(unit)
            uses = self._active.setdefault(unit, [])
            if (task, first) not in uses:
                uses.append((task, first))

    def _start_backward(self) -> None:
        if not self.gradients.under_way:
            self.forwards.check_thread()
            self.core.phase(BACKWARD)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
            self.gradients.begin_backward()

    def _before_gradient(self, unit: Unit, param: nn.Parameter) -> None:
        """A gradient is about to be accumulated: takes what came before it in this backward."""
        self._start_backward()
        self.gradients.collect(unit, param)

    def _settle(self, unit: Unit) -> None:
        """The unit's part of the backward is over."""
        self._active.pop(unit, None)
        if unit in self._kept:
            self._kept.remove(unit)
        self.gathering.release(unit)
        if unit.trained:
            self.gradients.take_all(unit)
            if self.gradients.has_all(unit):
                self.gradients.hand_over(unit)

    def _backward_ended(self) -> None:
        for unit, left in zip(self.gathering.units, self.gradients.left()):
            if left:
                self.gradients.hand_over_left(unit, left)
            self.gathering.release(unit)
        self._active.clear()
        self._kept.clear()
        self.gradients.hand_over_unused()
        self.gradients.end_backward()
        self.core.phase(ELSEWHERE)
        self.gradients.show()
        if self.activations is not None:
            self.activations.backward_ended()
        self.gathering.refuse_noted()

    # Between passes

    def check_between_steps(self, what: str) -> None:
        """Refuses to change what is in tiles where gradients would be lost, or a forward has the old values."""
        if self.forwards and calls_of(None):
            raise Error(f"{what} within a forward: do it between steps")
        if self.gradients.square_sums or self.gradients.broken:
            raise Error(f"{what} between backward and step(): call optimizer.step() or zero_grad() first")

    def forget_gradients(self, zero: bool = False, of: Optional[set[int]] = None) -> None:
        """Drops this step's gradients, or makes them `zero`, and what a forward or a backward has left that did not end: see `Gradients.forget`."""
        self.forwards.check_thread()
        self.forwards.clear()
        half = self.gradients.half_backward
        if half:
            self._active.clear()
            self._kept.clear()
        self.gradients.forget(zero, of)
        if half:
            self.gathering.release_all()

    def updated(self) -> None:
        """The step's update was ordered: parameters that are here are stale. Handles of the gradients stay until they are dropped."""
        gathering = self.gathering
        self.forwards.clear()
        for unit in gathering.units:
            unit.watch.end()
            unit.fresh = unit.fresh and not unit.trained
        with AS_TENSORS():
            count_changes([param for param in gathering.params if param.grad is not None])
        self.gradients.used()
        self.reading.replaced()
        gathering.order.forget_rest()
        if gathering.keep:
            gathering.refresh()
        else:
            gathering.release_all()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that stay on the GPU between their uses."""
        return self.residency.bytes if self.residency is not None else 0

    def step_ended(self) -> None:
        """A step was made: what it took of a GPU's memory is known."""
        if self.residency is not None:
            self.residency.step_ended()

    def release(self) -> None:
        """Gives back all memory that the next pass can do without, or makes again. All ranks must call it: the next pass brings what stayed."""
        gathering = self.gathering
        if self.forwards and calls_of(None) or in_backward():
            raise Error("run.release() within a forward or a backward: call it between passes")
        if any(unit.pins for unit in gathering.units):
            raise Error("run.release() while weights are to stay in memory: call it after run.gathered() or GatheredParameters has ended")
        if not gathering.ended:
            gathering.ranks.meet("release memory")
        for unit in gathering.units:
            if unit.expected:
                # Its memory must not go while it is written.
                gathering.memory.ready(unit)
        gathering.release_all()
        gathering.release_kept()
        if not self.gradients.under_way:
            self.gradients.forget_buffers()
            gathering.memory.shrink()

    def stale(self) -> None:
        """Drops the units in memory, which no longer equal the tiles."""
        gathering = self.gathering
        self.reading.replaced()
        for unit in gathering.units:
            unit.fresh = False
        gathering.release_all()
        gathering.order.forget_rest()
        if gathering.keep:
            gathering.refresh()


def count_changes(params: Iterable[nn.Parameter]) -> None:
    """Lets autograd refuse graphs that saved the weights of before, as a copy into a parameter does."""
    with AS_TENSORS():
        for param in params:
            # Older versions of torch take no list here.
            torch.autograd.graph.increment_version(param)


def _storages(gathering: Optional[Gathering]) -> set[int]:
    """The memory of a model's weights and buffers."""
    if gathering is None:
        return set()
    with AS_TENSORS():
        tensors = [*(unit.flat for unit in gathering.units), *gathering.model.parameters(), *gathering.model.buffers()]
        return {one.untyped_storage()._cdata for one in tensors if one.layout is torch.strided}


def _before_gradient(engine: "weakref.ref[Engine]", unit: int, param: int, grad: torch.Tensor) -> None:
    """The hook of a parameter. It holds neither engine nor parameter: the collector of cycles does not see what hooks hold."""
    found = engine()
    if found is not None:
        of_unit = found.gathering.units[unit]
        found._before_gradient(of_unit, of_unit.params[param])

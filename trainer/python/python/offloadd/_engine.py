"""Moves units in and out around a model's forward and backward. Nothing is inserted into the autograd graph.

A unit's storage is resized to nothing and back; parameters stay views of it, so whatever autograd saved of a weight is right
again when backward comes. A unit's backward is over when autograd works on a node made before the unit's forward began.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import sys
import time
import weakref
from typing import Any, Iterator, Mapping, Optional

import torch
from torch import nn

from ._errors import Error, NotSupported
from ._held import Held, Together
from ._memory import HostMemory, Memory
from ._order import Order
from ._ranks import Ranks
from ._released import AS_TENSORS, Released, by_other_optimizer, in_transform, on_copies, outside_transforms, unwatch, watch
from ._units import Unit

_Tensor = torch.Tensor

# Where the program is, for the seconds of a step's parts.
ELSEWHERE, FORWARD, BACKWARD = 0, 1, 2

# Action of several ranks while one of them reads or writes weights.
_LEADS = "save weights"

# What torch.compile(fullgraph=True) tells of the hooks.
_NO_FULL_GRAPH = "offloadd brings and releases parameters here: leave fullgraph=True out, or compile forwards of blocks, as in "
_NO_FULL_GRAPH += "block.forward = torch.compile(block.forward, fullgraph=True) before offloadd.prepare"
# Older versions of torch take no reason.
_REASON = {"reason": _NO_FULL_GRAPH} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}
_outside_of_graphs = functools.partial(torch.compiler.disable, **_REASON)


def tensors_in(value: Any, depth: int = 8) -> Iterator[_Tensor]:
    """The tensors in a module's output, in dataclasses and other plain objects too."""
    if isinstance(value, _Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif hasattr(value, "__dict__") and not callable(value):
        parts = vars(value).values()
    else:
        return
    for part in list(parts) if depth else ():
        yield from tensors_in(part, depth - 1)


class Engine:
    """The units of one model and the hooks that move them."""

    def __init__(self, model: nn.Module, units: list[Unit], modules: dict[int, nn.Module], core: Any, keep: bool, ranks: Optional[Ranks] = None) -> None:
        self.model, self.units, self.core, self.keep, self.ranks = model, units, core, keep, ranks or Ranks()
        # What the engine does, and what the model needs: the same where nothing comes ahead.
        self.order, self.needs = Order(core.announce), Order(lambda _: None, tells=False)
        self.params = [param for unit in units for param in unit.params]
        self.unit_of = {id(param): unit for unit in units for param in unit.params}
        # Modules in forward: their units, units gathered on their behalf, and autograd's number when they began.
        self._stack: list[tuple[list[Unit], list[Unit], int]] = []
        # Units whose backward has begun: for each use of them the graph task and the number of the use's first node.
        self._active: dict[Unit, list[tuple[int, int]]] = {}
        # Whether the other ranks bring what this one reads, without a script's telling them.
        self.leads = False
        self._in_backward = False
        self._kind: Any = None
        # Of several ranks: times a unit's part of this backward was over, the gradients it had then, and whether it has all of them,
        # by the kind of pass, the unit and that time.
        self._times: dict[Unit, int] = {}
        self._had: dict[Unit, int] = {}
        self._complete: dict[tuple, bool] = {}
        self.broken = False
        # Whether the run has ended and its tiles are gone.
        self.ended = False
        # Sums of squares by parameter, of the gradients that have come in this step.
        self.square_sums: dict[int, float] = {}
        # Parameters whose gradients were handed over in this step, and the units of this backward: their sums come at its end.
        self._summed: set[int] = set()
        self._handed_over: set[Unit] = set()
        # `param.grad` between backward and step, by parameter.
        self.held: dict[int, Held] = {}
        # Views of the buffers that gradients leave from, by unit and buffer.
        self._gradient_views: dict[tuple[Unit, int], dict[int, _Tensor]] = {}
        # Whether step() has used the gradients that `param.grad` still shows.
        self.applied = False
        # Parameters whose gradients a script has made zero: where none come, the step is one with zeros.
        self._zeroed: set[int] = set()
        # Parameters whose gradients lack what plain PyTorch would still have of an earlier step.
        self._partial: set[int] = set()
        # Times that weights were replaced, by a step or otherwise.
        self.steps = 0
        # Copies whose addresses a script has asked for since, by parameter.
        self.addressed: dict[int, _Tensor] = {}
        # The unit whose gradients were read last, and these.
        self._read: Optional[tuple[Unit, _Tensor]] = None
        # A parameter that a script has written while it was in memory.
        self._written: Optional[nn.Parameter] = None
        self._released = type("Released", (Released,), {"engine_ref": weakref.ref(self)})
        self.read_released = torch.compiler.disable(self.read_released)
        self._handles: list[Any] = []
        self.before_pass = lambda: None
        of_module: dict[nn.Module, list[Unit]] = {model: []}
        for unit in units:
            of_module.setdefault(modules[unit.index], []).append(unit)
            unit.watch = watch(unit)
            for index, param in enumerate(unit.params if unit.trained else ()):
                # Before the gradient is accumulated: by then no handle may be there to add to.
                self._handles.append(param.register_hook(functools.partial(_before_gradient, weakref.ref(self), unit.index, index)))
        for module, together in of_module.items():
            self._hook(module, together)
        # Units by the module with which they come and go, in the units' order.
        self.together = sorted((units for units in of_module.values() if units), key=lambda units: units[0].index)
        self.memory: Memory = HostMemory(core, units)

    # Moving

    def gather(self, unit: Unit, record: bool = True) -> None:
        """Brings the unit's newest parameters to where they belong."""
        if unit.here and (unit.fresh or not self.keep):
            self._open(unit)
            return
        if self.ended:
            raise Error(
                "the run is closed, and the values of the parameters went with it: call close(keep=True), or read them before; without keep they stay if they take "
                "half of the available host memory at most"
            )
        if in_transform():
            with outside_transforms():
                return self.gather(unit, record)
        began = time.perf_counter()
        if unit.here:
            self._note_written(unit)
        if self.leads:
            self.ranks.first_bytes(_LEADS, unit.index.to_bytes(4, "little"))
        if record:
            self.needs.next((False, unit.index))
        deviates = self._expect(unit, record)
        if record:
            for index in self.needs.gathers(self.memory.ahead):
                if not self.units[index].here:
                    self._expect(self.units[index])
        self.memory.ready(unit)
        self.ranks.transfers.gather(unit, self._pass, changed=not unit.fresh)
        if deviates:
            self.order.waited_s += time.perf_counter() - began
        unit.expected, unit.fresh, unit.here = False, True, True
        self._open(unit)
        unit.watch.begin()

    def _pass(self) -> str:
        """The position of the program, for people."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        if not self._stack:
            return "outside of forward and backward"
        return "forward" if torch.is_grad_enabled() else "forward without gradients"

    def _open(self, unit: Unit) -> None:
        if unit.guarded:
            for param in unit.params:
                param.__class__ = nn.Parameter
            unit.guarded = False

    def open_for_good(self, unit: Unit) -> None:
        """Makes the parameters of a unit plain ones, whose memory is not the engine's any more."""
        self._open(unit)
        unit.here = True

    def _guard(self, unit: Unit) -> None:
        """Sees to it that uses of the unit's parameters are noticed."""
        if not unit.guarded and not self.keep:
            for param in unit.params:
                param.__class__ = self._released
            unit.guarded = True

    def _expect(self, unit: Unit, record: bool = True) -> bool:
        """Begins to bring the unit, unless it is on its way. Returns whether the order did not foresee it."""
        if unit.expected:
            return False
        deviates = bool((self.order.next if record else self.order.outside)((False, unit.index)))
        self.memory.expect(unit)
        unit.expected = True
        return deviates

    def release(self, unit: Unit) -> None:
        """Gives the unit's memory back, unless it is pinned and not stale."""
        if not self.keep and (unit.here or unit.expected) and not (unit.pins and unit.fresh):
            self._note_written(unit)
            self.take_away(unit)

    def take_away(self, unit: Unit) -> None:
        """Gives the unit's memory back, whatever is kept and whatever was written there."""
        unit.watch.end()
        self.memory.release(unit)
        self._guard(unit)
        unit.here = unit.expected = False

    @contextlib.contextmanager
    def room(self, unit: Unit) -> Iterator[None]:
        """The unit's memory, for new values; it is released afterwards if it was."""
        absent = not unit.here
        if absent:
            unit.flat.untyped_storage().resize_(unit.bytes)
            unit.here = True
            self._open(unit)
        try:
            yield
        finally:
            if absent:
                self.release(unit)

    @contextlib.contextmanager
    def gathered(self, unit: Unit) -> Iterator[None]:
        """The unit's parameters; they are released afterwards if they were, within a forward together with the module that is under
        way."""
        absent = not unit.here
        self.gather(unit, record=bool(self._stack))
        if absent and self._stack:
            self._stack[-1][1].append(unit)
        try:
            yield
        finally:
            if absent and not self._stack:
                self.release(unit)

    @contextlib.contextmanager
    def pinned(self, unit: Unit) -> Iterator[None]:
        """The unit's parameters, which stay in memory through passes of the model until they change."""
        with self.gathered(unit):
            unit.pins += 1
            try:
                yield
            finally:
                unit.pins -= 1

    def units_with(self, params: list[_Tensor]) -> list[Unit]:
        """The units that have some of `params`."""
        return list(dict.fromkeys(self.unit_of[id(param)] for param in params if id(param) in self.unit_of))

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """On the first rank, reads parameters meanwhile that the others `follow` to bring."""
        self.leads = True
        try:
            yield
        finally:
            self.leads = False
            if not self.ranks.meetings.broken:
                self.ranks.first_bytes(_LEADS, b"")

    def follow(self) -> None:
        """Brings this rank's parts of what the first rank reads."""
        while index := self.ranks.first_bytes(_LEADS, b""):
            with self.gathered(self.units[int.from_bytes(index, "little")]):
                pass

    def release_all(self) -> None:
        """Gives back what is still here, after a pass that did not end in order too."""
        for unit in self.units:
            self.release(unit)

    # What scripts read and write

    def name(self, param: _Tensor) -> str:
        """The name of a parameter in the model."""
        return next((name for name, one in self.model.named_parameters() if one is param), f"a parameter of shape {tuple(param.shape)}")

    @property
    def under_way(self) -> bool:
        """Whether a forward or a backward is."""
        return bool(self._stack) or torch._C._current_graph_task_id() != -1

    def read_released(self, params: list[nn.Parameter], func, args, kwargs):
        """Calls `func`, which takes released parameters."""
        absent = [unit for unit in self.units_with(params) if not unit.here]
        task = torch._C._current_graph_task_id()
        if not self.under_way:
            with contextlib.ExitStack() as gathered:
                for unit in absent:
                    gathered.enter_context(self.gathered(unit))
                with AS_TENSORS():
                    return on_copies(self, params, func, args, kwargs)
        for unit in absent:
            self.gather(unit, record=bool(self._stack))
        if self._stack:
            # Released with the module that used them, and gathered again for that module's backward.
            self._stack[-1][1].extend(absent)
        try:
            with AS_TENSORS():
                return func(*args, **kwargs)
        finally:
            for unit in absent if not self._stack else ():
                # Computed again for this backward, which may need the values.
                self._active.setdefault(unit, []).append((task, 0))

    def is_same(self, param: nn.Parameter, value: _Tensor) -> bool:
        """Whether a released parameter has this value, type and device already."""
        with AS_TENSORS():
            like = lambda one: (one.shape, one.dtype, one.device, one.stride())
            if like(param) != like(value):
                return False
            with self.gathered(self.unit_of[id(param)]):
                return torch.equal(param, value)

    def check_trainable(self, param: nn.Parameter, requires_grad: bool = True) -> None:
        """Refuses to train what was frozen when the model was prepared: its tiles have no gradients and no moments."""
        if requires_grad and not self.unit_of[id(param)].trained:
            raise NotSupported(
                f"{self.name(param)} was frozen when the model was prepared, so its tiles have no moments: let it require gradients before "
                "offloadd.prepare, and give it a learning rate of 0 until it is to be trained; or close() the run and prepare the model again"
            )

    def _note_written(self, unit: Unit) -> None:
        found = unit.watch.end()
        if found is not None:
            self._written = found

    def refuse_writes(self) -> None:
        """Raises an error if a script has written to parameters while they were in memory: the tiles do not have it."""
        for unit in self.units:
            if unit.here:
                self._note_written(unit)
                unit.watch.begin()
        self._refuse_noted()

    def _refuse_noted(self) -> None:
        if self._written is None:
            return
        param, self._written = self._written, None
        raise NotSupported(
            f"{self.name(param)} was changed in place while it was in memory, in a forward or a hook, and its tiles do not have the change: only "
            "optimizer.step() changes weights. Compute with a changed copy in forward; make what forward updates by itself, such as a codebook, a buffer; or "
            "replace weights between steps: run.load_state_dict({name: value}, strict=False)"
        )

    # Hooks

    def _hook(self, module: nn.Module, units: list[Unit]) -> None:
        root = module is self.model
        before = _outside_of_graphs(functools.partial(self._before_forward, units, root))
        after = _outside_of_graphs(functools.partial(self._after_forward, units, root))
        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def detach(self) -> None:
        """Takes the engine's hooks from the model, whose units are in memory or have none any more."""
        for handle in self._handles:
            handle.remove()
        for unit in self.units:
            unwatch(unit)
        self._drop_grads()

    def _before_forward(self, units: list[Unit], root: bool, module, args, kwargs):
        if root and self._stack and self._calls(self.model) < 2:
            # An interrupt ended the forward before: no hook told.
            self._stack.clear()
        begins = not self._stack and torch._C._current_graph_task_id() == -1
        number = torch.autograd._get_sequence_nr()
        # First: the hook after the forward comes even if gathering fails.
        self._stack.append((units, [], number))
        if begins:
            self._begin_pass(units[0].index if units else -1)
        for unit in units:
            self.gather(unit)
            unit.start = 0 if unit.root else number
        return args, kwargs

    @staticmethod
    def _calls(module: Optional[nn.Module]) -> int:
        """Calls of a module that are under way, or of all modules."""
        frame, calls = sys._getframe(), 0
        while frame is not None:
            calls += frame.f_code.co_name == "_call_impl" and (module is None or frame.f_locals.get("self") is module)
            frame = frame.f_back
        return calls

    def check_between_steps(self, what: str) -> None:
        """Refuses to change what is in tiles where gradients would be lost, or a forward has the old values."""
        if self._stack and self._calls(None):
            raise Error(f"{what} within a forward: do it between steps")
        if self.square_sums or self.broken:
            raise Error(f"{what} between backward and step(): call optimizer.step() or zero_grad() first")

    def _begin_pass(self, first: int) -> None:
        if torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", bool)():
            raise NotSupported("a prepared model cannot be traced or exported: do it before offloadd.prepare, or after close() of its run")
        if self.half_backward:
            self._drop_half()
            self.broken = True
        self.core.phase(FORWARD)
        self.refuse_writes()
        self.release_all()
        self.before_pass()
        pinned = any(unit.pins for unit in self.units)
        kind = self._kind = ("train" if torch.is_grad_enabled() else "read", self.model.training, first, pinned)
        self.order.begin(kind)
        self.needs.begin(kind)

    @property
    def half_backward(self) -> bool:
        """Whether the last backward did not end."""
        return self._in_backward and torch._C._current_graph_task_id() == -1

    def _drop_half(self) -> None:
        """Drops what a backward brought that did not end: it is no gradient of anything."""
        self._in_backward = False
        self._active.clear()
        self._times.clear()
        self._had.clear()
        for unit in self.units:
            unit.gradients.clear()
        self._drop_grads()

    def _after_forward(self, units: list[Unit], root: bool, module, args, kwargs, output):
        _, companions, number = self._stack.pop()
        if in_transform():
            # Its backward is its own, and asks nobody for units: they stay until the next pass.
            return output
        with_grad = torch.is_grad_enabled()
        if not self._stack and not with_grad:
            self.core.phase(ELSEWHERE)
        if with_grad and output is not None:
            self._hook_made(output, number, units + companions, min([number, *(unit.start for unit in units)]))
        if torch._C._current_graph_task_id() != -1:
            return output
        for unit in units + companions:
            if unit.here and self._stack and self._returned(unit, output):
                # The caller computes with a view of the weights.
                self._stack[-1][1].append(unit)
            elif not (unit.root and with_grad):
                self.release(unit)
            elif not self._stack:
                self._guard(unit)
        self._refuse_noted()
        return output

    @staticmethod
    def _returned(unit: Unit, output) -> bool:
        """Whether a forward's output has a view of the unit's parameters."""
        address = unit.flat.untyped_storage().data_ptr()
        return any(one.layout is torch.strided and one.untyped_storage().data_ptr() == address for one in tensors_in(output))

    def _hook_made(self, output, number: int, units: list[Unit], first: int) -> None:
        """Brings `units` for the backward of what was made since `number`: what is handed through belongs to an older node."""
        for one in tensors_in(output):
            if one.requires_grad and one.grad_fn is not None:
                made = one.grad_fn._sequence_nr()
                if made >= number:
                    one.register_hook(functools.partial(self._before_backward, units, made, first))

    def _before_backward(self, units: list[Unit], made: int, first: int, grad) -> None:
        if torch.is_grad_enabled() and not self.keep:
            raise NotSupported("create_graph=True: gradients of gradients need all weights in memory; train this model with offload device none")
        self._start_backward()
        task = torch._C._current_graph_task_id()
        for unit, uses in list(self._active.items()):
            # A task within this one is over; the one around it continues.
            uses[:] = [(of_task, began) for of_task, began in uses if of_task < task or of_task == task and made >= began]
            if not uses and unit not in units and not unit.root:
                self._settle(unit)
        for unit in units:
            self.gather(unit)
            uses = self._active.setdefault(unit, [])
            if (task, first) not in uses:
                uses.append((task, first))

    def _start_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self.core.phase(BACKWARD)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
            self._put_away()

    def _put_away(self) -> None:
        """Takes handles away: autograd would add to them."""
        if not self.held:
            self.applied = False
            return
        dropped, given = self.looked_at()
        if self.applied:
            # Other ways to write zero_grad(), too.
            emptied = {key for key, grad in given.items() if not grad.any()}
            given = {key: grad for key, grad in given.items() if key not in emptied}
        else:
            emptied = set()
        zeros = {key for key, held in self.held.items() if held.zero and key not in dropped} | emptied
        # Zeros to which nothing has come change nothing.
        changed = given or dropped or any(key in self.square_sums for key in zeros) or any(held.value is not None for held in self.held.values())
        self._partial -= dropped | zeros
        if len(dropped | zeros) == len(self.held) and not given:
            # Other ways to write zero_grad().
            self.forget_sums()
        elif self.applied:
            # An error when somebody uses them, and none where zero_grad() comes first: a critic's gradients of the generator's loss.
            self._partial |= (self.held.keys() | given.keys()) - dropped - zeros
            self.forget_sums()
        elif changed:
            raise NotSupported(
                "some gradients were dropped or changed and more came: drop all of them, as optimizer.zero_grad() does, or change them after the last "
                "backward of a step"
            )
        elif any(held.scaled and float(held.scale) != 1.0 for held in self.held.values()):
            raise NotSupported("gradients were clipped or scaled and more came: clip after the last backward of a step")
        self._zeroed = zeros
        self._drop_grads()
        self.held.clear()

    def _drop_grads(self) -> None:
        with AS_TENSORS():
            for param in self.params:
                param.grad = None

    def looked_at(self) -> tuple[set[int], dict[int, _Tensor]]:
        """Parameters whose gradients the script has dropped since they came, and those to which it has given others."""
        dropped, given = set(), {}
        with AS_TENSORS():
            for param in self.params:
                held, grad = self.held.get(id(param)), param.grad
                if grad is None:
                    if held is not None:
                        dropped.add(id(param))
                elif grad is not held:
                    given[id(param)] = grad
        return dropped, given

    def _before_gradient(self, unit: Unit, param: nn.Parameter) -> None:
        """A gradient is about to be accumulated: takes what came before it in this backward."""
        self._start_backward()
        self._take(unit, param)

    def _take(self, unit: Unit, param: nn.Parameter) -> None:
        """Takes what autograd, and hooks after it, have left in `param.grad`."""
        with AS_TENSORS():
            grad = param.grad
            if grad is None or type(grad) is Held:
                return
            param.grad = None
            hooks = param._post_accumulate_grad_hooks
        if hooks and id(param) in self._summed:
            raise NotSupported(
                f"{self.name(param)} has a hook that runs after gradients were accumulated, and this is not the first pass of the step: it would see "
                "the sum in plain PyTorch, and sees the last part here. Use param.register_hook, or one pass a step"
            )
        before = unit.gradients.get(id(param))
        if before is not None and id(param) in self._summed and self.ranks.count == 1:
            # In the order autograd accumulates: each is added to the sum of the step.
            self._hand_over(unit)
            before = None
        unit.gradients[id(param)] = grad if before is None else before + grad

    def _take_all(self, unit: Unit) -> None:
        for param in unit.params:
            self._take(unit, param)

    def _settle(self, unit: Unit) -> None:
        """The unit's part of the backward is over."""
        self._active.pop(unit, None)
        self.release(unit)
        if unit.trained:
            self._take_all(unit)
        if unit.trained and self._has_all(unit):
            self._hand_over(unit)

    def _has_all(self, unit: Unit) -> bool:
        """Whether the gradients of the unit have come, on all ranks. They agree once on each time in a kind of pass: which parameters
        have gradients may differ by rank, as where experts do, and all must hand over at the same place."""
        complete = len(unit.gradients) == len(unit.params)
        if self.ranks.count == 1:
            return complete
        self._times[unit] = time = self._times.get(unit, 0) + 1
        self._had[unit] = len(unit.gradients)
        key = (self._kind, unit, time)
        if key not in self._complete:
            missing = self.ranks.any(f"agree on the gradients of {unit.name}", bytes([not complete]))
            self._complete[key] = not missing[0]
        return self._complete[key]

    def _backward_ended(self) -> None:
        # 1: gradients are left; 2: some came after the unit's part of the backward was over.
        for unit in self.units:
            if unit.trained:
                self._take_all(unit)
        left = lambda unit: (len(unit.gradients) > 0) + 2 * (len(unit.gradients) > self._had.get(unit, 0))
        for unit, flags in zip(self.units, self.ranks.any("end the backward", bytes(map(left, self.units)))):
            if flags:
                # Where experts got nothing on any rank, the unit need not wait for them the next time.
                self._complete[self._kind, unit, self._times.get(unit)] = flags == 1
                self._hand_over(unit)
            self.release(unit)
        self._active.clear()
        self._times.clear()
        self._had.clear()
        self._in_backward = False
        self._collect_sums()
        self.core.phase(ELSEWHERE)
        self._show()
        self._refuse_noted()

    def _collect_sums(self) -> None:
        """Adds up the squares of the gradients that were handed over, on all ranks."""
        square_sums = self.memory.square_sums() if self._handed_over else {}
        came = [(param, sum) for unit in self.units if unit in self._handed_over for param, sum in zip(unit.params, square_sums[unit.index])]
        used = self.ranks.any("end the backward", bytes(id(param) in self._summed for param, _ in came))
        sums = self.ranks.sum("sum up the gradients' squares", [square_sum for _, square_sum in came])
        for (param, _), is_used, square_sum in zip(came, used, sums):
            if is_used:
                self._summed.add(id(param))
                self.square_sums[id(param)] = square_sum
        self._handed_over.clear()

    def _show(self) -> None:
        """Gives `param.grad` what stands for gradients that have come, or that a script has made zero."""
        together, self.applied = Together(self.read_gradient), False
        with AS_TENSORS():
            for param in self.params:
                square_sum = self.square_sums.get(id(param))
                if square_sum is None and id(param) not in self._zeroed:
                    continue
                param.grad = self.held[id(param)] = held = Held(param, square_sum or 0.0, together)
                held.zero, held.partial = square_sum is None, id(param) in self._partial

    def read_gradient(self, param: nn.Parameter) -> _Tensor:
        """The values of a parameter's gradient of this step before anything was scaled, on the parameter's device and in its type."""
        if self.applied:
            raise by_other_optimizer(self.name(param)) or NotSupported(f"the gradient of {self.name(param)} after optimizer.step(): its values are gone with the step; read them before, and call zero_grad() to begin anew")
        unit = self.unit_of[id(param)]
        flat = self.gradients_of(unit)
        found = Unit.view_of(flat, param, unit.offsets[_index(unit, param)])
        return found.to(device=param.device, dtype=param.dtype, copy=True)

    def gradients_of(self, unit: Unit) -> _Tensor:
        """A copy of all gradients of a unit, in host memory."""
        if self._read is None or self._read[0] is not unit:
            flat = torch.zeros(unit.room_elems, dtype=unit.gradient_dtype, device="cpu")
            self.order.outside((True, unit.index))
            self.core.read_gradients(unit.index, flat.data_ptr())
            self.ranks.transfers.complete(f"read the gradients of {unit.name}", flat)
            self._read = unit, flat
        return self._read[1]

    def settle_changes(self, given: Mapping[int, _Tensor]) -> None:
        """Takes gradients to their tiles that a script has `given`, or changed in place, and zeros where it made them zero."""
        changed = dict(given)
        for key, held in self.held.items():
            if key not in given and (held.value is not None or held.zero):
                changed[key] = held.value
        if given and self.ranks.count > 1:
            raise NotSupported("param.grad was set by the script: with several ranks each has a part of it; change the gradient that came in place, or scale the loss")
        for unit in self.units_with([param for param in self.params if id(param) in changed]):
            if not unit.trained:
                raise NotSupported(f"param.grad of {unit.name}, which was frozen when the model was prepared")
            has_some = any(id(param) in self._summed for param in unit.params)
            flat = self.gradients_of(unit).clone() if has_some else torch.zeros(unit.room_elems, dtype=unit.gradient_dtype, device="cpu")
            for param, offset in zip(unit.params, unit.offsets):
                if id(param) in changed:
                    value, view = changed[id(param)], Unit.view_of(flat, param, offset)
                    view.zero_() if value is None else view.copy_(value)
            self._read = None
            self.order.outside((True, unit.index))
            squares = self.ranks.sum(f"change the gradients of {unit.name}", list(self.core.write_gradients(unit.index, flat.data_ptr())))
            together = Together(self.read_gradient)
            for param, square_sum in zip(unit.params, squares):
                if id(param) in changed:
                    self._summed.add(id(param))
                    self.square_sums[id(param)] = square_sum
                    self.held[id(param)] = held = Held(param, square_sum, together)
                    held.zero = changed[id(param)] is None
                    if id(param) not in given:
                        param.grad = held

    def _hand_over(self, unit: Unit) -> None:
        """Takes the unit's gradients to its tiles, adding to those of earlier passes of the step."""
        self._read = None
        buffer = self.memory.gradient_buffer(unit)
        buffer.zero_()
        key = (unit, buffer.data_ptr())
        if key not in self._gradient_views:
            self._gradient_views[key] = {id(param): Unit.view_of(buffer, param, offset) for param, offset in zip(unit.params, unit.offsets)}
        views = self._gradient_views[key]
        came = [one if one.layout is torch.strided else one.to_dense() for one in unit.gradients.values()]
        if came:
            # Of several ranks only some may have gradients.
            with torch.no_grad():
                torch._foreach_copy_([views[param] for param in unit.gradients], came)
        self.ranks.transfers.reduce(unit, buffer)
        self.order.next((True, unit.index))
        self.memory.hand_over(unit)
        self._handed_over.add(unit)
        self._summed.update(unit.gradients)
        unit.gradients.clear()
        self._had[unit] = 0

    def forget_gradients(self, zero: bool = False, of: Optional[set[int]] = None) -> None:
        """Drops this step's gradients, or makes them `zero`: a parameter that gets none is then updated with zeros. Where they are to be those `of`
        some parameters alone, the others' lack something from now on."""
        self._stack.clear()
        left = set(self.held) - self.looked_at()[0]
        if self.half_backward:
            self._drop_half()
            self.release_all()
            self.broken = True
        self.forget_sums()
        self._drop_grads()
        self._partial = self._partial | left if of is not None else set()
        self._partial -= of or set()
        if zero and left:
            self._zeroed = left if of is None else left & of
            self._show()

    def forget_sums(self) -> None:
        """Drops the gradients that were handed over in this step."""
        if self._summed or self.broken:
            self.core.begin_step()
            self.order.forget_rest()
        self._clear_sums()
        self.broken = False

    def _clear_sums(self) -> None:
        self._forget_what_came()
        self.held.clear()
        self.applied = False

    def _forget_what_came(self) -> None:
        self.square_sums.clear()
        self._summed.clear()
        self._handed_over.clear()
        self._zeroed.clear()
        self._read = None

    def updated(self) -> None:
        """The step's update was ordered: parameters that are here are stale. Handles of the gradients stay until they are dropped."""
        self._stack.clear()
        for unit in self.units:
            unit.watch.end()
            unit.fresh = unit.fresh and not unit.trained
        with AS_TENSORS():
            for param in self.params:
                if param.grad is not None:
                    # Autograd then refuses graphs that saved the weight of before. Older versions of torch take no list here.
                    torch.autograd.graph.increment_version(param)
        self._forget_what_came()
        self.applied = True
        self.steps += 1
        self.addressed.clear()
        self.order.forget_rest()
        if self.keep:
            self.refresh()
        else:
            self.release_all()

    def stale(self) -> None:
        """Drops the units in memory, which no longer equal the tiles."""
        self.steps += 1
        self.addressed.clear()
        for unit in self.units:
            unit.fresh = False
        self.release_all()
        self.order.forget_rest()
        if self.keep:
            self.refresh()

    def refresh(self) -> None:
        """Brings every unit up to date, where nothing is released and a script may look at any parameter."""
        for unit in self.units:
            self.gather(unit, record=False)


def _before_gradient(engine: "weakref.ref[Engine]", unit: int, param: int, grad: _Tensor) -> None:
    """The hook of a parameter. It holds neither engine nor parameter: the collector of cycles does not see what hooks hold."""
    found = engine()
    if found is not None:
        found._before_gradient(found.units[unit], found.units[unit].params[param])


def _index(unit: Unit, param: nn.Parameter) -> int:
    return next(index for index, one in enumerate(unit.params) if one is param)

"""Brings the units of a model to memory and releases them, in the order that the engine has been told.

A unit's storage is resized to nothing and back; parameters stay views of it, so whatever autograd saved of a weight is right again when
the unit comes back.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Container, Hashable, Iterator, Optional, TypeVar

import torch
from torch import nn

from ._errors import Error, NotSupported
from ._experts import Experts
from ._forwards import Forwards, in_backward
from ._memory import HostMemory, Memory
from ._order import Order
from ._packed import is_wrapper, wrap_again
from ._ranks import Ranks
from ._reentry import not_reentered
from ._state_copies import StateCopies
from ._released import BEFORE, in_transform, outside_transforms
from ._units import Unit
from ._watch import watch

T = TypeVar("T")

# Action of several ranks while one of them reads or writes weights.
_LEADS = "save weights"


class Gathering:
    """The units of one model, some of which are in memory."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        modules: dict[int, nn.Module],
        core: Any,
        keep: bool,
        ranks: Ranks,
        forwards: Forwards,
        experts: Optional[Experts] = None,
    ) -> None:
        self.experts = experts or Experts(model)
        self.experts.know(units, modules)
        for cut in self.experts.cuts:
            cut.agree = self._used_by_any
        self.model, self.units, self.keep, self.ranks, self.forwards = model, units, keep, ranks, forwards
        # What the engine does, and what the model needs: the same where nothing comes ahead.
        self.order, self.needs = Order(core.announce), Order(lambda _: None, tells=False)
        self.params = [param for unit in units for param in unit.params]
        self.trains = any(unit.trained for unit in units)
        self.state_copies = StateCopies("model")
        self.unit_of = {id(param): unit for unit in units for param in unit.params}
        # Units by the module with which they come and go.
        self.of_module: dict[nn.Module, list[Unit]] = {model: []}
        for unit in units:
            self.of_module.setdefault(modules[unit.index], []).append(unit)
            unit.watch = watch(unit.params, parts=unit.parts)
        # The same in the units' order.
        self.unit_groups = sorted((units for units in self.of_module.values() if units), key=lambda units: units[0].index)
        # By unit: the first of those that it comes with.
        first = {unit.index: units[0].index for units in self.unit_groups for unit in units}
        self.group_of = [first[unit.index] for unit in units]
        # Whether the other ranks bring what this one reads, without a script's telling them.
        self.leads = False
        # Whether the pass that is under way began with gradients.
        self.with_gradients = False
        # Experts that are on their way before they are needed, in that order.
        self._came_ahead: dict[Unit, None] = {}
        # Bytes that were brought.
        self.brought_bytes = 0
        # Called before units are pinned, and whether some were since somebody asked.
        self.before_pins: Callable[[], None] = lambda: None
        self.were_pinned = False
        # Whether the run has ended and its tiles are gone.
        self.ended = False
        # A parameter that a script has written while it was in memory.
        self._written: Optional[nn.Parameter] = None
        # The class that notices the use of a released parameter.
        self.released: type = nn.Parameter
        self._released: dict[type, type] = {}
        self.memory: Memory = HostMemory(core, units)

    @not_reentered
    def begin_order(self, kind: Hashable) -> None:
        """A pass of `kind` begins."""
        self.order.begin(kind)
        self.needs.begin(kind)

    @not_reentered
    def gather(self, unit: Unit, record: bool = True) -> None:
        """Brings the unit's newest parameters to where they belong."""
        self.forwards.check_thread()
        if unit.here and (unit.fresh or not self.keep):
            self._open(unit)
            return
        if self.ended:
            raise Error(
                "the run is closed, and the values of the parameters went with it: call close(keep=True), or read them before; without keep they stay if "
                "they take half of the available host memory at most"
            )
        if in_transform():
            with outside_transforms():
                return self.gather(unit, record)
        if unit.kept:
            return self._gather_kept(unit)
        began = time.perf_counter()
        if unit.here:
            self._note_written(unit)
        if self.leads:
            self.ranks.first_bytes(_LEADS, unit.index.to_bytes(4, "little"))
        if unit.apart and self.forwards and not self.with_backward:
            # A few tokens choose few experts, and others than the pass before: nothing of an earlier pass says which.
            record = False
        unforeseen = record and self.needs.next((False, unit.index))
        coming = self.needs.gathers(unit.index, self.memory.ahead, self.group_of, repeats=not self.trains) if record else []
        if unforeseen:
            self._drop_unused({unit.index, *coming})
        deviates = self._expect(unit, record)
        for index in coming:
            if not (self.units[index].here or self.units[index].kept):
                self._expect(self.units[index])
                if self.units[index].apart:
                    self._came_ahead[self.units[index]] = None
        self.memory.ready(unit)
        self.ranks.transfers.gather(unit, self.forwards.position, changed=not unit.fresh)
        if deviates:
            self.order.waited_s += time.perf_counter() - began
        self._came_ahead.pop(unit, None)
        self.brought_bytes += unit.bytes
        unit.expected, unit.fresh, unit.here, unit.written = False, True, True, False
        unit.came += 1
        self._open(unit)
        unit.watch.begin()

    def _gather_kept(self, unit: Unit) -> None:
        """Brings a unit whose memory has stayed: the engine does nothing, and no other rank is needed."""
        unit.access.allow()
        self.memory.ready(unit)
        unit.kept, unit.here = False, True
        self._open(unit)
        unit.watch.begin()

    def _drop_unused(self, needed: set[int]) -> None:
        """Releases experts that came ahead as in an earlier pass, and that this one has passed over: they would add up. Those `needed` stay: the
        order of what the engine does has them once."""
        for unit in [unit for unit in self._came_ahead if unit.index not in needed]:
            self.release(unit)
            del self._came_ahead[unit]

    @property
    def with_backward(self) -> bool:
        """Whether a backward follows the forward that is under way, or makes it again: another pass may have begun since the one it is of."""
        return self.with_gradients or in_backward()

    def _used_by_any(self, what: str, used: list[bool]) -> list[bool]:
        """Which of a layer's experts some rank uses: all ranks bring them together."""
        return (
            used
            if self.ranks.count == 1 or self.whole and not (self.trains and self.with_backward)
            else [bool(one) for one in self.ranks.any(what, bytes(used))]
        )

    def _open(self, unit: Unit) -> None:
        if unit.guarded:
            for param, plain in zip(unit.params, unit.classes):
                param.__class__ = plain
            unit.guarded = False

    def open_for_good(self, unit: Unit) -> None:
        """Makes the parameters of a unit plain ones, whose memory is not the engine's any more."""
        self._open(unit)
        unit.here = True

    def guard(self, unit: Unit) -> None:
        """Sees to it that uses of the unit's parameters are noticed."""
        if not unit.guarded and not self.keep:
            for param, plain in zip(unit.params, unit.classes):
                param.__class__ = self._released_as(plain)
            unit.guarded = True

    def _released_as(self, plain: type) -> type:
        """The class of released parameters that are of class `plain` while they are in memory."""
        if plain is nn.Parameter:
            return self.released
        if plain not in self._released:
            self._released[plain] = type("Released", (self.released, plain), {})
        return self._released[plain]

    def wrap_again(self, unit: Unit) -> None:
        """Lets parameters that are wrapped around the unit's tensors be where these are."""
        guarded = unit.guarded
        self._open(unit)
        for param in filter(is_wrapper, unit.params):
            wrap_again(param)
        if guarded:
            self.guard(unit)

    def _expect(self, unit: Unit, record: bool = True) -> bool:
        """Begins to bring the unit, unless it is on its way. Returns whether the order did not foresee it."""
        if unit.expected:
            return False
        deviates = bool((self.order.next if record else self.order.outside)((False, unit.index)))
        self.memory.expect(unit)
        unit.expected = True
        return deviates

    def release(self, unit: Unit) -> None:
        """Gives the unit's memory back, unless it is pinned and not stale. That of a resident one stays for the next gather as long as its values are
        the newest: to the script it is released all the same."""
        if self.keep or unit.pins and unit.fresh:
            return
        if unit.here or unit.expected:
            self._note_written(unit)
            self.take_away(unit, keep=unit.resident and unit.fresh and unit.here and not unit.written)
        elif unit.kept and not (unit.resident and unit.fresh):
            self.take_away(unit)

    @not_reentered
    def take_away(self, unit: Unit, keep: bool = False) -> None:
        """Gives the unit's memory back, whatever was written there, unless it is to `keep` it."""
        unit.watch.end()
        if self.keep:
            # Its parameters lie there for good, and values come there again.
            unit.fresh = False
            return
        # First: a handler of a signal may come in between, and what an interrupt leaves is brought anew.
        self.guard(unit)
        unit.here = unit.expected = unit.kept = False
        if keep:
            self.memory.keep(unit)
            unit.access.forbid()
            unit.kept = True
        else:
            self.memory.release(unit)

    def release_kept(self) -> None:
        """Gives the memory of resident units back, which come again at their next use."""
        for unit in self.units:
            if unit.kept:
                self.take_away(unit)

    @contextlib.contextmanager
    def room(self, unit: Unit) -> Iterator[None]:
        """The unit's memory, for new values; it is released afterwards if it was."""
        absent = not unit.here
        if absent:
            unit.access.allow()
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
        with self.forwards.alone(), self._gathered(unit):
            yield

    @contextlib.contextmanager
    def _gathered(self, unit: Unit) -> Iterator[None]:
        absent = not unit.here
        self.gather(unit, record=bool(self.forwards))
        if absent and self.forwards:
            self.forwards.release_with_innermost([unit])
        try:
            yield
        finally:
            if absent and not self.forwards:
                self.release(unit)

    @contextlib.contextmanager
    def pinned(self, unit: Unit) -> Iterator[None]:
        """The unit's parameters, which stay in memory through passes of the model until they change."""
        if not self.were_pinned:
            self.before_pins()
            self.were_pinned = True
        # Threads of the script's may use what stays.
        with self._gathered(unit):
            unit.pins += 1
            try:
                yield
            finally:
                unit.pins -= 1

    def units_with(self, params: list[torch.Tensor]) -> list[Unit]:
        """The units that have some of `params`."""
        return list(dict.fromkeys(self.unit_of[id(param)] for param in params if id(param) in self.unit_of))

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """On the first rank, reads parameters meanwhile that the others `follow` to bring. No unit stays afterwards: what the script may have changed
        is on this rank alone."""
        self.leads = True
        try:
            yield
        finally:
            self.leads = False
            if not self.ranks.meetings.broken:
                self.ranks.first_bytes(_LEADS, b"")
                self.release_kept()

    def follow(self) -> None:
        """Brings this rank's parts of what the first rank reads."""
        while index := self.ranks.first_bytes(_LEADS, b""):
            with self.gathered(self.units[int.from_bytes(index, "little")]):
                pass
        self.release_kept()

    def on_first(self, work: Callable[[], T]) -> Optional[T]:
        """Does `work`, which may read any parameter, on the first rank, and returns what it returned there. All ranks must call it."""
        if not self.ranks.first:
            return self.follow()
        if self.ranks.count == 1 or self.leads:
            return work()
        with self.leading():
            return work()

    @property
    def whole(self) -> bool:
        """Whether all units stay in memory through passes, so that no pass brings any."""
        return all(unit.pins and unit.here and unit.fresh for unit in self.units)

    @property
    def staying(self) -> tuple[tuple[int, bool], ...]:
        """The units that stay through passes, and whether each is in memory: passes with others bring units in another order."""
        return tuple((unit.index, unit.here or unit.kept) for unit in self.units if unit.pins or unit.resident)

    def release_all(self) -> None:
        """Gives back what is still here, after a pass that did not end in order too."""
        for unit in self.units:
            self.release(unit)

    def release_before_pass(self) -> None:
        """Gives back what is still here, and leaves what has come ahead during the pass before if nothing changes it."""
        for unit in self.units:
            if unit.here or self.trains:
                self.release(unit)

    def refresh(self) -> None:
        """Brings every unit up to date, where nothing is released and a script may look at any parameter."""
        self.order.outside_all([(False, unit.index) for unit in self.units if not (unit.here and unit.fresh)])
        for unit in self.units:
            self.gather(unit, record=False)

    def name(self, param: torch.Tensor) -> str:
        """The name of a parameter in the model."""
        names = (name for name, one in self.model.named_parameters() if one is param)
        return next(names, None) or self.experts.name(self.model, param) or f"a parameter of shape {tuple(param.shape)}"

    def _note_written(self, unit: Unit, replaced: Container[int] = ()) -> None:
        found = unit.watch.end(replaced)
        if found is not None:
            self._written, unit.written = found, True
            # Where nothing is released: the next pass brings what is in tiles.
            unit.fresh = unit.fresh and not self.keep

    def refuse_writes(self, instead: Optional[Callable[[Unit], str]] = None) -> None:
        """Raises an error if a script has written to parameters while they were in memory, or to copies of them: the tiles do not have it. `instead`
        says what to do, by unit."""
        self.state_copies.refuse_writes()
        self.refuse_writes_in_memory(instead)

    def refuse_writes_in_memory(self, instead: Optional[Callable[[Unit], str]] = None, replaced: Container[int] = ()) -> None:
        """`refuse_writes` without the copies. Parameters whose ids are `replaced` are about to have other values."""
        moved = [param for unit in self.units if self.keep and (param := unit.take_back()) is not None]
        for unit in self.units:
            if unit.here:
                self._note_written(unit, replaced)
                unit.watch.begin()
        if moved:
            # Such as set_() counts as a write too.
            self._written = None
            raise NotSupported(
                f"the memory of {self.name(moved[0])} was moved or exchanged after offloadd.prepare, as by share_memory_() or by sending it to another process, and updates "
                "would not reach it: send a clone() of it"
            )
        self.refuse_noted(instead)

    def drop_writes(self) -> Optional[NotSupported]:
        """Lets all units come from tiles again if a script has written to parameters in memory. Returns the error of `refuse_writes_in_memory`. All ranks must
        call it."""
        refused = None
        try:
            self.refuse_writes_in_memory()
        except NotSupported as error:
            refused = error
        # Ranks bring units together.
        if any(self.ranks.any("compare written weights", bytes([refused is not None]))):
            for unit in self.units:
                self.take_away(unit)
        return refused

    def refuse_noted(self, instead: Optional[Callable[[Unit], str]] = None) -> None:
        if self._written is None:
            return
        param, self._written = self._written, None
        changed = f"{self.name(param)} was changed in place while it was in memory"
        if instead is not None:
            raise NotSupported(f"{changed} to be read, and its tiles do not have the change: {instead(self.unit_of[id(param)])}")
        where = "" if self.keep else ", in a forward or a hook"
        raise NotSupported(
            f"{changed}{where}, and its tiles do not have the change: only step() of the optimizer that offloadd.prepare was given changes weights. Compute with a "
            f"changed copy in forward; make what forward updates by itself, such as a codebook, a buffer; or {BEFORE}"
        )

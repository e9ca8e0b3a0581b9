"""Which of a model's units stay on the GPU that computes: a released one keeps its memory there, with its values, until an update changes them.

    levels   nothing, what is in no block, frozen units of some blocks ... of all blocks, trained units of some blocks ... of all blocks
    first    the highest level that has room beside what a step took
    later    a lower one, when steps take more; level 0 and another measurement, when inputs become larger

A frozen unit that stays comes once a run, a trained one once a step. Several ranks have the same level, since they bring units together.
"""

from __future__ import annotations

import functools
import time
import weakref
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

import torch

from ._console import bytes_text, say
from ._forwards import tensors_in
from ._gathering import Gathering
from ._memory import GpuBytes, GpuDevice, gpu_weight_bytes
from ._units import Unit

# Memory that is left to steps which take more than those before, at least. Half of what a step computes with is left, too: lengths of sequences differ.
_MARGIN_BYTES = 2 << 30

# Least seconds between two lines about units that no longer stay.
_LINE_S = 60.0

# In place of a level: it is to be found out.
_UNKNOWN = -1


class Levels:
    """Sets of a model's units, each with more of them. Experts that come apart from their block are in none: tokens choose which are used."""

    def __init__(self, units: Sequence[Unit], modules: Mapping[int, Any]) -> None:
        """`modules` has the module of each unit, with which it comes and goes."""
        self.units, self._modules = units, modules
        self._root = [unit for unit in units if unit.root]
        self._frozen, self._trained = self._blocks(trained=False), self._blocks(trained=True)
        self.highest = 1 + len(self._frozen) + len(self._trained)
        self.all_bytes = _sum(units)

    def _blocks(self, trained: bool) -> list[list[Unit]]:
        found: dict[int, list[Unit]] = {}
        for unit in self.units:
            if unit.trained == trained and not (unit.root or unit.apart):
                found.setdefault(id(self._modules[unit.index]), []).append(unit)
        return list(found.values())

    def units_at(self, level: int) -> list[Unit]:
        """The units of a level. What is in no block is on the GPU through each pass anyway; blocks stay evenly spaced, so that the copies of one have
        the time of the others."""
        if level == 0:
            return []
        frozen = min(level - 1, len(self._frozen))
        blocks = [*_spaced(self._frozen, frozen), *_spaced(self._trained, level - 1 - frozen)]
        return [*self._root, *(unit for block in blocks for unit in block)]

    def bytes(self, level: int) -> int:
        """Bytes of the units that stay."""
        return _sum(self.units_at(level))

    def gpu_bytes(self, level: int) -> int:
        """Bytes of the units that are on the GPU at a time, at most."""
        return gpu_weight_bytes(self.units, self._modules, set(self.units_at(level)))

    def nearest(self, fraction: float) -> int:
        """The level with the bytes that are the nearest to a fraction of all."""
        return min(range(self.highest + 1), key=lambda level: abs(self.bytes(level) - fraction * self.all_bytes))

    def cost(self, level: int, alone: bool) -> int:
        """Bytes that a level adds to the highest use of memory. What is in no block, and blocks that no longer come, are part of it anyway if the highest
        use is in a pass of this model `alone`."""
        return self.gpu_bytes(level) - self.gpu_bytes(0) if alone else self.bytes(level)

    def highest_within(self, most: int, bytes_: int, alone: bool) -> int:
        """The highest level up to `most` that costs so many bytes at most."""
        least = 0
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.cost(middle, alone) <= bytes_ else (least, middle - 1)
        return least

    def bus_bytes(self, level: int, times: Callable[[Unit], int]) -> int:
        """Bytes that come to the GPU in a step in which each unit comes so many times at level 0."""
        resident = set(self.units_at(level))
        return sum(unit.bytes * (times(unit) if unit not in resident else min(times(unit), int(unit.trained))) for unit in self.units)


def margin_bytes(computed_bytes: int) -> int:
    """Bytes that are left to steps which take more than one that computed with so many."""
    return max(_MARGIN_BYTES, computed_bytes // 2)


def _spaced(blocks: Sequence[list[Unit]], count: int) -> list[list[Unit]]:
    """So many of the blocks, evenly spaced."""
    return [block for number, block in enumerate(blocks, 1) if number * count // len(blocks) > (number - 1) * count // len(blocks)]


def _sum(units: Iterable[Unit]) -> int:
    return sum(unit.bytes for unit in units)


# Those of open runs of this process.
_open: "weakref.WeakSet[Residency]" = weakref.WeakSet()


class Residency:
    """The units of one model that stay on a GPU: a fraction of their bytes, or where none is given as many as have room."""

    def __init__(self, gathering: Gathering, gpu: GpuDevice, fraction: Optional[float], run_dir: Path) -> None:
        self._gathering, self._gpu, self._run_dir = gathering, gpu, run_dir
        self.levels = Levels(gathering.units, {unit.index: module for module, units in gathering.of_module.items() for unit in units})
        self.level, self._has_chosen = 0, fraction is not None
        # Whether the level falls where memory becomes scarce.
        self._auto = fraction is None
        # Passes of this step, or since the level changed, and whether what the run takes with this level is known.
        self._passes, self._measured = 0, False
        # What tensors took when the first pass began.
        self._baseline_bytes: Optional[int] = None
        # The highest use that PyTorch has told, and the one that is expected with this level.
        self._reported_peak_bytes = self._expected_peak_bytes = 0
        # What the script held between passes that is part of the expected use.
        self._held_bytes = 0
        # What steps computed with at most, and what is left to larger ones.
        self._computed_bytes = self._margin_bytes = 0
        # The most numbers in the inputs of a forward so far, without gradients and with them.
        self._inputs = [0, 0]
        self._said_s = -_LINE_S
        _open.add(self)
        if torch.cuda.is_initialized():
            _watch_for_full()
        if self._auto:
            # The run ends with the script's model: nothing of it holds this.
            note_peak = weakref.WeakMethod(self._note_peak)
            gathering.before_pins = lambda: (note_peak() or bool)()
        if fraction:
            self._set_level(self.levels.nearest(fraction))

    @property
    def bytes(self) -> int:
        """Bytes of the units that stay."""
        return self.levels.bytes(self.level)

    def close(self) -> None:
        """Gives memory back with the run's end."""
        _open.discard(self)
        self._gathering.release_kept()

    def begin_pass(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A forward with these arguments begins. That of a model that trains nothing shows what memory the one before took."""
        gathering = self._gathering
        if gathering.leads or any(unit.pins for unit in gathering.units):
            # Other ranks make no pass, or other ones.
            return
        if self._auto:
            self._forget_pins()
            more_bytes = self._note_inputs(_numbers_in(args, kwargs))
            if self._has_chosen and self.level:
                self._check_level(more_bytes)
            elif not self._has_chosen and self._passes and not gathering.trains:
                self._choose_level()
        if torch.is_grad_enabled() or not gathering.trains:
            self._passes += 1
            if self._passes == 1 or not gathering.trains:
                for unit in gathering.units:
                    unit.came = 0

    def step_ended(self) -> None:
        """A step was made."""
        if not self._passes:
            return
        self._measured = True
        if not self._has_chosen:
            self._forget_pins()
            self._choose_level()
        self._passes = 0

    def _is_measured(self) -> bool:
        """Whether it is known what memory the run takes with the units of this level."""
        return self._measured or not self._gathering.trains and self._passes > 0 and not self._gathering.forwards

    def _others(self) -> "list[Residency]":
        """Other runs on this GPU."""
        return [one for one in _open if one is not self and one._gpu.index == self._gpu.index]

    # What memory is used

    def _note_peak(self) -> GpuBytes:
        """Notes the highest use of memory, if it has become higher."""
        found = self._gpu.memory()
        used_bytes = found.used_max_bytes
        if used_bytes > self._reported_peak_bytes and self._baseline_bytes is not None:
            self._reported_peak_bytes = used_bytes
            self._expected_peak_bytes = max(self._expected_peak_bytes, used_bytes)
            self._computed_bytes = max(self._computed_bytes, used_bytes - self._baseline_bytes - self.levels.gpu_bytes(self.level))
        return found

    def _note_inputs(self, numbers: int) -> int:
        """Notes how large a forward's inputs are. Returns the bytes that it is going to compute with in addition to those before, where they are larger:
        a forward without gradients takes no more than one with them."""
        with_gradients = torch.is_grad_enabled()
        before = self._inputs[1] if with_gradients else max(self._inputs)
        self._inputs[with_gradients] = max(self._inputs[with_gradients], numbers)
        return self._computed_bytes * (numbers - before) // before if 0 < before < numbers else 0

    def _forget_pins(self) -> None:
        """Leaves out of account what memory was used while units were pinned: all weights of the model, and what they generated. There was room for
        it."""
        gathering = self._gathering
        if self._baseline_bytes is not None and not gathering.were_pinned:
            return
        gathering.were_pinned = False
        if self._has_chosen:
            self._reported_peak_bytes = max(self._reported_peak_bytes, self._gpu.memory().used_max_bytes)
            return
        if not self._others():
            self._gpu.forget_peak()
        self._baseline_bytes = self._gpu.memory().used_bytes

    def _note_held(self) -> None:
        """Expects a higher use where the script holds more between passes than when the level was chosen, such as another optimizer's moments. Within a
        step, what a backward needs is held, too, which is no more than before."""
        if not any(one._passes and one._gathering.trains for one in (self, *self._others())):
            held_bytes = self._measured_held_bytes()
            self._expected_peak_bytes += max(0, held_bytes - self._held_bytes)
            self._held_bytes = max(self._held_bytes, held_bytes)

    def _measured_held_bytes(self) -> int:
        """Bytes that are used beside the units of all runs."""
        units = (unit for one in (self, *self._others()) for unit in one._gathering.units)
        return self._gpu.memory().used_bytes - _sum(unit for unit in units if unit.here or unit.kept or unit.expected)

    def _room_bytes(self) -> int:
        """Bytes that are left at the highest moment that is expected."""
        found = self._note_peak()
        return found.used_bytes + found.free_bytes - self._expected_peak_bytes

    def _alone(self) -> bool:
        """Whether the highest use of memory is in passes of this run: one that trains nothing may be beside another model that is trained."""
        return self._gathering.trains and not self._others()

    # The level

    def _choose_level(self) -> None:
        """Chooses the level, unless it is not known yet what other runs take."""
        room, level = self._room_bytes(), _UNKNOWN
        self._margin_bytes = margin_bytes(self._computed_bytes)
        if self._expected_peak_bytes and all(one._is_measured() for one in self._others()):
            level = self.levels.highest_within(self.levels.highest, room - self._margin_bytes, self._alone())
        level = self._lowest_of_ranks(level)
        if level == _UNKNOWN:
            return
        self._has_chosen, self._held_bytes = True, self._measured_held_bytes()
        self._expected_peak_bytes += self.levels.cost(level, self._alone())
        self._set_level(level)
        self._say_what_stays(room)

    def _check_level(self, more_bytes: int) -> None:
        """Lowers the level where less than half of the margin is left. A forward that is about to compute with so many bytes more, for which too little may
        be left, shows with level 0 what it takes."""
        self._note_peak()
        self._note_held()
        level, alone, room = self.level, self._alone(), self._room_bytes()
        if room < self._margin_bytes // 2:
            level = self.levels.highest_within(level, self.levels.cost(level, alone) + room - self._margin_bytes, alone)
        elif room - more_bytes < self._margin_bytes // 2:
            level = _UNKNOWN
        level = self._lowest_of_ranks(level)
        if level == _UNKNOWN:
            self._set_level(0)
            self._measure_anew()
        elif level < self.level:
            self._expected_peak_bytes -= self.levels.cost(self.level, alone) - self.levels.cost(level, alone)
            self._set_level(level)
            if not self._others():
                # The peak of the level before would hide those of this one.
                self._gpu.forget_peak()
                self._reported_peak_bytes = 0
            self._say_less()

    def _measure_anew(self) -> None:
        """Begins to find out what memory is used at level 0. Other runs keep what they have noted."""
        for one in self._others():
            one._note_peak()
        self._gpu.forget_peak()
        self._has_chosen = False
        self._reported_peak_bytes = self._expected_peak_bytes = 0
        self._baseline_bytes = self._gpu.memory().used_bytes

    def _lowest_of_ranks(self, level: int) -> int:
        """The lowest of all ranks' levels."""
        what = f"agree on the weights that stay on the GPU ({self._gathering.forwards.position()})"
        told = self._gathering.ranks.meet(what, level.to_bytes(4, "little", signed=True))
        return min(int.from_bytes(one, "little", signed=True) for one in told)

    def _set_level(self, level: int) -> None:
        self.level, self._passes, self._measured = level, 0, False
        resident = set(self.levels.units_at(level))
        for unit in self._gathering.units:
            unit.resident = unit in resident
            if unit.kept:
                self._gathering.release(unit)

    # Lines

    def _say_what_stays(self, room: int) -> None:
        left = f"{bytes_text(room)} of GPU memory were left at the highest moment, and {bytes_text(self._margin_bytes)} are kept for steps that take more"
        if not self.level:
            return say(f"{self._run_dir}: no weights stay on the GPU: {left}")
        before, now = (self.levels.bus_bytes(level, lambda unit: unit.came) for level in (0, self.level))
        say(
            f"{self._run_dir}: {bytes_text(self.bytes)} of {bytes_text(self.levels.all_bytes)} of weights stay on the GPU (offloadd.gpu_resident_fraction), and "
            f"{bytes_text(now)} in place of {bytes_text(before)} come in a {'step' if self._gathering.trains else 'pass'}: {left}"
        )

    def _say_less(self) -> None:
        if time.monotonic() - self._said_s >= _LINE_S:
            self._said_s = time.monotonic()
            say(f"{self._run_dir}: steps take more GPU memory: {bytes_text(self.bytes)} of weights stay there (offloadd.gpu_resident_fraction)")


@functools.cache
def _watch_for_full() -> None:
    """Lets a line name the key where an allocation on a GPU fails, in the model's own code too."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(_say_full)


def _say_full(index: int, *_: Any) -> None:
    """PyTorch has found no memory on a GPU."""
    stay = sum(one.bytes for one in list(_open) if one._gpu.index == index)
    if stay:
        say(f"GPU {index} is full, and {bytes_text(stay)} of weights stay there: set offloadd.gpu_resident_fraction lower, or to 0")


def _numbers_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The numbers in a forward's inputs. Caches of keys and values do not count: they are memory that is used already."""
    given = [*args, *(value for name, value in kwargs.items() if name != "past_key_values")]
    return sum(one.numel() for one in tensors_in(given, objects=False))

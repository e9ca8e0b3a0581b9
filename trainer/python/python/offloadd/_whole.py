"""All weights of a model in the memory that it computes in for a while, as for a generation, where there is room for them."""

from __future__ import annotations

import contextlib
from typing import Iterator, Optional, Sequence

from . import _offloadd
from ._console import bytes_text, say
from ._engine import Engine
from ._errors import Error
from ._generation import measured_bound
from ._memory import GpuDevice
from ._plan import Plan
from ._read_only import only_read
from ._units import Unit

# The part of the free memory that is left to a KV cache and activations, where the script does not say how much.
_HEADROOM = 0.2


class Whole:
    """Keeps all weights of one model in memory meanwhile."""

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self._engine, self._plan = engine, plan
        # Whether the run has said that they do not fit.
        self._told = False

    @contextlib.contextmanager
    def gathered(self, headroom_bytes: Optional[int] = None) -> Iterator[bool]:
        """See `Run.gathered`."""
        gathering = self._engine.gathering
        if gathering.forwards.under_way:
            raise Error("run.gathered() within a forward or a backward: call it between passes")
        with contextlib.ExitStack() as pins:
            whole = self.has_room(gathering.units, headroom_bytes)
            for unit in gathering.units if whole else ():
                pins.enter_context(gathering.pinned(unit))
            pins.enter_context(only_read(gathering, gathering.units, "replace weights between steps: run.load_state_dict({name: value}, strict=False)"))
            yield whole

    def has_room(self, units: Sequence[Unit], headroom_bytes: Optional[int] = None) -> bool:
        """Whether all of `units` fit into memory at a time, on each rank. The first time that they do not, says what this costs. All ranks must call
        it where units are to be brought."""
        gathering, wanted = self._engine.gathering, sum(unit.bytes for unit in units if not unit.here)
        if not wanted:
            return True
        # What stays is there, or can go.
        others = [unit for unit in gathering.units if unit.kept and unit not in units]
        others_bytes = sum(unit.bytes for unit in others)
        free = self._free_bytes() + others_bytes + sum(unit.bytes for unit in units if unit.kept)
        headroom = int(_HEADROOM * free) if headroom_bytes is None else headroom_bytes
        left = free - wanted - headroom
        full, others_go = gathering.ranks.any("find room for all weights", bytes([left < 0, left < others_bytes]))
        if not full:
            for unit in others if others_go else ():
                gathering.take_away(unit)
            return True
        if not self._told:
            self._told = True
            # Measured by all ranks.
            bound = measured_bound(self._engine, self._plan)
            # What stays on a GPU is read once.
            part = sum(unit.bytes for unit in units if not unit.resident) / sum(unit.bytes for unit in units)
            kind = "GPU" if units[0].flat.is_cuda else "host"
            say(
                f"{self._plan.run_dir}: all weights ({bytes_text(wanted)}) and {bytes_text(headroom)} for what is computed do not fit into the "
                f"{bytes_text(free)} of {kind} memory that are free: each token reads the weights, at least {part * bound.s:.3g} s a token "
                f"({bytes_text(part * bound.bytes)} at {bound.bytes_per_s / 1e9:.3g} GB/s from {bound.by})"
            )
        return False

    def _free_bytes(self) -> int:
        """Free memory of where units come to: the GPU's, with what PyTorch holds and can give back, or this rank's part of the host's."""
        gathering = self._engine.gathering
        device = gathering.units[0].flat.device
        if device.type == "cuda":
            return GpuDevice(device).memory().free_bytes
        return (_offloadd.host_available_bytes() or 0) // len(gathering.ranks.topology.local)

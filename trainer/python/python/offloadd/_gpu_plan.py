"""What a run takes of a GPU's memory, before it starts: weights on their way, buffers of gradients, and what a step computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Optional, Sequence

from torch import nn

from ._errors import Error
from ._memory import gpu_gradient_bytes
from ._mlp_chunks import MlpChunks
from ._plan import bytes_text
from ._residency import Levels, margin_bytes
from ._traced import TracedMemory, trace
from ._units import Unit


@dataclass(frozen=True)
class StepMemory:
    """What a step computes, with gradient checkpointing and without; the reason where one is unknown, as for a model whose code needs values. A pass
    that trains nothing has nothing to checkpoint."""

    sequences: int
    seq_len: int
    checkpointed: "TracedMemory | str | None"
    kept: "TracedMemory | str"
    # Chunks of tokens in which MLPs are computed.
    mlp_chunks: int = 1

    @property
    def moved_host_bytes(self) -> int:
        """Host memory of inputs of checkpointed blocks."""
        return self.least.moved_host_bytes if isinstance(self.least, TracedMemory) else 0

    @property
    def least(self) -> "TracedMemory | str":
        return self.kept if self.checkpointed is None or isinstance(self.checkpointed, str) else self.checkpointed


@dataclass(frozen=True)
class GpuPlan:
    """Bytes of GPU memory of a run."""

    computed: StepMemory
    # All weights where they stay with the model.
    weight_bytes: int
    gradient_bytes: int
    # Bytes of weights that come in a forward and in a backward, and of gradients that leave. None where weights stay with the model.
    bus_bytes: Optional[tuple[int, int, int]]
    # A line about weights that stay between their uses.
    resident: Optional[str] = None

    def total_bytes(self, traced: "TracedMemory | str | None") -> Optional[int]:
        """The highest sum of a step that computes so much; None where that is unknown."""
        return self.weight_bytes + self.gradient_bytes + traced.peak_bytes if isinstance(traced, TracedMemory) else None

    @property
    def moved_bytes(self) -> int:
        """Bytes of inputs of checkpointed blocks that leave the GPU and come back."""
        found = self.computed.least
        return found.moved_bytes if isinstance(found, TracedMemory) else 0

    def lines(self) -> list[str]:
        """For people."""
        computed = self.computed
        found = computed.least
        total = self.total_bytes(found)
        parts = [f"weights {bytes_text(self.weight_bytes)}"]
        if self.gradient_bytes:
            parts.append(f"buffers of gradients {bytes_text(self.gradient_bytes)}")
        if total is None:
            lines = [f"gpu       {', '.join(parts)}, and activations that are not known: {found}"]
        else:
            parts += self._parts(found)
            how = "" if found is computed.kept else " with gradient checkpointing"
            how += " and inputs of blocks in host memory" if found.moved_bytes else ""
            without = self.total_bytes(computed.kept) if how else None
            more = f"; {bytes_text(without)} without it" if without is not None else ""
            tokens = f"{computed.sequences} x {computed.seq_len} tokens" + f", MLPs in {computed.mlp_chunks} chunks" * (computed.mlp_chunks > 1)
            lines = [f"gpu       {bytes_text(total)}{how}, {tokens}: {', '.join(parts)}{more}"]
        if self.bus_bytes is not None:
            forward, backward, gradients = self.bus_bytes
            back = f", gradients of {bytes_text(gradients)} from it" if gradients else ""
            of = f" (forward {bytes_text(forward)}, backward {bytes_text(backward)})" if backward else ""
            moved = f", inputs of blocks of {bytes_text(self.moved_bytes)} each way" if self.moved_bytes else ""
            lines.append(f"bus       weights of {bytes_text(forward + backward)} to the GPU{of}{back}{moved}")
        if self.resident is not None:
            lines.append(f"resident  {self.resident}")
        return lines

    @staticmethod
    def _parts(found: TracedMemory) -> list[str]:
        # Logits that the forward keeps are counted with the others.
        kept = min(found.kept_bytes - found.cache_bytes, found.peak_bytes - found.cache_bytes - found.logits_bytes)
        rest = found.peak_bytes - found.cache_bytes - found.logits_bytes - kept
        named = {"activations": kept, "what is computed": rest, "logits": found.logits_bytes, "KV cache": found.cache_bytes}
        return [f"{name} {bytes_text(size)}" for name, size in named.items() if size]


def computed(model: nn.Module, units: Sequence[Unit], shape: tuple[int, int], trains: bool, moves: bool = False, mlp_chunks: int = 1) -> StepMemory:
    """What a step of a model on the meta device computes with inputs of `shape`, sequences and their length. With `moves` inputs of checkpointed
    blocks wait in host memory; MLPs are computed in so many chunks. Raises `NotSupported` where they cannot be."""
    chunks = MlpChunks(model, mlp_chunks) if mlp_chunks > 1 else None
    try:
        checkpointed = _traced(model, units, shape, True, checkpoints=True, moves=moves) if trains else None
        return StepMemory(*shape, checkpointed, _traced(model, units, shape, trains), mlp_chunks)
    finally:
        if chunks is not None:
            chunks.end()


def gpu_plan(
    of_step: StepMemory, units: Sequence[Unit], modules: Mapping[int, nn.Module], trains: bool, fraction: Optional[float], gpu_bytes: Optional[int]
) -> GpuPlan:
    """The plan of units, each with its module, of which a fraction stays on the GPU; where none is given, as many as a GPU with so much memory has room
    for."""
    levels, least = Levels(units, modules), of_step.least
    gradient_bytes, scale_bytes = gpu_gradient_bytes(units) if trains else 0, _scale_bytes(units)
    computed_bytes = gradient_bytes + least.peak_bytes if isinstance(least, TracedMemory) else None
    margin, resident = 0 if computed_bytes is None else margin_bytes(computed_bytes), None
    # What a GPU has that keeps the units of a level by itself.
    enough = lambda level: scale_bytes + levels.gpu_bytes(0) + levels.cost(level, trains) + (computed_bytes or 0) + margin
    if fraction is not None:
        level = levels.nearest(fraction)
    else:
        level = 0 if gpu_bytes is None or computed_bytes is None else levels.highest_within(levels.highest, gpu_bytes - enough(0), trains)
        if computed_bytes is not None:
            resident = f"all weights stay on a GPU with {bytes_text(enough(levels.highest))} of memory, none with less than {bytes_text(enough(1))}"
    if level or gpu_bytes is not None and fraction is None:
        resident = f"{bytes_text(levels.bytes(level))} of {bytes_text(levels.all_bytes)} of weights stay on the GPU" + (f"; {resident}" if resident else "")
    forward = levels.bus_bytes(level, lambda unit: 1)
    backward = levels.bus_bytes(level, lambda unit: 1 + (trains and not unit.root)) - forward
    bus = forward, backward, sum(unit.gradient_bytes for unit in units if unit.trained)
    return GpuPlan(of_step, scale_bytes + levels.gpu_bytes(level), gradient_bytes, bus, resident)


def gpu_plan_in_place(of_step: StepMemory, units: Sequence[Unit], trains: bool) -> GpuPlan:
    """The plan of units whose weights stay with the model."""
    return GpuPlan(of_step, _scale_bytes(units) + sum(unit.bytes for unit in units), gpu_gradient_bytes(units) if trains else 0, None)


def _scale_bytes(units: Sequence[Unit]) -> int:
    """Bytes of the scales of 4-bit weights, which stay on the GPU: one fp32 for 64 numbers; with double quantization a quarter of it."""
    params = (param for unit in units for param in unit.params)
    shapes = ((param, getattr(param, "_offloadd_shape", None)) for param in params)
    return sum(shape.numel() // 64 * 4 for param, shape in shapes if shape is not None and param.numel() < shape.numel())


def _traced(
    model: nn.Module, units: Sequence[Unit], shape: tuple[int, int], trains: bool, checkpoints: bool = False, moves: bool = False
) -> "TracedMemory | str":
    try:
        return trace(model, units, shape, trains, checkpoints, moves)
    except Error as error:
        return str(error)

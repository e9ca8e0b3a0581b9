"""What a run takes of a GPU's memory, before it starts: weights on their way, buffers of gradients, and what a step computes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Iterator, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import nn

from . import _offloadd
from ._config import Settings
from ._console import bytes_text
from ._errors import Error, NotSupported
from ._loss_chunks import LossChunks
from ._memory import GpuDevice, gpu_gradient_bytes
from ._mlp_chunks import MlpChunks
from ._packed import is_wrapper
from ._plan import NO_INPUTS, PlannedInputs
from ._residency import Levels, margin_bytes
from ._traced import TracedMemory, trace
from ._units import Unit

# What takes less of each part of a GPU's memory.
_FEWER = "fewer or shorter sequences at a time"
# Chunks that are advised.
_CHUNKS = 4
_OFFLOAD_WEIGHTS = 'zero_optimization.offload_param.device = "cpu"'

# The fraction of the memory below which a part is not worth advice.
_SMALL_PART = 0.1


@dataclass(frozen=True)
class StepMemory:
    """What a step computes, with gradient checkpointing and without; the reason where one is unknown, as for a model whose code needs values. A pass
    that trains nothing has nothing to checkpoint."""

    sequences: int
    seq_len: int
    checkpointed: "TracedMemory | str | None"
    kept: "TracedMemory | str"
    # Chunks of tokens in which MLPs, and the head with the loss, are computed.
    mlp_chunks: int = 1
    loss_chunks: int = 1
    # Where inputs of checkpointed blocks wait.
    activations: str = "gpu"
    # Which of both the model can compute in chunks, and does not.
    can_chunk: frozenset[str] = frozenset()

    def inputs(self, micro_batches: int) -> PlannedInputs:
        """Inputs of checkpointed blocks in host memory or on drives, of a step with so many micro-batches."""
        if not isinstance(self.least, TracedMemory):
            return NO_INPUTS
        if self.activations != "nvme":
            return PlannedInputs(host_bytes=self.least.moved_host_bytes)
        return PlannedInputs(area_bytes=_offloadd.activation_area(list(self.least.moved_sizes)), moved_bytes=self.least.moved_bytes * micro_batches)

    @property
    def least(self) -> "TracedMemory | str":
        return self.kept if self.checkpointed is None or isinstance(self.checkpointed, str) else self.checkpointed


class Directions(NamedTuple):
    """What Muon takes of a GPU between backward and the update, when nothing else is computed."""

    # Most memory for a matrix that is made orthogonal.
    working_bytes: int = 0
    # Bytes of matrices that cross the bus to the GPU, and back as directions.
    bus_bytes: int = 0


NO_DIRECTIONS = Directions()


def directions_of(units: Sequence[Unit], ranks: int) -> Directions:
    """Those of units that Muon updates, of which each of several ranks brings an equal part."""
    of_unit = [_offloadd.muon_directions([tuple(param.shape) for param in unit.params], unit.gradient_dtype.itemsize) for unit in units if unit.muon]
    return Directions(max((working for working, _ in of_unit), default=0), sum(moved for _, moved in of_unit) // ranks)


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
    # Memory of the GPU that is planned for, and what makes the weights there fewer, if anything does.
    memory_bytes: Optional[int] = None
    fewer_weights: str = ""
    # Weights where none stay between their uses, if that is left to the run.
    weight_bytes_min: Optional[int] = None
    # GPUs that compute the same, each with sequences of its own.
    ranks: int = 1
    directions: Directions = NO_DIRECTIONS

    def total_bytes(self, traced: "TracedMemory | str | None") -> Optional[int]:
        """The highest sum of a step that computes so much; None where that is unknown."""
        return self.weight_bytes + self.gradient_bytes + max(traced.peak_bytes, self.directions.working_bytes) if isinstance(traced, TracedMemory) else None

    @property
    def up_bytes(self) -> int:
        """Bytes that come to the GPU in a step."""
        return sum((self.bus_bytes or ())[:2]) + self.directions.bus_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes of inputs of checkpointed blocks that leave the GPU and come back."""
        found = self.computed.least
        return found.moved_bytes if isinstance(found, TracedMemory) else 0

    @property
    def warning(self) -> Optional[str]:
        """What the GPU has too little memory for, and what takes less; None where it is enough, or the GPU is not known."""
        found = self.computed.least
        known = isinstance(found, TracedMemory)
        need = self.total_bytes(found) if known else self.weight_bytes + self.gradient_bytes + self.directions.working_bytes
        if self.memory_bytes is None or need <= self.memory_bytes:
            return None
        less = {"weights": self.fewer_weights, "logits": _FEWER, "KV cache": _FEWER, "activations": _FEWER, "what is computed": _FEWER, "directions": ""}
        if known and not found.moved_bytes and found is not self.computed.kept:
            less["activations"] = "--activations cpu"
        if "mlp_chunks" in self.computed.can_chunk:
            less["what is computed"] = f"--mlp-chunks {_CHUNKS}"
        if "loss_chunks" in self.computed.can_chunk:
            less["logits"] = f"--loss-chunks {_CHUNKS}"
        parts = {"weights": self.weight_bytes, **(self._sizes(found) if known else {})}
        # The largest first. What is a small part of all makes no difference.
        named = [name for name in sorted(parts, key=parts.get, reverse=True) if parts[name] >= need * _SMALL_PART]
        advice: dict[str, str] = {}
        for name in named:
            if less[name]:
                advice.setdefault(less[name], f"{less[name]} ({name} {bytes_text(parts[name])})")
        what = (
            f"a step{' with gradient checkpointing' * (known and found is not self.computed.kept)} takes" if known else "weights and buffers of gradients take"
        )
        return f"{what} {bytes_text(need)} of GPU memory, {bytes_text(self.memory_bytes)} are available: {_choice(list(advice.values()))}"

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
            how += f" and inputs of blocks {'on drives' if computed.activations == 'nvme' else 'in host memory'}" if found.moved_bytes else ""
            without = self.total_bytes(computed.kept) if how else None
            more = f"; {bytes_text(without)} without it" if without is not None else ""
            coming = self.weight_bytes if self.weight_bytes_min is None else self.weight_bytes_min
            if without is not None and self.memory_bytes is not None and total <= self.memory_bytes < without - self.weight_bytes + coming:
                more += ", more than is available"
            how += f" on each of {self.ranks} GPUs" * (self.ranks > 1)
            tokens = f"{computed.sequences} x {computed.seq_len} tokens" + f", MLPs in {computed.mlp_chunks} chunks" * (computed.mlp_chunks > 1)
            tokens += f", the loss in {computed.loss_chunks} chunks" * (computed.loss_chunks > 1)
            lines = [f"gpu       {bytes_text(total)}{how}, {tokens}: {', '.join(parts)}{more}"]
        if self.bus_bytes is not None:
            forward, backward, gradients = self.bus_bytes
            back = f", gradients of {bytes_text(gradients)} from it" if gradients else ""
            of = f" (forward {bytes_text(forward)}, backward {bytes_text(backward)})" if backward else ""
            moved = f", inputs of blocks of {bytes_text(self.moved_bytes)} each way" if self.moved_bytes else ""
            to = "the GPU" if self.ranks == 1 else f"each of {self.ranks} GPUs, which exchange what they bring"
            lines.append(f"bus       weights of {bytes_text(forward + backward)} to {to}{of}{back}{moved}")
        if self.directions.bus_bytes:
            lines.append(
                f"Muon      matrices of {bytes_text(self.directions.bus_bytes)} to the GPU, and directions back; {bytes_text(self.directions.working_bytes)} there"
            )
        if self.resident is not None:
            lines.append(f"resident  {self.resident}")
        return lines

    def _parts(self, found: TracedMemory) -> list[str]:
        return [f"{name} {bytes_text(size)}" for name, size in self._sizes(found).items() if size]

    def _sizes(self, found: TracedMemory) -> dict[str, int]:
        # Activations are gone when matrices are made orthogonal.
        if self.directions.working_bytes > found.peak_bytes:
            return {"directions": self.directions.working_bytes}
        # Logits that the forward keeps are counted with the others.
        kept = min(found.kept_bytes - found.cache_bytes, found.peak_bytes - found.cache_bytes - found.logits_bytes)
        rest = found.peak_bytes - found.cache_bytes - found.logits_bytes - kept
        return {"activations": kept, "what is computed": rest, "logits": found.logits_bytes, "KV cache": found.cache_bytes}


def computed(
    model: nn.Module, units: Sequence[Unit], shape: tuple[int, int], trains: bool, activations: str = "gpu", mlp_chunks: int = 1, loss_chunks: int = 1
) -> StepMemory:
    """What a step of a model on the meta device computes with inputs of `shape`, sequences and their length, where inputs of checkpointed blocks
    wait in `activations`; MLPs and the loss are computed in so many chunks. Raises `NotSupported` where they cannot be."""
    chunks = {"mlp_chunks": mlp_chunks, "loss_chunks": loss_chunks}
    with _in_chunks(model, **chunks):
        checkpointed = _traced(model, units, shape, True, checkpoints=True, moves=activations != "gpu") if trains else None
        kept = _traced(model, units, shape, trains)
    can = (key for key, count in chunks.items() if trains and count == 1 and _can_chunk(model, units, shape, {**chunks, key: _CHUNKS}))
    return StepMemory(*shape, checkpointed, kept, mlp_chunks, loss_chunks, activations, frozenset(can))


@contextlib.contextmanager
def _in_chunks(model: nn.Module, mlp_chunks: int, loss_chunks: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if mlp_chunks > 1:
            stack.callback(MlpChunks(model, mlp_chunks).end)
        if loss_chunks > 1:
            stack.callback(LossChunks(model, loss_chunks).end)
        yield


def _can_chunk(model: nn.Module, units: Sequence[Unit], shape: tuple[int, int], chunks: Mapping[str, int]) -> bool:
    """Whether a step runs in so many chunks: some models are refused by what they are, and others by what their code does."""
    try:
        with _in_chunks(model, **chunks):
            return isinstance(_traced(model, units, shape, True), TracedMemory)
    except NotSupported:
        return False


def gpu_plan(
    of_step: StepMemory,
    units: Sequence[Unit],
    modules: Mapping[int, nn.Module],
    trains: bool,
    fraction: Optional[float],
    gpu_bytes: Optional[int],
    ranks: int = 1,
) -> GpuPlan:
    """The plan of units, each with its module, of which a fraction stays on the GPU; where none is given, as many as a GPU with so much memory has room
    for. Each of several ranks brings an equal part of them."""
    levels, least = Levels(units, modules), of_step.least
    gradient_bytes, scale_bytes = gpu_gradient_bytes(units) if trains else 0, _scale_bytes(units)
    directions = directions_of(units, ranks)
    computed_bytes = gradient_bytes + max(least.peak_bytes, directions.working_bytes) if isinstance(least, TracedMemory) else None
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
    bus = forward // ranks, backward // ranks, sum(unit.gradient_bytes for unit in units if unit.trained) // ranks
    fewer = _fewer_weights(units, fraction)
    coming = scale_bytes + levels.gpu_bytes(0) if fraction is None else None
    return GpuPlan(of_step, scale_bytes + levels.gpu_bytes(level), gradient_bytes, bus, resident, gpu_bytes, fewer, coming, ranks, directions)


def gpu_plan_in_place(of_step: StepMemory, units: Sequence[Unit], trains: bool, gpu_bytes: Optional[int], ranks: int = 1) -> GpuPlan:
    """The plan of units whose weights stay with the model."""
    weight_bytes, gradient_bytes = _scale_bytes(units) + sum(unit.bytes for unit in units), gpu_gradient_bytes(units) if trains else 0
    return GpuPlan(of_step, weight_bytes, gradient_bytes, None, None, gpu_bytes, _OFFLOAD_WEIGHTS, ranks=ranks, directions=directions_of(units, ranks))


def warning_at_start(model: nn.Module, units: Sequence[Unit], modules: Mapping[int, nn.Module], settings: Settings, gpu: GpuDevice) -> Optional[str]:
    """What the GPU has too little memory for, whatever a step computes, and what takes less; None where it is enough."""
    if settings.parameters_stay:
        weight_bytes, less = sum(one.nbytes for one in model.parameters() if not is_wrapper(one)), f"set {_OFFLOAD_WEIGHTS}"
    else:
        levels = Levels(units, modules)
        level = levels.nearest(settings.gpu_resident_fraction or 0.0)
        weight_bytes = levels.gpu_bytes(level)
        less = "set offloadd.gpu_resident_fraction lower" if level else "name smaller modules in offloadd.units, or quantize what is frozen"
    need = weight_bytes + gpu_gradient_bytes(units)
    # A model that is there already moves within its GPU.
    there = sum(one.nbytes for one in model.parameters() if one.device == gpu.device)
    available = gpu.memory().free_bytes + there
    if need <= available:
        return None
    return f"weights and buffers of gradients take {bytes_text(need)} of GPU memory beside what is computed, {bytes_text(available)} are available: {less}"


def _choice(options: Sequence[str]) -> str:
    """What to take of some options, of which one alone may not be enough."""
    if not options:
        return "it is too small"
    return f"take {', '.join(options)}" + ("", " or both", " or several of them")[min(len(options), 3) - 1]


def _fewer_weights(units: Sequence[Unit], fraction: Optional[float]) -> str:
    """What makes the weights on the GPU fewer, where they come and go; empty if nothing does."""
    if fraction:
        return "offloadd.gpu_resident_fraction lower"
    quantizes = any(not unit.trained and unit.dtype.is_floating_point for unit in units) and not any(unit.dtype == torch.uint8 for unit in units)
    return "--quantize nf4" if quantizes else ""


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

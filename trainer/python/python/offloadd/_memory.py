"""The memory that a model's units come to: the host's, or a GPU's beside its computation."""

from __future__ import annotations

from typing import Any, Container, Iterable, Mapping, NamedTuple, Optional, Protocol, Sequence

import torch

from . import _offloadd
from ._config import Settings
from ._console import bytes_text
from ._copies import Copies, GpuCopies
from ._errors import Error, NotSupported
from ._ranks import Ranks
from ._units import Unit

# Units that come to a GPU before they are needed: one arrives while one waits, and each takes a unit's memory.
_AHEAD = 2

# Groups of experts that stay for their backward after a checkpoint's forward.
KEPT_MAX = 2

# Buffers that gradients leave a GPU from: one is written while the other one leaves.
_GRADIENT_BUFFERS = 2


class Memory(Protocol):
    """How units come and go. A unit is expected, then ready, then released, any number of times."""

    # How many of the units that come next are to be expected before they are needed.
    ahead: int

    def expect(self, unit: Unit) -> None:
        """Makes room for the unit and begins to bring its newest parameters."""

    def ready(self, unit: Unit) -> None:
        """Returns when what is computed from now on sees the parameters."""

    def keep(self, unit: Unit) -> None:
        """Leaves a unit where it is that is not used for a while, until it is ready again or released."""

    def release(self, unit: Unit) -> None:
        """Gives the unit's memory back once nothing uses it any more."""

    def gradient_buffer(self, unit: Unit) -> torch.Tensor:
        """A flat tensor to write the unit's gradients to, in the type they have in tiles, for the next `hand_over`."""

    def hand_over(self, unit: Unit) -> None:
        """Begins to take the gradients in the unit's buffer to its tiles."""

    def mixtures(self, unit: Unit) -> torch.Tensor:
        """Updates the momenta of a unit of Muon, and returns its buffer of gradients with what is to be made orthogonal: this rank's part of it."""

    def give_directions(self, unit: Unit) -> None:
        """Begins to take the directions in the unit's buffer to its tiles, and to update these."""

    def shrink(self) -> None:
        """Frees what is made again when it is needed. No unit is here and no backward is under way."""

    def square_sums(self) -> dict[int, Sequence[float]]:
        """Waits for all gradients. Returns, by unit, the sum of squares of each parameter's gradient in this step, as far as this rank
        has its tiles."""


def _largest(units: Sequence[Unit]) -> int:
    """Bytes of the largest unit's gradients."""
    return max((unit.gradient_bytes for unit in units if unit.trained), default=0)


def gpu_weight_bytes(units: Sequence[Unit], modules: Mapping[int, Any], resident: Container[Unit] = ()) -> int:
    """Bytes of the units that are on a GPU at a time, at most: what is in no block, a block, experts of it that come apart or stay for
    their backward, what comes ahead, and what is `resident`.
    `modules` has the module of each unit, with which it comes and goes."""
    groups: dict[int, list[Unit]] = {}
    for unit in units:
        if not unit.root:
            groups.setdefault(id(modules[unit.index]), []).append(unit)
    # What comes in a forward, and the block beside which an expert comes. A block begins before its experts, which are the units before it.
    forward: list[tuple[int, Optional[int]]] = []
    experts: list[int] = []
    for group in groups.values():
        size = sum(unit.bytes for unit in group if unit not in resident)
        if group[0].apart:
            experts.append(size)
        else:
            forward += [(size, None), *((of_expert, size) for of_expert in experts)]
            experts.clear()
    forward = [one for one in forward if one[0]]
    highest = 0
    for order in (forward, forward[::-1]):
        for at, (_, beside) in enumerate(order):
            kept = [size for size, block in order[max(0, at - KEPT_MAX) : at] if block is not None] if beside is not None else []
            highest = max(highest, (beside or 0) + sum(kept) + sum(size for size, _ in order[at : at + 1 + _AHEAD]))
    return highest + sum(unit.bytes for unit in units if unit.root or unit in resident)


def gpu_gradient_bytes(units: Sequence[Unit]) -> int:
    """Bytes of the buffers that gradients leave a GPU from."""
    return _GRADIENT_BUFFERS * _largest(units)


class HostMemory:
    """Copies in the calling thread."""

    ahead = 0

    def __init__(self, core: Any, units: Sequence[Unit]) -> None:
        self._core, self._largest = core, _largest(units)
        self._buffer: Optional[torch.Tensor] = None
        self._square_sums: dict[int, Sequence[float]] = {}

    def expect(self, unit: Unit) -> None:
        storage = unit.flat.untyped_storage()
        unit.access.allow()
        if storage.size() != unit.bytes:
            # What stays keeps its address.
            storage.resize_(unit.bytes)
        try:
            self._core.gather(unit.index, unit.address(storage.data_ptr(), unit.dtype.itemsize))
        except BaseException:
            if not unit.here:
                storage.resize_(0)
                unit.access.forbid()
            raise

    def ready(self, unit: Unit) -> None:
        pass

    def keep(self, unit: Unit) -> None:
        pass

    def release(self, unit: Unit) -> None:
        storage = unit.flat.untyped_storage()
        if storage.resizable():
            # Its memory may be gone already.
            unit.access.allow()
            storage.resize_(0)
            unit.access.forbid()
        else:
            # An array of numpy's shares it and keeps it.
            unit.leave()

    def gradient_buffer(self, unit: Unit) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(self._largest, dtype=torch.uint8)
        return self._buffer[: unit.gradient_bytes].view(unit.gradient_dtype)

    def hand_over(self, unit: Unit) -> None:
        self._square_sums[unit.index] = self._core.scatter(unit.index, self._address(unit))

    def mixtures(self, unit: Unit) -> torch.Tensor:
        buffer = self.gradient_buffer(unit)
        self._core.revise(unit.index, self._address(unit))
        return buffer

    def give_directions(self, unit: Unit) -> None:
        self._core.write_gradients(unit.index, self._address(unit))
        self._core.update_revised(unit.index)

    def _address(self, unit: Unit) -> int:
        """Where the unit begins in the buffer of gradients."""
        return unit.address(self._buffer.data_ptr(), unit.gradient_dtype.itemsize)

    def shrink(self) -> None:
        self._buffer = None

    def square_sums(self) -> dict[int, Sequence[float]]:
        sums, self._square_sums = self._square_sums, {}
        return sums


class GpuBytes(NamedTuple):
    """A GPU's memory, as this process can use it."""

    # What tensors take, and the highest of it since `forget_peak`.
    used_bytes: int
    used_max_bytes: int
    # What they can take in addition: what the driver has free, and what PyTorch's allocator holds and does not use.
    free_bytes: int

    @property
    def room_bytes(self) -> int:
        """What was left at the highest moment."""
        return self.free_bytes + self.used_bytes - self.used_max_bytes


class GpuDevice:
    """PyTorch's side of a GPU: its streams and its allocator."""

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self.index)
        self._room: Any = None

    def open(self, core: Any) -> Any:
        """The engine's side. Memory of units is allocated on its stream `room` from now on."""
        mover = _offloadd.GpuMover.open(core, self.index, self.give_back)
        self._room = torch.cuda.ExternalStream(mover.room, device=self.device)
        return mover

    def stream(self) -> int:
        """The stream that PyTorch computes on."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def empty(self, elems: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elems, dtype=dtype, device=self.device)

    def allocate(self, storage: torch.UntypedStorage, size: int) -> None:
        # The allocator gives memory that was freed on a stream to the next allocation on it, at once: see gpu.rs.
        with torch.cuda.stream(self._room):
            storage.resize_(size)

    def free(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def memory(self) -> GpuBytes:
        """Asks the allocator and the driver, and waits for nothing that is computed."""
        stats = torch.cuda.memory_stats(self.device)
        held = lambda what, when="current": stats.get(f"{what}_bytes.all.{when}", 0)
        # Pieces between those in use are too small for most tensors.
        idle = held("reserved") - held("allocated") - held("inactive_split")
        return GpuBytes(held("allocated"), held("allocated", "peak"), torch.cuda.mem_get_info(self.device)[0] + max(0, idle))

    def forget_peak(self) -> None:
        """Begins to look for the highest use of memory."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def copies(self) -> Copies:
        """Copies to host memory and back, on a stream of their own."""
        return GpuCopies(self.device)

    def give_back(self) -> None:
        """Gives the driver what the allocator holds and no tensor uses: the engine allocates from the driver."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def shrink(self) -> None:
        """Gives back what the allocator holds, once nothing uses it."""
        torch.cuda.synchronize(self.device)
        self.give_back()


def gpu_of(settings: Settings, params: Iterable[torch.Tensor]) -> Optional[GpuDevice]:
    """The GPU that a model with these parameters computes on; `None` for the processor. Those of the meta device have no place yet."""
    where = next((param.device for param in params if not param.is_meta), torch.device("cpu"))
    device = torch.device(settings.compute_device) if settings.compute_device else where
    if device.type == "cpu" and where.type == "cpu":
        return None
    if device.type != "cuda" or where.type not in ("cpu", "cuda"):
        raise NotSupported(
            f"parameters on {where} cannot be brought to {device}: move the model to the CPU or to a CUDA GPU, and set offloadd.compute_device to one of these"
        )
    gpu = GpuDevice(device)
    try:
        _offloadd.gpu_name(gpu.index)
    except Error as error:
        raise Error(f"the model is to compute on {device}, which cannot be used: {error}") from None
    return gpu


class GpuMemory:
    """Copies on streams of the engine's own, enqueued by a thread of its own."""

    ahead = _AHEAD

    def __init__(self, ranks: Ranks, units: Sequence[Unit], gpu: GpuDevice) -> None:
        self._gpu, self._core = gpu, ranks.meetings.watched(ranks.meetings.core)
        self._mover = ranks.meetings.watched(gpu.open(ranks.meetings.core))
        self._units, self._largest = units, _largest(units)
        self._buffers: list[torch.Tensor] = []
        self._turn = 0

    def adopt(self, unit: Unit, keep: bool) -> None:
        """Makes a unit's parameters views of a flat tensor on the GPU, without memory there unless `keep`."""
        unit.move(self._gpu.empty(unit.room_elems, unit.dtype), copy=keep)
        if not keep:
            self._free(unit)
            unit.here = False

    def expect(self, unit: Unit) -> None:
        storage = unit.flat.untyped_storage()
        unit.access.allow()
        if storage.size():
            # It is written where it lies, when nothing computes with it any more. An interrupt may have left memory of a unit that is not here.
            self._mover.release(unit.index, self._gpu.stream())
        else:
            self._allocate(unit, storage)
        self._mover.expect(unit.index, unit.address(storage.data_ptr(), unit.dtype.itemsize))

    def _allocate(self, unit: Unit, storage: torch.UntypedStorage) -> None:
        try:
            self._gpu.allocate(storage, unit.bytes)
        except torch.cuda.OutOfMemoryError as error:
            unit.access.forbid()
            stay = sum(one.bytes for one in self._units if one.kept or one.here and one.resident)
            if not stay:
                raise
            raise type(error)(
                f"{error}. {bytes_text(stay)} of weights stay on the GPU and leave no room for {unit.name}: set offloadd.gpu_resident_fraction lower"
            ) from None

    def ready(self, unit: Unit) -> None:
        self._mover.ready(unit.index, self._gpu.stream())

    def keep(self, unit: Unit) -> None:
        self._mover.keep(unit.index, self._gpu.stream())

    def release(self, unit: Unit) -> None:
        self._mover.release(unit.index, self._gpu.stream())
        self._free(unit)

    def _free(self, unit: Unit) -> None:
        unit.access.allow()
        self._gpu.free(unit.flat.untyped_storage())
        unit.access.forbid()

    def gradient_buffer(self, unit: Unit) -> torch.Tensor:
        self._turn = (self._turn + 1) % _GRADIENT_BUFFERS
        if len(self._buffers) < _GRADIENT_BUFFERS:
            self._turn = len(self._buffers)
            self._buffers.append(self._gpu.empty(self._largest, torch.uint8))
        self._mover.grad_room(self._turn, self._gpu.stream())
        return self._buffers[self._turn][: unit.gradient_bytes].view(unit.gradient_dtype)

    def hand_over(self, unit: Unit) -> None:
        self._mover.hand_over(unit.index, self._turn, self._address(unit), self._gpu.stream(), False)

    def mixtures(self, unit: Unit) -> torch.Tensor:
        buffer = self.gradient_buffer(unit)
        self._mover.revise(unit.index, self._turn, self._address(unit), self._gpu.stream())
        return buffer

    def give_directions(self, unit: Unit) -> None:
        self._mover.hand_over(unit.index, self._turn, self._address(unit), self._gpu.stream(), True)
        self._core.update_revised(unit.index)

    def _address(self, unit: Unit) -> int:
        """Where the unit begins in the buffer of gradients whose turn it is."""
        return unit.address(self._buffers[self._turn].data_ptr(), unit.gradient_dtype.itemsize)

    def shrink(self) -> None:
        # All gradients have left them: the end of each backward waits for it.
        self._buffers.clear()
        self._gpu.shrink()

    def square_sums(self) -> dict[int, Sequence[float]]:
        return dict(enumerate(self._mover.square_sums()))

"""Runs a script with tensors of the processor in place of a GPU's, on the fake driver of kernels/tests/gpu/fake.

    on_fake_gpu.py DRIVER SCRIPT ARGS...          DRIVER is the fake libcuda.so.1, loaded before torch

The fake's streams run when somebody waits for them, PyTorch's operations at once: where PyTorch's stream is to wait, this waits.
A copy that reaches memory after it was freed ends the process.
"""

import ctypes
import pathlib
import runpy
import sys

import torch

driver, script = ctypes.CDLL(sys.argv[1]), sys.argv[2]

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import offloadd._opening  # noqa: E402
import offloadd._optimizer_run  # noqa: E402
import offloadd._run  # noqa: E402
from offloadd import _offloadd  # noqa: E402
from offloadd._memory import GpuBytes  # noqa: E402
from offloadd._tile_copies import TileCopies  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from stand_in import StandIn  # noqa: E402

TORCHS_STREAM = 0


def call(name, *args):
    code = getattr(driver, name)(*args)
    assert code == 0, f"{name}: {code}"


class WaitingMover:
    """The engine's side of a GPU, for a PyTorch that computes at once."""

    def __init__(self, mover):
        self._mover = mover

    def __getattr__(self, name):
        return getattr(self._mover, name)

    def ready(self, unit, stream):
        self._mover.ready(unit, stream)
        call("cuStreamSynchronize", ctypes.c_size_t(TORCHS_STREAM))

    def revise(self, unit, slot, address, stream):
        self._mover.revise(unit, slot, address, stream)
        call("cuStreamSynchronize", ctypes.c_size_t(TORCHS_STREAM))

    def grad_room(self, slot, stream):
        self._mover.grad_room(slot, stream)
        call("cuStreamSynchronize", ctypes.c_size_t(TORCHS_STREAM))


class FakeGpu:
    """Does what `GpuDevice` does for a GPU."""

    device, index = torch.device("cpu"), 0
    # Bytes of its memory, of units and buffers there, and the highest of these with what `compute` took.
    size, used, used_max = 80 << 30, 0, 0

    # What stands for PyTorch's cache: memory of the driver that no tensor uses.
    cache = ctypes.c_ulonglong(0)

    def open(self, core):
        self.fill_cache()
        mover = _offloadd.GpuMover.open(core, 0, self.give_back)
        self.fill_cache()
        self.room = ctypes.c_size_t(mover.room)
        return WaitingMover(mover)

    def fill_cache(self):
        """Leaves the driver nothing, as PyTorch's allocator may."""
        self.give_back()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        call("cuMemAlloc_v2", ctypes.byref(FakeGpu.cache), free)

    def give_back(self):
        if FakeGpu.cache:
            call("cuMemFree_v2", FakeGpu.cache)
            FakeGpu.cache = ctypes.c_ulonglong(0)

    def stream(self):
        return TORCHS_STREAM

    def empty(self, elems, dtype):
        made = torch.empty(elems, dtype=dtype)
        self._lend(made.untyped_storage())
        return made

    def allocate(self, storage, size):
        storage.resize_(size)
        self._lend(storage)

    def memory(self):
        return GpuBytes(self.used, self.used_max, self.size - self.used)

    def forget_peak(self):
        FakeGpu.used_max = self.used

    @classmethod
    def compute(cls, size):
        """Takes memory for a moment."""
        cls.used_max = max(cls.used_max, cls.used + size)

    def free(self, storage):
        FakeGpu.used -= storage.size()
        # The next owner's first access stands behind `room`.
        call("cuStreamSynchronize", self.room)
        call("fake_take_back", ctypes.c_ulonglong(storage.data_ptr()))
        storage.resize_(0)

    def copies(self):
        return StandIn()

    def shrink(self):
        call("cuStreamSynchronize", self.room)

    def _lend(self, storage):
        FakeGpu.used += storage.size()
        self.compute(0)
        ctypes.memset(storage.data_ptr(), 0xFF, storage.size())
        call("fake_lend", ctypes.c_ulonglong(storage.data_ptr()), ctypes.c_size_t(storage.size()))


class FakeTileCopies(TileCopies):
    """Copies of tensors that are the fake's memory as long as they are copied."""

    def _begin(self, begin, one, buffer):
        call("fake_lend", ctypes.c_ulonglong(one.data_ptr()), ctypes.c_size_t(one.nbytes))
        if begin == self.tiles.bring_back:
            ctypes.memset(one.data_ptr(), 0xFF, one.nbytes)
        return super()._begin(begin, one, buffer)

    def wait(self, number, stream):
        one = self.under_way.get(number)
        super().wait(number, stream)
        if one is not None:
            call("cuStreamSynchronize", ctypes.c_size_t(TORCHS_STREAM))
            call("fake_take_back", ctypes.c_ulonglong(one.data_ptr()))


if __name__ == "__main__":
    offloadd._opening.TileCopies = FakeTileCopies
    for module in (offloadd._run, offloadd._optimizer_run):
        module.gpu_of = lambda settings, params: FakeGpu() if settings.compute_device else None
    sys.argv = [script, *sys.argv[3:]]
    sys.path.insert(0, str(pathlib.Path(script).parent))
    runpy.run_path(script, run_name="__main__")

"""Joules that a GPU has taken, by the counter of NVIDIA's driver (NVML), for the programs that ours is compared with. metrics.jsonl of ours has them itself
(offloadd/support/src/energy.rs)."""

import ctypes
import statistics

LIBRARY = "libnvidia-ml.so.1"


class GpuEnergy:
    """Counts from when it is made. Without a counter every reading is None."""

    def __init__(self, uuid, library=None):
        """`uuid` is the GPU's, as `torch.cuda.get_device_properties` has it."""
        self._library, self._device = library, ctypes.c_void_p()
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
        except OSError:
            pass
        known = self._library is not None and self._library.nvmlInit_v2() == 0
        if not known or self._library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(self._device)) != 0:
            self._library = None
        self._last_mj = self._millijoules()

    def joules_since_last(self):
        now, last = self._millijoules(), self._last_mj
        self._last_mj = now
        return None if now is None or last is None else (now - last) / 1e3

    def _millijoules(self):
        count = ctypes.c_ulonglong()
        known = self._library is not None and self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(count)) == 0
        return count.value if known else None


def of_this_process(device):
    """The meter of the GPU that a process computes on."""
    import torch

    return GpuEnergy(torch.cuda.get_device_properties(device).uuid if torch.device(device).type == "cuda" else "")


def middle_joules(steps):
    """The median of the GPUs' joules in a step; None where some step has none."""
    joules = [step.get("gpu_energy_j") for step in steps]
    return statistics.median(joules) if joules and None not in joules else None

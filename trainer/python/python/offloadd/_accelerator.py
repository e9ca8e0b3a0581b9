"""What `deepspeed.get_accelerator()` returns: the device that torch computes on, under DeepSpeed's names."""

from __future__ import annotations

import os
import resource
from typing import Any, Optional

import torch

from . import _offloadd
from ._deepspeed_refused import refused_attribute

# Functions of torch.cuda of the same name, which do nothing on a processor.
_OF_CUDA = ("empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")

# Figures of the process's memory where there is no GPU, by their names in torch.cuda: now, and at most so far.
_NOW = ("memory_allocated", "memory_reserved", "memory_cached")
_MOST = ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")


class Accelerator:
    """The GPU if there is one, otherwise the processor."""

    @property
    def _name(self) -> str:
        return "cuda" if self.is_available() else "cpu"

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def device_name(self, device_index: Optional[int] = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: Optional[int] = None) -> Any:
        """A context in which the device is the current one."""
        return torch.cuda.device(device_index) if self.is_available() else torch.device("cpu")

    def current_device(self) -> int:
        return torch.cuda.current_device() if self.is_available() else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        if self.is_available():
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        return torch.cuda.device_count() if self.is_available() else 1

    def synchronize(self, device_index: Optional[int] = None) -> None:
        if self.is_available():
            torch.cuda.synchronize(device_index)

    def is_synchronized_device(self) -> bool:
        return not self.is_available()

    def communication_backend_name(self) -> str:
        return "nccl" if self.is_available() else "gloo"

    # Random numbers

    def manual_seed(self, seed: int) -> None:
        (torch.cuda if self.is_available() else torch).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        (torch.cuda.manual_seed_all if self.is_available() else torch.manual_seed)(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed() if self.is_available() else torch.initial_seed()

    def get_rng_state(self, device_index: Optional[int] = None) -> torch.Tensor:
        if not self.is_available():
            return torch.get_rng_state()
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: Optional[int] = None) -> None:
        if not self.is_available():
            torch.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    # Types and memory

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self.is_available() else True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def total_memory(self, device_index: Optional[int] = None) -> int:
        if self.is_available():
            return torch.cuda.get_device_properties(device_index or 0).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: Optional[int] = None) -> int:
        if self.is_available():
            return torch.cuda.mem_get_info(device_index)[0]
        return _offloadd.host_available_bytes() or 0

    def memory_stats(self, device_index: Optional[int] = None) -> dict[str, Any]:
        return torch.cuda.memory_stats(device_index) if self.is_available() else {}

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self.is_available() else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def range_push(self, message: str) -> None:
        if self.is_available():
            torch.cuda.nvtx.range_push(message)

    def range_pop(self) -> None:
        if self.is_available():
            torch.cuda.nvtx.range_pop()

    def __getattr__(self, name: str) -> Any:
        if name in (*_OF_CUDA, *_NOW, *_MOST):
            if self.is_available():
                return getattr(torch.cuda, name)
            return lambda device_index=None: _process_bytes(name)
        raise refused_attribute(f"deepspeed.accelerator.get_accelerator().{name}")


def _process_bytes(name: str) -> Optional[int]:
    """This process's memory under the name of a function of torch.cuda, bytes; None for functions that only do something."""
    if name in _MOST:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if name in _NOW:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


_accelerator = Accelerator()


def get_accelerator() -> Accelerator:
    return _accelerator

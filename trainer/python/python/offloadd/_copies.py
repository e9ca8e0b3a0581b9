"""Copies between a GPU and pinned host memory, on a stream of their own, and the buffers there.

All copies of one `Copies` run in the order in which they begin. So a buffer that was given back may be written by the next copy while an earlier
one still reads it.
"""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple, Protocol

import torch

from ._errors import Error


class Form(NamedTuple):
    """What a tensor is beside its values: a tensor that is brought back has the same strides, by which operations choose their order."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, one: torch.Tensor) -> "Form":
        return cls(one.size(), one.stride(), one.dtype)


class Copy(Protocol):
    """A copy that has begun."""

    def wait(self) -> None:
        """Lets what is computed from now on see the copy, and what it was made of be freed."""

    def forget(self) -> None:
        """Lets what it was made of and what it makes be freed: nobody needs the copy any more. Waits for no drive."""


class Buffer(Protocol):
    """Pinned host memory."""

    nbytes: int


class Copies(Protocol):
    """A device that computes, and its way to host memory."""

    device: torch.device

    def pin(self, size: int) -> Buffer:
        """Makes a buffer of so many bytes. Raises `Error` if the host's memory cannot be had."""

    def unpin(self, buffer: Buffer) -> None:
        """Frees a buffer once no copy uses it any more."""

    def leave(self, one: torch.Tensor, buffer: Buffer) -> Copy:
        """Begins to copy a dense tensor, which must stay as it is until the copy is waited for."""

    def bring_back(self, buffer: Buffer, form: Form) -> tuple[torch.Tensor, Copy]:
        """Makes a tensor on the device and begins to copy to it."""


class Pool:
    """Buffers of a `Copies`, which are pinned once: as many as were lent at a time, none larger than the largest wanted."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._free: list[Buffer] = []
        self._closed = False
        # Of all buffers, lent ones too.
        self.nbytes = 0

    def lend(self, size: int) -> Buffer:
        """Lends the smallest buffer with room for `size` bytes. Where none has, one that is too small goes for a new one, so that sequences of
        many lengths do not add up."""
        fitting = [one for one in self._free if one.nbytes >= size]
        if fitting:
            found = min(fitting, key=lambda one: one.nbytes)
            self._remove(found)
            return found
        if self._free:
            smaller = max(self._free, key=lambda one: one.nbytes)
            self._remove(smaller)
            self._unpin(smaller)
        found = self._copies.pin(_rounded(size))
        self.nbytes += found.nbytes
        return found

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back, which copies may still be using."""
        if self._closed:
            self._unpin(buffer)
        else:
            self._free.append(buffer)

    def close(self) -> None:
        """Frees the buffers: those that are lent when they come back."""
        self._closed = True
        while self._free:
            self._unpin(self._free.pop())

    def _remove(self, buffer: Buffer) -> None:
        self._free[:] = [one for one in self._free if one is not buffer]

    def _unpin(self, buffer: Buffer) -> None:
        self.nbytes -= buffer.nbytes
        self._copies.unpin(buffer)


def _rounded(size: int) -> int:
    """Whole pages, and an eighth of the size more at most: lengths that grow a little each time pin new buffers few times."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


class _PinnedMemory:
    """Memory that is registered with CUDA. PyTorch's own pinned memory comes in powers of two and is never given back."""

    def __init__(self, size: int) -> None:
        self.nbytes = size
        self.tensor = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)

    def view(self, form: Form) -> torch.Tensor:
        return self.tensor[: form.size.numel() * form.dtype.itemsize].view(form.dtype)


class _GpuCopy:
    """A copy on a GPU: its event, and the stream whose memory it reads or writes."""

    def __init__(self, device: torch.device, event: Any, stream: Any) -> None:
        self._device, self._event, self._stream = device, event, stream

    def wait(self) -> None:
        self._stream.wait_event(self._event)
        current = torch.cuda.current_stream(self._device)
        if current != self._stream:
            current.wait_event(self._event)

    forget = wait


class GpuCopies:
    """Copies of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def pin(self, size: int) -> _PinnedMemory:
        try:
            buffer = _PinnedMemory(size)
        except (OSError, ValueError) as error:
            raise Error(f"{size} bytes of host memory for inputs of blocks: {error}: leave offloadd.activations out, or take shorter sequences") from None
        cuda = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            failed = cuda.cudaHostRegister(buffer.tensor.data_ptr(), size, 0) != cuda.cudaError.success
        if failed:
            raise Error(f"{size} bytes of host memory for inputs of blocks cannot be pinned: leave offloadd.activations out, or take shorter sequences")
        return buffer

    def unpin(self, buffer: _PinnedMemory) -> None:
        self._stream.synchronize()
        torch.cuda.cudart().cudaHostUnregister(buffer.tensor.data_ptr())

    def leave(self, one: torch.Tensor, buffer: _PinnedMemory) -> _GpuCopy:
        flat = one.as_strided((one.numel(),), (1,))
        return self._begin(lambda: buffer.view(Form.from_tensor(one)).copy_(flat, non_blocking=True))

    def bring_back(self, buffer: _PinnedMemory, form: Form) -> tuple[torch.Tensor, _GpuCopy]:
        one = torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=self.device)
        flat = one.as_strided((one.numel(),), (1,))
        return one, self._begin(lambda: flat.copy_(buffer.view(form), non_blocking=True))

    def _begin(self, copy: Any) -> _GpuCopy:
        """Begins a copy after all that is computed so far."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            copy()
            return _GpuCopy(self.device, self._stream.record_event(), current)

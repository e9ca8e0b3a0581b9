"""The memory of released units, which nothing reaches: no view that a script has kept, nothing that autograd has saved, no function of torch
that takes tensors below `__torch_function__`.

A storage without memory gives native code a null pointer, which it reads. PyTorch can be told that the data of a storage must not be accessed, and
with which error; it does so for memory that a CUDA graph has taken back. It cannot be told that it may be accessed again: two flags of the
storage say it, which are found here in a storage of our own, by what changes in it. They are set back when the unit comes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Optional

import torch

from ._console import say

# Bytes at the beginning of a storage in which the flags are looked for: fewer than any version's storage has.
_LOOKED_AT_BYTES = 64


class Access:
    """Whether the data of one storage may be accessed."""

    def __init__(self, storage: torch.UntypedStorage, of_what: str) -> None:
        # The flags lie in it.
        self.storage, self._of_what = storage, of_what
        self._flags: list[ctypes.c_bool] = []

    def forbid(self) -> None:
        """Lets each access raise a RuntimeError, which says what to do."""
        if not self._flags and (offsets := _flag_offsets()):
            torch._C._set_storage_data_ptr_access_error_msg(self.storage._cdata, _message(self._of_what))
            self._flags = _flags(self.storage, offsets)
        for flag in self._flags:
            flag.value = True

    def allow(self) -> None:
        for flag in self._flags:
            flag.value = False


def can_forbid() -> bool:
    """Whether this version of torch can be told to refuse access to memory."""
    return _flag_offsets() is not None


def forbid_for_good(storage: torch.UntypedStorage, message: str) -> None:
    """Lets each access to the data of a storage raise a RuntimeError with a message, where torch can be told so."""
    if can_forbid():
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def _message(of_what: str) -> str:
    return (
        f"memory of {of_what} is used after it was released, and the values are in tiles: read the model's parameters, which brings them; keep a "
        "clone() of what a forward or a hook sees; and pass a clone() to functions of torch that take tensors as they are"
    )


@functools.lru_cache(maxsize=None)
def _flag_offsets() -> Optional[tuple[int, int]]:
    """The places of the flags in a storage; None, and a warning, where this version of torch has others."""
    found = _found_offsets()
    if found is None:
        say(
            f"warning: torch {torch.__version__} does not tell how to refuse access to memory (2.11 does): a view of a weight that is read after its block was "
            "released crashes the process"
        )
    return found


def _found_offsets() -> Optional[tuple[int, int]]:
    forbid = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if forbid is None:
        return None
    # Of the bytes before and after.
    ours = torch.zeros(1, device="cpu").untyped_storage()
    address, before = ours.data_ptr(), ctypes.string_at(ours._cdata, _LOOKED_AT_BYTES)
    forbid(ours._cdata, "")
    after = ctypes.string_at(ours._cdata, _LOOKED_AT_BYTES)
    changed = [at for at in range(_LOOKED_AT_BYTES) if before[at] != after[at]]
    if len(changed) != 2 or any((before[at], after[at]) != (0, 1) for at in changed):
        return None
    flags = _flags(ours, tuple(changed))
    for forbidden in (False, True, False):
        for flag in flags:
            flag.value = forbidden
        if _is_forbidden(ours, address) != forbidden:
            return None
    _answer_is_shared(tuple(changed))
    return tuple(changed)


def _answer_is_shared(offsets: tuple[int, ...]) -> None:
    """Lets a storage that must not be accessed answer that it is not shared: PyTorch's own function ends the process then."""
    plain = torch.UntypedStorage.is_shared

    @functools.wraps(plain)
    def is_shared(storage: torch.UntypedStorage) -> bool:
        return not all(flag.value for flag in _flags(storage, offsets)) and plain(storage)

    torch.UntypedStorage.is_shared = is_shared


def _flags(storage: torch.UntypedStorage, offsets: tuple[int, ...]) -> list[ctypes.c_bool]:
    return [ctypes.c_bool.from_address(storage._cdata + at) for at in offsets]


def _is_forbidden(storage: torch.UntypedStorage, address: int) -> Optional[bool]:
    """Whether access to a storage at `address` is refused."""
    try:
        return None if storage.data_ptr() != address else False
    except RuntimeError:
        return True

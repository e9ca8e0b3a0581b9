"""Writes to parameters while their values are in memory: in a forward, in a hook, or where nothing is ever released.

Version counters tell, also those of what `param.data` gave. What writes below PyTorch (numpy, kernels of others) changes no counter; sums of
the bits tell in the first passes.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import weakref
from typing import Container, Iterator, Optional

import torch
from torch import nn

from ._errors import NotSupported
from ._released import AS_TENSORS, BEFORE, ReleasedParam, in_transform

_Tensor = torch.Tensor

_version = operator.attrgetter("_version")

# Times that a unit comes for which sums are compared: two passes with their backwards.
_SUMMED_TIMES = 4


class Watch:
    """Notices that a script writes to parameters while their values are in memory."""

    def __init__(self, params: list[nn.Parameter], parts: Optional[list[torch.Tensor]] = None) -> None:
        self.params = params
        # What has their bytes.
        self._parts = params if parts is None else parts
        self._versions: list[int] = []
        # What `param.data` gave since the unit came: it counts its changes by itself.
        self._given: list[tuple[nn.Parameter, _Tensor]] = []
        self._on = False
        # Parameters of which it is known that they were written since.
        self._known: list[nn.Parameter] = []
        # Sums of the parameters' bits when the unit came, and how many times more they are wanted.
        self._sums: Optional[list[_Tensor]] = None
        self._sums_left = _SUMMED_TIMES

    def begin(self) -> None:
        """What is in memory now are the unit's values."""
        self._versions = list(map(_version, self._parts))
        self._given.clear()
        self._on, self._known = True, []
        if self._sums_left and not _observed():
            self._sums_left -= 1
            self._sums = bit_sums(self._parts)

    def end(self, replaced: Container[int] = ()) -> Optional[nn.Parameter]:
        """Ends the watch. Returns a parameter that was written since it began, if there is one whose id is not in `replaced`."""
        found = next((param for param in self._written() if id(param) not in replaced), None) if self._on else None
        self._on, self._known, self._sums = False, [], None
        self._given.clear()
        return found

    def _written(self) -> Iterator[nn.Parameter]:
        """The parameters that were written since the watch began."""
        yield from self._known
        yield from (param for param, part, version in zip(self.params, self._parts, self._versions) if part._version != version)
        yield from (param for param, given in self._given if given._version)
        if self._sums is not None and not _observed():
            yield from (param for param, before, now in zip(self.params, self._sums, bit_sums(self._parts)) if not torch.equal(before, now))

    @contextlib.contextmanager
    def accepting(self) -> Iterator[None]:
        """What is written meanwhile is no change."""
        if not self._on:
            yield
            return
        before = list(self._written())
        try:
            yield
        finally:
            self._versions, self._known = list(map(_version, self._parts)), before
            self._given.clear()
            if self._sums is not None:
                self._sums = bit_sums(self._parts)

    def gave(self, param: nn.Parameter, data: _Tensor) -> None:
        if self._on:
            self._given.append((param, data))

    def forgive(self, param: nn.Parameter, before: int, after: int) -> None:
        """Counts a write no more that was refused, and was not to the parameter's memory: one that shares its version has been written."""
        at = next(index for index, one in enumerate(self.params) if one is param)
        if self._on and self._versions[at] == before and self._parts[at]._version == after:
            self._versions[at] = after

    def drop_unheld(self) -> None:
        """Lets go of what `param.data` gave and nobody else has."""
        given, self._given = self._given, []
        for _ in range(len(given)):
            param, data = given.pop()
            # This name and the argument.
            if sys.getrefcount(data) > 2:
                self._given.append((param, data))
            elif data._version:
                self._known.append(param)


def _observed() -> bool:
    """Whether somebody records or changes the operations that are made, as torch.func and tracers do."""
    return in_transform() or bool(torch._C._len_torch_dispatch_stack())


def bit_sums(parts: list[_Tensor]) -> list[_Tensor]:
    """A sum of the bits of each parameter's part, on its device. It depends on the order of the part's elements, and not on that of its memory."""
    with torch.no_grad(), AS_TENSORS():
        return [_bit_sum(one.detach()) for one in parts]


def _bit_sum(part: _Tensor) -> _Tensor:
    """The sum of words of 8 bytes, of which a processor adds up 17 GB/s, and of words of 2 bytes 1. Odd factors tell words that
    change places: one for each word, or for each 4 KiB of large parts, where factors would take too much memory."""
    flat = part.contiguous().view(-1)
    per_word = max(8 // flat.element_size(), 1)
    if flat.storage_offset() % per_word:
        flat = flat.clone()
    rest = flat.numel() % per_word
    words = flat[: flat.numel() - rest].view(torch.int64)
    width = 1 if words.numel() < _FACTORS_MAX else _ROW_WORDS
    rest_words = words.numel() % width
    rows = words[: words.numel() - rest_words].view(-1, width).sum(1)
    found = (rows * torch.arange(1, 2 * len(rows) + 1, 2, device=rows.device)).sum()
    if rest_words:
        found = found + words[-rest_words:].sum()
    return found + flat[-rest:].view(_BITS[flat.element_size()]).sum() if rest else found


# Words of a part that have a factor each, and words of a larger one that have one together.
_FACTORS_MAX, _ROW_WORDS = 1 << 16, 512

# Whole numbers of so many bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


# Watches by the id of each parameter of a prepared model.
_watches: "weakref.WeakValueDictionary[int, Watch]" = weakref.WeakValueDictionary()

_data = _Tensor.data

# From torch 2.9 on.
_grad_dtype = getattr(_Tensor, "grad_dtype", None)


def watch(params: list[nn.Parameter], parts: Optional[list[_Tensor]] = None) -> Watch:
    """Begins to notice writes to parameters, whose bytes are those of `parts` if these are given."""
    made = Watch(params, parts)
    for param in params:
        _watches[id(param)] = made
    if "data" not in nn.Parameter.__dict__:
        nn.Parameter.data = property(_get_data, _set_data)
        if _grad_dtype is not None:
            nn.Parameter.grad_dtype = property(_grad_dtype.__get__, _set_grad_dtype)
    return made


def watch_of(param: nn.Parameter) -> Optional[Watch]:
    """Who watches a parameter, if somebody does."""
    return _watches.get(id(param))


def unwatch(params: list[nn.Parameter]) -> None:
    """The inverse of `watch`."""
    for param in params:
        _watches.pop(id(param), None)


def _get_data(param: nn.Parameter) -> _Tensor:
    data = _data.__get__(param)
    found = _watches.get(id(param))
    if found is not None:
        found.gave(param, data)
    return data


def _set_data(param: nn.Parameter, value: _Tensor) -> None:
    found = _watches.get(id(param))
    if found is not None and found._on and not isinstance(param, ReleasedParam) and value.data_ptr() != param.data_ptr():
        raise _refused("data", param)
    _data.__set__(param, value)


def _set_grad_dtype(param: nn.Parameter, value: Optional[torch.dtype]) -> None:
    # A released one refuses it by itself.
    if id(param) in _watches and not isinstance(param, ReleasedParam):
        raise _refused("grad_dtype", param)
    _grad_dtype.__set__(param, value)


def _refused(name: str, param: nn.Parameter) -> NotSupported:
    return NotSupported(f"assigning .{name} of a parameter of shape {tuple(param.shape)}, whose values are in tiles: {BEFORE}")

"""What the result of a module depends on, for modules that are computed later than a script has called them, or again in backward.

    forward      Dependencies(module, input)     parameters and buffers with their version counters, settings of each layer, the input
    later        check()                         refuses by name what has changed since, or is another tensor

Plain PyTorch has computed the result by then, so that a change would make another one of it. Writes that no version counter tells are not
seen: those through `.data`, and those below PyTorch.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional

import torch
from torch import nn

from ._errors import NotSupported
from ._released import AS_TENSORS

# What every module has: tables of parameters, hooks and modules, and whether it trains.
_OF_ALL_MODULES = frozenset(vars(nn.Module()))

_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Dependencies:
    """Those of `module`, which `key` computes later and `name` is the name of, and of the tensors that it is given."""

    # Compilers would look at each layer again.
    @torch.compiler.disable
    def __init__(self, key: str, name: str, module: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
        self._key, self._name, self._module, self._given = key, name, module, given
        self._tensors, self._settings = self._tensors_now(), _settings_of(module)

    def with_given(self, name: str, one: torch.Tensor) -> "Dependencies":
        """These, and one more tensor that is given."""
        while name in self._given:
            name += ", another one,"
        made = object.__new__(Dependencies)
        vars(made).update(vars(self), _given={**self._given, name: one}, _tensors={**self._tensors, name: (one, _version(one))})
        return made

    def check(self) -> None:
        """Raises where the result would be another one."""
        now = self._tensors_now()
        for name in {**self._tensors, **now}:
            (before, version), (after, version_after) = (of.get(name, (None, None)) for of in (self._tensors, now))
            if before is not after:
                self._refuse(f"{name} is another tensor than in the forward, as in torch.func.functional_call")
            if version != version_after:
                self._refuse(f"{name} was changed after the forward")
        settings = _settings_of(self._module)
        for name in {**self._settings, **settings}:
            before, after = (of.get(name, "missing") for of in (self._settings, settings))
            if before != after:
                self._refuse(f"{name} was {_shown(before)} in the forward and is {_shown(after)}")

    def _tensors_now(self) -> dict[str, tuple[torch.Tensor, Optional[int]]]:
        own = dict(self._module.named_parameters(self._name, remove_duplicate=False))
        own.update(self._module.named_buffers(self._name, remove_duplicate=False))
        return {name: (one, _version(one)) for name, one in {**own, **self._given}.items()}

    def _refuse(self, what: str) -> None:
        raise NotSupported(
            f"{self._key}: {self._name} is computed in chunks, for the loss or again in backward, and {what}: compute the loss and its backward before the "
            f"change, and within what made it, or leave {self._key} out"
        )


def _version(one: torch.Tensor) -> Optional[int]:
    with AS_TENSORS():
        return None if one.is_inference() else one._version


def _settings_of(module: nn.Module) -> dict[str, Any]:
    """What a module and those in it have that is plain data: which adapters are active, scales, types. Whether it trains counts where something is dropped."""
    found: dict[str, Any] = {}
    for inner, one in module.named_modules():
        own = {name: _plain(value) for name, value in vars(one).items() if name not in _OF_ALL_MODULES}
        if any((name == "p" or "drop" in name) and value for name, value in own.items()):
            own["training"] = one.training
        found[inner] = one
        found.update({f"{inner}.{name}".lstrip("."): value for name, value in own.items() if value is not _OTHER})
    return found


def _shown(setting: Any) -> str:
    return f"a {type(setting).__name__}" if isinstance(setting, nn.Module) else str(setting)


_OTHER = object()


def _plain(value: Any) -> Any:
    """A copy of plain data."""
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, dict):
        parts = {key: _plain(one) for key, one in value.items()}
        return _OTHER if _OTHER in parts.values() else parts
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [_plain(one) for one in value]
        return _OTHER if any(one is _OTHER for one in parts) else parts
    return _OTHER

"""Forwards that features put in place of those of modules: the only file that assigns `forward` of a module.

    module(...) -> what others have put over ours -> ours, the highest layer first -> the forward of the module's class

Rules, the same for all features:

- A forward that others put into a module before ours is neither called nor lost: the feature leaves the module out, or refuses it by name.
- A forward that others put over ours calls ours, and stays. When a feature ends, ours calls the next one below, and at last the plain forward.
- Several features meet in one module in the order of `Layer`, whichever came first.
- A deep copy of a module, a pickled one too, is plain, and features may replace its forward as that of any module. It has the forward that the class had
  when it was copied. A shallow copy shares the forward, as it shares the parameters, and computes with those of the module that it was copied from.
- A feature that fails half-way has replaced nothing.
- `torch.compile` looks into a forward unless the feature excludes it.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from typing import Any, Callable, Mapping

from torch import nn

from ._errors import NotSupported

# Called with the forward below it and the arguments of the module.
Function = Callable[..., Any]


class Layer(enum.IntEnum):
    """Features, from those that compute to those that divide what is computed."""

    PRODUCTS = enum.auto()
    EXPERTS = enum.auto()
    MLP_CHUNKS = enum.auto()
    LOSS_CHUNKS = enum.auto()


class ReplacedForwards:
    """Forwards of modules that one feature has replaced, until `end`."""

    def __init__(self, layer: Layer, functions: Mapping[nn.Module, Function]) -> None:
        """Replaces the forward of each module by a function. Raises `NotSupported` for a module that others have given a forward."""
        self._layer = layer
        self._replaced: list[_Forward] = []
        try:
            for module, function in functions.items():
                self._replace(module, function)
        except BaseException:
            self.end()
            raise

    def _replace(self, module: nn.Module, function: Function) -> None:
        if is_given_by_others(module):
            raise NotSupported(f"the forward of a {type(module).__name__} was replaced already")
        ours = _ours(module)
        if ours is None:
            vars(module)["forward"] = ours = _Forward(module)
        if self._layer in ours.functions:
            raise NotSupported(f"the forward of a {type(module).__name__} is replaced already by {self._layer.name}")
        ours.put(self._layer, function)
        self._replaced.append(ours)

    def end(self) -> None:
        """Gives the modules what they had before, also below forwards that others have put over ours since."""
        for ours in self._replaced:
            ours.remove(self._layer)
        self._replaced.clear()


def is_given_by_others(module: nn.Module) -> bool:
    """Whether a module has a forward of its own that is neither ours nor that of its class."""
    own = vars(module).get("forward")
    return own is not None and not isinstance(own, _Forward) and not _is_plain(module, own)


def _ours(module: nn.Module) -> "_Forward | None":
    own = vars(module).get("forward")
    return own if isinstance(own, _Forward) else None


def _is_plain(module: nn.Module, own: Any) -> bool:
    """Whether `own` is what a copy of a module with one of our forwards has."""
    return isinstance(own, types.MethodType) and own.__self__ is module and own.__func__ is type(module).forward


class _Forward:
    """The forward of a module in which features meet."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.functions: dict[Layer, Function] = {}
        self._call: Callable[..., Any] = self._plain

    def put(self, layer: Layer, function: Function) -> None:
        self.functions[layer] = function
        self._chain()

    def remove(self, layer: Layer) -> None:
        del self.functions[layer]
        self._chain()
        if not self.functions and vars(self.module).get("forward") is self:
            del vars(self.module)["forward"]

    def _chain(self) -> None:
        below = self._plain
        for layer in sorted(self.functions):
            below = functools.partial(self.functions[layer], below)
        self._call = below

    @property
    def _plain(self) -> Callable[..., Any]:
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._plain)

    def __reduce__(self) -> tuple:
        # For copy.deepcopy too: what is copied or loaded has nothing of its own yet, and gives the forward of its class.
        return getattr, (self.module, "forward")

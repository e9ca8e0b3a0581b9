"""Weights that are in memory to be read, and are lost afterwards: a change that a script makes meanwhile is an error at the end, by name.

PEFT may merge adapters into them, as TRL does before it gives weights to a server, if it unmerges them again: the tiles have what was before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any, Callable, Iterator, Sequence

from torch import nn

from ._errors import NotSupported
from ._gathering import Gathering
from ._units import Unit


@contextlib.contextmanager
def only_read(gathering: Gathering, units: Sequence[Unit], instead: str) -> Iterator[None]:
    """Refuses at its end what was written to weights of `units` meanwhile; `instead` says how trained ones are changed."""
    layers = [layer for layer in gathering.model.modules() if _merges(layer) and gathering.units_with(list(layer.get_base_layer().parameters()))]
    merged = [list(layer.merged_adapters) for layer in layers]
    # Those that a script merges or unmerges meanwhile.
    rounded: list[nn.Module] = []
    with contextlib.ExitStack() as replaced:
        for layer, name in itertools.product(layers, ("merge", "unmerge")):
            replaced.enter_context(_replaced(vars(layer), name, _accepted(gathering, layer, getattr(layer, name), rounded)))
        try:
            yield
        finally:
            # Merging and its inverse round: what stays on a GPU is brought again, as the tiles have it. With several ranks also where this one has
            # merged nothing: units stay on all of them or on none.
            bring = layers if gathering.ranks.count > 1 else rounded
            for unit in gathering.units_with([param for layer in bring for param in layer.get_base_layer().parameters()]):
                unit.written = unit.written or not gathering.leads
    for layer, before in zip(layers, merged):
        if layer.merged_adapters != before:
            raise NotSupported(
                f"{_names(gathering.model, layer)}: adapters were {'merged' if layer.merged_adapters else 'unmerged'} while weights were in memory to be read, "
                f"and its tiles do not have the change: call {'un' if layer.merged_adapters else ''}merge_adapter() before the end of the `with` too"
            )
    frozen = "its values are written once: change a copy, or change it before offloadd.prepare, with another run_dir"
    gathering.refuse_writes(lambda unit: instead if unit.trained or not gathering.trains else frozen)


@contextlib.contextmanager
def _replaced(attributes: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Attributes with another value meanwhile."""
    before = attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        if before is not None:
            attributes[name] = before


def _merges(layer: nn.Module) -> bool:
    """Whether it is a layer of PEFT that adds adapters to the weights of another one."""
    return all(hasattr(layer, name) for name in ("merged_adapters", "merge", "unmerge", "get_base_layer"))


def _accepted(gathering: Gathering, layer: nn.Module, plain: Callable[..., Any], rounded: list[nn.Module]) -> Callable[..., Any]:
    """A merge, or the inverse, whose writes are no change; notes the layer in `rounded`."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        rounded.append(layer)
        with contextlib.ExitStack() as stack:
            for unit in gathering.units_with(list(layer.get_base_layer().parameters())):
                stack.enter_context(unit.watch.accepting())
            return plain(*args, **kwargs)

    return call


def _names(model: nn.Module, layer: nn.Module) -> str:
    return next((name for name, one in model.named_modules() if one is layer), type(layer).__name__)

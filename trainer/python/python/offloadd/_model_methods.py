"""Methods of a prepared model that work on tiles: `zero_grad`, `state_dict`, `load_state_dict`, `save_pretrained`, `generate`."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Mapping

from torch import nn

from ._engine import Engine
from ._errors import NotSupported
from ._gathering import Gathering
from ._rewriting import Rewriting
from ._weights import Blocks, PartsLoaded, stream_save_pretrained

_METHODS = ("zero_grad", "state_dict", "load_state_dict", "save_pretrained", "generate")


class ModelMethods:
    """Puts them into one model until `end`."""

    def __init__(self, engine: Engine, rewriting: Rewriting) -> None:
        self._engine, self._gathering, self._rewriting = engine, engine.gathering, rewriting
        self._model = model = engine.model
        self._plain_zero_grad, self._plain_state_dict = model.zero_grad, model.state_dict
        model.zero_grad, model.state_dict, model.load_state_dict = self._zero_grad, self._state_dict, self._load_state_dict
        self._parts_loaded = PartsLoaded(self._gathering, rewriting.check_loadable, rewriting.replace)
        if self._gathering.ranks.count > 1:
            _generate_together(model, self._gathering)
        stream_save_pretrained(model, self._gathering)
        if hasattr(model, "save_pretrained"):
            save, on_first = model.save_pretrained, self._gathering.on_first
            # Weights that are in memory already need nobody else: the Trainer writes them on the first rank alone.
            alone = lambda kwargs: kwargs.get("state_dict") is not None
            on_all = lambda *args, **kwargs: save(*args, **kwargs) if alone(kwargs) else on_first(lambda: save(*args, **kwargs))
            model.save_pretrained = functools.wraps(save)(on_all)

    def end(self) -> None:
        """Gives the model its own methods back."""
        self._parts_loaded.end()
        for name in _METHODS:
            self._model.__dict__.pop(name, None)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if self._gathering.trains:
            self._engine.forget_gradients(zero=not set_to_none)
        self._plain_zero_grad(set_to_none)

    def _state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state; names of one parameter have one tensor, as in a model that is not prepared."""
        kwargs = {**dict(zip(("destination", "prefix", "keep_vars"), args)), **kwargs}
        if kwargs.get("keep_vars") or self._gathering.keep:
            return self._plain_state_dict(**kwargs)
        state = self._plain_state_dict(**{**kwargs, "keep_vars": True})
        state.update(Blocks(self._gathering, state).copies())
        return state

    def _load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads weights, a unit at a time."""
        if assign:
            raise NotSupported("load_state_dict(assign=True): parameters are in tiles and keep their place; leave assign out")
        self._rewriting.check_loadable()
        return self._rewriting.load_state_dict(state_dict, strict)


def _generate_together(model: nn.Module, gathering: Gathering) -> None:
    """Makes transformers' `generate` compute until all ranks have what they want, unless all weights stay in memory."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    generate = getattr(type(base), "generate", None)
    if generate is None or "synced_gpus" not in inspect.signature(generate).parameters:
        return
    plain = model.generate
    on_all = lambda *args, **kwargs: plain(*args, **{**kwargs, "synced_gpus": not gathering.whole})
    model.generate = functools.wraps(plain)(on_all)

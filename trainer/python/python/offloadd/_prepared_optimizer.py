"""The optimizer of a run: an object of the script's own class whose step updates tiles, and whose state is read from them.

The object keeps its identity and its parameter groups, so schedulers and wrappers made earlier go on with it. `step` runs through PyTorch's
hooks, `state_dict` and `load_state_dict` have PyTorch's form.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from itertools import chain
from typing import Any, Callable, Iterator, Optional

import torch
from torch import nn

from . import _offloadd
from ._errors import Error, NotSupported
from ._plan import bytes_text
from ._released import Copied, Origin
from ._units import Unit

# Key of an fp32 master in the state of a 16-bit parameter, which plain PyTorch does not have.
MASTER = "master_param"

# Moments of a parameter in PyTorch's form.
MOMENTS = ("exp_avg", "exp_avg_sq")

ParamStates = dict[int, dict[str, Any]]


class Prepared:
    """What an optimizer becomes: PyTorch's class with the methods below in front."""

    _offloadd_run: Any

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # What schedulers look at.
        self._opt_called = True
        self._offloadd_run._step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        run = self._offloadd_run
        own = {id(param) for group in self.param_groups for param in group["params"]}
        run.engine.forget_gradients(zero=not set_to_none, of=own)

    @property
    def state(self) -> "States":
        """The moments of each parameter, read from its tiles when somebody asks for them."""
        return States(self._offloadd_run)

    @state.setter
    def state(self, value: Any) -> None:
        raise _no_write("optimizer.state")

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's `state_dict`, with all moments in memory. `run.save_checkpoint` writes them without."""
        run = self._offloadd_run
        run.check_room(States(run).bytes, "optimizer.state_dict() with all moments")
        whole = super().state_dict()
        whole["state"] = {key: {name: _plain(one) for name, one in dict(of_param).items()} for key, of_param in whole["state"].items()}
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """PyTorch's `load_state_dict`: moments go to the tiles, a unit at a time, and are committed."""
        run = self._offloadd_run
        run.check_replaceable("optimizer.load_state_dict", "moments")
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        params_of = lambda groups: chain.from_iterable(group["params"] for group in groups)
        names, states = list(params_of(state_dict["param_groups"])), state_dict["state"]
        hooks = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = collections.OrderedDict(), collections.OrderedDict()
        try:
            super().load_state_dict({**state_dict, "state": {}})
        finally:
            self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = hooks
        params = params_of(self.param_groups)
        run.load_states({id(param): dict(states[name]) for name, param in zip(names, params) if states.get(name)})
        for hook in hooks[1].values():
            hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise NotSupported(
            "add_param_group after offloadd.prepare: the run's tiles have moments for the parameters that the optimizer had then. Give it all of "
            "them, with a learning rate of 0 until they are to be trained; or close() the run and prepare the model again"
        )

    def __reduce_ex__(self, protocol: int) -> Any:
        raise NotSupported("the optimizer of a prepared model cannot be pickled or copied: save its state_dict()")

    step = torch.compiler.disable(torch.optim.Optimizer.profile_hook_step(step))
    # PyTorch need not wrap it again, neither for hooks nor for a scheduler.
    step.hooked = step._wrapped_by_lr_sched = True


def take_over(optimizer: torch.optim.Optimizer, run: Any) -> None:
    """Makes the optimizer that of `run`."""
    kind = type(optimizer)
    # A scheduler's, around the step that is replaced.
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = type(kind.__name__, (Prepared, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    optimizer._offloadd_run = run


def give_back(optimizer: torch.optim.Optimizer, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
    """The inverse of `take_over`: a plain optimizer with `states`."""
    optimizer.__class__ = type(optimizer).__mro__[2]
    del optimizer._offloadd_run
    optimizer.__dict__["state"] = collections.defaultdict(dict, states)


def _no_write(what: str) -> NotSupported:
    return NotSupported(f"{what} is read from tiles, and changing it would change nothing: use optimizer.load_state_dict")


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, Copied) else value


class ParamState(dict):
    """The state of one parameter, to read."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise _no_write("a parameter's state in optimizer.state")

    __setitem__ = __delitem__ = update = clear = pop = popitem = setdefault = __ior__ = _refuse

    def __reduce__(self) -> Any:
        return dict, ({name: _plain(value) for name, value in self.items()},)


class States(Mapping):
    """`optimizer.state`: the parameters that were updated, with their moments. Each unit is read when one of its parameters is asked for; all
    ranks must ask."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._read: Optional[tuple[Unit, list[torch.Tensor]]] = None

    def _params(self) -> list[nn.Parameter]:
        run = self._run
        groups = (param for group in run.optimizer.param_groups for param in group["params"])
        return [param for param in groups if run.updates_of(param)]

    @property
    def bytes(self) -> int:
        """Bytes of all moments, and of the masters that go with them."""
        return sum(param.numel() * (8 if param.dtype == torch.float32 else 12) for param in self._params())

    def __len__(self) -> int:
        return len(self._params())

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._params())

    def __contains__(self, param: Any) -> bool:
        return any(param is one for one in self._params())

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        run = self._run
        updates = run.updates_of(param)
        if not updates:
            return ParamState()
        unit = run.engine.unit_of[id(param)]
        if self._read is None or self._read[0] is not unit:
            self._read = unit, run.read_state(unit)
        offset = next(offset for one, offset in zip(unit.params, unit.offsets) if one is param)
        values = [Unit.view_of(flat, param, offset).clone() for flat in self._read[1]]
        copies = [one.as_subclass(Copied) for one in (torch.tensor(float(updates)), *values)]
        for one in copies:
            what = lambda: f"optimizer.state of {run.engine.name(param)}, which is read from tiles: use optimizer.load_state_dict"
            one.origin = Origin(what, run.engine, run.engine.steps)
        step, master, *moments = copies
        found = {"step": step, **dict(zip(MOMENTS, moments))}
        if param.dtype != torch.float32:
            found[MASTER] = master
        return ParamState(found)

    def __setitem__(self, *_: Any, **__: Any) -> Any:
        raise _no_write("optimizer.state")

    clear = pop = popitem = update = setdefault = __delitem__ = __setitem__

    def __reduce_ex__(self, protocol: int) -> Any:
        raise NotSupported("optimizer.state lies in tiles: save optimizer.state_dict()")


def checked(states: ParamStates, names: Mapping[int, list[str]], shapes: Mapping[int, torch.Size]) -> ParamStates:
    """States to load, by the id of their parameter. Raises `Error` for what no AdamW wrote."""
    for key, state in states.items():
        if key not in shapes:
            raise Error("the optimizer's state has a parameter that is not in the run: load the state of this model's optimizer")
        if not {"step", *MOMENTS} <= state.keys() or "max_exp_avg_sq" in state:
            raise NotSupported(
                f"the state of {names[key][0]} has {', '.join(map(str, state))}, and AdamW's has step, exp_avg and exp_avg_sq: load the state of an AdamW "
                "without amsgrad"
            )
        for name in MOMENTS:
            if state[name].shape != shapes[key]:
                raise Error(f"{name} of {names[key][0]} has the shape {tuple(state[name].shape)}, and the parameter has {tuple(shapes[key])}: load the state of this model's optimizer")
    return states


def check_room(bytes_: int, what: str) -> None:
    """Refuses what does not fit into the host's memory."""
    available = _offloadd.host_available_bytes()
    if available is not None and bytes_ > available:
        raise Error(f"{what} takes {bytes_text(bytes_)} of host memory, and {bytes_text(available)} are available: use run.save_checkpoint(directory), which needs none")

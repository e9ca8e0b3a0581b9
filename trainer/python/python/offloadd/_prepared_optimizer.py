"""The optimizer of a run: an object of the script's own class whose step updates tiles, and whose state is read from them.

The object keeps its identity and its parameter groups, so schedulers and wrappers made earlier go on with it. `step` runs through PyTorch's
hooks, `state_dict` and `load_state_dict` have PyTorch's form.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from itertools import chain
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import nn

from ._errors import NotSupported
from ._moments import Moments, ParamStates, States, check_room, no_write, plain
from ._rewriting import Rewriting
from ._state_copies import StateCopies
from ._steps import Steps
from ._supported_optimizers import NO_MOMENTS, check_settings, plain_of


class PreparedOptimizer:
    """What an optimizer becomes: PyTorch's class with the methods below in front."""

    _offloadd_run: "OfRun"
    _state_copies: StateCopies
    # Whether groups are being loaded.
    _loading = False

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # What schedulers look at.
        self._opt_called = True
        self._state_copies.refuse_writes()
        self._offloadd_run.steps.make()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        own = {id(param) for group in self.param_groups for param in group["params"]}
        self._offloadd_run.steps.engine.forget_gradients(zero=not set_to_none, of=own)

    @property
    def state(self) -> "States":
        """The moments of each parameter, read from its tiles when somebody asks for them."""
        return States(self._offloadd_run.moments)

    @state.setter
    def state(self, value: Any) -> None:
        raise no_write("optimizer.state")

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's `state_dict`, with all moments in memory. `run.save_checkpoint` writes them without."""
        check_room(self._offloadd_run.moments.bytes, "optimizer.state_dict() with all moments")
        return self._guarded(super().state_dict())

    def _guarded(self, whole: dict[str, Any]) -> dict[str, Any]:
        """A state whose tensors, which are copies, tell when they are written to."""
        self._state_copies.refuse_writes()
        guard = self._state_copies.guard
        whole["state"] = {
            key: {
                name: guard(plain(one), f"{name} of parameter {key}", [(key, name)]) if isinstance(one, torch.Tensor) else one
                for name, one in dict(of_param).items()
            }
            for key, of_param in whole["state"].items()
        }
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """PyTorch's `load_state_dict`: moments go to the tiles, a unit at a time, and are committed."""
        self._check_loadable()
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        params_of = lambda groups: chain.from_iterable(group["params"] for group in groups)
        names, states = list(params_of(state_dict["param_groups"])), state_dict["state"]
        hooks = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = collections.OrderedDict(), collections.OrderedDict()
        before = self.param_groups
        try:
            try:
                self._load_groups({**state_dict, "state": {}})
            finally:
                self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = hooks
            check_settings(self)
            params = params_of(self.param_groups)
            self._state_copies.forget()
            self._load_states({id(param): dict(states[name]) for name, param in zip(names, params) if states.get(name)})
        except BaseException:
            # What is refused changes nothing: PyTorch has made new groups.
            self.param_groups = before
            raise
        for hook in hooks[1].values():
            hook(self)

    def _check_loadable(self) -> None:
        """Refuses to load where that would replace what a run has."""
        self._offloadd_run.rewriting.check_replaceable("optimizer.load_state_dict", "moments")

    def _load_groups(self, state_dict: Mapping[str, Any]) -> None:
        """PyTorch's `load_state_dict` of the parameter groups alone."""
        self._loading = True
        try:
            super().load_state_dict(state_dict)
        finally:
            del self._loading

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """PyTorch's, which scripts call with an empty state to begin anew: moments are in tiles, and nobody would look at it."""
        if "state" in state and not self._loading:
            self.state = state["state"]
        super().__setstate__({key: value for key, value in state.items() if key != "state"})

    def _load_states(self, states: ParamStates) -> None:
        """Gives parameters, by their id, the states of an optimizer, and all others none."""
        self._offloadd_run.moments.load(states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise NotSupported(f"add_param_group after offloadd.prepare: {NO_MOMENTS}")

    def __reduce_ex__(self, protocol: int) -> Any:
        raise NotSupported("the optimizer of a prepared model cannot be pickled or copied: save its state_dict()")

    step = torch.compiler.disable(torch.optim.Optimizer.profile_hook_step(step))
    # PyTorch need not wrap it again, neither for hooks nor for a scheduler.
    step.hooked = step._wrapped_by_lr_sched = True


class OfRun(NamedTuple):
    """What an optimizer does in its run."""

    steps: Steps
    moments: Moments
    rewriting: Rewriting


def take_over(optimizer: torch.optim.Optimizer, of_run: OfRun) -> None:
    """Makes the optimizer that of a run."""
    kind = type(optimizer)
    # A scheduler's, around the step that is replaced.
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = type(kind.__name__, (PreparedOptimizer, plain_of(kind)), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    optimizer._offloadd_run, optimizer._state_copies = of_run, StateCopies("optimizer")


def give_back(optimizer: torch.optim.Optimizer, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
    """The inverse of `take_over`: a plain optimizer with `states`."""
    optimizer.__class__ = type(optimizer).__mro__[2]
    del optimizer._offloadd_run, optimizer._state_copies
    optimizer.__dict__["state"] = collections.defaultdict(dict, states)

"""Moments of parameters: read from tiles in PyTorch's form when somebody asks for them, and loaded from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Container, Iterable, Iterator, Optional, Sequence

import torch
from torch import nn

from . import _offloadd
from ._commits import Commits
from ._console import bytes_text
from ._errors import Error, NotSupported
from ._released import ReadOnlyCopy, Origin, Reader
from ._reentry import not_reentered
from ._rewriting import Rewriting
from ._supported_optimizers import MOMENTS
from ._units import Unit

# Key of an fp32 master in the state of a 16-bit parameter, which plain PyTorch does not have.
MASTER = "master_param"

ParamStates = dict[int, dict[str, Any]]


class Moments:
    """Those of one run."""

    def __init__(self, commits: Commits, rewriting: Rewriting) -> None:
        self._commits, self._rewriting = commits, rewriting
        self.master = commits.settings.master
        self.gathering, self.reading = commits.engine.gathering, commits.engine.reading

    def params(self) -> list[nn.Parameter]:
        """The optimizer's parameters that were updated."""
        groups = (param for group in self._commits.optimizer.param_groups for param in group["params"])
        return [param for param in groups if self.updates_of(param)]

    def names_of(self, param: torch.Tensor) -> tuple[str, ...]:
        """The names of a parameter's moments."""
        return MOMENTS[self._rule_of(id(param))]

    def _rule_of(self, key: int) -> str:
        """The rule by which the parameter with an id is updated."""
        rule = self._commits.settings.rule
        return "AdamW" if rule == "Muon" and not self.gathering.unit_of[key].muon else rule

    @property
    def bytes(self) -> int:
        """Bytes of all moments, and of the masters that go with them."""
        return sum(param.numel() * state_bytes(param, self.names_of(param), self.master) for param in self.params())

    def updates_of(self, param: torch.Tensor) -> int:
        """Updates so far of a parameter."""
        return self._commits.updates.get(self._commits.layout.index_of.get(id(param), -1), 0)

    @not_reentered
    def read(self, unit: Unit) -> list[torch.Tensor]:
        """Masters, momentum and variance of a trained unit in fp32, in host memory; zeros where the optimizer has no variance. All ranks must call it."""
        flats, ranks = _fp32_like(unit), self._commits.ranks
        with self.gathering.forwards.alone():
            ranks.meet(f"read the moments of {unit.name}")
            self._commits.core.read_state([(unit.index, [flat.data_ptr() for flat in flats])])
            self.gathering.order.forget_rest()
        for flat in flats:
            ranks.transfers.complete(f"bring the moments of {unit.name}", flat)
        return flats

    def load(self, states: ParamStates) -> None:
        """Gives parameters, by their id, moments and masters in PyTorch's form, a unit at a time, and commits them. Others begin anew."""
        commits, gathering = self._commits, self.gathering
        units = [unit for unit in gathering.units if unit.trained]
        check_states(states, commits.layout.names, {id(param): param.shape for unit in units for param in unit.params}, self._rule_of)
        commits.seal()
        present = {}
        for unit in units:
            if any(MASTER in states.get(id(param), ()) for param in unit.params):
                with gathering.gathered(unit):
                    present[unit] = unit.flat.to("cpu", copy=True)
        commits.updates = {commits.layout.index_of[key]: updates_in(state) for key, state in states.items()}
        with self._rewriting.committing(units, "moments"):
            for unit in units:
                flats, exact = _fp32_like(unit), []
                for index, param in enumerate(unit.params):
                    if id(param) in states and _fill(flats, unit, index, states[id(param)], present.get(unit), self.names_of(param)):
                        exact.append(index)
                commits.core.rewrite_state(unit.index, [flat.data_ptr() for flat in flats], list(range(len(unit.params))), exact)
        commits.engine.stale()

    def set(self, unit: Unit, index: int, flats: list[torch.Tensor]) -> None:
        """Gives the parameter `index` of a unit the master and moments in `flats`, which are as `read` gives them."""
        with self._rewriting.weights([unit]):
            self._commits.core.rewrite_state(unit.index, [flat.data_ptr() for flat in flats], [index], [index])


def _fp32_like(unit: Unit) -> list[torch.Tensor]:
    """Room for masters, momentum and variance of a unit."""
    return [torch.zeros(unit.room_elems, dtype=torch.float32, device="cpu") for _ in range(3)]


def _fill(flats: list[torch.Tensor], unit: Unit, index: int, state: dict[str, Any], present: Optional[torch.Tensor], names: Sequence[str]) -> bool:
    """Copies a parameter's state to its place in `flats`. Returns whether it has a master that belongs to the values `present`."""
    param, offset, (masters, *moments) = unit.params[index], unit.offsets[index], flats
    for flat, name in zip(moments, names):
        Unit.view_of(flat, param, offset).copy_(state[name])
    master = state.get(MASTER)
    # Weights that were loaded since the state was saved have masters of their own.
    if master is None or not is_master_of(master.to("cpu", torch.float32), Unit.view_of(present, param, offset)):
        return False
    Unit.view_of(masters, param, offset).copy_(master)
    return True


def is_master_of(master: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether an fp32 `master` has the bits of `values` where the engine rounds it."""
    bits = torch.int32 if values.dtype == torch.float32 else torch.int16
    if values.dtype == torch.bfloat16:
        # Halves away from zero, as kernels/src/number.rs has it: PyTorch rounds them to even.
        whole = torch.where(master.isnan(), float("nan"), master).view(torch.int32)
        rounded = ((whole + 0x8000) >> 16).to(bits)
    else:
        rounded = master.to(values.dtype).view(bits)
    return torch.equal(rounded, values.view(bits))


class ParamState(dict):
    """The state of one parameter, to read."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise no_write("a parameter's state in optimizer.state")

    __setitem__ = __delitem__ = update = clear = pop = popitem = setdefault = __ior__ = _refuse

    def __reduce__(self) -> Any:
        return dict, ({name: plain(value) for name, value in self.items()},)


def state_bytes(param: torch.Tensor, names: Sequence[str], master: str) -> int:
    """Bytes of an element's moments `names` in PyTorch's form, and of the master of a 16-bit parameter."""
    return 4 * (len(names) + _has_master(param, master))


def _has_master(param: torch.Tensor, master: str) -> bool:
    """Whether there is a master beside a parameter, where the setting is `master`."""
    return param.dtype != torch.float32 and master == "fp32"


def updates_in(state: Mapping[str, Any]) -> int:
    """Updates that a state in PyTorch's form has had. Lion and Muon of others do not count them, and compute without their number."""
    return int(state.get("step", 1))


def state_of(
    param: torch.Tensor, updates: int, values: list[torch.Tensor], name: Callable[[], str], reader: Reader, names: Sequence[str], setting: str
) -> ParamState:
    """The state of a parameter that has `updates`, of its fp32 master, if the `setting` gives it one, and its moments `names`."""
    step, master, *others = (torch.tensor(float(updates)), *values)
    found = {"step": step, **dict(zip(names, others))}
    if _has_master(param, setting):
        found[MASTER] = master
    return ParamState({key: _to_read(value, name, reader) for key, value in found.items()})


def _to_read(value: torch.Tensor, name: Callable[[], str], reader: Reader) -> torch.Tensor:
    """A copy that refuses to be changed; a tensor of another class as it is."""
    if type(value) is not torch.Tensor:
        return value
    copy = value.as_subclass(ReadOnlyCopy)
    copy.origin = Origin(lambda: f"optimizer.state of {name()}, which is read from tiles: use optimizer.load_state_dict", reader, reader.steps)
    return copy


class States(Mapping):
    """`optimizer.state`: the parameters that were updated, with their moments. Each unit is read when one of its parameters is asked for; all
    ranks must ask."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments
        self._read: Optional[tuple[Unit, list[torch.Tensor]]] = None

    def params(self) -> list[nn.Parameter]:
        """The parameters that have a state."""
        return self._moments.params()

    def __len__(self) -> int:
        return len(self.params())

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self.params())

    def __contains__(self, param: Any) -> bool:
        return any(param is one for one in self.params())

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        moments, gathering, reading = self._moments, self._moments.gathering, self._moments.reading
        updates = moments.updates_of(param)
        if not updates:
            return ParamState()
        unit = gathering.unit_of[id(param)]
        if self._read is None or self._read[0] is not unit:
            self._read = unit, moments.read(unit)
        offset = next(offset for one, offset in zip(unit.params, unit.offsets) if one is param)
        values = [Unit.view_of(flat, param, offset).clone() for flat in self._read[1]]
        return state_of(param, updates, values, lambda: gathering.name(param), reading, moments.names_of(param), moments.master)

    def __setitem__(self, *_: Any, **__: Any) -> Any:
        raise no_write("optimizer.state")

    clear = pop = popitem = update = setdefault = __delitem__ = __setitem__

    def __reduce_ex__(self, protocol: int) -> Any:
        raise NotSupported("optimizer.state lies in tiles: save optimizer.state_dict()")


def check_known(keys: Iterable[int], known: Container[int]) -> None:
    """Refuses an optimizer's state, by the id of its parameter, of something that is not in the run."""
    if any(key not in known for key in keys):
        raise Error(
            "the optimizer's state has something that is no parameter of the run, or was frozen when the model was prepared: load the state of this model's "
            "optimizer; freeze what was trained after offloadd.prepare"
        )


def check_states(states: ParamStates, names: Mapping[int, list[str]], shapes: Mapping[int, torch.Size], rule_of: Callable[[int], str]) -> None:
    """Refuses states to load, by the id of their parameter, that have other moments than the rule by which it is updated."""
    check_known(states, shapes)
    for key, state in states.items():
        rule = rule_of(key)
        moments = MOMENTS[rule]
        others = {one for of_rule in MOMENTS.values() for one in of_rule}.difference(moments)
        needed = ("step", *moments) if rule == "AdamW" else moments
        if not state.keys() >= set(needed) or not others.union(["max_exp_avg_sq"]).isdisjoint(state):
            like = "load the state of an AdamW without amsgrad" if rule == "AdamW" else f"load the state of a {rule}"
            *first, last = needed
            raise NotSupported(
                f"the state of {names[key][0]} has {', '.join(map(str, state))}, and {rule}'s has {' and '.join([', '.join(first), last] if first else [last])}: {like}"
            )
        for name in moments:
            if state[name].shape != shapes[key]:
                raise Error(
                    f"{name} of {names[key][0]} has the shape {tuple(state[name].shape)}, and the parameter has {tuple(shapes[key])}: load the state of "
                    "this model's optimizer"
                )


def check_room(bytes_: int, what: str) -> None:
    """Refuses what does not fit into the host's memory."""
    available = _offloadd.host_available_bytes()
    if available is not None and bytes_ > available:
        raise Error(
            f"{what} takes {bytes_text(bytes_)} of host memory, and {bytes_text(available)} are available: use run.save_checkpoint(directory), which needs none"
        )


def no_write(what: str) -> NotSupported:
    return NotSupported(f"{what} is read from tiles, and changing it would change nothing: use optimizer.load_state_dict")


def plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, ReadOnlyCopy) else value

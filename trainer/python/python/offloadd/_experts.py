"""Experts of a layer that is larger than a unit may be: groups of them are units of their own.

Experts that are modules become units as they are. Packed ones, as transformers has them, are one parameter for all experts of a layer, cut along its
first dimension. Each group is a module with its part of the parameters, which comes and goes like a block; the layer calls only those groups that have
tokens.

    experts.gate_up_proj [8, ...]    ->    experts.0:4.gate_up_proj [4, ...], experts.4:8.gate_up_proj [4, ...]

The model's state has the parameter's own name and shape, and so has the model again when the run ends with its values.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from typing import Any, Callable, Mapping, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten

from ._errors import NotSupported
from ._packed import users_of
from ._released import AS_TENSORS, BACKWARD, BEFORE, ITSELF, REPLACES, on_copies
from ._replaced_forwards import Layer, ReplacedForwards, is_given_by_others
from ._units import BLOCKS_MIN, Unit, blocks_of

# Of the functions that compute packed experts. Products of grouped ones have the same bits for a group of experts as for all. So has their gate, except
# that PyTorch on a CPU computes exponentials at the end of a tensor, where numbers do not fill its vectors, by another function.
_EAGER, _GROUPED = "eager", ("grouped_mm", "batched_mm")

# Bodies of the eager forwards that compute as `Group.eager` does, by `_digest`: transformers' common one in its two spellings, the same two of 5.17, which pass
# over an expert that no token has, and those of MuseSpark, GptOss and Aria. Others compute or add in other types.
_COMMON_EAGER = {"df64e11f4632", "07291db04ec0", "cba0fa84ffeb", "ed82fd99b265", "681de5c08476", "3d517ef0bd7a", "fec4c1882989"}

# What the parts answer: they lie where the model computes, and are trained.
_OF_PARTS = {*(getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "requires_grad")), torch.Tensor.get_device}

# What only the parts can do.
_ON_PARTS = {torch.Tensor.grad.__set__, torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_, torch.Tensor.retain_grad}
_ON_PARTS |= {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}

_IN_GROUP = re.compile(r"^(.*\.)?(\d+):(\d+)\.(\w+)$")


def part_of(name: str) -> Optional[tuple[str, slice]]:
    """The name of the whole parameter, and the experts of it, that a name of a group's parameter says; None for other names."""
    found = _IN_GROUP.match(name)
    return found and (f"{found[1] or ''}{found[4]}", slice(int(found[2]), int(found[3])))


class CutParam(nn.Parameter):
    """A packed parameter whose experts are in groups: its metadata answers at once, anything else joins its parts."""

    parts: list[nn.Parameter]
    cut: "CutExperts"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == torch.Tensor.grad.__get__:
            return _joined_grad(args[0].parts)
        if func in REPLACES and isinstance(args[0], CutParam):
            raise NotSupported(f"{REPLACES[func]} on {args[0].name}, whose values are in tiles: {BEFORE}")
        if func in _ON_PARTS:
            raise NotSupported(
                f"{func.__name__} of {args[0].name}, whose experts are in groups: use the parameters of the groups, which named_parameters() has"
            )
        if func in _OF_PARTS:
            return func(args[0].parts[0])
        if func in ITSELF:
            with AS_TENSORS():
                return func(*args, **kwargs)
        found = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, CutParam)]
        inputs = inspect.signature(func).bind(*args, **kwargs).arguments.get("inputs") if func in BACKWARD else None
        if any(isinstance(one, CutParam) for one in tree_flatten(inputs)[0]):
            raise NotSupported(
                f"{func.__name__} for {found[0].name}, whose experts are in groups: take the gradients of the groups' parameters, which named_parameters() has"
            )
        return on_copies(found[0].cut.reading, found, func, args, kwargs, copy_of=CutParam.joined)

    @property
    def name(self) -> str:
        return self.cut.reading.name(self)

    def joined(self) -> torch.Tensor:
        """The values, from which gradients reach the parts."""
        if torch.is_grad_enabled() and any(part.requires_grad for part in self.parts):
            return torch.cat([part.clone() for part in self.parts])
        return torch.cat([part.detach().clone().as_subclass(torch.Tensor) for part in self.parts])

    # PyTorch hands it to no __torch_function__.
    def set_(self, *args, **kwargs):
        raise NotSupported(f"set_ of {self.name}, whose values are in tiles: {BEFORE}")

    def __deepcopy__(self, memo):
        memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol):
        raise NotSupported("a prepared model cannot be pickled: save its state_dict")

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"Parameter in tiles: {tuple(self.shape)}, {self.dtype}"


class Group(nn.Module):
    """The experts `first` to `last` - 1 of a layer."""

    def __init__(self, cut: "CutExperts", first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last
        # Not a module of this one.
        vars(self)["cut"] = cut
        for name, whole in cut.wholes.items():
            self.register_parameter(name, nn.Parameter(whole.detach()[first:last], requires_grad=whole.requires_grad))

    def forward(self, compute: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        return compute(self, *args)

    def expert(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """What one expert makes of tokens, as transformers' eager experts do."""
        experts = self.cut.experts
        up = "gate_up_proj" if experts.has_gate else "up_proj"
        rows = self._linear(rows, up, index)
        rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
        rows = self._linear(rows, "down_proj", index)
        return experts.post_expert_norm(rows) if getattr(experts, "has_post_expert_norm", False) else rows

    def _linear(self, rows: torch.Tensor, name: str, index: int) -> torch.Tensor:
        experts = self.cut.experts
        weight, bias = getattr(self, name)[index], getattr(self, f"{name}_bias")[index] if experts.has_bias else None
        if experts.is_transposed:
            return rows @ weight if bias is None else rows @ weight + bias
        return F.linear(rows, weight, bias)

    def eager(self, final: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Adds what the experts of this group make of tokens to `final`, in the order of transformers' eager experts."""
        # One, so that ranks without tokens for the group take part in its backward.
        for index in [index for index, count in enumerate(counts) if count] or [0]:
            position, token = torch.where(mask[self.first + index])
            made = self.expert(hidden[token], index) * weights[token, position, None]
            final.index_add_(0, token, made.to(final.dtype))
        return final

    def grouped(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """What the experts make of tokens in the order of the experts, as transformers' grouped experts do."""
        if not len(rows):
            return self.expert(rows, 0)
        from transformers.integrations.moe import _grouped_linear

        experts, device = self.cut.experts, rows.device
        number = torch.tensor(counts, device=device)
        ends = torch.cumsum(number, dim=0, dtype=torch.int32)
        ids = torch.repeat_interleave(torch.arange(len(counts), device=device), number, output_size=len(rows)) if experts.has_bias else None
        up = "gate_up_proj" if experts.has_gate else "up_proj"
        bias = lambda name: getattr(self, f"{name}_bias")[ids] if experts.has_bias else None
        rows = _grouped_linear(rows, getattr(self, up), ends, bias=bias(up), is_transposed=experts.is_transposed)
        rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
        rows = _grouped_linear(rows, self.down_proj, ends, bias=bias("down_proj"), is_transposed=experts.is_transposed)
        return experts.post_expert_norm(rows) if getattr(experts, "has_post_expert_norm", False) else rows


class CutExperts:
    """A module of packed experts whose parameters are cut into groups."""

    def __init__(self, experts: nn.Module, names: Sequence[str], experts_of_group: int) -> None:
        self.experts = experts
        self.wholes: dict[str, Any] = {name: experts._parameters[name] for name in names}
        self.params_before = dict(experts._parameters)
        # What the run adds: its units with the groups, what reads released parameters, and which groups any rank uses.
        self.units: list[Unit] = []
        self.reading: Any = None
        self.agree: Callable[[str, list[bool]], list[bool]] = lambda what, used: used
        # Whether the values have left the whole parameters.
        self.taken = False
        count = experts.num_experts
        ranges = [(first, min(first + experts_of_group, count)) for first in range(0, count, experts_of_group)]
        self.groups = [Group(self, first, last) for first, last in ranges]
        for group in self.groups:
            experts.add_module(f"{group.first}:{group.last}", group)
        for name, whole in self.wholes.items():
            del experts._parameters[name]
            # No parameter of the module any more, and found under its name all the same.
            vars(experts)[name] = whole
        self._replaced = ReplacedForwards(Layer.EXPERTS, {experts: torch.compiler.disable(self._forward)})
        self._handles = [experts._register_state_dict_hook(self._join_state), experts._register_load_state_dict_pre_hook(self._cut_state)]

    # Forward

    def _forward(self, below: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In place of the module's `forward`. The names of the other two arguments differ between models."""
        weights, index = sorted([*args, *kwargs.values()], key=lambda one: not one.is_floating_point())
        how = getattr(self.experts.config, "_experts_implementation", None) or _EAGER
        # This waits for a GPU: what is to be brought is decided by the values.
        counts = torch.bincount(index.reshape(-1), minlength=self.experts.num_experts).tolist()
        of_groups = [counts[group.first : group.last] for group in self.groups]
        used = self.agree("find the experts that have tokens", [any(of_group) for of_group in of_groups])
        if how == _EAGER:
            if not is_common_eager(type(self.experts)):
                raise NotSupported(
                    f"the eager forward of {type(self.experts).__name__}, in groups: call model.set_experts_implementation('grouped_mm'), or raise "
                    "offloadd.unit_bytes_max above the size of a layer"
                )
            return self._eager(hidden_states, index, weights, of_groups, used)
        if how not in _GROUPED:
            raise NotSupported(
                f"experts that are computed by {how!r}, in groups: call model.set_experts_implementation('grouped_mm') or ('eager'), or raise "
                "offloadd.unit_bytes_max above the size of a layer"
            )
        return self._grouped(hidden_states, index, weights, of_groups, used)

    def _eager(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, of_groups: list[list[int]], used: list[bool]) -> torch.Tensor:
        final = torch.zeros_like(hidden)
        with torch.no_grad():
            mask = F.one_hot(index, num_classes=self.experts.num_experts).permute(2, 1, 0)
        for group, counts, is_used in zip(self.groups, of_groups, used):
            if is_used:
                final = group(Group.eager, final, hidden, mask, weights, counts)
        return final

    def _grouped(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, of_groups: list[list[int]], used: list[bool]) -> torch.Tensor:
        """transformers' `grouped_mm_experts_forward`, of whose tokens each group gets its own."""
        count, of_token = hidden.size(0), index.size(-1)
        perm = torch.sort(index.reshape(-1))[1]
        rows = hidden[perm // of_token].split([sum(counts) for counts in of_groups])
        made = [group(Group.grouped, of_group, counts) for group, of_group, counts, is_used in zip(self.groups, rows, of_groups, used) if is_used]
        out = torch.cat(made) if made else hidden.new_zeros((0, hidden.size(1)))
        out = out * weights.reshape(-1)[perm].unsqueeze(-1)
        back = torch.empty_like(perm)
        back[perm] = torch.arange(len(perm), device=perm.device)
        return out[back].view(count, of_token, hidden.size(1)).sum(dim=1).to(hidden.dtype)

    # The module's state

    def parts(self, name: str) -> list[nn.Parameter]:
        """The parts of a parameter, in the groups' order."""
        return [group._parameters[name] for group in self.groups]

    def _join_state(self, experts: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, whole in self.wholes.items():
            found = [state.pop(f"{prefix}{group.first}:{group.last}.{name}") for group in self.groups]
            # The whole one stands for the parameters themselves.
            state[prefix + name] = whole if isinstance(found[0], nn.Parameter) else torch.cat(found)

    def _cut_state(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, whole in self.wholes.items():
            value = state.get(prefix + name)
            if value is not None and value.shape == whole.shape:
                del state[prefix + name]
                state.update({f"{prefix}{group.first}:{group.last}.{name}": value[group.first : group.last] for group in self.groups})

    # The parameters

    def free_wholes(self) -> None:
        """The parts have memory of their own: frees that of the whole parameters, once all have."""
        if self.taken or any(unit.flat is None for unit in self.units):
            return
        self.taken = True
        for name, whole in self.wholes.items():
            # Its shape and type. Nothing reads it: see `CutParam`.
            empty = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="cpu")
            empty.untyped_storage().resize_(0)
            _give(whole, empty)
            whole.__class__, whole.parts, whole.cut = CutParam, self.parts(name), self

    def end(self) -> None:
        """Makes the module what it was. Parts that have values give them to the whole parameters."""
        for handle in self._handles:
            handle.remove()
        self._replaced.end()
        for name, whole in self.wholes.items():
            if self.taken:
                parts = self.parts(name)
                value = torch.cat([part.detach() for part in parts])
                grad = _joined_grad(parts)
                del whole.parts, whole.cut
                whole.__class__ = nn.Parameter
                _give(whole, value)
                whole.requires_grad_(parts[0].requires_grad)
                whole.grad = grad
            vars(self.experts).pop(name, None)
        for group in self.groups:
            del self.experts._modules[f"{group.first}:{group.last}"]
        self.experts._parameters.clear()
        self.experts._parameters.update(self.params_before)


class Experts:
    """The experts of one model that are units of their own."""

    def __init__(self, model: nn.Module, wanted: Optional[Sequence] = None, bytes_max: Optional[int] = None, with_block: bool = False) -> None:
        """Cuts layers larger than `bytes_max`. With `with_block` experts that are modules come with their block: ranks whose tokens choose other
        experts call other modules."""
        self.cuts: list[CutExperts] = []
        # Modules that are units of their own, with the module with which each comes.
        self.apart: dict[nn.Module, nn.Module] = {}
        if bytes_max is None:
            return
        users = users_of(model)
        adapted = {id(module.base_layer) for module in model.modules() if hasattr(module, "parameter_name") and hasattr(module, "base_layer")}
        for _, block in blocks_of(model, wanted):
            if sum(param.nbytes for param in block.parameters()) <= bytes_max:
                continue
            for module in list(block.modules()):
                names = _packed_names(module, users) if id(module) not in adapted else []
                if names:
                    bytes_of_expert = sum(module._parameters[name].nbytes for name in names) // module.num_experts
                    self._cut(module, names, max(1, bytes_max // max(1, bytes_of_expert)))
                elif isinstance(module, nn.ModuleList) and _are_experts(module, block):
                    self.apart.update({expert: block if with_block else expert for expert in module})

    def _cut(self, module: nn.Module, names: list[str], experts_of_group: int) -> None:
        groups = -(-module.num_experts // experts_of_group)
        if groups > 1:
            self.cuts.append(CutExperts(module, names, -(-module.num_experts // groups)))
            self.apart.update({group: group for group in self.cuts[-1].groups})

    def know(self, units: Sequence[Unit], modules: Mapping[int, nn.Module]) -> None:
        """Learns the units that were made of the model."""
        for cut in self.cuts:
            cut.units = [unit for unit in units if modules[unit.index] in cut.groups]

    @property
    def wholes(self) -> list[nn.Parameter]:
        """The parameters that are cut."""
        return [whole for cut in self.cuts for whole in cut.wholes.values()]

    def free_wholes(self) -> None:
        """Frees the memory of whole parameters whose parts have memory of their own."""
        for cut in self.cuts:
            cut.free_wholes()

    def name(self, model: nn.Module, whole: Any) -> Optional[str]:
        """The name that a whole parameter has in the model's state."""
        found = next(((cut.experts, name) for cut in self.cuts for name, one in cut.wholes.items() if one is whole), None)
        return found and next(f"{of_module}.{found[1]}" for of_module, module in model.named_modules() if module is found[0])

    def _parts_of(self) -> dict[int, list[nn.Parameter]]:
        return {id(whole): cut.parts(name) for cut in self.cuts for name, whole in cut.wholes.items()}

    def cut_optimizer(self, optimizer: Any) -> None:
        """Gives an optimizer the parts of parameters that are cut, with the state that it has of them."""
        parts_of = self._parts_of()
        for group in optimizer.param_groups if parts_of else ():
            given = list(zip(group["params"], group.get("param_names") or [""] * len(group["params"])))
            cut = [(one, name) for param, name in given for one in parts_of.get(id(param), [param])]
            group["params"][:] = [param for param, _ in cut]
            if "param_names" in group:
                group["param_names"] = [name for _, name in cut]
        for param in [param for param in optimizer.state if id(param) in parts_of]:
            state, first = optimizer.state.pop(param), 0
            for part in parts_of[id(param)]:
                of_part = lambda one: one[first : first + len(part)].clone() if torch.is_tensor(one) and one.shape == param.shape else one
                optimizer.state[part] = {key: of_part(value) if key != "step" else value.clone() for key, value in state.items()}
                first += len(part)

    def join_optimizer(self, optimizer: Any) -> None:
        """The inverse of `cut_optimizer`."""
        for cut in self.cuts:
            for name, whole in cut.wholes.items():
                parts = cut.parts(name)
                ids = set(map(id, parts))
                for group in optimizer.param_groups:
                    numbers = [number for number, param in enumerate(group["params"]) if id(param) in ids]
                    for key, first in (("params", whole), ("param_names", None)):
                        if numbers and key in group:
                            kept = first if first is not None else group[key][numbers[0]]
                            group[key][numbers[0] : numbers[-1] + 1] = [kept]
                states = [optimizer.state.pop(part) for part in parts if part in optimizer.state]
                if len(states) == len(parts):
                    join = lambda key: torch.cat([state[key] for state in states]) if states[0][key].dim() else states[0][key]
                    optimizer.state[whole] = {key: join(key) for key in states[0]}

    def undo(self, optimizer: Any) -> None:
        """Makes the model and its optimizer what they were, where the values are still theirs."""
        if not any(cut.taken for cut in self.cuts):
            self.end(optimizer)

    def end(self, optimizer: Any) -> None:
        """Makes the model and its optimizer what they were."""
        self.join_optimizer(optimizer)
        for cut in self.cuts:
            cut.end()


def _joined_grad(parts: Sequence[nn.Parameter]) -> Optional[torch.Tensor]:
    """The gradient of a whole parameter; None where no part has one."""
    grads = [part.grad for part in parts]
    if all(grad is None for grad in grads):
        return None
    return torch.cat([torch.zeros_like(part) if grad is None else grad for part, grad in zip(parts, grads)])


def _give(param: nn.Parameter, value: torch.Tensor) -> None:
    """Gives a parameter another value, on another device too. It stays the same object."""
    if param.device == value.device:
        param.data = value
    else:
        torch.utils.swap_tensors(param, nn.Parameter(value, requires_grad=param.requires_grad))


@functools.cache
def is_common_eager(experts: type) -> bool:
    """Whether a class of packed experts computes eagerly as `Group.eager` does."""
    try:
        source = inspect.getsource(experts.forward.__wrapped__)
    except OSError:
        return False
    return _digest(source) in _COMMON_EAGER


def _digest(source: str) -> str:
    """Tells bodies of functions apart, whose sources may differ in spaces and comments."""
    return hashlib.sha256(re.sub(r"#.*|\s", "", source.partition("->")[2]).encode()).hexdigest()[:12]


def _packed_names(module: nn.Module, users: Mapping[int, list[nn.Module]]) -> list[str]:
    """The parameters of packed experts that transformers' functions for experts compute with; none where a module is something else."""
    moe = sys.modules.get("transformers.integrations.moe")
    count = getattr(module, "num_experts", None)
    if not (hasattr(moe, "_grouped_linear") and hasattr(module, "has_gate") and hasattr(module, "is_transposed") and isinstance(count, int)):
        return []
    # Older versions of transformers mark what they divide among ranks by this.
    if getattr(module, "_is_expert_parallel", hasattr(module, "_is_hooked")) or is_given_by_others(module) or not hasattr(type(module).forward, "__wrapped__"):
        return []
    weights = [*(("gate_up_proj",) if module.has_gate else ("up_proj",)), "down_proj"]
    names = weights + [f"{name}_bias" for name in weights if module.has_bias]
    params = [module._parameters.get(name) for name in names]
    plain = lambda param: type(param) is nn.Parameter and param.is_floating_point() and len(param) == count and users[id(param)] == [module]
    # A gradient, or a hook for it, is of the whole parameter.
    bare = lambda param: param.grad is None and not param._backward_hooks and not getattr(param, "_post_accumulate_grad_hooks", None)
    return names if all(plain(param) and bare(param) for param in params) else []


def _are_experts(modules: nn.ModuleList, block: nn.Module) -> bool:
    """Whether the modules are a layer's experts: of one class, in a list within a block, most of whose bytes they have."""
    if modules is block or len(modules) < BLOCKS_MIN or len(set(map(type, modules))) > 1:
        return False
    bytes_of = lambda module: sum(param.nbytes for param in module.parameters())
    return 2 * bytes_of(modules) > bytes_of(block)

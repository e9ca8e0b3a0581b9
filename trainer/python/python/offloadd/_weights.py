"""Weights out of a prepared model and into it, a block at a time: only the units of one block are in memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Union

import torch
from torch import nn

from ._errors import Error, NotSupported
from ._experts import Group, CutParam, part_of
from ._gathering import Gathering
from ._packed import is_wrapper
from ._units import Unit

# Names of types in safetensors' files.
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

State = dict[str, torch.Tensor]
Convert = Callable[[State], State]


class Blocks:
    """A model's state by the units that come together: what is in no unit comes with the last of them. Parameters whose experts are in groups are
    blocks of their own."""

    def __init__(self, gathering: Gathering, state: Mapping[str, Any]) -> None:
        self.gathering, self.state = gathering, state
        self.tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        gathering.state_copies.refuse_writes()
        groups = gathering.unit_groups
        block_of = {unit: index for index, units in enumerate(groups) for unit in units}
        self.names: list[list[str]] = [[] for _ in groups]
        for name, value in self.tensors.items():
            if type(value) is CutParam:
                continue
            unit = gathering.unit_of.get(id(value))
            self.names[block_of[unit] if unit else -1].append(name)
        self.names += [[name] for name, value in self.tensors.items() if type(value) is CutParam]

    def shapes(self) -> State:
        """The whole state on the meta device, to be written by safetensors."""
        for name, value in self.tensors.items():
            if is_wrapper(value):
                raise NotSupported(f"{name} is several tensors of torchao, which this cannot write: write torch.save(model.state_dict(), ...)")
        return _shapes(self.tensors)

    @contextlib.contextmanager
    def values(self, block: int) -> Iterator[State]:
        """The state of one block, in memory meanwhile."""
        if block >= len(self.gathering.unit_groups):
            (name,) = self.names[block]
            yield {name: joined(self.gathering, self.tensors[name])}
            return
        with contextlib.ExitStack() as stack:
            for unit in self.gathering.unit_groups[block]:
                stack.enter_context(self.gathering.gathered(unit))
            yield {name: self.tensors[name].detach() for name in self.names[block]}

    def copies(self) -> dict[str, Any]:
        """The whole state in memory, each unit read once. Names of one parameter have one copy; what is in no unit is no copy."""
        found: dict[str, Any] = dict(self.state)
        copied: dict[int, torch.Tensor] = {}
        for block in range(len(self.names)):
            with self.values(block) as values:
                for name, value in values.items():
                    key = id(self.tensors[name])
                    whole = self.tensors[name]
                    parts = [whole] if key in self.gathering.unit_of else whole.parts if type(whole) is CutParam else []
                    if parts and key not in copied:
                        copy = (value if type(whole) is CutParam else value.clone()).to(whole.device)
                        copied[key] = self.gathering.state_copies.guard(copy, name, map(id, parts))
                    found[name] = copied[key] if parts else value.to(whole.device)
        return found


def joined(gathering: Gathering, whole: CutParam) -> torch.Tensor:
    """A copy of a parameter whose experts are in groups, in host memory. One group is in memory at a time."""
    found = torch.empty(whole.shape, dtype=whole.dtype, device="cpu")
    at = 0
    for part in whole.parts:
        with gathering.gathered(gathering.unit_of[id(part)]):
            found[at : at + len(part)].copy_(part.detach())
        at += len(part)
    return found


def write_safetensors(path: Union[str, os.PathLike], shapes: State, metadata: Mapping[str, str], blocks: Blocks, convert: Convert) -> None:
    """Writes tensors of a model's state to a file in safetensors' format. `shapes` says which, under the names that `convert` gives
    them, which takes the state of one block. The file appears when it is whole."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, shape in shapes.items():
        if shape.dtype not in _TYPES:
            raise NotSupported(f"{name} is {shape.dtype}, which files of safetensors cannot hold: write torch.save(model.state_dict(), ...)")
        bytes_ = shape.numel() * shape.element_size()
        header[name] = {"dtype": _TYPES[shape.dtype], "shape": list(shape.shape), "data_offsets": [at, at + bytes_]}
        at += bytes_
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = Path(f"{os.fspath(path)}.part")
    left = set(shapes)
    try:
        with open(part, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for block, names in enumerate(_names_by_block(blocks, convert)):
                if left.isdisjoint(names):
                    continue
                with blocks.values(block) as values:
                    for name, value in convert(values).items():
                        if name in left:
                            file.seek(8 + len(encoded) + header[name]["data_offsets"][0])
                            _write(file, value, shapes[name])
                            left.discard(name)
            if left:
                raise Error(f"{path}: the model has no parameter {sorted(left)[0]}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_weights(gathering: Gathering, path: Union[str, os.PathLike]) -> None:
    """Writes the model's state to one file under the names of its state_dict. Of several names of one parameter the first is written."""
    blocks = Blocks(gathering, gathering.model.state_dict(keep_vars=True))
    shapes, seen = {}, set()
    for name, shape in blocks.shapes().items():
        if id(blocks.tensors[name]) not in seen:
            seen.add(id(blocks.tensors[name]))
            shapes[name] = shape
    write_safetensors(path, shapes, {"format": "pt"}, blocks, lambda state: state)


def _names_by_block(blocks: Blocks, convert: Convert) -> list[set[str]]:
    shapes = blocks.shapes()
    return [set(convert({name: shapes[name] for name in names})) for names in blocks.names]


def _write(file: Any, value: torch.Tensor, shape: torch.Tensor) -> None:
    if value.shape != shape.shape or value.dtype != shape.dtype:
        raise Error(f"a tensor has shape {tuple(value.shape)} and type {value.dtype}, and the header of the file says {tuple(shape.shape)} and {shape.dtype}")
    value = value.detach().contiguous().cpu()
    bytes_ = value.numel() * value.element_size()
    if bytes_:
        file.write((ctypes.c_char * bytes_).from_address(value.data_ptr()))


def stream_save_pretrained(model: nn.Module, gathering: Gathering) -> None:
    """Replaces the `save_pretrained` of a Hugging Face or PEFT model by one that has the weights of one block in memory."""
    transformers, peft = sys.modules.get("transformers"), sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        model.save_pretrained = _save_adapters(model, gathering, model.save_pretrained)
    elif transformers is not None and isinstance(model, transformers.PreTrainedModel):
        model.save_pretrained = _save_by_blocks(model, gathering, model.save_pretrained)


def _save_adapters(model: nn.Module, gathering: Gathering, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            kwargs["state_dict"] = trained_state(model, gathering)
        return plain(*args, **kwargs)

    return save_pretrained


def trained_state(model: nn.Module, gathering: Gathering) -> State:
    """Copies of what is trained, by its names in the model's state, and of what is in no unit."""
    gathering.state_copies.refuse_writes()
    names: dict[Optional[Unit], list[str]] = {}
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    for name, value in state.items():
        if type(value) is not CutParam:
            names.setdefault(gathering.unit_of.get(id(value)), []).append(name)
    found = {name: state[name].detach().clone() for name in names.pop(None, ())}
    for unit, of_unit in names.items():
        if unit.trained:
            with gathering.gathered(unit):
                found.update((name, state[name].detach().clone()) for name in of_unit)
    wholes = {name: value for name, value in state.items() if type(value) is CutParam and value.requires_grad}
    return {**found, **{name: joined(gathering, value) for name, value in wholes.items()}}


def each_weight(gathering: Gathering) -> Iterator[tuple[str, torch.Tensor]]:
    """A copy of each tensor of the model's state under the first of its names, with one unit in memory at a time."""
    gathering.state_copies.refuse_writes()
    names: dict[Optional[Unit], dict[int, str]] = {}
    state = {name: value for name, value in gathering.model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    for name, value in state.items():
        if type(value) is not CutParam:
            names.setdefault(gathering.unit_of.get(id(value)), {}).setdefault(id(value), name)
    for name in names.pop(None, {}).values():
        yield name, state[name].detach().clone()
    for unit in gathering.units:
        with gathering.gathered(unit):
            for name in names.get(unit, {}).values():
                yield name, state[name].detach().clone()
    for name, value in state.items():
        if type(value) is CutParam:
            yield name, joined(gathering, value)


def _save_by_blocks(model: nn.Module, gathering: Gathering, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def save_pretrained(save_directory: Union[str, os.PathLike], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is not None or len(args) > 1 or getattr(model, "_hf_peft_config_loaded", False):
            return plain(save_directory, *args, **kwargs)
        from transformers import modeling_utils

        blocks = Blocks(gathering, model.state_dict(keep_vars=True))
        convert = _reverted(model) if kwargs.get("save_original_format", True) else _same
        write = lambda shapes, path, metadata=None: write_safetensors(path, shapes, metadata or {}, blocks, convert)
        split = modeling_utils.split_torch_state_dict_into_shards
        # Parts of a tensor that a conversion took apart count by themselves, not with the whole.
        apart = lambda state, **settings: split(_shapes(state), **settings)
        with _replaced(modeling_utils, safe_save_file=write, split_torch_state_dict_into_shards=apart):
            return plain(save_directory, *args, **{**kwargs, "state_dict": blocks.shapes()})

    return save_pretrained


@contextlib.contextmanager
def _replaced(module: Any, **functions: Any) -> Iterator[None]:
    """A module with other functions meanwhile."""
    before = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _shapes(state: Mapping[str, torch.Tensor]) -> State:
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}


def _same(state: State) -> State:
    return state


def _reverted(model: nn.Module) -> Convert:
    """Changes a state as transformers does before it writes it: renames and splits weights as checkpoints on disk have them."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return _same
    return lambda state: revert_weight_conversion(model, state)


# Weights in


class Loading(nn.Parameter):
    """A parameter to which `load_state_dict` copies: remembers from what."""

    copied: dict[int, torch.Tensor]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and isinstance(args[0], Loading):
            cls.copied[id(args[0])] = args[1]
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recording(params: Iterable[nn.Parameter]) -> Iterator[dict[int, torch.Tensor]]:
    """Meanwhile, what is copied to `params` goes to the dict instead, by their id."""
    recorder = type("Loading", (Loading,), {"copied": {}})
    classes = [(param, param.__class__) for param in params]
    try:
        for param, _ in classes:
            param.__class__ = recorder
        yield recorder.copied
    finally:
        for param, before in classes:
            param.__class__ = before


class PartsLoaded:
    """Lets `load_state_dict` of a part of a model, or of a module around it, reach the tiles: what PyTorch copies to parameters is
    remembered, and given to them all when the outermost module of the model has been loaded."""

    def __init__(self, gathering: Gathering, check: Callable[[], None], give: Callable[[dict[int, torch.Tensor]], None]) -> None:
        self._gathering, self._check, self._give = gathering, check, give
        # Modules within the outermost one that is being loaded, itself first.
        self._within: list[int] = []
        self._sources: dict[int, torch.Tensor] = {}
        # Modules of torch.jit.script take no hooks, and have no parameters.
        self._modules = [module for module in gathering.model.modules() if not isinstance(module, torch.jit.RecursiveScriptModule)]
        self._handles: list[Any] = []
        for module in self._modules:
            vars(module)["_load_from_state_dict"] = functools.partial(self._load, module, module._load_from_state_dict)
            self._handles.append(module.register_load_state_dict_post_hook(self._loaded))
            # Hooks of the script look at what was loaded.
            module._load_state_dict_post_hooks.move_to_end(self._handles[-1].id, last=False)

    def _load(self, module: nn.Module, plain: Callable[..., None], state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *rest: Any) -> None:
        if isinstance(self._gathering.params[0], Loading):
            # The whole model is being loaded.
            return plain(state, prefix, metadata, *rest)
        params = [param for param in module._parameters.values() if param is not None and id(param) in self._gathering.unit_of]
        if id(module) not in self._within:
            self._check()
            self._within, self._sources = list(map(id, module.modules())), {}
        if params and metadata.get("assign_to_params_buffers"):
            raise NotSupported("load_state_dict(assign=True): parameters are in tiles and keep their place; leave assign out")
        with recording(params) as copied:
            plain(state, prefix, metadata, *rest)
        self._sources.update(copied)

    def _loaded(self, module: nn.Module, keys: Any) -> None:
        if self._within[:1] == [id(module)]:
            sources, self._within, self._sources = self._sources, [], {}
            if sources:
                self._give(sources)

    def end(self) -> None:
        """Leaves the modules as they were."""
        for module, handle in zip(self._modules, self._handles):
            vars(module).pop("_load_from_state_dict", None)
            handle.remove()


# Models built without memory


@contextlib.contextmanager
def init() -> Iterator[None]:
    """Builds modules whose parameters have no memory. `offloadd.prepare` then gives them values, a block at a time: those of
    `weights`, or what the modules themselves begin with."""
    plain = nn.Module.register_parameter

    def register_parameter(module: nn.Module, name: str, param: Optional[nn.Parameter]) -> None:
        plain(module, name, param)
        if param is not None and type(param) is nn.Parameter:
            module._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register_parameter
    try:
        yield
    finally:
        nn.Module.register_parameter = plain


class Weights:
    """Tensors of safetensors' files, read when they are asked for."""

    def __init__(self, path: Union[str, os.PathLike]) -> None:
        from safetensors import safe_open

        path = Path(path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise Error(f"weights: {path} has no *.safetensors; name such a file, or a directory of them")
        self.path = path
        self._file_of: dict[str, Any] = {}
        for one in files:
            try:
                opened = safe_open(str(one), framework="pt")
            except OSError as error:
                raise Error(f"weights: {one}: {error}") from None
            self._file_of.update(dict.fromkeys(opened.keys(), opened))

    def shape_of(self, names: list[str]) -> Optional[tuple[int, ...]]:
        """The shape of the tensor that has one of `names`; None where there is none."""
        name = next((name for name in names if name in self._file_of), None)
        return None if name is None else tuple(self._file_of[name].get_slice(name).get_shape())

    def value_of(self, param: torch.Tensor, names: list[str]) -> torch.Tensor:
        """The tensor that has one of `names` and a parameter's shape."""
        name = next((name for name in names if name in self._file_of), None)
        part = part_of(names[0]) if name is None else None
        if part is not None and part[0] in self._file_of:
            name, value = part[0], self._file_of[part[0]].get_slice(part[0])[part[1]]
        elif name is not None:
            value = self._file_of[name].get_tensor(name)
        else:
            raise Error(f"weights: {self.path} has no {names[0]}; its names must be those of the model's state_dict")
        if value.shape != param.shape:
            raise Error(f"weights: {self.path} has {name} {tuple(value.shape)} where the model has {tuple(param.shape)}")
        return value


def begin(model: nn.Module, here: set[int], done: set[int], weights: Optional[Weights], names: Mapping[int, list[str]]) -> None:
    """Gives first values to the parameters `here`, ids of parameters that have memory and no values yet."""
    with torch.no_grad():
        if weights is not None:
            for param in model.parameters():
                if id(param) in here:
                    param.copy_(weights.value_of(param, names[id(param)]))
            return
        for name, module in model.named_modules():
            own = [param for param in module._parameters.values() if param is not None]
            if id(module) in done or not any(id(param) in here for param in own):
                continue
            if not all(id(param) in here for param in own):
                raise NotSupported(f"{name}: its parameters lie in several units, so it cannot begin by itself; pass weights= to offloadd.prepare")
            done.add(id(module))
            if isinstance(module, Group):
                raise NotSupported(f"{name}: these experts are a part of a layer's, so they cannot begin by themselves; pass weights= to offloadd.prepare")
            if hasattr(model, "_init_weights"):
                model._init_weights(module)
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()
            else:
                raise NotSupported(f"{name or type(module).__name__} has no reset_parameters(): pass weights= to offloadd.prepare")

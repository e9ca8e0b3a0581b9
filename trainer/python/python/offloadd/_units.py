"""Units: the parts of a model whose parameters are moved together, found in its module tree.

A block's parameters of one type that are trained are one unit, those that are frozen another: units of a block come and go
together, and a frozen one has parameters only, which are written once.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Any, Container, Iterable, Iterator, Mapping, Optional, Sequence

import torch
from torch import nn

from ._errors import Error, NotSupported
from ._packed import PackedParam, packed_of, users_of
from ._storage import Access

# Reached here without what a prepared model makes of `param.data`.
_DATA = torch.Tensor.data

# Parameters start at multiples of so many elements: whole cache lines of every type. With moments in 8 bits, whose blocks have so many, no block has
# elements of two parameters.
ALIGN_ELEMS = 64
BLOCK_ELEMS = 256

# A block that holds less than this part of the largest one is not worth moving alone.
SMALL_PART = 64

# Lists of so many modules of one class are taken for a model's blocks.
BLOCKS_MIN = 3


@dataclass(eq=False, repr=False)
class Unit:
    """Parameters of one type that lie in one flat tensor and are gathered and released together."""

    index: int
    name: str
    params: list[nn.Parameter]
    trained: bool = True
    # Whether it holds what is in no block: it stays from the model's forward to the end of its backward.
    root: bool = False
    # Whether it comes for a part of a block's forward: experts.
    apart: bool = False
    # Where each parameter has its bytes.
    packed: list[PackedParam] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    align_elems: int = ALIGN_ELEMS
    # Elements of the parameters, the gaps between them included.
    elems: int = 0
    # Elements of each rank's part, and of the equal parts of all ranks, which the flat tensor has room for.
    shard_elems: int = 0
    room_elems: int = 0
    flat: Optional[torch.Tensor] = None
    here: bool = True
    # How many wish that it stays until they say otherwise.
    pins: int = 0
    # Whether its memory stays when it is released, until its values change.
    resident: bool = False
    # Whether it is released, and its memory is still there with the newest values.
    kept: bool = False
    # Whether it is on its way.
    expected: bool = False
    # Whether its parameters are of the class that notices their use.
    guarded: bool = False
    # Whether what is here is the newest.
    fresh: bool = True
    # Times that it came, since somebody began to count.
    came: int = 0
    # Whether a script has written to what is here, or may have.
    written: bool = False
    # Autograd's sequence number when the unit's forward began.
    start: int = 0
    # Gradients of this backward that are not handed over yet.
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    # Notices writes to the parameters while they are in memory: a `Watch` of _watch.py.
    watch: Any = None
    # Whether native code may read and write the flat tensor.
    access: Optional[Access] = None
    # Whether Muon updates it: a direction made of whole matrices takes the place of each gradient.
    muon: bool = False
    # Whether each rank has a part of its own, with parameters of its own.
    sharded: bool = False

    def __repr__(self) -> str:
        # torch writes hooks into warnings, and hooks have units.
        return f"Unit({self.name!r})"

    def __post_init__(self) -> None:
        self.packed = self.packed or [PackedParam(param) for param in self.params]
        self.parts = [one.part for one in self.packed]
        # While they are in memory.
        self.classes = [type(param) for param in self.params]
        for part in self.parts:
            self.offsets.append(self.elems)
            self.elems += -(-part.numel() // self.align_elems) * self.align_elems
        self.shard_elems = self.room_elems = self.elems
        self.dtype = self.parts[0].dtype
        # As gradients lie in tiles.
        self.gradient_dtype = self.dtype
        self.built_on_meta = self.params[0].is_meta

    @property
    def bytes(self) -> int:
        return self.room_elems * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """Numbers that the parameters stand for."""
        return sum((packed.shape or param.shape).numel() for param, packed in zip(self.params, self.packed))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients, in the type they have in tiles, for the whole flat tensor."""
        return self.room_elems * self.gradient_dtype.itemsize

    @property
    def division(self) -> str:
        """How the script's own parameters are divided, for a later start that must have them alike; empty if they are whole."""
        return ""

    @property
    def memory_orders(self) -> list[str]:
        """How the elements of each parameter lie in memory, and in tiles; empty where they lie in their order."""
        return list(map(memory_order, self.parts))

    @property
    def plan_params(self) -> list[dict[str, int]]:
        """The place of each parameter, for the extension."""
        return [{"offset": offset, "elems": part.numel()} for part, offset in zip(self.parts, self.offsets)]

    def tensors(self, flat: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """The parameters, each with the tensor like it whose numbers `flat` has in its place."""
        for param, offset in zip(self.params, self.offsets):
            yield param, self.view_of(flat, param, offset)

    def address(self, start: int, item_bytes: int) -> int:
        """Where the unit begins whose memory begins at `start`, with so many bytes an element."""
        return start

    def flatten(self) -> None:
        """Moves the parameters into one flat tensor in the processor's memory, of which they become views."""
        self.move(torch.zeros(self.room_elems, dtype=self.dtype, device="cpu"), copy=True)

    def move(self, flat: torch.Tensor, copy: bool) -> None:
        """Makes the parameters views of `flat`, to which their values are copied if `copy`."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for (part, shares, *_), offset in zip(self.packed, self.offsets):
                view = self.view_of(flat, part, offset)
                if copy:
                    view.copy_(part)
                for one in (part, *shares):
                    _DATA.__set__(one, view)
        self._lie_in(flat)

    def own_storages(self) -> None:
        """Gives each parameter a storage of its own, whose memory is its place in the flat tensor: libraries take tensors of one storage for one tensor, and
        some write the first of them alone."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for (part, shares, *_), offset in zip(self.packed, self.offsets):
                own = _own_storage(self.view_of(self.flat, part, offset))
                for one in (part, *shares):
                    _DATA.__set__(one, own)

    def take_back(self) -> Optional[nn.Parameter]:
        """Lets each parameter have its place again. Returns one whose storage somebody has moved, as `share_memory_()` does, if there is one."""
        with torch._C.DisableTorchFunctionSubclass():
            places = (self.flat.data_ptr() + offset * self.dtype.itemsize for offset in self.offsets)
            moved = (param for param, part, place in zip(self.params, self.parts, places) if part.numel() and part.data_ptr() != place)
            found = next(moved, None)
        if found is not None:
            self.own_storages()
        return found

    def leave(self) -> None:
        """Leaves the memory to somebody who holds it, and makes the parameters views of a flat tensor without memory."""
        self.move(torch.empty(self.room_elems, dtype=self.dtype, device=self.flat.device), copy=False)
        self.flat.untyped_storage().resize_(0)
        self.access.forbid()

    def flatten_meta(self) -> None:
        """Gives parameters of the meta device a place in a flat tensor that has no memory yet. They stay the same objects."""
        flat = torch.empty(self.room_elems, dtype=self.dtype, device="cpu")
        for param, offset in zip(self.params, self.offsets):
            view = self.view_of(flat, param, offset)
            torch.utils.swap_tensors(param, nn.Parameter(view, requires_grad=param.requires_grad))
        flat.untyped_storage().resize_(0)
        self._lie_in(flat)
        self.access.forbid()
        self.here = False

    def _lie_in(self, flat: torch.Tensor) -> None:
        self.flat, self.access = flat, Access(flat.untyped_storage(), self.name)

    @staticmethod
    def view_of(flat: torch.Tensor, param: torch.Tensor, offset: int) -> torch.Tensor:
        """The part of `flat` that holds a tensor like `param`, with its strides where they are dense."""
        # Of a released parameter too: the shape is asked for and not the values.
        with torch._C.DisableTorchFunctionSubclass():
            if param.is_contiguous() or not is_dense(param):
                return flat[offset : offset + param.numel()].view(param.shape)
            return flat.as_strided(param.size(), param.stride(), offset)


def _own_storage(view: torch.Tensor) -> torch.Tensor:
    """A dense tensor of the memory of `view`, in a storage that begins and ends with it."""
    item_bytes = view.element_size()
    if view.numel() == 0 or view.untyped_storage().nbytes() == view.numel() * item_bytes:
        return view
    whole = torch.empty(0, dtype=torch.uint8, device=view.device)
    whole.set_(view.untyped_storage(), view.storage_offset() * item_bytes, (view.numel() * item_bytes,))
    # It keeps the memory of the view.
    storage = torch.from_dlpack(whole).untyped_storage()
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.size(), view.stride())


def is_dense(one: torch.Tensor) -> bool:
    """Whether the elements of a tensor have the memory between the first and the last one, each its own."""
    return one.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(one)


def memory_order(one: torch.Tensor) -> str:
    """The strides of a dense tensor, empty if they are those of a contiguous one. Those of others, as tiles have them, are."""
    with torch._C.DisableTorchFunctionSubclass():
        if one.is_contiguous() or not is_dense(one):
            return ""
        return "with strides " + "x".join(str(stride) for size, stride in zip(one.size(), one.stride()) if size > 1)


def check_memory(tensors: Iterable[tuple[str, torch.Tensor, bool]]) -> None:
    """Refuses a trained tensor that has memory with another one, given their names and whether they are trained: an update of one changes both in plain
    PyTorch, and would not here."""
    plain = ((name, one, trained) for name, one, trained in tensors if type(one) in (torch.Tensor, nn.Parameter) and one.layout is torch.strided)
    placed = [(one.data_ptr(), one.numel() * one.element_size(), name, trained) for name, one, trained in plain if not one.is_meta and is_dense(one)]
    end, before, before_trained = 0, "", False
    for start, size, name, trained in sorted(placed):
        if size and start < end and (trained or before_trained):
            raise NotSupported(
                f"{name} has memory with {before}, so that plain PyTorch updates both with one: make them one parameter, as model.tie_weights() does, or give "
                "each memory of its own, as param.data = param.data.clone() does"
            )
        if start + size > end:
            end, before, before_trained = start + size, name, trained


def blocks_of(model: nn.Module, wanted: Optional[Sequence]) -> list[tuple[str, nn.Module]]:
    """The modules that become units, outermost first, with their names.

    `wanted` has classes, names of classes, or patterns of module names. Without it: the model's `_no_split_modules`, else the
    members of lists of three or more modules of one class.
    """
    if wanted:
        names = {one if isinstance(one, str) else one.__name__ for one in wanted}
        found = [
            (name, module)
            for name, module in model.named_modules()
            if type(module).__name__ in names or any(fnmatch.fnmatchcase(name, pattern) for pattern in names)
        ]
        if not found:
            raise Error(f"units: no module of the model is one of {', '.join(sorted(names))}; name classes or patterns of module names")
        return _outermost(found)
    classes = set(getattr(model, "_no_split_modules", None) or ())
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]
    if found:
        return _outermost(found)
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            members = list(module.named_children())
            if len(members) >= BLOCKS_MIN and len({type(member) for _, member in members}) == 1:
                found += [(f"{name}.{key}" if name else key, member) for key, member in members]
    return _outermost(found)


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    kept: list[tuple[str, nn.Module]] = []
    within: set[int] = set()
    for name, module in found:
        if name and id(module) not in within:
            kept.append((name, module))
            within.update(map(id, module.modules()))
    return kept


def alignment_of(moments: str) -> int:
    """At which multiples parameters start whose moments are stored as the setting `moments` says."""
    return BLOCK_ELEMS if moments == "8bit" else ALIGN_ELEMS


def units_of(
    model: nn.Module,
    wanted: Optional[Sequence],
    frozen: bool = True,
    fp32_gradients: bool = False,
    trains: bool = True,
    apart: Optional[Mapping[nn.Module, nn.Module]] = None,
    align_elems: int = ALIGN_ELEMS,
    muon: Container[int] = (),
) -> tuple[list[Unit], dict[int, nn.Module]]:
    """The model's units and the module of each; the last ones, of the model itself, hold what is in no block. Without `frozen`,
    frozen parameters stay where they are. Gradients lie in tiles in fp32 or in the parameters' type. Unless the run `trains`, no unit is
    trained, whatever requires gradients. Modules of blocks that are in `apart` are units of their own, which come with the module it names. Parameters with
    the ids `muon`, which Muon updates, are in units of their own.
    """
    users = users_of(model)
    params = [param for param in model.parameters() if param.requires_grad or frozen]
    _check(params, trains)
    if trains:
        check_memory((name, one, one.requires_grad) for name, one in (*model.named_parameters(), *model.named_buffers()))
    managed = set(map(id, params))
    names = {id(param): name for name, param in model.named_parameters()}
    packed = {id(param): packed_of(names[id(param)], param, users[id(param)]) for param in params}
    bytes_of = lambda own: sum(packed[id(param)].part.nbytes for param in own)

    taken: set[int] = set()
    candidates = []
    apart = apart or {}
    for name, module in _blocks_and(apart, model, wanted):
        inside = set(map(id, module.modules()))
        # What others use too belongs to the root: it must be there for all of them.
        own = [
            param
            for param in dict.fromkeys(module.parameters())
            if id(param) in managed and id(param) not in taken and all(id(user) in inside for user in users[id(param)])
        ]
        taken.update(map(id, own))
        candidates.append((name, module, own))
    largest = max((bytes_of(own) for _, _, own in candidates), default=0)
    units: list[Unit] = []
    modules: dict[int, nn.Module] = {}
    in_blocks: set[int] = set()

    def add(name: str, module: nn.Module, own: list[nn.Parameter]) -> None:
        groups: dict[tuple[bool, torch.dtype, bool, bool], list[nn.Parameter]] = {}
        for param in own:
            trained = trains and param.requires_grad
            groups.setdefault((not trained, packed[id(param)].part.dtype, param.is_meta, trained and id(param) in muon), []).append(param)
        for (frozen, dtype, _, by_muon), of_group in sorted(groups.items(), key=lambda one: (one[0][0], str(one[0][1]), *one[0][2:])):
            kind = [str(dtype).removeprefix("torch.")] * (len({of for _, of, *_ in groups}) > 1) + ["frozen"] * (trains and frozen) + ["Muon"] * by_muon
            modules[len(units)] = apart.get(module, module)
            label = f"{name} ({', '.join(kind)})" if kind else name
            of_unit = [packed[id(param)] for param in of_group]
            of = dict(root=module is model, apart=apart.get(module) is module, packed=of_unit, align_elems=ALIGN_ELEMS if frozen else align_elems)
            unit = Unit(len(units), label, of_group, trained=not frozen, **of)
            unit.muon = by_muon
            unit.gradient_dtype = torch.float32 if fp32_gradients else gradient_dtype(dtype, by_muon)
            units.append(unit)

    for name, module, own in candidates:
        if own and (module in apart or bytes_of(own) * SMALL_PART >= largest):
            add(name, module, own)
            in_blocks.update(map(id, own))
    rest = [param for param in dict.fromkeys(params) if id(param) not in in_blocks]
    if rest:
        add("(root)", model, rest)
    return units, modules


def gradient_dtype(came: torch.dtype, muon: bool) -> torch.dtype:
    """The type in tiles of gradients that have `came` in one."""
    # A direction is bf16, and its small numbers are none of fp16.
    return torch.float32 if muon and came == torch.float16 else came


def _blocks_and(apart: Mapping[nn.Module, nn.Module], model: nn.Module, wanted: Optional[Sequence]) -> Iterator[tuple[str, nn.Module]]:
    """The model's blocks, and before each of them what is `apart` within it."""
    for name, block in blocks_of(model, wanted):
        for inner, module in block.named_modules() if apart else ():
            if module in apart:
                yield f"{name}.{inner}", module
        yield name, block


def _check(params: list[nn.Parameter], trains: bool) -> None:
    if trains and not any(param.requires_grad for param in params):
        raise Error("no parameter of the model requires a gradient: there is nothing to train; to use the model as it is, pass None as the optimizer")
    devices = list(dict.fromkeys(param.device for param in params if not param.is_meta))
    if len(devices) > 1:
        raise NotSupported(f"parameters are on {devices[0]} and on {devices[1]}: move the model to one device")
    for param in params:
        if nn.parameter.is_lazy(param):
            raise NotSupported("the model has a lazy layer without parameters: call the model once before offloadd.prepare, which makes them")
        if type(param) is not nn.Parameter and (param.requires_grad or param.is_meta):
            raise NotSupported(f"a parameter is a {type(param).__name__}: only plain torch.nn.Parameter can be offloaded")
        if trains and param.requires_grad and param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotSupported(f"a trained parameter is {param.dtype}: it can be float32, bfloat16 or float16")
        if trains and param.requires_grad and getattr(param, "grad_dtype", param.dtype) != param.dtype:
            raise NotSupported(
                f"a trained parameter is {param.dtype} and its grad_dtype is {param.grad_dtype}: leave grad_dtype as it is; gradients of several backward passes "
                "are added up in float32, unless data_types.grad_accum_dtype says otherwise"
            )

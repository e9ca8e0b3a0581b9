"""Reads: weights that a script looks at outside of forward, their attributes, and functional transforms."""

import contextlib
import copy
import ctypes
import gc
import inspect
import os
import weakref

import numpy
import torch

# As scripts take names: before any model is prepared.
from torch import tensor as tensor_of_before
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, functionalize as functionalize_of_before
from torch.utils.dlpack import to_dlpack as to_dlpack_of_before

from table import EQUAL, Block, Theme, net

# Of the error that the memory of a released block raises, whoever reaches for it.
RELEASED = "is used after it was released, and the values are in tiles"

read = Theme("read", changes=False)

read.equal("`w[0]`", lambda s: s.w[0])
read.equal("`w[0, 1].item()`", lambda s: s.w[0, 1].item())
read.equal("slices with steps", lambda s: s.w[:, ::2])
read.equal("a mask", lambda s: s.w[s.w > 0])
read.equal("an index tensor", lambda s: s.w[torch.tensor([2, 0])])
read.equal("`w[..., None]`", lambda s: s.w[..., None])
read.equal("`w.T`", lambda s: s.w.T)
read.equal("`w.t() @ w`", lambda s: s.w.t() @ s.w)
read.equal("`w.view(-1)`", lambda s: s.w.view(-1))
read.equal("`flatten`, `reshape`, `permute`", lambda s: [s.w.flatten(), s.w.reshape(4, -1), s.w.permute(1, 0)])
read.equal("`expand`", lambda s: s.b.expand(3, -1))
read.equal("`narrow`, `select`, `diagonal`", lambda s: [s.w.narrow(0, 1, 2), s.w.select(1, 3), s.w.diagonal()])
read.equal("`unfold`", lambda s: s.w.unfold(0, 4, 2))
read.equal("`as_strided`", lambda s: s.w.as_strided((3, 3), (1, 2)))
read.equal("views of views", lambda s: s.w[2:9].t()[::3].contiguous())
read.equal("`view(torch.int32)`", lambda s: s.w.view(torch.int32))
read.equal("`view_as_complex`", lambda s: torch.view_as_complex(s.w.view(-1, 8, 2)))
read.equal("`sum`, `mean`, `std`, `norm`", lambda s: [s.w.sum(), s.w.mean(), s.w.std(), s.w.norm()])
read.equal("`float`, `bool` and `format`", lambda s: [float(s.w.mean()), bool((s.w > 0).any()), f"{s.w.mean():.5f}"])
read.equal("`min`, `max`, `argmax`", lambda s: [s.w.min(), s.w.max(), s.w.argmax()])
read.equal("arithmetic with numbers and tensors", lambda s: [s.w + 1, 2 * s.w, 1 / s.w, s.w - s.w.mean(), -s.w, abs(s.w), s.w**2])
read.equal("comparisons", lambda s: [s.w == s.w, s.w > 0.1, torch.equal(s.w, s.w), torch.allclose(s.w, s.w + 1)])
read.equal(
    "`F.linear`, `einsum`, `bmm`",
    lambda s: [F.linear(torch.ones(16), s.w), torch.einsum("ij,kj->ik", s.w, s.w), torch.bmm(s.w[None], s.w.t()[None])],
)
read.equal("`cat`, `stack`, `hstack` of parameters", lambda s: [torch.cat([s.w.flatten(), s.b]), torch.stack([s.b, s.b]), torch.hstack([s.b, s.b])])
read.equal("`cosine_similarity` of two blocks", lambda s: F.cosine_similarity(s.w, s.model.blocks[0].up.weight))
read.equal("`clone`, `detach`, `data`", lambda s: [s.w.clone(), s.w.detach(), s.w.data])
read.equal("`cpu`, `to`, `double`, `bfloat16`", lambda s: [s.w.cpu(), s.w.to(torch.float16), s.w.double(), s.w.bfloat16()])
read.equal("`cpu`, `to`, `contiguous`, `+w` and others that give back the weight itself", lambda s: _themselves(s))
read.equal("`contiguous` and `to`, held over a step", lambda s: [held := [s.w.contiguous(), s.root.to("cpu")], s.step(0), held][2])
read.equal("a gradient for what `to` gives back", lambda s: torch.autograd.grad(s.loss(), [s.w.to("cpu"), s.b.float()]))
read.equal("`numpy`", lambda s: s.w.detach().numpy().sum().item())
read.equal("`numpy` of a parameter that requires a gradient", lambda s: s.w.numpy(), error=RuntimeError)
read.equal("`numpy.asarray(w.detach())`", lambda s: float(numpy.asarray(s.w.detach()).max()))
read.equal("`numpy.mean` of `w.data`", lambda s: float(numpy.mean(s.w.data.cpu().numpy())))
read.equal("`tolist`", lambda s: s.w.tolist())
read.equal(
    "`torch.tensor(w)`, `new_tensor`", lambda s: [torch.tensor(s.w), torch.tensor([s.w[0, 0], s.w[1, 0]]), s.w.new_tensor(s.w), torch.ones(1).new_tensor(s.w)]
)
read.equal("`torch.sparse_coo_tensor` of a weight", lambda s: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), s.model.last.weight[:2]).to_dense())
read.equal("a function of `torch.jit.script`", lambda s: _scripted()(s.w))
read.equal("a gradient that is a weight", lambda s: [s.w.backward(s.w), s.optimizer.zero_grad(), torch.autograd.grad(s.w * 2, s.w, s.w)][2])
read.equal("`format`, `str`, `repr` of views", lambda s: [f"{s.w[0, 1]:.3f}", str(s.w[0].detach()), repr(s.w.data[1])])
read.equal("all functions of torch and of tensors, with weights", lambda s: _is_safe(s))
read.equal("`dlpack`", lambda s: torch.from_dlpack(s.w.detach()))
read.equal("`torch.utils.dlpack.to_dlpack`", lambda s: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(s.w.detach())))
read.equal("`histc`, `quantile`, `bincount`", lambda s: [s.w.histc(8), s.w.quantile(0.3), (s.w * 10).abs().long().flatten().bincount()])
read.equal("`fft`", lambda s: torch.fft.rfft(s.w).abs())
read.equal("`linalg.norm`, `matrix_rank`, `cond`", lambda s: [torch.linalg.norm(s.w), torch.linalg.matrix_rank(s.w), torch.linalg.cond(s.w)])
read.equal("`as_subclass`", lambda s: [s.w.as_subclass(torch.Tensor).sum(), s.w.data.as_subclass(torch.Tensor)])
read.equal("parameters outside of blocks", lambda s: [s.root[1], s.root.T, s.root.sum()])
read.equal("all parameters in a loop", lambda s: {name: param.abs().mean() for name, param in s.model.named_parameters()})
read.equal("`sum(p.numel() for p in parameters())`", lambda s: sum(p.numel() for p in s.model.parameters()))
read.equal("the norm of all weights", lambda s: torch.norm(torch.stack([p.detach().norm() for p in s.model.parameters()])))
read.equal("`_foreach_norm`", lambda s: torch._foreach_norm([p.detach() for p in s.model.parameters()]))
read.equal("`_foreach_mul` of parameters", lambda s: torch._foreach_mul(list(s.model.parameters()), 2.0))
read.equal(
    "under `no_grad` and `inference_mode`",
    lambda s: [torch.no_grad()(lambda: s.w[0] * 2)(), torch.inference_mode()(lambda: (s.w[1] * 2).sum().item())()],
)
read.equal(
    "weights in a penalty of the loss",
    lambda s: [(s.loss() + 0.1 * sum(p.pow(2).sum() for p in s.model.parameters())).backward(), s.optimizer.step()],
)
read.equal("a gradient of a weight's own", lambda s: torch.autograd.grad(s.w.square().sum(), s.w)[0])
read.equal("after a step", lambda s: [s.step(0, 1), s.w[0], s.root.sum()][1:])
read.equal("between backward and step", lambda s: [s.backward(0), s.w[0].clone(), s.root.sum(), s.optimizer.step()][1:3])
read.equal("in a block's forward, of another block", lambda s: _reads_in_forward(s))
read.equal("`w.data` in forward", lambda s: _uses_data_in_forward(s))


def _themselves(s):
    given = [s.w.cpu(), s.w.to("cpu"), s.w.float(), s.w.type(torch.float32), s.w.contiguous(), +s.w, s.w.real, torch.as_tensor(s.w), F.dropout(s.w, 0.5, False)]
    return [[one is s.w for one in (*given, *torch.atleast_2d(s.w, s.b))], given[0]._cdata == s.w._cdata, s.w.double() is s.w]


def _reads_in_forward(s):
    class Reads(Block):
        def forward(self, x):
            return super().forward(x) * first[0].up.weight[0].mean().sigmoid()

    model = net(block=Reads)
    first = [model.blocks[0]]
    s.begin(model)
    s.step(0, 1)


def _uses_data_in_forward(s):
    class Reads(Block):
        def forward(self, x):
            scale = self.up.weight.data.norm() + self.down.weight.detach().max()
            return super().forward(x) / scale

    s.begin(net(block=Reads))
    s.step(0, 1)


@read.refused("a view made before a step and read after it", "read them again", none=EQUAL)
def _(s):
    row = s.w.detach()[0]
    whole = s.w.data
    s.step(0)
    return [row, whole]


@read.equal("a copy made before a step")
def _(s):
    before = {name: param.detach().clone() for name, param in s.model.named_parameters()}
    s.step(0)
    return [before, sum((param.detach() - before[name]).abs().sum() for name, param in s.model.named_parameters())]


@read.equal("`torch.from_numpy(w.detach().numpy())` after a step")
def _(s):
    s.step(0)
    return torch.from_numpy(s.w.detach().numpy())


@read.equal("an autograd function of a script's own")
def _(s):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            ctx.save_for_backward(w)
            return w * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 + 0 * ctx.saved_tensors[0]

    return torch.autograd.grad(Double.apply(s.w).square().sum(), s.w)[0]


def _untold(s, read):
    """Reads a weight and a bias where nothing tells that they are parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        return read(s.w, s.b)


# Where weights stay in memory, of what was written there.
BEFORE = "before offloadd.prepare"

unseen = Theme("read below PyTorch's dispatch", changes=False, none=EQUAL)

unseen.refused("`from torch import tensor` before `prepare`", RELEASED, lambda s: tensor_of_before(s.w), error=RuntimeError)
unseen.equal("`tensor` of a list of elements, imported before `prepare`", lambda s: tensor_of_before([s.w[0, 0], s.w[1, 0]]))
unseen.refused("`from torch.utils.dlpack import to_dlpack`", RELEASED, lambda s: to_dlpack_of_before(s.w), error=RuntimeError)
unseen.refused("`torch.Tensor(w)`", RELEASED, lambda s: torch.Tensor(s.w) + 1, error=RuntimeError)
unseen.refused("`torch.FloatTensor(w)`", RELEASED, lambda s: torch.FloatTensor(s.w).sum(), error=RuntimeError)
unseen.refused("`torch.sparse.FloatTensor(i, w)`", RELEASED, lambda s: torch.sparse.FloatTensor(torch.arange(16)[None], s.b).to_dense(), error=RuntimeError)
unseen.refused("`torch.empty(0).set_(w)`", RELEASED, lambda s: torch.empty(0).set_(s.w).sum(), error=RuntimeError)
unseen.refused("a tensor whose `data` is a weight", RELEASED, lambda s: _as_data(s), error=RuntimeError)
unseen.equal("`torch.nested.nested_tensor`", lambda s: torch.nested.nested_tensor([s.b, s.b]).to_padded_tensor(0.0))
unseen.refused("without `__torch_function__`", RELEASED, lambda s: _untold(s, lambda w, b: w.sum()), error=RuntimeError)
unseen.refused("without `__torch_function__`, by numpy", RELEASED, lambda s: _untold(s, lambda w, b: w.detach().numpy()), error=RuntimeError)
unseen.refused("without `__torch_function__`, its address", RELEASED, lambda s: _untold(s, lambda w, b: w.data_ptr() > 0), error=RuntimeError)
unseen.refused(
    "without `__torch_function__`, in place",
    RELEASED,
    lambda s: [_untold(s, lambda w, b: b.detach().add_(1)), s.step()],
    error=RuntimeError,
    none=BEFORE,
)
unseen.refused("`torch.Tensor._make_subclass`", RELEASED, lambda s: torch.Tensor._make_subclass(torch.Tensor, s.w).sum(), error=RuntimeError)
unseen.refused("a view that forward keeps, after it", RELEASED, lambda s: _kept(s, lambda w: w[0]), error=RuntimeError)
unseen.refused("`w.data` that forward keeps, after it", RELEASED, lambda s: _kept(s, lambda w: w.data), error=RuntimeError)
unseen.refused(
    "the address of a storage that forward keeps",
    RELEASED,
    lambda s: _kept(s, torch.Tensor.untyped_storage, lambda one: one.data_ptr() > 0),
    error=RuntimeError,
)
unseen.refused("what forward keeps, after a step", RELEASED, lambda s: _kept(s, lambda w: w[0], steps=True), error=RuntimeError)
unseen.refused(
    "what forward keeps, written after it",
    RELEASED,
    lambda s: [_kept(s, lambda w: w.data, lambda one: one.mul_(2)), s.step()],
    error=RuntimeError,
    none=BEFORE,
)
unseen.equal("`is_shared` of a view that forward keeps", lambda s: _kept(s, lambda w: w[0], torch.Tensor.is_shared))
unseen.equal("a copy that forward keeps, after it", lambda s: _kept(s, lambda w: w[0].clone()))
unseen.refused("what autograd has saved of a weight", RELEASED, lambda s: _saved_by_autograd(s), error=RuntimeError)


def _as_data(s):
    other = torch.zeros(())
    other.data = s.w
    return other.sum()


def _kept(s, keep, read=lambda one: one.sum(), steps=False):
    """Reads after forward what a block has kept of its weight in it."""
    kept = []

    class Keeps(Block):
        def forward(self, x):
            kept.append(keep(self.up.weight))
            return super().forward(x)

    s.begin(net(block=Keeps))
    s.step(0) if steps else s.loss(0)
    return read(kept[1])


def _saved_by_autograd(s):
    found, nodes = [], [s.loss(0).grad_fn]
    while nodes:
        node = nodes.pop()
        found += [getattr(node, name) for name in ("_saved_mat2", "_saved_weight") if hasattr(node, name)]
        nodes += [one for one, _ in node.next_functions if one is not None]
    return [one.sum() for one in found if isinstance(one, torch.Tensor)]


def _scripted():
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    return torch.jit.script(doubled)


# Public functions that end the process of any script that calls them like this, and one that takes long.
_END = ("PyTorchFileWriter", "sym_fresh_size", "compile")


def _is_safe(s):
    """Calls all functions with weights, in a forked process: none may reach memory that is not there, whatever else it says."""
    w, index = s.w, torch.tensor([[0, 1]])
    arguments = [(w,), (w, w), ([w],), (torch.ones(1), w), (index, w)]
    child = os.fork()
    if child == 0:
        for file in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), file)
        for owner in (torch, torch.Tensor):
            for name in dir(owner):
                for given in arguments if name[0] != "_" and name not in _END and callable(getattr(owner, name)) else ():
                    with contextlib.suppress(BaseException):
                        getattr(owner, name)(*given)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


viewed = Theme("views and tuples", changes=False)

viewed.equal("iteration", lambda s: [row.norm() for row in s.w])
viewed.equal("`list(w)`, `[*w]`", lambda s: [list(s.w), [*s.root]])
viewed.equal("`zip(w, v)`", lambda s: [(a * b).sum() for a, b in zip(s.w, s.model.blocks[0].up.weight)])
viewed.equal("`enumerate`, `reversed`", lambda s: [[index * row for index, row in enumerate(s.w)], list(reversed(s.w))])
viewed.equal("`chunk`", lambda s: s.w.chunk(2))
viewed.equal("`a, b = w.chunk(2)` and arithmetic", lambda s: (lambda a, b: (a - b).pow(2).sum())(*s.w.chunk(2)))
viewed.equal("`split`", lambda s: s.w.split(5))
viewed.equal("`split` with sizes", lambda s: torch.split(s.w, [8, 8, 16]))
viewed.equal("`unbind`", lambda s: s.w.unbind(1))
viewed.equal("`tensor_split`", lambda s: s.w.tensor_split(3))
viewed.equal("`hsplit`, `vsplit`", lambda s: [s.w.hsplit(2), s.w.vsplit(2)])
viewed.equal("`dsplit`", lambda s: s.w.view(4, 4, 32).dsplit(2))
viewed.equal("`unsafe_split`, `unsafe_chunk`", lambda s: [s.w.unsafe_split(5), s.w.unsafe_chunk(3)])
viewed.equal("`split_with_sizes`", lambda s: s.w.split_with_sizes([30, 2]))
viewed.equal("`split` of `w.data`", lambda s: s.w.data.split(5))
viewed.equal("`chunk` of a view", lambda s: s.w.t()[2:].chunk(3, dim=1))
viewed.equal("`topk`", lambda s: s.w.topk(3))
viewed.equal("`sort`, `argsort`, `msort`", lambda s: [s.w.sort(), s.w.argsort(), s.w.msort()])
viewed.equal("`max(dim)`, `min(dim)`", lambda s: [s.w.max(0), s.w.min(1), s.w.max(0).values, s.w.max(1).indices])
viewed.equal("`median(dim)`, `mode`, `kthvalue`", lambda s: [s.w.median(0), s.w.mode(0), s.w.kthvalue(2, 0)])
viewed.equal("`cummax`, `cummin`", lambda s: [s.w.cummax(0), s.w.cummin(1)])
viewed.equal("`aminmax`, `var_mean`, `std_mean`", lambda s: [s.w.aminmax(), torch.var_mean(s.w), torch.std_mean(s.w, dim=0)])
viewed.equal("`frexp`, `slogdet`", lambda s: [torch.frexp(s.w.detach()), torch.linalg.slogdet(s.w[:16])])
viewed.equal("`unique`", lambda s: s.w.round(decimals=1).unique(return_counts=True))
viewed.equal("`svd`", lambda s: torch.linalg.svd(s.w, full_matrices=False))
viewed.equal("`svd_lowrank`, `pca_lowrank`", lambda s: [torch.svd_lowrank(s.w.detach(), q=3)[1], torch.pca_lowrank(s.w.detach(), q=3)[1]])
viewed.equal("`qr`, `eigh`, `lu_factor`", lambda s: [torch.linalg.qr(s.w), torch.linalg.eigh(s.w.t() @ s.w), torch.linalg.lu_factor(s.w)])
viewed.equal("`nonzero(as_tuple=True)`, `where`", lambda s: [s.w.nonzero(as_tuple=True), torch.where(s.w > 0)])
viewed.equal("`meshgrid`, `broadcast_tensors`", lambda s: [torch.meshgrid(s.b, s.b, indexing="ij"), torch.broadcast_tensors(s.b, s.w)])
viewed.equal("`atleast_2d` of several", lambda s: torch.atleast_2d(s.b, s.w))
viewed.equal("`block_diag`, `cartesian_prod`", lambda s: [torch.block_diag(s.w, s.w), torch.cartesian_prod(s.b[:3], s.b[:2])])
viewed.equal("views kept while another block is read", lambda s: [parts := s.w.chunk(2), s.model.blocks[3].up.weight.sum(), parts[0] + parts[1]])
viewed.equal("views of parameters outside of blocks", lambda s: [s.root.chunk(2), list(s.root), s.root.unbind()])
viewed.equal("a fused projection that is split", lambda s: [part.norm() for part in s.w.view(2, 16, 16).unbind(0)])
viewed.equal(
    "a gradient through views",
    lambda s: torch.autograd.grad(sum((i + 1) * part.square().sum() for i, part in enumerate(s.w.chunk(4))), s.w)[0],
)
viewed.equal(
    "`pytree` and `nested_tensor`",
    lambda s: torch.nested.to_padded_tensor(torch.nested.nested_tensor([s.b.detach(), s.w[0].detach()]), 0.0),
)
viewed.equal("`vector of all weights`", lambda s: torch.nn.utils.parameters_to_vector(s.model.parameters()))


@viewed.equal("`chunk` in a forward, of another module's weight")
def _(s):
    class Splits(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.qkv.weight.chunk(3)
            a, b, c = self.qkv.bias.split(16)
            return x + F.linear(torch.tanh(F.linear(x, q, a)), k, b) * F.linear(x, v, c).sigmoid()

    s.begin(net(block=Splits))
    s.step(0, 1)


def _attributes(weight):
    """What a weight says of itself, in words, but for addresses, hooks, and changes of what is in memory."""
    said = {}
    for name in set(dir(torch.Tensor)) - {"_cdata", "_version", "__weakref__", "_backward_hooks", "_post_accumulate_grad_hooks"}:
        if inspect.isdatadescriptor(getattr(torch.Tensor, name)):
            try:
                value = getattr(weight, name)
                said[name] = "a tensor" if isinstance(value, torch.Tensor) else str(value)
            except (AttributeError, RuntimeError) as error:
                said[name] = type(error).__name__
    return said


attributes = Theme("attributes", changes=False)

attributes.equal("`shape`, `dtype`, `device`, `layout`", lambda s: [list(s.w.shape), str(s.w.dtype), str(s.w.device), str(s.w.layout)])
attributes.equal("`size`, `numel`, `dim`, `ndim`, `len`", lambda s: [list(s.w.size()), s.w.numel(), s.w.dim(), s.w.ndim, len(s.w)])
attributes.equal(
    "all of a tensor's, between backward and step and after it", lambda s: [s.backward(0), _attributes(s.w), s.optimizer.step(), _attributes(s.root)]
)
attributes.equal("`stride`, `is_contiguous`, `element_size`", lambda s: [s.w.stride(), s.w.is_contiguous(), s.w.element_size(), s.w.nbytes])
attributes.equal("`requires_grad`, `is_leaf`, `grad_fn`, `grad`", lambda s: [s.w.requires_grad, s.w.is_leaf, s.w.grad_fn, s.w.grad])
attributes.equal(
    "`is_floating_point`, `is_complex`, `is_cuda`, `is_meta`",
    lambda s: [s.w.is_floating_point(), s.w.is_complex(), s.w.is_cuda, s.w.is_meta],
)
attributes.equal(
    "`isinstance` of Parameter and Tensor",
    lambda s: [isinstance(s.w, nn.Parameter), isinstance(s.w, torch.Tensor), torch.is_tensor(s.w)],
)
attributes.differs(
    "`type(w) is nn.Parameter`", "a subclass while its values are in tiles; `isinstance` is True", lambda s: type(s.w) is nn.Parameter, none=EQUAL
)
attributes.equal("`type()` as a string", lambda s: s.w.type())
attributes.equal("identity and hash", lambda s: _identity(s))
attributes.equal(
    "membership in a set and a dict",
    lambda s: [s.w in {s.w}, {s.w: 1}[s.w], id(s.w) == id(next(p for n, p in s.model.named_parameters() if n.endswith("1.up.weight")))],
)
attributes.equal("attributes of a script's own", lambda s: [setattr(s.w, "tag", "x"), s.step(), s.w.tag][2])
attributes.equal("`is` before and after steps", lambda s: (lambda w: [s.step(0, 1), s.w is w][1])(s.w))
attributes.equal("weak references", lambda s: (lambda ref: [s.step(), gc.collect(), ref() is s.w][2])(weakref.ref(s.w)))
attributes.differs("`repr(w)` has values", "says that they are in tiles", lambda s: "tensor([[" in repr(s.w), none=EQUAL)
attributes.equal("`str` of a module", lambda s: str(s.model))
attributes.equal("`repr` of the optimizer", lambda s: repr(s.optimizer))
attributes.equal("`data_ptr` and storages of all parameters, to find tied ones", lambda s: _addresses(s))
attributes.equal("memory at `data_ptr`", lambda s: [ctypes.cast(s.w.data_ptr(), ctypes.POINTER(ctypes.c_float))[3], s.w.untyped_storage().tolist()[:4]])
attributes.equal("`untyped_storage().nbytes()` of `w.detach().clone()`", lambda s: s.w.detach().clone().untyped_storage().nbytes())
attributes.equal("`untyped_storage()` values", lambda s: len(bytes(s.w.detach().clone().untyped_storage())))
attributes.equal("`storage_offset` of a copy", lambda s: s.w.clone().storage_offset())
attributes.equal("`share_memory_` of a copy", lambda s: s.w.detach().clone().share_memory_().is_shared())
attributes.equal("`__cuda_array_interface__` is missing", lambda s: hasattr(s.w.detach(), "__cuda_array_interface__"))
attributes.equal("`__array_interface__` is missing", lambda s: hasattr(s.w.detach(), "__array_interface__"))
attributes.equal("`dir` has the usual names", lambda s: "add_" in dir(s.w))
attributes.equal("`_version` grows with a step", lambda s: (lambda before: [s.step(), s.w._version > before][1])(s.w._version))
attributes.equal("`names`, `itemsize`, `is_sparse`", lambda s: [s.w.names, s.w.itemsize, s.w.is_sparse, s.w.is_nested, s.w.is_quantized])
attributes.equal(
    "`torch.numel`, `torch.is_floating_point`",
    lambda s: [torch.numel(s.w), torch.is_floating_point(s.w), list(torch.tensor(0).expand_as(s.w).shape)],
)
attributes.equal(
    "`new_zeros`, `zeros_like`, `empty_like`",
    lambda s: [s.w.new_zeros(2), torch.zeros_like(s.w), list(torch.empty_like(s.w).shape), torch.ones_like(s.w, dtype=torch.int)],
)
attributes.equal("`zeros_like` requires no gradient", lambda s: [torch.zeros_like(s.w).requires_grad, type(torch.zeros_like(s.w)) is torch.Tensor])
attributes.equal("`type` of a result", lambda s: type(s.w + 1) is torch.Tensor)
attributes.differs("`type(w.data) is torch.Tensor`", "a subclass that refuses to be written", lambda s: type(s.w.data) is torch.Tensor, none=EQUAL)
attributes.equal("`get_device`, `is_shared`, `is_pinned`", lambda s: [s.w.get_device(), s.w.is_shared(), s.w.is_pinned()])
attributes.equal(
    "`requires_grad_(False)` of all, evaluation and back",
    lambda s: [s.model.requires_grad_(False), s.loss().item(), s.model.requires_grad_(True), s.step()][1],
)
attributes.equal(
    "`torch.promote_types`, `result_type`",
    lambda s: [str(torch.result_type(s.w, 1.0)), str(torch.promote_types(s.w.dtype, torch.float64))],
)
attributes.equal("`retain_grad` of a leaf", lambda s: [s.w.retain_grad(), s.step()])
attributes.equal("`is_inference`, `is_conj`, `is_neg`", lambda s: [s.w.is_inference(), s.w.is_conj(), s.w.is_neg()])
attributes.equal(
    "`model.get_parameter`, `getattr`",
    lambda s: [s.model.get_parameter("blocks.1.up.weight") is s.w, getattr(s.model.blocks[1].up, "weight") is s.w],
)
attributes.equal(
    "a step with the attributes read in between",
    lambda s: [s.backward(), s.w.grad.shape, s.w.grad.dtype, s.w.grad.device, s.w.grad is s.w.grad][1:2] and s.w.grad.requires_grad,
)


def _identity(s):
    w = s.w
    before = hash(w), id(w)
    s.step()
    return [before == (hash(s.w), id(s.w)), w is s.w]


def _addresses(s):
    params = [*s.model.parameters(), s.w]
    found = [[p.data_ptr() for p in params], [p.untyped_storage().data_ptr() for p in params], [p.data.data_ptr() for p in params]]
    return [[addresses.index(one) for one in addresses] for addresses in found]


functional = Theme("torch.func")
functional.equal("`functionalize`", lambda s: [s.w, torch.func.functionalize(lambda w: w * 2)(s.w)][1])
functional.equal("`from torch.func import functionalize` before `prepare`", lambda s: [s.w, functionalize_of_before(lambda w: w * 2)(s.w)][1])
functional.refused("`functionalize` of what writes to a weight", "functionalize changes", lambda s: _functionalized_write(s), none="before offloadd.prepare")

functional.equal("`functional_call` with the model's parameters", lambda s: functional_call(s.model, dict(s.model.named_parameters()), (s.x(),)))
functional.equal("`functional_call` with copies", lambda s: functional_call(s.model, s.weights(), (s.x(),)))
functional.equal("`functional_call` with changed weights", lambda s: functional_call(s.model, {k: v * 0.5 for k, v in s.weights().items()}, (s.x(),)))
functional.equal(
    "`functional_call` with some weights replaced",
    lambda s: functional_call(s.model, {"blocks.1.up.weight": torch.ones(32, 16)}, (s.x(),)),
)
functional.equal(
    "`functional_call` of a block",
    lambda s: functional_call(s.model.blocks[1], dict(s.model.blocks[1].named_parameters()), (torch.ones(2, 16),)),
)
functional.equal("backward through `functional_call`", lambda s: _functional_backward(s))
functional.equal("`torch.func.grad` over the weights", lambda s: _grad(s))
functional.equal("`torch.func.grad` over the input", lambda s: torch.func.grad(_sum(s))(s.x()))
functional.equal("`torch.func.grad_and_value`", lambda s: torch.func.grad_and_value(_sum(s))(s.x()))
functional.equal("`vmap` over a batch", lambda s: torch.vmap(_quiet(s))(s.x()))
functional.equal("gradients of each sample", lambda s: _per_sample(s))
functional.equal("`vmap` over a weight", lambda s: torch.vmap(lambda row: row.sum())(s.w))
functional.equal("`jvp`", lambda s: torch.func.jvp(_quiet(s), (s.x(),), (torch.ones(4, 8),)))
functional.equal("`vjp`", lambda s: torch.func.vjp(_quiet(s), s.x())[1](torch.ones(4, 5)))
functional.equal("`jacrev`", lambda s: torch.func.jacrev(_quiet(s))(s.x()))
functional.equal("`jacfwd`", lambda s: torch.func.jacfwd(_quiet(s))(s.x()))
functional.equal("`hessian` over the input", lambda s: torch.func.hessian(_sum(s))(s.x()[0]))
functional.equal("`linearize`", lambda s: torch.func.linearize(_quiet(s), s.x())[0])
functional.equal("`torch.func.functionalize`", lambda s: torch.func.functionalize(_quiet(s))(s.x()))
functional.equal("forward AD of the input", lambda s: _dual(s))
functional.equal("forward AD of a weight", lambda s: _dual_weight(s))
functional.equal("`stack_module_state` of two models", lambda s: _stacked(s))
functional.equal("`autograd.functional.jacobian`", lambda s: torch.autograd.functional.jacobian(_quiet(s), s.x()))
functional.equal("`autograd.functional.vjp`", lambda s: torch.autograd.functional.vjp(_quiet(s), s.x(), torch.ones(4, 5)))
functional.refused("`autograd.functional.jvp`", "create_graph=True", lambda s: torch.autograd.functional.jvp(_quiet(s), s.x(), torch.ones(4, 8)), none=EQUAL)
functional.refused("`autograd.functional.hvp`", "create_graph=True", lambda s: torch.autograd.functional.hvp(_sum(s), s.x(), torch.ones(4, 8)), none=EQUAL)
functional.equal("`TorchDispatchMode` around a forward", lambda s: _dispatch_mode(s))
functional.equal("`TorchFunctionMode` around a forward", lambda s: _function_mode(s))
functional.equal("`FakeTensorMode`", lambda s: _fake(s))
functional.equal("`make_fx` of a forward", lambda s: torch.fx.experimental.proxy_tensor.make_fx(_quiet(s))(s.x())(s.x()))
functional.equal("the flop counter", lambda s: _flops(s))


def _quiet(s):
    """The model without dropout."""
    return s.trained[-1][0] if s.trained else s.begin(net(dropout=0.0))


def _sum(s):
    """The sum of what the model makes of an input."""
    model = _quiet(s)
    return lambda x: model(x).sum()


def _functionalized_write(s):
    with torch.no_grad():
        functionalize_of_before(lambda w: w.mul_(2))(s.w)
    s.step(0)


def _functional_backward(s):
    model = _quiet(s)
    x, y = s.batch()
    F.cross_entropy(functional_call(model, dict(model.named_parameters()), (x,)), y).backward()
    s.optimizer.step()


def _grad(s):
    model = _quiet(s)
    x, y = s.batch()
    return torch.func.grad(lambda params: F.cross_entropy(functional_call(model, params, (x,)), y))(s.weights())


def _per_sample(s):
    model = _quiet(s)
    x, y = s.batch()

    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    params = {name: param.detach() for name, param in model.named_parameters()}
    return torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)


def _dual(s):
    model = _quiet(s)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(s.x(), torch.ones(4, 8))
        return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent


def _dual_weight(s):
    w = s.w
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w.detach(), torch.ones_like(w))
        return torch.autograd.forward_ad.unpack_dual((dual * w).sum()).tangent


def _stacked(s):
    models = [s.begin(net(seed, dropout=0.0)) for seed in range(2)]
    params, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(net(dropout=0.0)).to("meta")
    return torch.vmap(lambda p, x: functional_call(base, p, (x,)), in_dims=(0, None))(params, s.x())


def _dispatch_mode(s):
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    model = _quiet(s)
    with Names():
        out = model(s.x())
    return [out, names.count("aten.addmm.default")]


def _function_mode(s):
    from torch.overrides import TorchFunctionMode

    names = []

    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    model = _quiet(s)
    with Names():
        out = model(s.x())
    return [out, names.count("linear")]


def _fake(s):
    from torch._subclasses import FakeTensorMode

    model = _quiet(s)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return list(model(mode.from_tensor(torch.ones(4, 8))).shape)


def _flops(s):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        _quiet(s)(s.x()).sum().backward()
    return counter.get_total_flops()

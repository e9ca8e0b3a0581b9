"""What training scripts do around a loop: gradients and states written below or beside PyTorch's operations, layers and groups that change midway."""

import copy
import gc
import io

import numpy
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import offloadd
from table import CLASSES, EQUAL, EVERYWHERE, INPUTS, WIDTH, Block, Net, Theme, adamw, net, randomized

shared = Theme("memory that plain PyTorch shares")

BEFORE = "before offloadd.prepare"
STATE = "give the changed state to"


def _gradients(name, do, **more):
    """A line of a script that does something to each gradient after a step and before the next one."""

    def script(s):
        s.step(0)
        s.backward(1)
        for param in s.model.parameters():
            do(param)
        s.optimizer.step()
        s.optimizer.zero_grad()

    (shared.refused if "phrase" in more else shared.equal)(name, *([more.pop("phrase")] if "phrase" in more else []), script, **more)


_gradients("`p.grad.numpy()` in place", lambda p: p.grad.numpy().__imul__(0.5), phrase="read-only", error=ValueError)
_gradients("`np.asarray(p.grad)` in place", lambda p: p.grad.__array__().fill(0), phrase="read-only", error=ValueError)
_gradients("`from_dlpack(p.grad)`", lambda p: torch.from_dlpack(p.grad).mul_(0.5), phrase="pass a clone() of it")
_gradients("`p.grad.share_memory_()`", lambda p: p.grad.share_memory_(), phrase="share a clone() of it")
_gradients("`p.grad.resize_`", lambda p: p.grad.resize_(3), phrase="its parameter's shape")
_gradients("`p.grad.apply_`", lambda p: p.grad.apply_(lambda value: value / 2))
_gradients("`p.grad.map_`", lambda p: p.grad.map_(torch.ones(p.shape), lambda value, one: value / 2 + 0 * one))
_gradients("`torch.clamp(p.grad, out=p.grad)`", lambda p: torch.clamp(p.grad, -0.01, 0.01, out=p.grad))
_gradients("rows of `p.grad` in a loop", lambda p: [row.mul_(0.5) for row in p.grad])


@shared.equal("gradients of two parameters that change places")
def _(s):
    s.backward(0)
    one, other = s.model.blocks[0].up.weight, s.model.blocks[1].up.weight
    one.grad, other.grad = other.grad, one.grad
    s.optimizer.step()


@shared.equal("one gradient given to two parameters")
def _(s):
    s.backward(0)
    s.model.blocks[1].up.weight.grad = s.model.blocks[0].up.weight.grad
    s.optimizer.step()


# A gradient that a script holds: it is one tensor through the backwards of a step.
GONE = "its values are gone; keep a clone() of it"
OWN = "a tensor of the script's own"


def _grads(s):
    return [param.grad for param in s.model.parameters()]


def _give(s, grads):
    for param, grad in zip(s.model.parameters(), grads):
        param.grad = grad


def _given(s, make):
    own = [make(param) for param in s.model.parameters()]
    _give(s, own)
    return own


def _give_same(s):
    one, other = s.model.blocks[0].up.weight, s.model.blocks[1].up.weight
    one.grad = other.grad = torch.zeros_like(one)


@shared.equal("gradients held over backwards, which add to them")
def _(s):
    s.backward(0)
    held = _grads(s)
    s.backward(1)
    s.note([one is grad for one, grad in zip(held, _grads(s))])
    s.note([[one.sum(), one.norm()] for one in held], exact=False)
    s.optimizer.step()


@shared.equal("gradients held over `zero_grad(set_to_none=False)` and a backward")
def _(s):
    s.backward(0)
    held = _grads(s)
    s.optimizer.zero_grad(set_to_none=False)
    s.note([one.sum() for one in held])
    s.backward(1)
    s.note([one.sum() for one in held])
    s.optimizer.step()


@shared.refused("gradients held over `zero_grad`, and added to the next ones", GONE)
def _(s):
    s.backward(0)
    held = _grads(s)
    s.optimizer.zero_grad()
    s.backward(1)
    for grad, one in zip(_grads(s), held):
        grad.add_(one)


@shared.refused("gradients held over a step and `zero_grad`, and read", GONE)
def _(s):
    s.backward(0)
    held = _grads(s)
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.note([one.sum() for one in held])


@shared.equal("gradients of two losses, the first by `clone`, projected and added")
def _(s):
    s.backward(0)
    first = [grad.clone() for grad in _grads(s)]
    s.optimizer.zero_grad()
    s.backward(1)
    dot = sum((one * other).sum() for one, other in zip(first, _grads(s)))
    _give(s, [one + other if dot > 0 else one - other for one, other in zip(first, _grads(s))])
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.step(2)


def _flat_gradients(s):
    params = list(s.model.parameters())
    flat, at = torch.zeros(sum(param.numel() for param in params)), 0
    for param in params:
        param.grad, at = flat[at : at + param.numel()].view_as(param), at + param.numel()
    return flat


def _after_backward(name, use, give=_flat_gradients):
    """A line of a script that gives gradients before a backward, and uses what it has of them afterwards."""
    shared.refused(name, OWN, lambda s: [own := give(s), s.backward(0), use(own)], error=RuntimeError)


_after_backward("a buffer of which gradients are views, read after backward", lambda flat: flat.norm())
_after_backward("a buffer of which gradients are views, written after backward", lambda flat: flat.mul_(0.5))
_after_backward("a view of a buffer of which gradients are views", lambda flat: flat[:3].tolist())
_after_backward("`numpy()` of a buffer of which gradients are views", lambda flat: flat.numpy())
_after_backward("the storage of a buffer of which gradients are views", lambda storage: storage[0], lambda s: _flat_gradients(s).untyped_storage())
_after_backward("gradients of a script's own, read after backward", lambda own: own[3].sum(), lambda s: _given(s, torch.ones_like))
_after_backward("gradients of a script's own, cleared by `_foreach_zero_` after backward", torch._foreach_zero_, lambda s: _given(s, torch.ones_like))


@shared.refused("a buffer of which gradients are views, cleared and given again each step", OWN, error=RuntimeError)
def _(s):
    flat = _flat_gradients(s)
    for number in range(2):
        flat.zero_()
        s.backward(number)
        s.optimizer.step()


def _ones(param):
    return torch.from_numpy(numpy.ones(param.shape, numpy.float32))


shared.refused("a gradient that is an array of numpy, and backward", OWN, lambda s: [own := _given(s, _ones), s.backward(0), own])
for _how, _array in (("numpy()", torch.Tensor.numpy), ("np.from_dlpack", numpy.from_dlpack)):
    shared.refused(
        f"an array of `{_how}` of a gradient that was given, and backward",
        OWN,
        lambda s, array=_array: [own := [array(one) for one in _given(s, torch.ones_like)], s.backward(0), own],
    )
shared.refused(
    "an array of `np.from_dlpack` of a buffer of which gradients are views, and backward",
    OWN,
    lambda s: [own := numpy.from_dlpack(_flat_gradients(s)), s.backward(0), own],
)
shared.refused("one gradient given to two parameters, and backward", "given the same memory", lambda s: [_give_same(s), s.backward(0)])


@shared.equal("a buffer of which gradients are views, which nobody uses after backward")
def _(s):
    flat = _flat_gradients(s).fill_(0.1)
    s.backward(0, 1)
    s.note([one.clone() for one in _grads(s)])
    s.optimizer.step()
    s.optimizer.zero_grad()
    s.step(2)
    s.note(flat.shape)


@shared.equal("zeros given before backward in a loop, whose variable is left")
def _(s):
    for number in range(2):
        for param in s.model.parameters():
            grad = torch.zeros_like(param)
            param.grad = grad
        s.step(number)
    s.note(grad.shape)


@shared.equal("gradients of `autograd.grad` that are still there after `zero_grad(set_to_none=False)` and a backward")
def _(s):
    grads = torch.autograd.grad(s.loss(0), list(s.model.parameters()))
    _give(s, grads)
    s.optimizer.step()
    s.optimizer.zero_grad(set_to_none=False)
    s.backward(1)
    s.optimizer.step()
    s.note([one.shape for one in grads])


class _Joined(nn.Module):
    """A block with one product for several weights, which gets their gradients as views of one memory."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = F.linear(x, torch.cat([self.q.weight, self.k.weight, self.v.weight])).chunk(3, -1)
        return x + torch.tanh(q * k) + v


class _Twice(Net):
    """Shared layers: its blocks run twice, with or without checkpoints."""

    def __init__(self, reentrant):
        super().__init__(block=_Joined, blocks=2)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def _joined(name, reentrant):
    shared.equal(name, lambda s: [s.begin(randomized(_Twice(reentrant))), s.backward(0, 1), s.note([one.clone() for one in _grads(s)]), s.step(2)][-1])


_joined("weights joined by `cat` in shared layers, whose gradients are views of one memory", None)
_joined("weights joined by `cat` in shared layers under `checkpoint`", False)
_joined("weights joined by `cat` in shared layers under `checkpoint(use_reentrant=True)`", True)


def _columns(s):
    params = [block.up.weight for block in s.model.blocks]
    together = torch.full((*params[0].shape, len(params)), 0.1)
    for number, param in enumerate(params):
        param.grad = together[..., number]


shared.equal("gradients that are columns of one buffer, which nobody uses after backward", lambda s: [_columns(s), s.backward(0), s.optimizer.step()][-1])
shared.equal("a buffer of which gradients are views, given after backward", lambda s: [s.backward(0), _flat_gradients(s).fill_(0.1), s.optimizer.step()])
shared.equal(
    "zeros given before each backward", lambda s: [[_give(s, [torch.zeros_like(p) for p in s.model.parameters()]), s.step(number)] for number in range(2)][0][0]
)


@shared.refused("momentum of a script's own as gradients, and `zero_grad(set_to_none=False)`", OWN, error=RuntimeError)
def _(s):
    own = [torch.zeros_like(param) for param in s.model.parameters()]
    for number in range(2):
        s.backward(number)
        for one, grad in zip(own, _grads(s)):
            one.mul_(0.9).add_(grad)
        _give(s, own)
        s.optimizer.step()
        s.optimizer.zero_grad(set_to_none=False)
        s.note(own)


def _zeroed_without_use(s, zero_grad):
    """A parameter whose gradient is zero gets weight decay, and one without a gradient none."""
    model = net()
    model.more = nn.Linear(WIDTH, WIDTH)
    s.begin(model, adamw(model.parameters(), weight_decay=0.5))
    s.continues = False
    s.loss_of = lambda model, x, y: F.cross_entropy(model(x), y) + model.more(torch.ones(WIDTH)).sum()
    s.backward(0)
    zero_grad(s)
    s.loss_of = lambda model, x, y: F.cross_entropy(model(x), y)
    s.backward(1)
    s.optimizer.step()
    return s.weights()


shared.equal(
    "`model.zero_grad(set_to_none=False)`, and a layer that is not used", lambda s: _zeroed_without_use(s, lambda s: s.model.zero_grad(set_to_none=False))
)
shared.equal("`optimizer.zero_grad(set_to_none=False)`, and a layer that is not used", lambda s: _zeroed_without_use(s, lambda s: s.optimizer.zero_grad(False)))


def _loaded_in_parts(s, state):
    for name, value in state.items():
        s.model.load_state_dict({name: value}, strict=False)
    s.step(0)


def _halved(state):
    with torch.no_grad():
        for value in state.values():
            value.copy_(value * 0.5)
    return state


shared.refused(
    "`own = model.state_dict(); own[name].copy_(x)`", STATE, lambda s: [s.step(0), _halved(s.model.state_dict()), s.step(1)], devices=EVERYWHERE, none=BEFORE
)
shared.refused("a row of `model.state_dict()[name]`", STATE, lambda s: [s.step(0), s.model.state_dict()["last.weight"][0].zero_(), s.step(1)], none=BEFORE)
shared.refused(
    "a `state_dict` that is written, and read again",
    STATE,
    lambda s: [s.step(0), _halved(s.model.state_dict()), s.model.state_dict(), s.step(1)],
    none=BEFORE,
)
shared.refused(
    "a `state_dict` of `inference_mode` that is written",
    STATE,
    lambda s: [s.step(0), torch.inference_mode()(lambda: s.model.state_dict()["last.weight"].zero_())(), s.step(1)],
    none=BEFORE,
)
shared.equal(
    "an optimizer's `state_dict` of `inference_mode`, loaded",
    lambda s: [s.step(0), s.optimizer.load_state_dict(torch.inference_mode()(lambda: s.optimizer.state_dict())()), s.step(1)],
)
shared.refused(
    "`model.state_dict()[name].numpy()` in place",
    "read-only",
    lambda s: [s.step(0), s.model.state_dict()["last.weight"].numpy().fill(0), s.step(1)],
    error=ValueError,
    none=BEFORE,
)
shared.refused(
    "a `state_dict` that is written, and other weights loaded",
    STATE,
    lambda s: [s.step(0), _halved(s.model.state_dict()), s.model.load_state_dict({"last.bias": torch.ones(5)}, strict=False), s.step(1)],
    none=BEFORE,
)
shared.equal("a `state_dict` that is written, and loaded in parts", lambda s: _loaded_in_parts(s, _halved(s.model.state_dict())), none=BEFORE)
shared.equal("a `state_dict` that is written and loaded", lambda s: [s.step(0), s.model.load_state_dict(_halved(s.model.state_dict())), s.step(1)])
shared.refused(
    "moments of `optimizer.state_dict()` in place",
    STATE,
    lambda s: [s.step(0), s.optimizer.state_dict()["state"][2]["exp_avg"].zero_(), s.step(1)],
)


@shared.equal("moments of `optimizer.state_dict()` that are written and loaded")
def _(s):
    s.step(0)
    state = s.optimizer.state_dict()
    state["state"][2]["exp_avg"].zero_()
    s.optimizer.load_state_dict(state)
    s.step(1)


shared.refused(
    "`optimizer.__setstate__({'state': {}})`, a restart",
    "use optimizer.load_state_dict",
    lambda s: [s.step(0), s.optimizer.__setstate__({"state": {}}), s.step(1)],
)

shared.refused(
    "two parameters that are one memory",
    "has memory with",
    lambda s: _begin_shared(s, lambda model, of_other: setattr(of_other, "data", model.last.weight.data)),
)
shared.refused(
    "a buffer that is a parameter's memory",
    "has memory with",
    lambda s: _begin_shared(s, lambda model, _: model.register_buffer("own", model.last.weight.data)),
)


def _begin_shared(s, share):
    model = net()
    model.other = nn.Linear(*reversed(model.last.weight.shape))
    share(model, model.other.weight)
    s.begin(model)


midway = Theme("changes midway")


@midway.equal("a block frozen for some steps", devices=EVERYWHERE)
def _(s):
    s.step(0)
    s.model.blocks[1].requires_grad_(False)
    s.step(1, 2)
    s.model.blocks[1].requires_grad_(True)
    s.step(3)


@midway.equal("a block frozen between backward and step")
def _(s):
    s.step(0)
    s.backward(1)
    s.model.blocks[1].requires_grad_(False)
    s.optimizer.step()


@midway.equal("blocks in another order")
def _(s):
    s.step(0)
    blocks = list(s.model.blocks)
    s.model.blocks = nn.ModuleList([blocks[2], blocks[0], blocks[3], blocks[1]])
    s.step(1, 2)


@midway.equal("a weight tied to another one")
def _(s):
    s.step(0)
    s.model.blocks[1].up.weight = s.model.blocks[0].up.weight
    s.step(1, 2)


@midway.equal("a layer replaced by one that has its weight")
def _(s):
    s.step(0)
    layer, old = nn.Linear(WIDTH, 2 * WIDTH), s.model.blocks[1].up
    layer.weight, layer.bias = old.weight, old.bias
    s.model.blocks[1].up = layer
    s.step(1, 2)


@midway.equal("a parameter moved to another group")
def _(s):
    model = net()
    optimizer = adamw([{"params": list(model.blocks.parameters())}, {"params": [*model.first.parameters(), *model.last.parameters()], "lr": 1e-3}])
    s.begin(model, optimizer)
    s.step(0)
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(2))
    s.step(1, 2)


@midway.equal("`ChainedScheduler`, and two schedulers that both step")
def _(s):
    chained = lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(s.optimizer, 0.5, 2), lr_scheduler.ExponentialLR(s.optimizer, 0.9)])
    other = lr_scheduler.LinearLR(s.optimizer, 0.5, total_iters=3)
    for number in range(3):
        s.step(number)
        chained.step()
        other.step()


@midway.equal("sharpness-aware steps by `functional_call`")
def _(s):
    for number in range(2):
        params = dict(s.model.named_parameters())
        grads = torch.autograd.grad(s.loss(number), list(params.values()))
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        moved = {name: param + 0.05 * grad / norm for (name, param), grad in zip(params.items(), grads)}
        x, y = s.batch(number)
        F.cross_entropy(torch.func.functional_call(s.model, moved, (x,)), y).backward()
        s.optimizer.step()
        s.optimizer.zero_grad()


@midway.equal("gradients of outputs kept, and a second forward for each part")
def _(s):
    s.model.eval()
    with torch.no_grad():
        outputs = [s.model(s.x(number)) for number in range(3)]
    kept = [output.detach().requires_grad_() for output in outputs]
    torch.cat(kept).logsumexp(0).sum().backward()
    for number, output in enumerate(kept):
        s.model(s.x(number)).backward(gradient=output.grad)
    s.optimizer.step()


@midway.equal("an adversarial input, and gradients of both passes")
def _(s):
    x, y = s.batch(1)
    x.requires_grad_()
    F.cross_entropy(s.model(x), y).backward()
    F.cross_entropy(s.model((x + 0.1 * x.grad.sign()).detach()), y).backward()
    s.optimizer.step()


class _OwnGradient(torch.autograd.Function):
    """A product that adds the gradient of its weight up itself, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            weight.grad = grad.T @ x if weight.grad is None else weight.grad + grad.T @ x
        return grad @ weight, None


class _Fused(Block):
    def forward(self, x):
        return x + self.down(F.gelu(_OwnGradient.apply(self.norm(x), self.up.weight) + self.up.bias))


midway.equal("a function that writes the gradient of its weight itself", lambda s: [s.begin(net(block=_Fused)), s.step(0, 1)][1])


@midway.equal("a loss that takes the head's weight outside of forward")
def _(s):
    def loss(model, x, y):
        for module in (model.first, *model.blocks):
            x = module(x)
        penalty = sum(param.pow(2).sum() for param in model.parameters())
        return F.cross_entropy(F.linear(x, model.last.weight), y) + 1e-3 * penalty

    assert s.model.last.out_features == CLASSES
    s.loss_of = loss
    s.step(0, 1)


# What a script takes before `prepare` goes on to be the parameters' memory in plain PyTorch.
held = Theme("memory held from before `prepare`")

AGAIN = "read them again"
DROP = "drop it before offloadd.prepare"

# How a script takes memory of weights, and what it does with it later.
TAKEN = {
    "`p.data`": (lambda m: _up(m).data, lambda old: old.sum()),
    "`p.detach()`": (lambda m: _up(m).detach(), lambda old: old + 0),
    "a view that autograd knows": (lambda m: _up(m).view(-1), lambda old: old.sum()),
    "a row": (lambda m: _up(m).data[1], lambda old: old.tolist()),
    "a transposed view": (lambda m: _up(m).data.T, lambda old: old.mean()),
    "a parameter made of `p.data`": (lambda m: nn.Parameter(_up(m).data), lambda old: old.sum()),
    "a `state_dict()`": (lambda m: m.state_dict(), lambda old: old["blocks.1.up.weight"].norm()),
    "that of a weight in no block": (lambda m: m.state_dict(), lambda old: old["last.weight"].norm()),
    "`copy.deepcopy` of it": (lambda m: m.state_dict(), copy.deepcopy),
    "`torch.save` of it": (lambda m: m.state_dict(), lambda old: torch.save(old, io.BytesIO())),
    "`safetensors` of it": (lambda m: m.state_dict(), lambda old: len(safetensors.torch.save(old))),
    "`numpy` of it": (lambda m: _up(m).data, lambda old: old.numpy().sum().item()),
    "its address": (lambda m: _up(m).data, lambda old: old.data_ptr() > 0),
    "`torch.stack` of rows": (lambda m: list(_up(m).detach()), torch.stack),
    "a `TensorDataset`": (lambda m: torch.utils.data.TensorDataset(_up(m).data), lambda old: old[0][0].sum()),
    "another model with the same memory": (lambda m: _with_memory_of(net(1), m), lambda other: other(torch.ones(1, INPUTS))),
}


class _Marked(torch.Tensor):
    pass


def _up(model):
    return model.blocks[1].up.weight


def _with_memory_of(other, model):
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


def _flat(model):
    """A buffer of which a model's parameters become views."""
    params = list(model.parameters())
    flat, at = torch.cat([param.detach().reshape(-1) for param in params]), 0
    for param in params:
        param.data, at = flat[at : at + param.numel()].view_as(param), at + param.numel()
    return flat


def _frozen(model):
    """A model with a block that is not trained."""
    model.blocks[1].requires_grad_(False)
    return model


def _begin_with(s, take, model=None):
    """Prepares a model of which something was taken. Returns that."""
    model = net() if model is None else model
    taken = take(model)
    s.begin(model)
    return taken


def _held(take, use, frozen=False):
    """A script that uses what it has taken before `prepare` after a step."""

    def script(s):
        taken = _begin_with(s, take, _frozen(net()) if frozen else net())
        s.step(0)
        s.note(use(taken))
        s.step(1)

    return script


@held.equal("what is taken, read before the first step")
def _(s):
    taken = _begin_with(s, lambda model: {name: take(model) for name, (take, _) in TAKEN.items()})
    for name, (_, use) in TAKEN.items():
        s.note([name, use(taken[name])])
    s.step(0)


@held.refused(f"{', '.join(TAKEN)}: read after a step", AGAIN, devices=EVERYWHERE)
def _(s):
    taken = _begin_with(s, lambda model: {name: take(model) for name, (take, _) in TAKEN.items()})
    s.step(0)
    for name, (_, use) in TAKEN.items() if s.run is not None else ():
        try:
            use(taken[name])
        except offloadd.NotSupported as one:
            error = one
        else:
            raise AssertionError(f"{name} can be read")
    s.run and _raise(error)


def _raise(error):
    raise error


@torch.no_grad()
def _half(old):
    old.mul_(0.5)


held.refused("`p.data`, written", BEFORE, lambda s: _half(_begin_with(s, lambda m: _up(m).data)))
held.refused("a `state_dict()`, written", BEFORE, lambda s: _half(_begin_with(s, lambda m: m.state_dict())["last.bias"]))
held.refused("a buffer of which parameters are views, written", BEFORE, lambda s: _half(_begin_with(s, _flat)))
held.refused("a part of it", BEFORE, lambda s: _half(_begin_with(s, lambda m: _flat(m)[3:5])))
held.refused("`p.data`, written after a step", AGAIN, _held(lambda m: _up(m).data, _half))
held.equal("`p.data` of a frozen block, read after a step", _held(lambda m: _up(m).data, lambda old: old.sum(), frozen=True))
held.refused("`p.data` of a frozen block, written", BEFORE, _held(lambda m: _up(m).data, _half, frozen=True), none=EQUAL)

held.refused("an array of numpy", DROP, lambda s: _begin_with(s, lambda m: _up(m).detach().numpy()))
held.refused("a view of an array of numpy, in a list", DROP, lambda s: _begin_with(s, lambda m: [_up(m).detach().numpy()[1:, ::-1]]))
held.refused("arrays of numpy in a dict", DROP, lambda s: _begin_with(s, lambda m: {"up": _up(m).detach().numpy()}))
held.refused("arrays of numpy in a tuple, after `gc.freeze()`", DROP, lambda s: _begin_frozen(s, lambda m: (_up(m).detach().numpy(),)))
held.refused("an array of numpy in an array of objects", DROP, lambda s: _begin_with(s, lambda m: numpy.array([_up(m).detach().numpy(), None], dtype=object)))
held.refused("an array of numpy of which a parameter was made", DROP, lambda s: _begin_with(s, lambda m: _of_array(m)))
held.equal("an array of numpy of which a parameter was made, dropped", lambda s: [_begin_with(s, lambda m: _of_array(m).shape), s.step(0)][1])
held.refused("a tensor of another class", DROP, lambda s: _begin_with(s, lambda m: _up(m).data.as_subclass(_Marked)))
held.equal("an array of a frozen block, read", _held(lambda m: _up(m).detach().numpy(), lambda old: old.sum().item(), frozen=True))
held.refused(
    "an array of a frozen block, written",
    "read-only",
    _held(lambda m: _up(m).detach().numpy(), lambda old: old.fill(0), frozen=True),
    error=ValueError,
    none=EQUAL,
)


def _begin_frozen(script, hold):
    def frozen(model):
        held = hold(model)
        gc.freeze()
        return held

    try:
        return _begin_with(script, frozen)
    finally:
        gc.unfreeze()


def _of_array(model):
    array = numpy.full(_up(model).shape, 0.1, dtype=numpy.float32)
    _up(model).data = torch.from_numpy(array)
    return array


held.refused("`model.share_memory()` before `prepare`", "give it memory of its own", lambda s: s.begin(net().share_memory()))
held.equal("a frozen block in shared memory", lambda s: [s.begin(_frozen(_shared_block(net()))), s.step(0, 1)][1])


def _shared_block(model):
    model.blocks[1].share_memory()
    return model


# What no class of ours is around.
OLD_MEMORY = "is used after weights were replaced"
held.refused("a storage", OLD_MEMORY, _held(lambda m: _up(m).untyped_storage(), lambda old: torch.empty(0).set_(old).sum()), error=RuntimeError)
held.refused(
    "`p.data` below PyTorch's dispatch",
    OLD_MEMORY,
    _held(lambda m: _up(m).data, lambda old: torch.Tensor._make_subclass(torch.Tensor, old).sum()),
    error=RuntimeError,
)


@held.equal("a graph of before, its backward after a step: an error")
def _(s):
    model = net()
    loss = model(s.x()).sum()
    s.begin(model)
    s.step(0)
    try:
        loss.backward()
    except RuntimeError:
        s.optimizer.zero_grad()
        return "refused"


@held.refused("`p.data` after `close`", AGAIN)
def _(s):
    old = _begin_with(s, lambda m: _up(m).data)
    if s.run is not None:
        s.run.close()
    old.sum()


class _Aliased(Block):
    def __init__(self):
        super().__init__()
        self.again = [self.up.weight.data]

    def forward(self, x):
        return super().forward(x) + 0 * F.linear(self.norm(x), self.again[0]).sum()


@held.refused("a list of a module's that forward reads", AGAIN)
def _(s):
    s.continues = False
    s.begin(net(block=_Aliased))
    s.step(0, 1)


# What is no memory of a parameter's.
@held.equal("copies, parameters, shapes and other numbers of before")
def _(s):
    model = net()
    beside = torch.ones(_up(model).numel() + 8)
    _up(model).data = beside[8:].view_as(_up(model)).copy_(_up(model).data)
    beside = beside[:8]
    copied, averaged, state = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model), model.state_dict()
    vector, params, clones = (
        nn.utils.parameters_to_vector(model.parameters()).detach(),
        dict(model.named_parameters()),
        [p.detach().clone() for p in model.parameters()],
    )
    array = _up(model).detach().numpy().copy()
    s.begin(model)
    s.step(0)
    s.note([copied.state_dict(), averaged.state_dict(), vector, params, clones, array.sum().item(), beside.mul_(2)])
    s.note([[list(one.shape), str(one.dtype), one.numel(), one.device.type, one.is_contiguous()] for one in state.values()])
    averaged.update_parameters(model)
    s.note(averaged.state_dict())


def _assigned(s):
    model, state = net(), {name: one.clone() for name, one in net(3).state_dict().items()}
    model.load_state_dict(state, assign=True)
    s.begin(model)
    return state


@held.equal("`load_state_dict(assign=True)` of a state that is kept, loaded by another model, and dropped")
def _(s):
    state, other = _assigned(s), net(1)
    other.load_state_dict(state)
    s.note(other.state_dict())
    s.step(0, 1)
    state.clear()


@held.refused("`load_state_dict` of a `state_dict()` of before", AGAIN)
def _(s):
    state = _begin_with(s, lambda m: m.state_dict())
    s.step(0)
    s.model.load_state_dict(state)

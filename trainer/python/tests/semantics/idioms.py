"""What training scripts do around a loop: gradients and states written below or beside PyTorch's operations, layers and groups that change midway."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from table import CLASSES, WIDTH, Block, Theme, adamw, net

shared = Theme("memory that plain PyTorch shares")

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


def _halved(state):
    with torch.no_grad():
        for value in state.values():
            value.copy_(value * 0.5)
    return state


shared.refused(
    "`own = model.state_dict(); own[name].copy_(x)`", STATE, lambda s: [s.step(0), _halved(s.model.state_dict()), s.step(1)], devices=("cpu", "nvme")
)
shared.refused("a row of `model.state_dict()[name]`", STATE, lambda s: [s.step(0), s.model.state_dict()["last.weight"][0].zero_(), s.step(1)])
shared.refused("a `state_dict` that is written, and read again", STATE, lambda s: [s.step(0), _halved(s.model.state_dict()), s.model.state_dict()])
shared.refused(
    "a `state_dict` of `inference_mode` that is written",
    STATE,
    lambda s: [s.step(0), torch.inference_mode()(lambda: s.model.state_dict()["last.weight"].zero_())(), s.step(1)],
)
shared.equal(
    "an optimizer's `state_dict` of `inference_mode`, loaded",
    lambda s: [s.step(0), s.optimizer.load_state_dict(torch.inference_mode()(lambda: s.optimizer.state_dict())()), s.step(1)],
)
shared.refused(
    "`model.state_dict()[name].numpy()` in place",
    "read-only",
    lambda s: [s.step(0), s.model.state_dict()["last.weight"].numpy().fill(0)],
    error=ValueError,
)
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
    "two parameters that are one memory", "has memory with", lambda s: _begin_with(s, lambda model, of_other: setattr(of_other, "data", model.last.weight.data))
)
shared.refused(
    "a buffer that is a parameter's memory", "has memory with", lambda s: _begin_with(s, lambda model, _: model.register_buffer("own", model.last.weight.data))
)


def _begin_with(s, share):
    model = net()
    model.other = nn.Linear(*reversed(model.last.weight.shape))
    share(model, model.other.weight)
    s.begin(model)


midway = Theme("changes midway")


@midway.equal("a block frozen for some steps", devices=("cpu", "nvme"))
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

"""Training: gradients, steps, optimizers, schedulers, precision, and what is saved and loaded."""

import contextlib
import copy
import io
import pathlib
import pickle
import tempfile

import numpy
import torch
import torch.distributed.checkpoint
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from table import CLASSES, EQUAL, EVERYWHERE, MEMORY, Block, Net, Theme, adamw, net, randomized

stepped = Theme("steps")

stepped.equal("one step after another", lambda s: s.step(0, 1, 2, 3), devices=EVERYWHERE)
stepped.refused("no `zero_grad` between steps", "zero_grad()", lambda s: s.step(0, 1, 2, zero=False), devices=EVERYWHERE)


def _block(s, number):
    """A backward that reaches one block."""
    s.model.blocks[number](torch.ones(1, 16)).square().sum().backward()


def _drop(s, number, drop):
    for param in s.model.blocks[number].parameters():
        drop(param)


stepped.refused(
    "no `zero_grad` between steps of two blocks",
    "zero_grad()",
    lambda s: [_block(s, 0), s.optimizer.step(), _block(s, 1), s.optimizer.step()],
    devices=EVERYWHERE,
)
stepped.equal(
    "`p.grad = None` of a block that a step has left, after a backward of another",
    lambda s: [_block(s, 0), s.optimizer.step(), _block(s, 1), _drop(s, 0, lambda p: setattr(p, "grad", None)), s.optimizer.step()],
)
stepped.equal(
    "`p.grad.zero_()` of a block that a step has left, after a backward of another",
    lambda s: [_block(s, 0), s.optimizer.step(), _block(s, 1), _drop(s, 0, lambda p: p.grad.zero_()), s.optimizer.step()],
)
stepped.equal(
    "`zero_grad` before backward instead of after the step",
    lambda s: [(s.optimizer.zero_grad(), s.step(n, zero=False)) for n in range(3)],
)
stepped.equal("`model.zero_grad()`", lambda s: [(s.step(n, zero=False), s.model.zero_grad()) for n in range(3)])
stepped.refused("a second step with the same gradients", "call backward again", lambda s: [s.backward(0), s.optimizer.step(), s.optimizer.step()])
stepped.equal("a step without gradients", lambda s: s.optimizer.step())
stepped.equal("a step without gradients after a step", lambda s: [s.step(0), s.optimizer.step(), s.step(1)])
stepped.equal("`zero_grad` and then a step", lambda s: [s.step(0), s.backward(1), s.optimizer.zero_grad(), s.optimizer.step(), s.step(2)])
stepped.equal("`zero_grad(set_to_none=False)`", lambda s: [(s.step(n, zero=False), s.optimizer.zero_grad(set_to_none=False)) for n in range(2)])
stepped.equal(
    "`zero_grad(set_to_none=False)` and then a step",
    lambda s: [s.step(0), s.backward(1), s.optimizer.zero_grad(False), s.optimizer.step()],
)
stepped.equal(
    "gradients of several batches",
    lambda s: [s.backward(0, 1, 2), s.optimizer.step(), s.optimizer.zero_grad(), s.step(3)],
    devices=EVERYWHERE,
)
stepped.equal("gradients dropped between batches", lambda s: [s.backward(0), s.model.zero_grad(), s.backward(1), s.optimizer.step()])
stepped.equal("`p.grad = None` of all", lambda s: [_each(s, lambda p: setattr(p, "grad", None)), s.step(1)])
stepped.equal("`p.grad = None` of some", lambda s: [s.backward(0), setattr(s.w, "grad", None), s.optimizer.step(), s.optimizer.zero_grad()])
stepped.refused(
    "`p.grad = None` of some, and more gradients",
    "drop all of them",
    lambda s: [s.backward(0), setattr(s.w, "grad", None), s.backward(1), s.optimizer.step()],
)
stepped.equal("`del p.grad`", lambda s: [s.backward(0), s.w.__delattr__("grad"), s.optimizer.step()])
stepped.equal("a loss divided by its batches", lambda s: [(s.loss(0) / 2).backward(), (s.loss(1) / 2).backward(), s.optimizer.step()])
stepped.equal("`loss.backward(gradient)`", lambda s: [s.loss(0).backward(torch.tensor(0.5)), s.optimizer.step()])
stepped.equal("`torch.autograd.backward` of two losses", lambda s: [torch.autograd.backward([s.loss(0), s.loss(1)]), s.optimizer.step()])
stepped.equal(
    "`backward(inputs=...)`",
    lambda s: [s.loss().backward(inputs=list(s.model.blocks[2].parameters())), s.optimizer.step(), s.weights()][2],
)
stepped.equal(
    "`retain_graph` and a second backward",
    lambda s: [(loss := s.loss()).backward(retain_graph=True), loss.backward(), s.optimizer.step()],
)
stepped.equal("a second backward without `retain_graph`", lambda s: [(loss := s.loss()).backward(), loss.backward()], error=RuntimeError)
stepped.equal("a graph of before a step", lambda s: [old := s.loss(), s.step(1), old.backward()], error=RuntimeError)
stepped.equal("two forwards, one backward", lambda s: [(s.loss(0) + s.loss(1)).backward(), s.optimizer.step()])
stepped.equal("an evaluation between forward and backward", lambda s: _evaluates_between(s))
stepped.equal("a forward whose result is dropped", lambda s: [s.loss(0), s.step(1)])
stepped.equal("`autograd.grad` over all weights", lambda s: torch.autograd.grad(s.loss(), list(s.model.parameters())))
stepped.equal("`autograd.grad` over one weight", lambda s: torch.autograd.grad(s.loss(), s.w)[0])
stepped.equal("`autograd.grad` over the input", lambda s: (lambda x: torch.autograd.grad(s.model(x).sum(), x)[0])(s.x().requires_grad_()))
stepped.equal("`autograd.grad` whose result is given to `p.grad`", lambda s: _given_gradients(s))
stepped.equal(
    "`autograd.grad` with `allow_unused`",
    lambda s: torch.autograd.grad(s.model.first(s.x()).sum(), [s.w, s.model.first.weight], allow_unused=True),
)
stepped.equal(
    "gradients of an activation",
    lambda s: (lambda h: torch.autograd.grad(s.model.last(s.model.blocks[1](h)).sum(), h)[0])(s.model.first(s.x())),
)
stepped.equal("a closure", lambda s: [s.optimizer.step(lambda: _closure(s, n)) for n in range(2)])
stepped.equal("a closure without gradients", lambda s: s.optimizer.step(lambda: 1.5))
stepped.equal(
    "some blocks unused",
    lambda s: [setattr(s, "loss_of", lambda m, x, y: F.cross_entropy(m.last(m.blocks[0](m.first(x))), y)), s.step(0, 1)],
)
stepped.equal("other blocks in each step", lambda s: _other_blocks(s))
stepped.equal(
    "a block used three times",
    lambda s: [setattr(s, "loss_of", lambda m, x, y: F.cross_entropy(m.last(m.blocks[0](m.blocks[0](m.blocks[0](m.first(x))))), y)), s.step(0, 1)],
)
stepped.equal("a loss that needs no gradient", lambda s: torch.zeros(()).backward(), error=RuntimeError)
stepped.equal("`detect_anomaly`", lambda s: _with_anomalies(s))
stepped.equal(
    "gradients under `set_grad_enabled`",
    lambda s: [torch.set_grad_enabled(False), s.loss().requires_grad, torch.set_grad_enabled(True), s.step()][1],
)
stepped.equal("`checkpoint(use_reentrant=False)`", lambda s: _checkpointed(s, use_reentrant=False), devices=EVERYWHERE)
stepped.equal("`checkpoint(use_reentrant=True)`", lambda s: _checkpointed(s, use_reentrant=True))
stepped.equal("`checkpoint_sequential`", lambda s: _checkpointed_sequence(s))
stepped.equal("`checkpoint` within a block", lambda s: _checkpointed_parts(s))
stepped.refused("`create_graph` over the input", "create_graph=True", lambda s: _gradient_penalty(s), none=EQUAL)
stepped.refused("`create_graph` over the weights", "create_graph=True", lambda s: _second_order(s), none=EQUAL)
stepped.equal("a loss that is not a number", lambda s: _not_finite(s))


def _with_anomalies(s):
    with torch.autograd.detect_anomaly():
        s.step(0, 1)


def _each(s, do):
    s.backward(0)
    for param in s.model.parameters():
        do(param)


def _closure(s, number):
    s.optimizer.zero_grad()
    loss = s.loss(number)
    loss.backward()
    return loss


def _evaluates_between(s):
    loss = s.loss(0)
    s.model.eval()
    with torch.no_grad():
        s.note(s.loss(1))
    s.model.train()
    loss.backward()
    s.optimizer.step()


def _given_gradients(s):
    params = list(s.model.parameters())
    for param, grad in zip(params, torch.autograd.grad(s.loss(), params)):
        param.grad = grad
    s.optimizer.step()


def _reads_others(s):
    """A loss through checkpoints, each of which reads a weight of another block."""
    x, model = s.model.first(s.x()), s.model
    for block, other in zip(model.blocks, reversed(model.blocks)):
        x = checkpoint(lambda x, block=block, other=other: block(x) + x @ other.up.weight.t() @ other.up.weight * 0.1, x, use_reentrant=False)
    return F.cross_entropy(model.last(x), s.batch()[1])


def _other_blocks(s):
    def loss(model, x, y):
        x = model.first(x)
        for block in model.blocks[: 1 + len(s.notes) % 4]:
            x = block(x)
        return F.cross_entropy(model.last(x), y)

    s.loss_of = loss
    s.step(0, 1, 2, 3, 4)


def _checkpointed(s, **how):
    def loss(model, x, y):
        x = model.first(x)
        for block in model.blocks:
            x = checkpoint(block, x, **how)
        return F.cross_entropy(model.last(x), y)

    s.loss_of = loss
    s.step(0, 1)


def _checkpointed_sequence(s):
    s.loss_of = lambda m, x, y: F.cross_entropy(m.last(checkpoint_sequential(nn.Sequential(*m.blocks), 3, m.first(x), use_reentrant=False)), y)
    s.step(0, 1)


def _checkpointed_parts(s):
    class Parts(Block):
        def forward(self, x):
            return x + checkpoint(lambda x: self.down(F.gelu(self.up(self.norm(x)))), x, use_reentrant=False)

    s.begin(net(block=Parts))
    s.step(0, 1)


def _gradient_penalty(s):
    x, _ = s.batch()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(s.model(x).sum(), x, create_graph=True)
    (grad.norm() - 1).square().backward()
    s.optimizer.step()


def _second_order(s):
    grads = torch.autograd.grad(s.loss(), list(s.model.parameters()), create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    s.optimizer.step()


def _not_finite(s):
    s.step(0)
    loss = s.loss(1) * float("nan")
    if torch.isfinite(loss):
        loss.backward()
        s.optimizer.step()
    s.step(2)


grads = Theme("gradients after backward")


def _emptied(s, empty):
    """Trains with gradients that are made zero by hand after each step."""
    for number in range(3):
        s.step(number, zero=False)
        for param in s.model.parameters():
            empty(param)


grads.equal("`p.grad` is None before", lambda s: s.w.grad is None)
grads.equal("`p.grad` values", lambda s: [s.backward(), s.w.grad, s.b.grad, s.root.grad][1:])
grads.equal("`p.grad` of a parameter that was not used", lambda s: [s.model.first(s.x()).sum().backward(), s.w.grad][1])
grads.refused("`p.grad` after the step", "gone with the step", lambda s: [s.step(zero=False), s.w.grad][1])


def _held_over_a_step(s, change=lambda grad: None):
    """What a script holds of a gradient that is made zero after a step, when another has come."""
    s.backward(0)
    held = s.w.grad
    change(held)
    s.optimizer.step()
    for param in s.model.parameters():
        param.grad.zero_()
    s.backward(1)
    return [held is s.w.grad, held.clone()]


grads.equal("a gradient that is held and made zero after a step, and the next one", _held_over_a_step)
grads.equal(
    "a gradient that is held, changed in place and made zero after a step, and the next one", lambda s: _held_over_a_step(s, lambda grad: grad.add_(0.01))
)
grads.equal("`p.grad` after `zero_grad`", lambda s: [s.step(), s.w.grad][1])
grads.equal("`p.grad` after `zero_grad(set_to_none=False)`", lambda s: [s.backward(), s.optimizer.zero_grad(False), s.w.grad][2])
grads.equal("`p.grad.norm()`", lambda s: [s.backward(), s.note(s.w.grad.norm(), exact=False)])
grads.equal("`p.grad.detach().data.norm(2)`", lambda s: [s.backward(), s.note(s.w.grad.detach().data.norm(2), exact=False)])
grads.equal(
    "the norm of all by hand",
    lambda s: [s.backward(), s.note(sum(p.grad.norm(2) ** 2 for p in s.model.parameters()) ** 0.5, exact=False)],
)
grads.equal("`p.grad.abs().max()`", lambda s: [s.backward(), s.w.grad.abs().max()][1])
grads.equal("`p.grad.mean()`, `sum()`, `std()`", lambda s: [s.backward(), s.w.grad.mean(), s.w.grad.sum(), s.w.grad.std()][1:])
grads.equal("`p.grad.clone()`", lambda s: [s.backward(), s.w.grad.clone()][1])
grads.equal("`torch.isfinite(p.grad).all()`", lambda s: [s.backward(), all(torch.isfinite(p.grad).all() for p in s.model.parameters())][1])
grads.equal("`p.grad.isnan().any()`", lambda s: [s.backward(), s.w.grad.isnan().any()][1])
grads.equal("`p.grad[0]`, iteration", lambda s: [s.backward(), s.w.grad[0], list(s.w.grad)][1:])
grads.equal("`p.grad.cpu().numpy()`", lambda s: [s.backward(), s.w.grad.cpu().numpy().sum().item()][1])
grads.equal("`p.grad.flatten()` of all, in one vector", lambda s: [s.backward(), torch.cat([p.grad.flatten() for p in s.model.parameters()])][1])
grads.equal(
    "`p.grad.shape`, `dtype`, `device`, `is_leaf`",
    lambda s: [s.backward(), list(s.w.grad.shape), str(s.w.grad.dtype), str(s.w.grad.device), s.w.grad.is_leaf][1:],
)
grads.equal("`p.grad.mul_`", lambda s: [_each(s, lambda p: p.grad.mul_(0.5)), s.optimizer.step()])
grads.equal("`p.grad.div_`", lambda s: [_each(s, lambda p: p.grad.div_(4)), s.optimizer.step()])
grads.equal("`p.grad *= 0.5`", lambda s: [_each(s, lambda p: p.grad.__imul__(0.5)), s.optimizer.step()])
grads.equal("`p.grad.data = x`", lambda s: [_each(s, lambda p: setattr(p.grad, "data", p.grad.data.clamp(-1e-3, 1e-3))), s.optimizer.step()])
grads.equal("`p.grad = torch.zeros_like(p)` after each step", lambda s: _emptied(s, lambda p: setattr(p, "grad", torch.zeros_like(p))))
grads.equal("`p.grad.fill_(0)` after each step", lambda s: _emptied(s, lambda p: p.grad.fill_(0)))
grads.equal("`p.grad.data.mul_`", lambda s: [_each(s, lambda p: p.grad.data.mul_(0.5)), s.optimizer.step()])
grads.equal("`p.grad = p.grad * 0.5`", lambda s: [_each(s, lambda p: setattr(p, "grad", p.grad * 0.5)), s.optimizer.step()])
grads.equal("`p.grad.clamp_`", lambda s: [_each(s, lambda p: p.grad.clamp_(-0.01, 0.01)), s.optimizer.step()])
grads.equal("`p.grad.add_(noise)`", lambda s: [_each(s, lambda p: p.grad.add_(torch.randn(p.shape), alpha=0.01)), s.optimizer.step()])
grads.equal("`p.grad.add_(p)`, decay by hand", lambda s: [_each(s, lambda p: p.grad.add_(p.detach(), alpha=0.01)), s.optimizer.step()])
grads.equal("`p.grad.zero_()`", lambda s: [_each(s, lambda p: p.grad.zero_()), s.optimizer.step()])
grads.equal("`p.grad.zero_()` of some", lambda s: [s.backward(), s.w.grad.zero_(), s.optimizer.step()])
grads.equal("`p.grad.copy_`", lambda s: [_each(s, lambda p: p.grad.copy_(torch.ones(p.shape))), s.optimizer.step()])
grads.equal("`p.grad[0] = 0`", lambda s: [s.backward(), s.w.grad.__setitem__(0, 0.0), s.optimizer.step()])
grads.equal("`p.grad = torch.zeros_like(p)` before backward", lambda s: [setattr(s.w, "grad", torch.zeros_like(s.w)), s.step()])
grads.equal(
    "`p.grad = x` of all without a backward",
    lambda s: [[setattr(p, "grad", torch.ones(p.shape)) for p in s.model.parameters()], s.optimizer.step()],
)
grads.equal(
    "`_foreach_mul_` of gradients",
    lambda s: _scaled_together(s),
)
grads.equal(
    "`_foreach_norm` of gradients",
    lambda s: [s.backward(), s.note(torch._foreach_norm([p.grad for p in s.model.parameters()]), exact=False)],
)
grads.equal(
    "`clip_grad_norm_`",
    lambda s: [s.backward(), s.note(nn.utils.clip_grad_norm_(s.model.parameters(), 0.1), exact=False), s.optimizer.step()],
    devices=EVERYWHERE,
)
grads.equal(
    "`clip_grad_norm_` that changes nothing",
    lambda s: [s.backward(), s.note(nn.utils.clip_grad_norm_(s.model.parameters(), 1e9), exact=False), s.optimizer.step()],
)
grads.equal(
    "`clip_grad_norm_` of groups",
    lambda s: [s.backward(), s.note([nn.utils.clip_grad_norm_(b.parameters(), 0.05) for b in s.model.blocks], exact=False), s.optimizer.step()],
)
grads.equal(
    "`clip_grad_norm_` with the infinity norm",
    lambda s: [s.backward(), s.note(nn.utils.clip_grad_norm_(s.model.parameters(), 0.1, norm_type=float("inf")), exact=False), s.optimizer.step()],
)
grads.equal(
    "`clip_grad_norm_` with the 1-norm",
    lambda s: [s.backward(), s.note(nn.utils.clip_grad_norm_(s.model.parameters(), 0.1, norm_type=1), exact=False), s.optimizer.step()],
)
grads.equal(
    "`clip_grad_norm_(foreach=False)`",
    lambda s: [s.backward(), s.note(nn.utils.clip_grad_norm_(s.model.parameters(), 0.1, foreach=False), exact=False), s.optimizer.step()],
)
grads.equal(
    "`clip_grad_norm_(error_if_nonfinite=True)`",
    lambda s: [(s.loss() * float("inf")).backward(), nn.utils.clip_grad_norm_(s.model.parameters(), 1.0, error_if_nonfinite=True)],
    error=RuntimeError,
)
grads.equal(
    "`get_total_norm`, `clip_grads_with_norm_`",
    lambda s: _clipped_in_two(s),
)
grads.equal("`clip_grad_value_`", lambda s: [s.backward(), nn.utils.clip_grad_value_(s.model.parameters(), 0.01), s.optimizer.step()])
grads.refused(
    "clipping in the middle of an accumulation",
    "after the last backward",
    lambda s: [s.backward(0), nn.utils.clip_grad_norm_(s.model.parameters(), 0.1), s.backward(1), s.optimizer.step()],
)
grads.equal(
    "gradients averaged over a count by hand",
    lambda s: [s.backward(1, 2), _each(s, lambda p: p.grad.div_(3)), s.optimizer.step()],
)
grads.equal("gradients kept and added later", lambda s: _kept_gradients(s))
grads.equal("gradients of two tasks, one projected", lambda s: _projected_gradients(s))
grads.equal("a sign instead of the gradient", lambda s: [_each(s, lambda p: p.grad.sign_()), s.optimizer.step()])
grads.equal("gradients centralised by hand", lambda s: [_each(s, lambda p: p.grad.sub_(p.grad.mean())), s.optimizer.step()])


def _scaled_together(s):
    s.backward()
    torch._foreach_mul_([param.grad for param in s.model.parameters()], 0.5)
    s.optimizer.step()


def _clipped_in_two(s):
    s.backward()
    norm = nn.utils.get_total_norm([param.grad for param in s.model.parameters()])
    s.note(norm, exact=False)
    nn.utils.clip_grads_with_norm_(s.model.parameters(), 0.1, norm)
    s.optimizer.step()


def _kept_gradients(s):
    s.backward(0)
    kept = [param.grad.clone() for param in s.model.parameters()]
    s.optimizer.zero_grad()
    s.backward(1)
    for param, grad in zip(s.model.parameters(), kept):
        param.grad.add_(grad)
    s.optimizer.step()


def _projected_gradients(s):
    s.backward(0)
    first = torch.cat([param.grad.flatten() for param in s.model.parameters()])
    s.optimizer.zero_grad()
    s.backward(1)
    second = torch.cat([param.grad.flatten() for param in s.model.parameters()])
    mixed, at = first - second * (first @ second) / second.square().sum(), 0
    for param in s.model.parameters():
        param.grad = mixed[at : at + param.numel()].view_as(param).clone()
        at += param.numel()
    s.optimizer.step()


optimizers = Theme("optimizers")

# Of other optimizers, where parameters stay in memory.
GIVEN = "the optimizer that offloadd.prepare was given"


def _with(name, make, devices=MEMORY):
    """A line in which an optimizer of the model's parameters makes three steps."""

    @optimizers.equal(name, devices=devices)
    def _(s):
        model = net()
        s.begin(model, make(model))
        s.step(0, 1, 2)


def _refused(name, phrase, make):
    @optimizers.refused(name, phrase)
    def _(s):
        model = net()
        optimizer = make(model)
        s.continues = False
        s.begin(model, optimizer)


def _groups(model):
    """Groups for weights with decay and for the rest without."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.99)}]


_with("AdamW with weight decay", lambda m: adamw(m.parameters(), weight_decay=0.1), devices=EVERYWHERE)
_with("Adam", lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4))
_with("groups with their own settings", lambda m: adamw(_groups(m)), devices=EVERYWHERE)
_with("a group of each parameter", lambda m: adamw([{"params": [p], "lr": 1e-2 / (i + 1)} for i, p in enumerate(m.parameters())]))
_with("a group with a function of a script's own", lambda m: adamw([{"params": [*m.parameters()], "rate_of": lambda step: 1 / step}]))
_with("named parameters", lambda m: adamw(m.named_parameters()))
_with("`foreach=True`", lambda m: adamw(m.parameters(), foreach=True))
_with("`foreach=False`", lambda m: adamw(m.parameters(), foreach=False))
_with("`fused=True`", lambda m: adamw(m.parameters(), fused=True))
_with("a learning rate that is a tensor", lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2), eps=1e-4))
_with("a learning rate of zero", lambda m: adamw(m.parameters(), lr=0.0))
_with("Muon of the matrices", lambda m: torch.optim.Muon([p for p in m.blocks.parameters() if p.dim() == 2], lr=1e-4))
_with("some parameters only", lambda m: adamw(m.blocks.parameters()))
_with("only the head", lambda m: adamw(m.last.parameters()))
_with("frozen parameters among them", lambda m: [m.blocks[2].requires_grad_(False), adamw(m.parameters())][1], devices=EVERYWHERE)
_with("a frozen base and a head", lambda m: [m.blocks.requires_grad_(False), adamw(p for p in m.parameters() if p.requires_grad)][1])
_with(
    "only biases",
    lambda m: [[p.requires_grad_(n.endswith("bias")) for n, p in m.named_parameters()], adamw(p for p in m.parameters() if p.requires_grad)][1],
)

_refused("SGD", "use torch.optim.AdamW", lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
_refused("Adagrad", "use torch.optim.AdamW", lambda m: torch.optim.Adagrad(m.parameters()))
_refused("RMSprop", "use torch.optim.AdamW", lambda m: torch.optim.RMSprop(m.parameters()))
_refused("NAdam", "use torch.optim.AdamW", lambda m: torch.optim.NAdam(m.parameters()))
_refused("RAdam", "use torch.optim.AdamW", lambda m: torch.optim.RAdam(m.parameters()))
_refused("Adamax", "use torch.optim.AdamW", lambda m: torch.optim.Adamax(m.parameters()))
_refused("Adafactor", "use torch.optim.AdamW", lambda m: torch.optim.Adafactor(m.parameters()))
_refused(
    "Muon and AdamW, one each",
    "into those of offloadd.optim.Muon",
    lambda m: [torch.optim.Muon([p for p in m.blocks.parameters() if p.dim() == 2]), adamw(m.last.parameters())],
)
_refused("LBFGS", "use torch.optim.AdamW", lambda m: torch.optim.LBFGS(m.parameters()))
_refused("SparseAdam", "use torch.optim.AdamW", lambda m: torch.optim.SparseAdam(list(m.parameters())))
_refused("an AdamW of a script's own", "use torch.optim.AdamW", lambda m: type("MyAdamW", (torch.optim.AdamW,), {})(m.parameters()))
_refused(
    "another library's class named AdamW",
    "torch.optim.AdamW",
    lambda m: type("AdamW", (torch.optim.Optimizer,), {"__module__": "bitsandbytes.optim"})(m.parameters(), {"lr": 0.1}),
)
_refused("`amsgrad`", "amsgrad=True: leave it out", lambda m: adamw(m.parameters(), amsgrad=True))
_refused("`maximize`", "maximize=True: leave it out", lambda m: adamw(m.parameters(), maximize=True))
_refused("`differentiable`", "differentiable=True: leave it out", lambda m: torch.optim.AdamW(m.parameters(), differentiable=True))
_refused(
    "`amsgrad` in one group",
    "amsgrad=True: leave it out",
    lambda m: adamw([{"params": m.blocks.parameters()}, {"params": m.last.parameters(), "amsgrad": True}]),
)
_refused("Adam with weight decay", "use torch.optim.AdamW", lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1))
_refused("a parameter of another model", "not the model's", lambda m: adamw([*m.parameters(), nn.Parameter(torch.zeros(2))]))


@optimizers.equal("an optimizer that has made steps", devices=EVERYWHERE)
def _(s):
    model = net()
    optimizer = adamw(model.parameters())
    model(s.x()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    s.begin(model, optimizer)
    s.step(0, 1)


@optimizers.refused("a parameter given twice", "is there twice")
def _(s):
    model = net()
    s.begin(model, adamw([*model.parameters(), model.last.weight]))


@optimizers.refused("a block unfrozen for `add_param_group`", "was frozen when the model was prepared", none="add_param_group after offloadd.prepare")
def _(s):
    model = net()
    model.blocks[0].requires_grad_(False)
    s.begin(model)
    s.step(0)
    model.blocks[0].requires_grad_(True)
    s.optimizer.add_param_group({"params": list(model.blocks[0].parameters()), "lr": 1e-3})
    s.step(1)


@optimizers.refused("`add_param_group` of trained parameters outside the optimizer", "add_param_group after offloadd.prepare")
def _(s):
    model = net()
    s.begin(model, adamw(model.blocks.parameters()))
    s.step(0)
    s.optimizer.add_param_group({"params": [*model.first.parameters(), *model.last.parameters()], "lr": 1e-3})
    s.optimizer.zero_grad()
    s.step(1)


@optimizers.equal("a parameter frozen after `prepare`")
def _(s):
    s.step(0)
    s.model.blocks[1].requires_grad_(False)
    s.step(1)
    s.model.blocks[1].requires_grad_(True)
    s.step(2)


@optimizers.refused("a parameter unfrozen after `prepare`", "was frozen when the model was prepared")
def _(s):
    model = net()
    model.blocks[1].requires_grad_(False)
    s.begin(model, adamw(model.parameters()))
    s.step(0)
    model.blocks[1].requires_grad_(True)
    s.continues = False
    s.step(1)


@optimizers.differs("gradients of parameters in no optimizer are kept", "`optimizer.zero_grad()` drops them too")
def _(s):
    model = net()
    s.begin(model, adamw(model.last.parameters()))
    s.backward(0)
    s.optimizer.step()
    s.optimizer.zero_grad()
    return model.blocks[0].up.weight.grad is not None


def clip_all(s, model, forget):
    """Steps with gradients of the whole model clipped, of which the optimizer has the last layer."""
    s.begin(model, adamw(model.last.parameters()))
    for number in range(2):
        s.backward(number)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        s.optimizer.step()
        forget(model)


@optimizers.refused("clipping with gradients of parameters in no optimizer, which add up in plain PyTorch", "is in no group of the optimizer")
def _(s):
    clip_all(s, net(), lambda model: s.optimizer.zero_grad())


@optimizers.equal("clipping with gradients of parameters in no optimizer, and `model.zero_grad()`")
def _(s):
    clip_all(s, net(), lambda model: model.zero_grad())


@optimizers.refused("two optimizers, the second is not prepared", "not given to offloadd.prepare")
def _(s):
    model = net()
    # A decay would be written before the gradients are read.
    other = adamw([*model.first.parameters(), *model.last.parameters()], lr=3e-3, weight_decay=0.0)
    s.begin(model, adamw(model.blocks.parameters()))
    for number in range(3):
        s.backward(number)
        s.optimizer.step()
        other.step()
        model.zero_grad()


@optimizers.refused("two optimizers of one model that take turns", "not given to offloadd.prepare", none=GIVEN)
def _(s):
    model = net()
    other = adamw(model.blocks[2:].parameters(), lr=3e-3)
    s.begin(model, adamw(model.blocks[:2].parameters()))
    for number in range(4):
        s.backward(number)
        [s.optimizer, other][number % 2].step()
        model.zero_grad()


@optimizers.refused("a second optimizer made later", "not given to offloadd.prepare", none=GIVEN)
def _(s):
    s.step(0)
    other = adamw(s.model.parameters(), lr=3e-3)
    s.backward(1)
    other.step()
    other.zero_grad()
    s.backward(2)


@optimizers.refused("an SGD for embeddings beside AdamW", "not given to offloadd.prepare", none=GIVEN)
def _(s):
    model = net()
    other = torch.optim.SGD(model.first.parameters(), lr=0.1)
    s.begin(model, adamw([*model.blocks.parameters(), *model.last.parameters()]))
    for number in range(2):
        s.backward(number)
        other.step()
        s.optimizer.step()
        model.zero_grad()


def _settings(name, change):
    """A line in which settings of the optimizer change between steps."""

    @optimizers.equal(name)
    def _(s):
        s.step(0)
        change(s.optimizer.param_groups[0])
        s.step(1, 2)


_settings("another `lr` in the group", lambda group: group.update(lr=1e-3))
_settings("other `betas`", lambda group: group.update(betas=(0.5, 0.9)))
_settings("another `eps`, `weight_decay`", lambda group: group.update(eps=1e-3, weight_decay=0.5))
_settings("a parameter taken out of the group", lambda group: group["params"].pop(3))
_settings("settings of a script's own", lambda group: group.update(name="all"))


def _refused_later(line, message, key, value):
    """A line in which a setting of the optimizer that is not supported is changed after a step."""

    @optimizers.refused(line, message)
    def _(s):
        s.step(0)
        s.optimizer.param_groups[0][key] = value
        s.continues = False
        s.step(1)


_refused_later("`amsgrad` set later", "amsgrad", "amsgrad", True)


@optimizers.refused("its `step` replaced before `prepare`", "replace it after offloadd.prepare")
def _(s):
    model = net()
    optimizer = adamw(model.parameters())
    step = optimizer.step
    optimizer.step = lambda *args: step(*args)
    s.begin(model, optimizer)


@optimizers.equal("its `step` replaced after `prepare`")
def _(s):
    s.model
    step, calls = s.optimizer.step, []
    s.optimizer.step = lambda *args: [calls.append(1), step(*args)][1]
    s.step(0, 1)
    return calls


_refused_later("`decoupled_weight_decay` switched off later", "adds the decay to the gradient", "decoupled_weight_decay", False)


def _put_into_a_group(s, put):
    """A parameter that comes to the optimizer's groups without `add_param_group`."""
    s.step(0)
    s.model.gain = nn.Parameter(torch.ones(CLASSES))
    s.loss_of = lambda model, x, y: F.cross_entropy(model(x) * model.gain, y)
    s.continues = False
    put(s.optimizer.param_groups, s.model.gain)
    s.step(1)


optimizers.refused(
    "a new parameter appended to a group's list",
    "put there after offloadd.prepare",
    lambda s: _put_into_a_group(s, lambda groups, p: groups[0]["params"].append(p)),
)
optimizers.refused(
    "a new group appended to `param_groups`",
    "put there after offloadd.prepare",
    lambda s: _put_into_a_group(s, lambda groups, p: groups.append({**groups[0], "params": [p]})),
)


@optimizers.refused("`maximize` set later", "maximize")
def _(s):
    s.step(0)
    s.optimizer.param_groups[0]["maximize"] = True
    s.continues = False
    s.step(1)


schedulers = Theme("schedulers")


def _scheduled(name, make, devices=MEMORY, **more):
    @schedulers.equal(name, devices=devices)
    def _(s):
        model = net()
        optimizer = adamw(model.parameters())
        scheduler = make(optimizer)
        s.begin(model, optimizer, track=[scheduler])
        for number in range(4):
            s.step(number)
            scheduler.step(*[0.5] * (type(scheduler).__name__ == "ReduceLROnPlateau"))
        return [scheduler.get_last_lr(), s.optimizer.param_groups[0]["lr"]]


from torch.optim import lr_scheduler  # noqa: E402

_scheduled("StepLR", lambda o: lr_scheduler.StepLR(o, 2, 0.1))
_scheduled("CosineAnnealingLR", lambda o: lr_scheduler.CosineAnnealingLR(o, 4))
_scheduled("OneCycleLR, which changes the betas", lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=8))
_scheduled("CyclicLR", lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=False))
_scheduled("LambdaLR", lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1, (step + 1) / 3)))
_scheduled("SequentialLR", lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.5)], [2]))
_scheduled("ReduceLROnPlateau", lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0))
_scheduled("CosineAnnealingWarmRestarts", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2))
_scheduled("SWALR", lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=1e-3, anneal_epochs=2))


@schedulers.equal("a scheduler made after `prepare`")
def _(s):
    s.model
    scheduler = lr_scheduler.ExponentialLR(s.optimizer, 0.5)
    for number in range(3):
        s.step(number)
        scheduler.step()
    return scheduler.state_dict()


@schedulers.equal("a scheduler that is loaded")
def _(s):
    scheduler = lr_scheduler.StepLR(s.begin() and s.optimizer, 1, 0.5)
    s.step(0)
    scheduler.step()
    again = lr_scheduler.StepLR(s.optimizer, 1, 0.5)
    again.load_state_dict(scheduler.state_dict())
    again.step()
    s.step(1)
    return [s.optimizer.param_groups[0]["lr"], again.get_last_lr()]


@schedulers.equal("a search for the learning rate that goes back to the start", devices=EVERYWHERE)
def _(s):
    s.step(0)
    model, optimizer = copy.deepcopy(s.model.state_dict()), copy.deepcopy(s.optimizer.state_dict())
    for number in range(3):
        s.optimizer.param_groups[0]["lr"] *= 2
        s.step(number)
    s.model.load_state_dict(model)
    s.optimizer.load_state_dict(optimizer)
    s.step(1, 2)


@schedulers.equal("a warning about the order of steps")
def _(s):
    import warnings

    scheduler = lr_scheduler.StepLR(s.begin() and s.optimizer, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        s.step(0)
        scheduler.step()
    return [str(one.message)[:60] for one in told if "lr_scheduler" in str(one.message)]


def _with_gradients_of(model, dtype):
    for param in model.parameters():
        param.grad_dtype = dtype
    return model


precision = Theme("precision")


@precision.equal("`autocast` with bfloat16", devices=EVERYWHERE)
def _(s):
    s.loss_of = lambda m, x, y: torch.autocast("cpu", torch.bfloat16)(lambda: F.cross_entropy(m(x), y))()
    s.step(0, 1)


@precision.equal("`autocast` and the types of activations")
def _(s):
    kinds = []
    s.model.blocks[1].up.register_forward_hook(lambda module, args, out: kinds.append(str(out.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        s.loss(0).backward()
    s.optimizer.step()
    return kinds


@precision.equal("`autocast` with two forwards, its cache")
def _(s):
    with torch.autocast("cpu", torch.bfloat16):
        loss = s.loss(0) + s.loss(1)
    loss.backward()
    s.optimizer.step()


@precision.equal("`autocast` and `checkpoint`")
def _(s):
    with torch.autocast("cpu", torch.bfloat16):
        _checkpointed_loss(s).backward()
    s.optimizer.step()


def _checkpointed_loss(s):
    model, (x, y) = s.model, s.batch()
    x = model.first(x)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return F.cross_entropy(model.last(x), y)


@precision.equal("`autocast` in evaluation, then in training")
def _(s):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        s.note(s.loss(0))
    with torch.autocast("cpu", torch.bfloat16):
        s.step(1)


@precision.equal("`autocast` nested and switched off")
def _(s):
    class Off(Block):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    s.begin(net(block=Off))
    with torch.autocast("cpu", torch.bfloat16):
        s.step(0, 1)


@precision.equal("`autocast` as a decorator of forward")
def _(s):
    class Cast(Net):
        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x):
            return super().forward(x)

    s.begin(randomized(Cast()))
    s.step(0, 1)


def _scaled(s, unscale=False, factor=1.0):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for number in range(3):
        scaler.scale(s.loss(number) * (float("inf") if number == 1 and factor != 1.0 else 1.0)).backward()
        if unscale:
            scaler.unscale_(s.optimizer)
            s.note(nn.utils.clip_grad_norm_(s.model.parameters(), 0.1))
        scaler.step(s.optimizer)
        scaler.update()
        s.optimizer.zero_grad()
    return [scaler.get_scale(), scaler.state_dict()]


def _scaled_sum(s, scaler):
    for number in range(2):
        scaler.scale(s.loss(number)).backward()
    scaler.step(s.optimizer)
    scaler.update()


precision.equal("`GradScaler`", lambda s: _scaled(s))
precision.equal("`GradScaler` and `unscale_`, then clipping", lambda s: _scaled(s, unscale=True))
precision.equal("`GradScaler` that skips a step", lambda s: _scaled(s, factor=float("inf")))
precision.equal(
    "`GradScaler(enabled=False)`",
    lambda s: _scaled_sum(s, torch.amp.GradScaler("cpu", enabled=False)),
)
precision.equal(
    "`GradScaler` over several batches",
    lambda s: _scaled_sum(s, torch.amp.GradScaler("cpu", init_scale=64.0)),
)
precision.equal("`model.float()` changes nothing", lambda s: [s.model.float(), s.step()])
precision.equal("`model.to('cpu')` changes nothing", lambda s: [s.model.to("cpu") is s.model, s.step()][0])
precision.equal("`model.cpu()` after a step", lambda s: [s.step(0), s.model.cpu(), s.step(1)])
precision.equal("`model.to(memory_format)`", lambda s: [s.model.to(memory_format=torch.contiguous_format), s.step()])
precision.refused(
    "`grad_dtype` of a weight before `prepare`",
    "leave grad_dtype as it is",
    lambda s: [setattr(s, "continues", False), s.begin(_with_gradients_of(net(), torch.bfloat16))],
)
precision.refused("`grad_dtype` of a weight after `prepare`", "assigning .grad_dtype", lambda s: _with_gradients_of(s.model, torch.bfloat16))
precision.refused("`model.to(torch.bfloat16)` after `prepare`", "before offloadd.prepare", lambda s: s.model.to(torch.bfloat16))
precision.refused("`model.half()` after `prepare`", "before offloadd.prepare", lambda s: s.model.half())
precision.refused("`model.double()` after `prepare`", "before offloadd.prepare", lambda s: s.model.double())
precision.refused("`model.to('meta')` after `prepare`", "before offloadd.prepare", lambda s: s.model.to("meta"))
precision.refused("`block.bfloat16()` after `prepare`", "before offloadd.prepare", lambda s: s.model.blocks[0].bfloat16())
precision.refused(
    "a model in double precision",
    "float32, bfloat16 or float16",
    lambda s: [setattr(s, "continues", False), s.begin(net().double())],
)
precision.equal(
    "`set_default_dtype` while the model is made",
    lambda s: [torch.set_default_dtype(torch.float64), torch.set_default_dtype(torch.float32), s.step()],
)
precision.equal("bfloat16 weights, their losses before a step", lambda s: _sixteen(s, torch.bfloat16))
precision.equal("float16 weights, their gradients", lambda s: _sixteen(s, torch.float16))


def _sixteen(s, dtype):
    model = net(dropout=0.0).to(dtype)
    s.continues = False
    s.begin(model)
    loss = F.cross_entropy(model(s.x().to(dtype)).float(), s.batch()[1])
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


saved = Theme("saved")


def _through(value, **more):
    """The value written by `torch.save` and read again."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **more)


def _after(s, do):
    """What `do` returns after two steps."""
    s.step(0, 1)
    return do()


saved.equal("`model.state_dict()`", lambda s: _after(s, lambda: s.model.state_dict()), devices=EVERYWHERE)
saved.equal(
    "`state_dict` of a block, with a prefix, with `keep_vars`",
    lambda s: _after(s, lambda: [s.model.blocks[1].state_dict(), s.model.state_dict(prefix="m."), s.model.state_dict(keep_vars=True)]),
)
saved.equal(
    "`state_dict` in the middle of an accumulation",
    lambda s: [s.backward(0), s.note(s.model.state_dict()), s.backward(1), s.optimizer.step()],
)
saved.equal("`state_dict` kept over a step", lambda s: [state := copy.deepcopy(s.model.state_dict()), s.step(0), state][2])
saved.differs(
    "a `state_dict` after a step",
    "its tensors are copies and keep their values",
    lambda s: [state := s.model.state_dict(), before := state["last.weight"].clone(), s.step(0), not torch.equal(before, state["last.weight"])][3],
    none=EQUAL,
)
saved.equal(
    "`state_dict` has its `_metadata`, order and class",
    lambda s: [list(s.model.state_dict()._metadata), list(s.model.state_dict()), type(s.model.state_dict()).__name__],
)
saved.equal("`torch.save` of the state", lambda s: _after(s, lambda: _through(s.model.state_dict())), devices=EVERYWHERE)
saved.equal("`torch.save` of a list of weights", lambda s: _after(s, lambda: _through([p.detach() for p in s.model.parameters()])))
saved.equal(
    "`torch.save` of `dict(named_parameters())`",
    lambda s: _after(s, lambda: _through({n: p.data for n, p in s.model.named_parameters()})),
)
saved.equal("`torch.save` of `w.detach()`", lambda s: _after(s, lambda: _through(s.w.detach())))
saved.refused("`torch.save` of a parameter", "state_dict", lambda s: _after(s, lambda: _through(s.w, weights_only=False)), none=EQUAL)
saved.refused("`torch.save(model)`", "state_dict", lambda s: _after(s, lambda: _through(s.model, weights_only=False)))
saved.refused("`pickle` of the model", "state_dict", lambda s: _after(s, lambda: pickle.dumps(s.model)))
saved.refused("`pickle` of the optimizer", "state_dict", lambda s: _after(s, lambda: pickle.dumps(s.optimizer)))
saved.refused(
    "`torch.save` of a checkpoint with the model in it",
    "state_dict",
    lambda s: _after(s, lambda: _through({"model": s.model, "step": 3}, weights_only=False)),
)
saved.refused("`copy.deepcopy(model)`", "before offloadd.prepare", lambda s: _after(s, lambda: copy.deepcopy(s.model)))
saved.refused(
    "`copy.deepcopy` of a block",
    "before offloadd.prepare",
    lambda s: _after(s, lambda: copy.deepcopy(s.model.blocks[0])),
)
saved.refused("`copy.deepcopy(optimizer)`", "state_dict", lambda s: _after(s, lambda: copy.deepcopy(s.optimizer)))
saved.equal(
    "`copy.deepcopy` of `w.detach()`, of `w.data`, of all weights",
    lambda s: _after(s, lambda: [copy.deepcopy(s.w.detach()), copy.deepcopy(s.w.data), copy.deepcopy(dict(s.model.named_parameters()))]),
)
saved.refused("`copy.copy(model)`", "save its state_dict", lambda s: _after(s, lambda: copy.copy(s.model)(s.x(3))))
saved.equal("a new model from the state", lambda s: _after(s, lambda: _loaded(net(5), s.model.state_dict())(s.x(3))))
saved.equal("`safetensors` of the state", lambda s: _after(s, lambda: _safetensors(s.model.state_dict())))
saved.equal("`safetensors.torch.save_model`", lambda s: _after(s, lambda: _save_model(s.model)))
saved.equal("tied weights in a `state_dict`", lambda s: _tied_state(s))
saved.equal("weights that were tied, with `keep_vars`", lambda s: _untied_state(s, keep_vars=True))
saved.equal("weights that were tied, where parameters stay with the model", lambda s: _untied_state(s), devices=("none",))
saved.equal("`optimizer.state_dict()`", lambda s: _after(s, lambda: s.optimizer.state_dict()), devices=EVERYWHERE)
saved.equal("`optimizer.state_dict()` before the first step", lambda s: s.optimizer.state_dict())
saved.equal(
    "`optimizer.state_dict()` of groups",
    lambda s: [s.begin(m := net(), adamw(_groups(m))), _after(s, lambda: s.optimizer.state_dict())][1],
)
saved.equal("`torch.save` of the optimizer's state", lambda s: _after(s, lambda: _through(s.optimizer.state_dict())))
saved.equal("plain AdamW that continues from `state_dict`s", lambda s: _continued_plain(s), devices=EVERYWHERE)
saved.equal("`len(optimizer.state)`", lambda s: _after(s, lambda: len(s.optimizer.state)))
saved.equal("`optimizer.state[w]['exp_avg']`", lambda s: _after(s, lambda: s.optimizer.state[s.w]["exp_avg"]))
saved.equal("`optimizer.state[w]['step']`", lambda s: _after(s, lambda: float(s.optimizer.state[s.w]["step"])))
saved.equal(
    "the moments' norms in a loop",
    lambda s: _after(s, lambda: [s.optimizer.state[p]["exp_avg_sq"].norm() for g in s.optimizer.param_groups for p in g["params"]]),
)
saved.equal("`w in optimizer.state`", lambda s: [s.w in s.optimizer.state, s.step(), s.w in s.optimizer.state][::2])
saved.refused(
    "`optimizer.state[w].clear()`, a restart of the moments",
    "use optimizer.load_state_dict",
    lambda s: [s.step(0), s.optimizer.state[s.w].clear(), s.step(1)],
)
saved.refused(
    "`optimizer.state.clear()`, a restart of all moments",
    "use optimizer.load_state_dict",
    lambda s: [s.step(0), s.optimizer.state.clear(), s.step(1)],
)
saved.refused(
    "moments multiplied by a script",
    "use optimizer.load_state_dict",
    lambda s: [s.step(0), s.optimizer.state[s.w]["exp_avg"].mul_(0.5), s.step(1)],
)
saved.refused(
    "the number of updates changed by a script",
    "use optimizer.load_state_dict",
    lambda s: [s.step(0), s.optimizer.state[s.w]["step"].fill_(10.0), s.step(1)],
)
saved.equal("`get_model_state_dict`", lambda s: _after(s, lambda: get_model_state_dict(s.model)))
saved.equal("`get_optimizer_state_dict`", lambda s: _after(s, lambda: get_optimizer_state_dict(s.model, s.optimizer)))
saved.equal("`get_state_dict`", lambda s: _after(s, lambda: get_state_dict(s.model, s.optimizer)), devices=EVERYWHERE)
saved.equal("`torch.distributed.checkpoint.save`", lambda s: _after(s, lambda: _distributed_checkpoint(s)))
saved.equal(
    "`scheduler.state_dict()` of a scheduler beside it",
    lambda s: _after(s, lambda: lr_scheduler.StepLR(s.optimizer, 2).state_dict()),
)


def _loaded(model, state):
    model.load_state_dict(state)
    return model.eval()


def _safetensors(state):
    from safetensors.torch import load, save

    return dict(sorted(load(save(state)).items()))


def _save_model(model):
    from safetensors.torch import load_file, save_model

    with tempfile.TemporaryDirectory() as dir:
        save_model(model, f"{dir}/model.safetensors")
        return dict(sorted(load_file(f"{dir}/model.safetensors").items()))


class Tied(Net):
    """The first layer's weight is the head's too."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 8)
        self.first.weight = nn.Parameter(self.mix.weight.t().detach().clone())
        self.back = nn.Linear(8, 16)
        self.back.weight = self.first.weight

    def forward(self, x):
        x = super().forward(self.mix(self.back(x)))
        return x


def _untied_state(s, **more):
    s.begin(randomized(Tied()))
    s.step(0)
    s.model.back.weight = nn.Parameter(torch.full_like(s.model.back.weight, 0.1), requires_grad=False)
    s.step(1)
    state = s.model.state_dict(**more)
    return [list(state), state]


def _tied_state(s):
    s.begin(randomized(Tied()))
    s.step(0, 1)
    state = s.model.state_dict()
    return [state, state["first.weight"].data_ptr() == state["back.weight"].data_ptr()]


def _continued_plain(s):
    s.step(0, 1)
    model = net(5)
    model.load_state_dict(s.model.state_dict())
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(s.optimizer.state_dict()))
    F.cross_entropy(model(s.x(2)), s.batch(2)[1]).backward()
    optimizer.step()
    return s.weights(model)


def _distributed_checkpoint(s):
    model, optimizer = get_state_dict(s.model, s.optimizer)
    torch.distributed.checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=s.dir / "saved")
    other = net(5)
    found, _ = get_state_dict(other, [])
    torch.distributed.checkpoint.load({"model": found}, checkpoint_id=s.dir / "saved")
    other.load_state_dict(found)
    return s.weights(other)


loaded = Theme("loaded")


def _trained_state():
    """The state of a plain model and its optimizer after two steps."""
    model = net(3)
    optimizer = adamw(model.parameters(), lr=3e-3)
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


loaded.equal("`model.load_state_dict` after `prepare`", lambda s: [s.model.load_state_dict(_trained_state()[0]), s.step(0, 1)])
loaded.equal("`model.load_state_dict` after steps", lambda s: [s.step(0), s.model.load_state_dict(_trained_state()[0]), s.step(1)], devices=EVERYWHERE)
loaded.equal("what `load_state_dict` returns", lambda s: str(s.model.load_state_dict(_trained_state()[0])))
loaded.equal("its own `state_dict`", lambda s: [s.step(0), s.model.load_state_dict(s.model.state_dict()), s.step(1)])
loaded.equal(
    "`strict=False` with missing and unexpected keys",
    lambda s: [str(s.model.load_state_dict({"last.weight": torch.ones(5, 16), "other": torch.ones(1)}, strict=False)), s.step()][0],
)
loaded.equal("a missing key", lambda s: _mismatch(s, {"last.weight": torch.ones(5, 16)}))
loaded.equal("a weight of another shape", lambda s: _mismatch(s, {**net(3).state_dict(), "last.weight": torch.ones(2, 16)}))
loaded.equal(
    "weights of another type",
    lambda s: [s.model.load_state_dict({k: v.double() for k, v in net(3).state_dict().items()}), s.step()],
)
loaded.refused("`assign=True`", "leave assign out", lambda s: s.model.load_state_dict(net(3).state_dict(), assign=True))
loaded.equal(
    "`load_state_dict` of a block",
    lambda s: [s.step(0), s.model.blocks[1].load_state_dict(net(3).blocks[1].state_dict()), s.step(1)],
)
loaded.equal(
    "`load_state_dict` of the head",
    lambda s: [s.step(0), s.model.last.load_state_dict(net(3).last.state_dict()), s.step(1)],
)
loaded.equal(
    "a state with tied weights",
    lambda s: [s.begin(randomized(Tied())), s.model.load_state_dict(randomized(Tied(), 4).state_dict()), s.step()],
)
loaded.equal("a state with frozen weights in it", lambda s: _loaded_frozen(s))
loaded.refused(
    "`load_state_dict` in the middle of an accumulation",
    "between backward and step",
    lambda s: [s.backward(), s.model.load_state_dict(net(3).state_dict())],
)
loaded.equal(
    "`optimizer.load_state_dict` of plain PyTorch's",
    lambda s: [s.model.load_state_dict(_trained_state()[0]), s.optimizer.load_state_dict(_trained_state()[1]), s.step(0, 1)],
    devices=EVERYWHERE,
)
loaded.equal(
    "`optimizer.load_state_dict` alone",
    lambda s: [s.model, s.optimizer.load_state_dict(_trained_state()[1]), s.step(0, 1)],
)
loaded.equal("`optimizer.load_state_dict` after steps", lambda s: [s.step(0, 1), s.optimizer.load_state_dict(_trained_state()[1]), s.step(0, 1)])
loaded.equal(
    "`optimizer.load_state_dict` of its own state",
    lambda s: [s.step(0, 1), s.optimizer.load_state_dict(s.optimizer.state_dict()), s.step(0, 1)],
)
loaded.equal(
    "`optimizer.load_state_dict` of a fresh one, moments begin anew",
    lambda s: [s.step(0, 1), s.optimizer.load_state_dict(adamw(net().parameters()).state_dict()), s.step(2)],
)
loaded.equal(
    "`optimizer.load_state_dict` of `torch.load`",
    lambda s: [s.model, s.optimizer.load_state_dict(_through(_trained_state()[1])), s.step(0)],
)
loaded.equal(
    "settings that come with the state",
    lambda s: [s.model, s.optimizer.load_state_dict(_trained_state()[1]), {k: v for k, v in s.optimizer.param_groups[0].items() if k != "params"}][2],
)
loaded.equal(
    "a state of another number of groups",
    lambda s: s.optimizer.load_state_dict(adamw([{"params": [p]} for p in net().parameters()]).state_dict()) if s.model else None,
    error=ValueError,
)
loaded.equal(
    "a state of other numbers of parameters",
    lambda s: s.optimizer.load_state_dict(adamw(net().last.parameters()).state_dict()) if s.model else None,
    error=ValueError,
)


@loaded.refused("a state with moments of a frozen block", "was frozen when the model was prepared")
def _(s):
    trained = net()
    optimizer = adamw(trained.parameters())
    s.loss_of(trained, *s.batch()).backward()
    optimizer.step()
    model = net()
    model.blocks[1].requires_grad_(False)
    s.begin(model, adamw(model.parameters()))
    s.optimizer.load_state_dict(optimizer.state_dict())
    s.step(1)


loaded.equal("`optimizer.load_state_dict` before `prepare`", lambda s: _loaded_before(s), devices=EVERYWHERE)
loaded.equal("`set_model_state_dict`", lambda s: [set_model_state_dict(s.model, net(3).state_dict()), s.step()])
loaded.equal("`set_state_dict` of both", lambda s: _set_both(s))
loaded.equal("weights loaded before `prepare`", lambda s: [s.begin(_loaded(net(), net(3).state_dict()).train()), s.step()])
loaded.equal("a state from `safetensors`", lambda s: [s.model.load_state_dict(_safetensors(net(3).state_dict())), s.step()])
loaded.equal("a buffer in the state", lambda s: _loaded_buffer(s))


def _mismatch(s, state):
    """Loads what does not fit. PyTorch has loaded the rest when it says so."""
    s.step(0)
    with contextlib.suppress(RuntimeError):
        s.model.load_state_dict(state)
        s.note("no error")
    s.step(1)


def _loaded_frozen(s):
    model = net()
    model.blocks[1].requires_grad_(False)
    state = {name: value * (1 if name.startswith("blocks.1.") else 0.9) for name, value in model.state_dict().items()}
    s.begin(model)
    s.model.load_state_dict(state)
    s.step(0)


def _loaded_before(s):
    model = net(3)
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(_trained_state()[1])
    s.begin(model, optimizer)
    s.step(0, 1)


def _set_both(s):
    s.step(0)
    other = net(3)
    trained = adamw(other.parameters())
    other(s.x()).square().mean().backward()
    trained.step()
    model, optimizer = get_state_dict(other, trained)
    set_state_dict(s.model, s.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    s.step(1)


def _loaded_buffer(s):
    def made(seed):
        model = net(seed)
        model.register_buffer("scale", torch.full((), float(seed)))
        return model

    s.begin(made(1))
    s.model.load_state_dict(made(2).state_dict())
    return s.model.scale


again = Theme("a script's own checkpoints", devices=("nvme",))


def _start(s, numbers, checkpoint=None, **more):
    """A start of a script that loads a checkpoint of its own before `prepare`, if there is one. Returns those that it saves, one a step."""
    model = net(3)
    optimizer = adamw(model.parameters())
    if checkpoint is not None:
        model.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(checkpoint[1])
    s.trained.clear()
    s.begin(model, optimizer, run_dir=s.dir / "run", **more)
    saved = []
    for number in numbers:
        s.step(number)
        saved.append(copy.deepcopy((s.model.state_dict(), s.optimizer.state_dict())))
    if s.run:
        s.run.close()
    return saved


again.equal("the last step's", lambda s: _start(s, (3, 4), _start(s, (0, 1, 2))[2]) and s.weights())
again.equal("an earlier one, with `resume=False`", lambda s: _start(s, (2, 3), _start(s, (0, 1, 2))[1], resume=False) and s.weights())
again.refused("an earlier one", "pass resume=False", lambda s: _start(s, (2, 3), _start(s, (0, 1, 2))[1]))
again.refused("one of another run", "pass resume=False", lambda s: [_start(s, (0,)), _start(s, (1,), _trained_state())])


def _with_states(s, state_of):
    """Two steps, and a start that resumes with states that its optimizer has already; plain PyTorch goes on."""
    _start(s, (0, 1))
    if s.device is not None:
        model = net(4)
        optimizer = adamw(model.parameters())
        optimizer.state.update(state_of(model))
        s.trained.clear()
        s.begin(model, optimizer, run_dir=s.dir / "run")
    s.step(2)
    return s.weights()


def _of_no_steps(model):
    return {param: {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)} for param in model.parameters()}


again.equal("states of no steps, which each start makes", lambda s: _with_states(s, _of_no_steps))
again.refused("a state of something else", "no parameter of the run", lambda s: _with_states(s, lambda model: {"number": {"of": 1}}))


@again.refused("steps between `close` and `prepare`", "pass resume=False")
def _(s):
    _start(s, (0, 1))
    s.step(2)
    s.begin(*s.trained.pop(), run_dir=s.dir / "run")


resumed = Theme("a run that resumes", devices=("nvme",))


def _resumed(name, block=Block, track=lambda: None, before_step=lambda s, number, tracked: None):
    """A line in which a prepared run ends after two of four steps, and a start with a new model resumes it; plain PyTorch makes the steps at once."""

    def start(s, seed):
        s.trained.clear()
        tracked = track()
        s.begin(net(seed, block=block), run_dir=s.dir / "run", track=[tracked] if tracked else [])
        return tracked

    @resumed.equal(name)
    def _(s):
        tracked = start(s, 3)
        for number in range(4):
            if s.run and number == 2:
                s.run.close()
                tracked = start(s, 4)
            before_step(s, number, tracked)
            s.step(number)
        groups = [{key: value for key, value in group.items() if key != "params"} for group in s.optimizer.param_groups]
        return [s.weights(), list(s.model.state_dict()), groups, [type(value).__name__ for group in groups for value in group.values()]]


class _Growing(Block):
    """Its buffer has a row for each pass that trains."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 16))
        self.register_module("reader", _Reader(self.seen))

    def forward(self, x):
        if self.training:
            self.seen = self.reader.seen = torch.cat([self.seen, x.detach().mean(0, keepdim=True)])
        return super().forward(x) + self.reader.seen.mean(0)


class _Reader(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.register_buffer("seen", seen)


class _Late(Block):
    """Its first pass makes a buffer, which is not the same as that of a later pass."""

    def __init__(self, declared=False, persistent=True):
        super().__init__()
        self.persistent = persistent
        if declared:
            self.register_buffer("center", None, persistent)

    def forward(self, x):
        if getattr(self, "center", None) is None:
            self.register_buffer("center", x.detach().mean(0), self.persistent)
        return super().forward(x - self.center)


class _Counted(Block):
    """Its buffer of whole numbers becomes one of fractions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16, dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.mean = self.mean + x.detach().mean(0)
        return super().forward(x + self.mean)


class _Dropping(Block):
    """Its first pass drops a buffer, by giving it None or by deleting it."""

    def __init__(self, deletes):
        super().__init__()
        self.deletes = deletes
        self.register_buffer("first", torch.ones(16))

    def forward(self, x):
        if getattr(self, "first", None) is not None:
            x = x + self.first
            self.first = None
            if self.deletes:
                del self.first
        return super().forward(x)


class _Sharing(Block):
    """Its first pass makes a buffer that two modules have, or gives one of two modules another one than that they have had."""

    def __init__(self, begins_shared):
        super().__init__()
        self.reader = nn.Module()
        shared = torch.zeros(16) if begins_shared else None
        self.register_buffer("center", shared)
        self.reader.register_buffer("center", shared)

    def forward(self, x):
        if self.center is None:
            self.center = self.reader.center = x.detach().mean(0)
        elif self.center is self.reader.center and self.training and not self.center.any():
            self.center = x.detach().mean(0)
        self.center += 0.5
        return super().forward(x - self.center + 2 * self.reader.center)


class _Spread(Block):
    """Its buffer has one number for all its elements until the first pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1).expand(16))

    def forward(self, x):
        if self.training:
            self.center = self.center + x.detach().mean(0)
        return super().forward(x - self.center)


class _Scripted(Block):
    """A part of it without parameters is a module of torch.jit.script."""

    def __init__(self):
        super().__init__()
        self.count = torch.jit.script(_Count())

    def forward(self, x):
        return super().forward(self.count(x))


class _Numbered(Block):
    """It has a number of passes that is no tensor."""

    passes = 0

    def get_extra_state(self):
        return {"passes": self.passes}

    def set_extra_state(self, state):
        self.passes = state["passes"]

    def forward(self, x):
        self.passes += self.training
        return super().forward(x * (1 + 0.1 * self.passes))


class _Placed(Block):
    """Its extra state is no plain data."""

    def get_extra_state(self):
        return pathlib.Path("data")

    def set_extra_state(self, state):
        pass


class _Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(16))

    def forward(self, x):
        self.passes += 0.25
        return x + self.passes


_resumed("a buffer that passes make longer, which two modules have", _Growing)
_resumed("a buffer that the first pass makes", _Late)
_resumed("a buffer that the first pass makes and `state_dict` leaves out", lambda: _Late(persistent=False))
_resumed("a buffer that is None until the first pass", lambda: _Late(declared=True))
_resumed("a buffer that is None until the first pass and `state_dict` leaves out", lambda: _Late(declared=True, persistent=False))
_resumed("a buffer of whole numbers that becomes one of fractions", _Counted)
_resumed("a buffer that is None after the first pass", lambda: _Dropping(deletes=False))
_resumed("a buffer that the first pass deletes", lambda: _Dropping(deletes=True))
_resumed("a buffer that the first pass makes for two modules", lambda: _Sharing(begins_shared=False))
_resumed("a buffer that two modules have until the first pass", lambda: _Sharing(begins_shared=True))
_resumed("a buffer with one number for all its elements", _Spread)
_resumed("a buffer of a module of `torch.jit.script`", _Scripted)
_resumed("extra state of a module", _Numbered)


class _Tracked:
    """What a script tracks: `state` is its whole state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def _scheduled(s, number, tracked):
    """Rates as scripts take them from an array that is made once."""
    for group in s.optimizer.param_groups:
        group.update(lr=numpy.linspace(1e-2, 1e-3, 8)[number], weight_decay=numpy.float32(0.1) * numpy.float32(number))


def _counted(s, number, tracked):
    counts, number_of_steps = tracked.state["counts"], tracked.state["steps"]
    tracked.state = {"counts": counts + number, "steps": number_of_steps + numpy.int64(1)}
    s.note([counts.tolist(), int(number_of_steps), type(number_of_steps).__name__])


_resumed("rates that are numbers of NumPy", before_step=_scheduled)
_resumed(
    "a tracked object with numbers and arrays of NumPy",
    track=lambda: _Tracked({"counts": numpy.zeros(3, dtype=numpy.float16), "steps": numpy.int64(0)}),
    before_step=_counted,
)


class _Loader(_Tracked):
    """Batches in an order that is drawn when they begin, which they do when their state is asked for, too, as those of torchdata's StatefulDataLoader."""

    def _begin(self):
        if not self.state:
            self.state["order"] = torch.randperm(4)
        return self.state

    def state_dict(self):
        return self._begin()

    def __iter__(self):
        return iter(self._begin()["order"].tolist())


@resumed.equal("a tracked loader that begins when its state is asked for")
def _(s):
    loader = _Loader({})
    s.begin(track=[loader])
    torch.manual_seed(7)
    s.step(*loader)
    return loader.state["order"]


resumed.refused("a tracked object with a path", "hold plain data", lambda s: s.begin(track=[_Tracked({"file": pathlib.Path("data")})]))
resumed.refused("extra state of a module with a path", "hold plain data", lambda s: s.begin(net(block=_Placed)))
resumed.refused("a tracked object with a function", "hold plain data", lambda s: s.begin(track=[_Tracked({"make": lambda: 0})]))


@resumed.refused("a parameter group with a path, set later", "parameter group 0 of the optimizer cannot be kept")
def _(s):
    s.step(0)
    s.optimizer.param_groups[0]["file"] = pathlib.Path("data")
    try:
        s.step(1, 2)
    finally:
        del s.optimizer.param_groups[0]["file"]

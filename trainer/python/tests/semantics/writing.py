"""Writes: weights that a script or a module changes itself, averages of weights, and hooks."""

import contextlib
import copy
from multiprocessing.reduction import ForkingPickler

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import init
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

import offloadd
from offloadd import _zero
from table import EQUAL, EVERYWHERE, MEMORY, Block, Net, Theme, adamw, net, randomized


written = Theme("written outside of forward")


# Where a script finds what to do instead.
BEFORE = "before offloadd.prepare"

# Of memory in which updates would not be seen.
MOVED = "send a clone() of it"


def _writes(name, write, **more):
    written.refused(name, BEFORE, lambda s: _write(s, write), **more)


def _write(s, write):
    """Writes to a weight before the first step and after it."""
    with torch.no_grad():
        write(s.w)
    s.step(0)
    with torch.no_grad():
        write(s.w)
    s.step(1)
    return [s.w, s.b, s.root]


_writes("`w.add_`", lambda w: w.add_(0.1))
_writes("`w[0] = 0`", lambda w: w.__setitem__(0, 0.0))
_writes("`w[0].mul_(2)`, a view", lambda w: w[0].mul_(2))
_writes("`for row in w: row.div_(row.norm())`", lambda w: [row.div_(row.norm()) for row in w])
_writes("`w.data.add_`", lambda w: w.data.add_(0.1))
_writes("`w.data[0] = 0`", lambda w: w.data.__setitem__(0, 0.0))
_writes("`w.data = x`", lambda w: setattr(w, "data", torch.full_like(w, 0.1)))
_writes("`w.set_`", lambda w: w.set_(torch.full_like(w, 0.1)), none=MOVED)
_writes("`torch.add(out=w)`", lambda w: torch.add(w, 0.1, out=w))
_writes("`torch.mul(out=w.data)`", lambda w: torch.mul(w.data, 0.9, out=w.data))
written.refused("`numpy` in place", "read-only", lambda s: _write(s, lambda w: w.detach().numpy().__imul__(0.9)), error=ValueError, none=BEFORE)
_writes("`init.xavier_uniform_`", lambda w: init.xavier_uniform_(w))
_writes("`_foreach_copy_` into a parameter", lambda w: torch._foreach_copy_([w], [torch.full_like(w, 0.1)]))

_writes("`_fused_sgd_` of an optimizer of a script's own", lambda w: _fused(w))


def _stays(name, change):
    """A line in which the memory of weights that stay in memory is moved, before the first step."""

    @written.refused(name, MOVED, devices=("none",))
    def _(s):
        s.begin()
        with torch.no_grad():
            change(s.w)
        s.step(0)


_stays("`w.detach().share_memory_()` of weights that stay in memory", lambda w: w.detach().share_memory_())
_stays("weights that stay in memory, sent to another process", lambda w: ForkingPickler.dumps(w.data))


def _not_made(name, change):
    """A line in which a script goes on after a write was refused, with the weights of before."""

    @written.equal(name)
    def _(s):
        s.step(0)
        with torch.no_grad(), contextlib.suppress(offloadd.NotSupported):
            if s.run:
                change(s.w)
                s.step(1)
        s.optimizer.zero_grad()
        s.step(2)
        return s.weights()


_not_made("a write that is refused, and the next batch", lambda w: w.add_(0.5))
_not_made("a write through `data` that is refused, and the next batch", lambda w: w.data.add_(0.5))


@written.equal("`GatheredParameters` with `modifier_rank=0`, written")
def _(s):
    s.step(0)
    if s.run:
        _zero.remember(s.run)
    with _zero.GatheredParameters([s.w], modifier_rank=0), torch.no_grad():
        s.w.mul_(0.5)
    # Takes memory that was given back.
    taken = [torch.full((elems,), 7.0) for elems in range(64, 4096, 64)]
    s.step(1)
    return [s.weights(), len(taken)]


def _write_and(name, do, **more):
    """A line in which a script writes to a weight, and then does what replaces or stores what is in tiles."""

    @written.refused(name, BEFORE, **more)
    def _(s):
        s.step(0)
        with torch.no_grad():
            s.w.mul_(0.5)
        do(s)
        s.step(1)
        return s.weights()


def _gather_bias(s):
    if s.run:
        _zero.remember(s.run)
    with _zero.GatheredParameters([s.b], modifier_rank=0), torch.no_grad():
        s.b.mul_(0.5)


_write_and("a write, and a checkpoint", lambda s: s.run and [s.run.save_checkpoint(s.dir / "checkpoints"), s.run.load_checkpoint(s.dir / "checkpoints")])
_write_and("a write, and `load_state_dict` of another weight", lambda s: s.model.load_state_dict({"last.bias": torch.ones(5)}, strict=False))
_write_and("a write, and `load_state_dict` of all weights", lambda s: s.model.load_state_dict(net(3).state_dict()), none=EQUAL)
_write_and("a write, and `load_state_dict` of the optimizer", lambda s: s.optimizer.load_state_dict(copy.deepcopy(s.optimizer.state_dict())))
_write_and("a write, and another weight written in `GatheredParameters`", _gather_bias)
_write_and("a write, and `close`", lambda s: s.run and s.run.close(), devices=EVERYWHERE)


def _write_at_end(s, write):
    """Writes to a weight after the last step of a run."""
    s.step(0)
    with s.run or contextlib.nullcontext(), torch.no_grad():
        write(s.w)


written.refused("a write at the end of `with run`", BEFORE, lambda s: _write_at_end(s, lambda w: w.data.mul_(0.5)))
written.refused("`w.set_` at the end of `with run`", BEFORE, lambda s: _write_at_end(s, lambda w: w.set_(torch.full_like(w, 0.1))), none=MOVED)


written.refused("all parameters in a loop", BEFORE, lambda s: _all(s, lambda p: p.mul_(0.9)))
written.refused("`model.apply(init)`", BEFORE, lambda s: [s.step(), s.model.apply(_init), s.step(1)])
written.refused("`vector_to_parameters`", BEFORE, lambda s: _vector(s))
written.refused("weights in no block", BEFORE, lambda s: _write_root(s))
written.refused(
    "a write between backward and step",
    BEFORE,
    lambda s: [s.backward(), torch.no_grad()(lambda: s.w.mul_(0.9))(), s.optimizer.step(), s.weights()][3],
)
written.refused(
    "`w.set_` between backward and step",
    BEFORE,
    lambda s: [s.backward(), torch.no_grad()(lambda: s.w.set_(torch.full_like(s.w, 0.1)))(), s.optimizer.step()],
    none=MOVED,
)
# Where weights stay in memory, autograd refuses it as in a model that is not prepared.
written.refused("a write between forward and backward", BEFORE, lambda s: _write_before_backward(s), devices=("cpu",))
written.refused("a leaf that requires a gradient, without `no_grad`", BEFORE, lambda s: s.w.add_(1.0), none=EQUAL)
written.refused("a frozen parameter", BEFORE, lambda s: _write_frozen(s), none=EQUAL)
written.refused("`torch.utils.swap_tensors`", BEFORE, lambda s: [torch.utils.swap_tensors(s.w, nn.Parameter(torch.zeros(32, 16))), s.step(0)], none=MOVED)
written.refused("weights stored, replaced and restored", BEFORE, lambda s: _swapped(s))
written.refused("a weight of another model copied into it", BEFORE, lambda s: _copied(s))


def _fused(w):
    torch._fused_sgd_([w], [torch.ones_like(w)], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=False)


def _init(module):
    if isinstance(module, nn.Linear):
        init.constant_(module.weight, 0.03)
        init.zeros_(module.bias)


def _all(s, write):
    s.step(0)
    with torch.no_grad():
        for param in s.model.parameters():
            write(param)
    s.step(1)


def _vector(s):
    s.step(0)
    vector = nn.utils.parameters_to_vector(s.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, s.model.parameters())
    s.step(1)


def _write_root(s):
    s.step(0)
    with torch.no_grad():
        s.root.mul_(0.5)
        s.model.first.bias.data.zero_()
    s.step(1)


def _write_before_backward(s):
    loss = s.loss()
    with torch.no_grad():
        s.w.mul_(0.9)
    loss.backward()


def _write_frozen(s):
    model = net()
    model.blocks[3].requires_grad_(False)
    s.begin(model)
    s.step(0)
    with torch.no_grad():
        model.blocks[3].up.weight.mul_(0.5)
    s.step(1)


def _swapped(s):
    s.step(0)
    kept = [param.detach().clone() for param in s.model.parameters()]
    with torch.no_grad():
        for param in s.model.parameters():
            param.copy_(torch.zeros_like(param) + 0.02)
    s.note(s.loss())
    with torch.no_grad():
        for param, value in zip(s.model.parameters(), kept):
            param.copy_(value)
    s.step(1)


def _copied(s):
    other = net(3)
    s.step(0)
    with torch.no_grad():
        for ours, theirs in zip(s.model.blocks[0].parameters(), other.blocks[0].parameters()):
            ours.data.copy_(theirs.data)
    s.step(1)


averaged = Theme("averages of weights")


def _averages(name, update, devices=MEMORY):
    """A line in which a copy of the model, made before, follows it."""

    @averaged.equal(name, devices=devices)
    def _(s):
        model = net()
        ema = copy.deepcopy(model).requires_grad_(False)
        s.begin(model)
        for number in range(3):
            s.step(number)
            with torch.no_grad():
                update(list(ema.parameters()), list(model.parameters()))
        return [s.weights(ema), s.loss(3, ema)]


_averages("`ema.mul_(0.9).add_(p, alpha=0.1)`", lambda e, p: [a.mul_(0.9).add_(b, alpha=0.1) for a, b in zip(e, p)], devices=EVERYWHERE)
_averages("`ema.lerp_(p, 0.1)`", lambda e, p: [a.lerp_(b, 0.1) for a, b in zip(e, p)])
_averages("`ema.sub_((ema - p) * 0.1)`", lambda e, p: [a.sub_((a - b) * 0.1) for a, b in zip(e, p)])
_averages("`ema.copy_(p)`", lambda e, p: [a.copy_(b) for a, b in zip(e, p)])
_averages("`ema.data.copy_(p.data)`", lambda e, p: [a.data.copy_(b.data) for a, b in zip(e, p)])
_averages("`ema += p`", lambda e, p: [a.__iadd__(b) for a, b in zip(e, p)])
_averages("`ema[0] = p[0]`", lambda e, p: [a.__setitem__(0, b[0]) for a, b in zip(e, p)])
_averages("`ema.addcmul_(p, p)`", lambda e, p: [a.addcmul_(b, b, value=0.1) for a, b in zip(e, p)])
_averages("`torch.lerp(ema, p, 0.1, out=ema)`", lambda e, p: [torch.lerp(a, b, 0.1, out=a) for a, b in zip(e, p)])
_averages("`_foreach_lerp_(ema, params, 0.1)`", lambda e, p: torch._foreach_lerp_(e, p, 0.1))
_averages("`_foreach_copy_(ema, params)`", lambda e, p: torch._foreach_copy_(e, p))
_averages("`_foreach_mul_`, `_foreach_add_(ema, params)`", lambda e, p: [torch._foreach_mul_(e, 0.9), torch._foreach_add_(e, p, alpha=0.1)])
_averages("`ema.data = p.data.clone()`", lambda e, p: [setattr(a, "data", b.data.clone()) for a, b in zip(e, p)])


@averaged.equal("a dictionary of shadows by name")
def _(s):
    shadow = {name: param.detach().clone() for name, param in s.model.named_parameters()}
    for number in range(2):
        s.step(number)
        for name, param in s.model.named_parameters():
            shadow[name] -= 0.1 * (shadow[name] - param.data)
    return shadow


@averaged.refused("an average evaluated in the model's place", BEFORE)
def _(s):
    shadow = {name: param.detach().clone() for name, param in s.model.named_parameters()}
    s.step(0)
    kept = {name: param.detach().clone() for name, param in s.model.named_parameters()}
    for name, param in s.model.named_parameters():
        param.data.copy_(shadow[name].lerp(kept[name], 0.5))
    s.model.eval()
    with torch.no_grad():
        s.note(s.loss(1))
    s.model.train()
    for name, param in s.model.named_parameters():
        param.data.copy_(kept[name])
    s.step(1)


@averaged.equal("an average kept in buffers of the model")
def _(s):
    model = net()
    model.register_buffer("average", model.last.weight.detach().clone())
    s.begin(model)
    for number in range(2):
        s.step(number)
        with torch.no_grad():
            model.average.lerp_(model.last.weight, 0.3)
    return model.average


@averaged.equal("`AveragedModel` made before")
def _(s):
    model = net()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    s.begin(model)
    for number in range(3):
        s.step(number)
        averaged.update_parameters(model)
    return [s.weights(averaged), averaged.module(s.x())]


@averaged.equal("`AveragedModel` with the mean, made before")
def _(s):
    model = net()
    averaged = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn(), use_buffers=True)
    s.begin(model)
    for number in range(3):
        s.step(number)
        averaged.update_parameters(model)
    return s.weights(averaged)


@averaged.equal("`AveragedModel` with a function of a script's own")
def _(s):
    model = net()
    averaged = AveragedModel(model, avg_fn=lambda a, p, n: a * 0.5 + p * 0.5)
    s.begin(model)
    for number in range(2):
        s.step(number)
        averaged.update_parameters(model)
    return s.weights(averaged)


@averaged.equal("`update_bn` of an average")
def _(s):
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

    model = net(block=Normed)
    averaged = AveragedModel(model)
    s.begin(model)
    s.step(0, 1)
    averaged.update_parameters(model)
    update_bn([s.x(2), s.x(3)], averaged)
    return s.weights(averaged)


@averaged.refused("`AveragedModel` made after `prepare`", "copy it before offloadd.prepare")
def _(s):
    s.step(0)
    AveragedModel(s.model)


@averaged.equal("a target network that follows by `load_state_dict`")
def _(s):
    model, target = net(), net(1).requires_grad_(False)
    s.begin(model)
    for number in range(2):
        s.step(number)
        target.load_state_dict(model.state_dict())
    return s.weights(target)


@averaged.equal("a target network that follows by a mixed state dict")
def _(s):
    model, target = net(), net(1).requires_grad_(False)
    s.begin(model)
    s.step(0)
    ours, theirs = model.state_dict(), target.state_dict()
    target.load_state_dict({name: 0.1 * ours[name] + 0.9 * theirs[name] for name in ours})
    return s.weights(target)


in_forward = Theme("written in forward", changes=False)

# What an error says of weights that were written while they were in memory.
IN_PLACE = "was changed in place while it was in memory"


def _module(name, make, evaluates=False, phrase=IN_PLACE):
    """A line with a model whose modules write to their weights."""

    @in_forward.refused(name, phrase)
    def _(s):
        s.begin(make())
        s.step(0, 1, 2)
        s.note(s.weights())
        if evaluates:
            s.model.eval()
            with torch.no_grad():
                s.note(s.loss(3))
            s.model.train()
            s.step(4)


def _block(forward):
    class Writes(Block):
        def forward(self, x):
            forward(self)
            return super().forward(x)

    return lambda: net(block=Writes)


def _without_gradients(write):
    return lambda block: torch.no_grad()(write)(block)


class Words(Net):
    """Embeds numbers made of the input."""

    def __init__(self, **more):
        super().__init__()
        self.words = nn.Embedding(50, 16, **more)

    def forward(self, x):
        h = self.words((x * 7).long().abs() % 50).mean(1) + self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


class WordsInBlock(Block):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 16, max_norm=0.5)

    def forward(self, x):
        return super().forward(x) + self.words((x[:, 0] * 7).long().abs() % 9)


def _assign(block):
    block.up.weight.data = block.up.weight.data.clamp(-0.1, 0.1)


def _uncounted(w):
    with torch.autograd._unsafe_preserve_version_counter(w), torch.no_grad():
        w.mul_(0.9)


def _each_row(block):
    for row in block.up.weight:
        row.div_(row.norm() + 1)


_module("`Embedding(max_norm)` in no block", lambda: randomized(Words(max_norm=0.5)), evaluates=True)
_module("`Embedding(max_norm)` in a block", lambda: net(block=WordsInBlock), evaluates=True)
_module("`self.w.data.clamp_`", _block(lambda block: block.up.weight.data.clamp_(-0.05, 0.05)))
_module("`self.w.mul_` under `no_grad`", _block(_without_gradients(lambda block: block.up.weight.mul_(0.9))))
_module("`self.w.data *= 0.9`", _block(lambda block: block.up.weight.data.__imul__(0.9)))
_module("`self.w.data = x`", _block(_assign), phrase=BEFORE)
_module("`self.w.copy_(F.normalize(self.w))`", _block(_without_gradients(lambda block: block.up.weight.copy_(F.normalize(block.up.weight, dim=1)))))
_module("rows in a loop", _block(_without_gradients(_each_row)))
_module("`_foreach_mul_` of a block's weights", _block(_without_gradients(lambda block: torch._foreach_mul_(list(block.parameters()), 0.99))))
_module("only in training", _block(lambda block: block.up.weight.data.clamp_(-0.05, 0.05) if block.training else None), evaluates=True)
_module("only in evaluation", _block(lambda block: None if block.training else block.up.weight.data.clamp_(-0.05, 0.05)), evaluates=True)
_module("through numpy", _block(lambda block: block.up.weight.detach().numpy().__imul__(0.9)))
_module("into the storage", _block(lambda block: block.up.weight.untyped_storage().fill_(0)))
_module("without its version counter", _block(lambda block: _uncounted(block.up.weight)), evaluates=True)
_module("`torch.mul(out=self.w.data)`", _block(lambda block: torch.mul(block.up.weight.data, 0.9, out=block.up.weight.data)))


_module("`load_state_dict` of the block", _block(lambda block: block.load_state_dict(block.state_dict())), phrase="within a forward: do it between steps")


@in_forward.refused("a codebook that is renormalised", IN_PLACE)
def _(s):
    class Codes(Block):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(7, 16))

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.codes.copy_(F.normalize(self.codes, dim=-1))
            nearest = torch.cdist(x, self.codes).argmin(1)
            return super().forward(x) + self.codes[nearest]

    s.begin(net(block=Codes))
    s.step(0, 1, 2)


@in_forward.equal("a codebook in a buffer that follows its inputs")
def _(s):
    class Codes(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.randn(7, 16))

        def forward(self, x):
            nearest = torch.cdist(x, self.codes).argmin(1)
            if self.training:
                self.codes[nearest] = self.codes[nearest].lerp(x.detach(), 0.1)
            return super().forward(x) + self.codes[nearest]

    s.begin(net(block=Codes))
    s.step(0, 1, 2)
    return s.model.state_dict()


@in_forward.refused("a codebook that dead codes are reset in", IN_PLACE)
def _(s):
    class Codes(Block):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(7, 16))

        def forward(self, x):
            used = torch.cdist(x, self.codes).argmin(1)
            if self.training:
                dead = torch.ones(7, dtype=torch.bool)
                dead[used] = False
                self.codes.data[dead] = x.detach()[0]
            return super().forward(x) + self.codes[used]

    s.begin(net(block=Codes))
    s.step(0, 1, 2)


@in_forward.refused("a frozen weight", IN_PLACE, none=EQUAL)
def _(s):
    class Writes(Block):
        def forward(self, x):
            self.up.weight.data.mul_(0.9)
            return super().forward(x)

    model = net(block=Writes)
    for block in model.blocks:
        block.up.requires_grad_(False)
    s.begin(model)
    s.step(0, 1)
    return s.weights()


@in_forward.refused("in a forward pre-hook", IN_PLACE)
def _(s):
    for block in s.model.blocks:
        block.up.register_forward_pre_hook(lambda module, args: [module.weight.data.clamp_(-0.1, 0.1)] and None)
    s.step(0, 1)
    return s.weights()


@in_forward.refused("in a forward hook", IN_PLACE)
def _(s):
    for block in s.model.blocks:
        block.up.register_forward_hook(lambda module, args, out: [module.bias.data.mul_(0.9)] and None)
    s.step(0, 1)
    return s.weights()


@in_forward.refused("in the model's own forward", IN_PLACE)
def _(s):
    class Writes(Net):
        def forward(self, x):
            self.last.weight.data.clamp_(-0.1, 0.1)
            self.blocks[2].up.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    s.begin(randomized(Writes()))
    s.step(0, 1)
    return s.weights()


@in_forward.refused("in a hook of a gradient", IN_PLACE)
def _(s):
    s.w.register_hook(lambda grad: [s.b.data.mul_(0.9)] and None)
    s.step(0, 1)
    return s.weights()


@in_forward.refused("what is read after a write, in the same forward", IN_PLACE)
def _(s):
    class Writes(Block):
        def forward(self, x):
            with torch.no_grad():
                self.up.weight[0].fill_(0.25)
            return super().forward(x) + self.up.weight[0].detach().mean()

    s.begin(net(block=Writes))
    s.step(0, 1)


hooked = Theme("hooks")


@hooked.equal("`register_hook` before `prepare` sees gradients", devices=EVERYWHERE)
def _(s):
    model, seen = net(), []
    model.blocks[1].up.weight.register_hook(lambda grad: seen.append(grad.clone()))
    s.begin(model)
    s.step(0, 1)
    return seen


@hooked.equal("`register_hook` before `prepare` changes gradients")
def _(s):
    model = net()
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5 + 0.01)
    s.begin(model)
    s.step(0, 1)


@hooked.equal("`register_hook` after `prepare` sees gradients")
def _(s):
    seen = []
    s.w.register_hook(lambda grad: seen.append(grad.clone()))
    s.step(0, 1)
    return seen


@hooked.equal("`register_hook` after `prepare` changes gradients")
def _(s):
    for param in s.model.parameters():
        param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    s.step(0, 1)


@hooked.equal("a hook that is removed")
def _(s):
    seen = []
    handle = s.w.register_hook(lambda grad: seen.append(grad.clone()))
    s.step(0)
    handle.remove()
    s.step(1)
    return seen


@hooked.equal("`register_post_accumulate_grad_hook` before `prepare`")
def _(s):
    model, seen = net(), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.norm()))
    s.begin(model)
    s.step(0, 1)
    return sorted(map(float, seen))


@hooked.equal("`register_post_accumulate_grad_hook` after `prepare`")
def _(s):
    seen = []
    for param in s.model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.norm()))
    s.step(0, 1)
    return sorted(map(float, seen))


@hooked.equal("a post-accumulate hook that scales the gradient")
def _(s):
    for param in s.model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: [param.grad.mul_(0.5)] and None)
    s.step(0, 1)


@hooked.equal("a post-accumulate hook that clips the gradient by value")
def _(s):
    model = net()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: [param.grad.clamp_(-0.01, 0.01)] and None)
    s.begin(model)
    s.step(0, 1)


@hooked.equal("hooks of both kinds, before and after, in their order")
def _(s):
    model, order = net(), []
    w = model.blocks[1].up.weight
    w.register_hook(lambda grad: order.append("hook before"))
    w.register_post_accumulate_grad_hook(lambda param: order.append("accumulated before"))
    s.begin(model)
    w.register_hook(lambda grad: order.append("hook after"))
    w.register_post_accumulate_grad_hook(lambda param: order.append("accumulated after"))
    s.step(0)
    return order


@hooked.equal("a post-accumulate hook that steps an optimizer of each parameter")
def _(s):
    model = net()
    seen = []
    model.last.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.abs().sum()))
    s.begin(model)
    s.step(0)
    return seen


@hooked.equal("`register_multi_grad_hook`")
def _(s):
    seen = []
    torch.autograd.graph.register_multi_grad_hook((s.w, s.b), lambda grads: seen.append([grad.clone() for grad in grads]))
    s.step(0, 1)
    return seen


@hooked.equal("a hook of the gradient's accumulation node")
def _(s):
    seen = []
    node = torch.autograd.graph.get_gradient_edge(s.w).node
    node.register_prehook(lambda grads: seen.append(grads[0].clone()))
    s.step(0)
    return seen


@hooked.equal("the accumulation node through `expand_as`")
def _(s):
    seen = []
    node = s.w.expand_as(s.w).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(1))
    s.step(0)
    return [seen, type(node).__name__]


@hooked.equal("forward pre-hooks and forward hooks of modules")
def _(s):
    seen = []
    s.model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    s.model.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    s.model.blocks[2].register_forward_hook(lambda module, args, out: out * 0.5)
    s.step(0, 1)
    return seen


@hooked.equal("forward hooks that read weights")
def _(s):
    seen = []
    for block in s.model.blocks:
        block.up.register_forward_hook(lambda module, args, out: seen.append(module.weight.norm()))
        block.register_forward_hook(lambda module, args, out: seen.append(module.down.weight.norm()))
    s.model.register_forward_hook(lambda module, args, out: seen.append(module.last.weight.norm()))
    s.step(0, 1)
    return seen


@hooked.equal("`register_full_backward_hook`")
def _(s):
    seen = []
    for block in s.model.blocks:
        block.up.register_full_backward_hook(lambda module, grads, outs: seen.append([outs[0].clone(), module.weight.norm()]))
    s.step(0, 1)
    return seen


@hooked.equal("`register_full_backward_hook` of blocks and the model")
def _(s):
    seen = []
    for module in [*s.model.blocks, s.model]:
        module.register_full_backward_hook(lambda module, grads, outs: seen.append(outs[0].clone()))
    s.step(0, 1)
    return seen


@hooked.equal("`register_full_backward_pre_hook` changes gradients")
def _(s):
    s.model.blocks[1].register_full_backward_pre_hook(lambda module, outs: (outs[0] * 0.5,))
    s.step(0, 1)


@hooked.equal("global hooks of modules")
def _(s):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    s.step(0)
    handle.remove()
    return seen


@hooked.equal("hooks of activations, `retain_grad`")
def _(s):
    kept = []
    s.model.blocks[1].register_forward_hook(lambda module, args, out: [out.retain_grad(), kept.append(out)] and None)
    s.backward(0)
    return kept[0].grad


@hooked.equal("`saved_tensors_hooks`")
def _(s):
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one):
        s.step(0, 1)


@hooked.equal("`saved_tensors_hooks` through numpy")
def _(s):
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.detach().numpy().copy(), lambda one: torch.from_numpy(one)):
        s.step(0, 1)


@hooked.equal("`save_on_cpu`")
def _(s):
    with torch.autograd.graph.save_on_cpu():
        s.step(0, 1)


@hooked.equal("`allow_mutation_on_saved_tensors`")
def _(s):
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        s.step(0, 1)


def _counted(register):
    """A script in which a hook of the optimizer notes that it ran and what it saw."""

    def script(s):
        seen = []
        register(s.optimizer, lambda optimizer, args, kwargs: seen.append(len(optimizer.param_groups[0]["params"])))
        s.step(0, 1)
        return seen

    return script


hooked.equal("`register_step_pre_hook`", _counted(lambda o, hook: o.register_step_pre_hook(lambda *args: hook(*args))), devices=EVERYWHERE)
hooked.equal("`register_step_post_hook`", _counted(lambda o, hook: o.register_step_post_hook(lambda *args: hook(*args))))


@hooked.equal("step hooks registered before `prepare`")
def _(s):
    model, seen = net(), []
    optimizer = adamw(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    s.begin(model, optimizer)
    s.step(0, 1)
    return seen


@hooked.equal("a step pre-hook that reads the gradients' norm")
def _(s):
    seen = []
    s.optimizer.register_step_pre_hook(lambda o, *_: seen.append([p.grad.norm() for p in o.param_groups[0]["params"]]))
    s.step(0, 1)
    return seen


@hooked.equal("a step pre-hook that clips")
def _(s):
    s.optimizer.register_step_pre_hook(lambda o, *_: [nn.utils.clip_grad_norm_(o.param_groups[0]["params"], 0.1)] and None)
    s.step(0, 1)


@hooked.equal("a step post-hook that reads weights")
def _(s):
    seen = []
    s.optimizer.register_step_post_hook(lambda *_: seen.append(s.w.norm()))
    s.step(0, 1)
    return seen


@hooked.refused("a step post-hook that writes weights", BEFORE)
def _(s):
    s.optimizer.register_step_post_hook(lambda *_: [torch.no_grad()(lambda: s.w.mul_(0.9))()] and None)
    s.continues = False
    s.step(0, 1)
    return s.weights()


@hooked.equal("a step pre-hook that changes the learning rate")
def _(s):
    def slower(optimizer, *_):
        optimizer.param_groups[0]["lr"] *= 0.5

    s.optimizer.register_step_pre_hook(slower)
    s.step(0, 1, 2)


@hooked.equal("hooks of all optimizers")
def _(s):
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("post")),
    ]
    s.step(0, 1)
    for handle in handles:
        handle.remove()
    return seen


@hooked.equal("a step hook that is removed")
def _(s):
    seen = []
    handle = s.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    s.step(0)
    handle.remove()
    s.step(1)
    return seen


@hooked.equal("hooks of the model's `state_dict`")
def _(s):
    def add(module, state, prefix, metadata):
        state["added"] = torch.ones(1)

    s.model.register_state_dict_post_hook(add)
    s.model.register_state_dict_pre_hook(lambda module, prefix, keep: setattr(module, "asked", True))
    s.step(0)
    return [s.model.state_dict(), s.model.asked]


@hooked.equal("hooks of a block's `state_dict`")
def _(s):
    def rename(module, state, prefix, metadata):
        state[prefix + "renamed"] = state.pop(prefix + "weight")

    s.model.blocks[1].up.register_state_dict_post_hook(rename)
    return s.model.state_dict()


@hooked.equal("hooks of the model's `load_state_dict`")
def _(s):
    seen = []
    s.model.register_load_state_dict_pre_hook(lambda module, state, *_: seen.append(len(state)))
    s.model.register_load_state_dict_post_hook(lambda module, keys: seen.append(len(keys.missing_keys)))
    s.model.load_state_dict(net(3).state_dict())
    s.step(0)
    return seen


@hooked.equal("hooks of the optimizer's `state_dict`")
def _(s):
    seen = []
    s.optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append("pre"))
    s.optimizer.register_state_dict_post_hook(lambda optimizer, state: seen.append("post"))
    s.step(0)
    s.optimizer.state_dict()
    return seen


@hooked.equal("hooks of the optimizer's `load_state_dict`")
def _(s):
    seen = []
    s.optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append("pre"))
    s.optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append("post"))
    state = adamw(net().parameters()).state_dict()
    s.optimizer.load_state_dict(state)
    s.step(0)
    return seen


@hooked.equal("hooks of a script's own class around `__call__`")
def _(s):
    class Wrapped(Block):
        def __call__(self, *args):
            return super().__call__(*args) * 1.5

    s.begin(net(block=Wrapped))
    s.step(0, 1)

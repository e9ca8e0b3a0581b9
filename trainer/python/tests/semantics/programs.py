"""Whole programs: several models, errors and interrupts, notebooks, processes and threads."""

import concurrent.futures
import contextlib
import copy
import gc
import multiprocessing
import os
import signal
import threading

import torch
import torch.nn.functional as F
from torch import nn

import offloadd
from table import CLASSES, EQUAL, EVERYWHERE, MEMORY, ONLY_MOVED, Block, Net, Theme, adamw, net, randomized

several = Theme("several models")


@several.equal("two prepared models side by side", devices=EVERYWHERE)
def _(s):
    models = [s.begin(net(seed)) for seed in (0, 1)]
    for number in range(3):
        for model, optimizer in s.trained:
            loss = s.loss(number, model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            s.note(loss)
    return [s.weights(model) for model in models]


@several.equal("one loss over two prepared models")
def _(s):
    models = [s.begin(net(seed)) for seed in (0, 1)]
    for number in range(3):
        loss = sum(s.loss(number, model) for model in models)
        loss.backward()
        for _, optimizer in s.trained:
            optimizer.step()
            optimizer.zero_grad()
        s.note(loss)


@several.equal("a prepared model that feeds another one")
def _(s):
    first, second = s.begin(net(0)), s.begin(net(1))
    for number in range(3):
        x, y = s.batch(number)
        loss = F.cross_entropy(second(F.pad(first(x), (0, 3))), y)
        loss.backward()
        for _, optimizer in s.trained:
            optimizer.step()
            optimizer.zero_grad()
        s.note(loss)


@several.equal("a teacher that is not prepared")
def _(s):
    teacher = net(7).eval().requires_grad_(False)
    s.loss_of = lambda m, x, y: F.cross_entropy(m(x), y) + F.kl_div(m(x).log_softmax(-1), teacher(x).softmax(-1), reduction="batchmean")
    s.step(0, 1)


@several.equal("a student that learns from a prepared teacher")
def _(s):
    teacher = s.begin(net(7))
    student = s.begin(net(1))
    for number in range(2):
        x, _ = s.batch(number)
        with torch.no_grad():
            target = teacher(x)
        loss = F.mse_loss(student(x), target)
        loss.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
        s.note(loss)


@several.equal("a generator and a discriminator, both prepared", devices=EVERYWHERE)
def _(s):
    generator, critic = s.begin(net(0)), s.begin(net(1))
    (_, of_generator), (_, of_critic) = s.trained
    for number in range(3):
        x, _ = s.batch(number)
        fake = F.pad(generator(x), (0, 3))
        of_critic.zero_grad()
        loss = critic(fake.detach()).mean() - critic(x).mean()
        loss.backward()
        of_critic.step()
        s.note(loss)
        of_generator.zero_grad()
        loss = -critic(fake).mean()
        loss.backward()
        of_generator.step()
        s.note(loss)


@several.refused(
    "a generator and a discriminator in one model, two optimizers", "not given to offloadd.prepare", none="the optimizer that offloadd.prepare was given"
)
def _(s):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.critic = net(0), net(1)

        def forward(self, x):
            return self.critic(F.pad(self.generator(x), (0, 3)))

    model = Both()
    other = adamw(model.critic.parameters())
    s.begin(model, adamw(model.generator.parameters()))
    for number in range(3):
        x, _ = s.batch(number)
        other.zero_grad()
        loss = model.critic(F.pad(model.generator(x), (0, 3)).detach()).mean() - model.critic(x).mean()
        loss.backward()
        other.step()
        s.optimizer.zero_grad()
        loss = -model(x).mean()
        loss.backward()
        s.optimizer.step()
        s.note(loss)
    other.zero_grad()


@several.equal("a target network made before, with soft updates")
def _(s):
    model = net()
    target = copy.deepcopy(model)
    s.begin(model)
    for number in range(3):
        x, _ = s.batch(number)
        with torch.no_grad():
            goal = target(x).max(1).values
        loss = F.mse_loss(model(x)[:, 0], goal)
        loss.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
        for a, b in zip(target.parameters(), model.parameters()):
            a.data.copy_(0.1 * b.data + 0.9 * a.data)
        s.note(loss)
    return s.weights(target)


@several.equal("a momentum encoder and a queue")
def _(s):
    model, queue = net(), torch.zeros(5, 6)
    key = copy.deepcopy(model).requires_grad_(False)
    s.begin(model)
    for number in range(3):
        x, _ = s.batch(number)
        with torch.no_grad():
            for a, b in zip(key.parameters(), model.parameters()):
                a.data = a.data * 0.9 + b.data * 0.1
            keys = F.normalize(key(x), dim=1)
        loss = F.cross_entropy(F.normalize(model(x), dim=1) @ queue, torch.zeros(4, dtype=torch.long))
        loss.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
        queue[:, number : number + 4] = keys.t()[:, : queue[:, number : number + 4].shape[1]]
        s.note(loss)


@several.equal("a model within a module that is not prepared")
def _(s):
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.extra = inner, nn.Linear(CLASSES, CLASSES)

        def forward(self, x):
            return self.extra(self.inner(x))

    inner = net()
    torch.manual_seed(8)
    around = Around(inner)
    s.begin(inner)
    other = adamw(around.extra.parameters())
    for number in range(3):
        loss = s.loss(number, around)
        loss.backward()
        s.optimizer.step()
        other.step()
        around.zero_grad()
        s.note(loss)
    return [s.weights(around), list(around.state_dict())]


@several.equal("a wrapper of the model that is saved and loaded")
def _(s):
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    around = Around(s.model)
    s.step(0)
    state = copy.deepcopy(around.state_dict())
    s.step(1)
    around.load_state_dict(state)
    s.step(2)
    return around.state_dict()


@several.equal("a module shared with a model that is not prepared")
def _(s):
    model = net()
    other = nn.Sequential(model.blocks[0], model.blocks[1], nn.Linear(16, 2))
    s.begin(model)
    s.step(0)
    s.note(other(torch.ones(1, 16)))
    s.step(1)
    return other(torch.ones(1, 16))


@several.equal("twins: one model on two inputs")
def _(s):
    s.loss_of = lambda m, x, y: F.cosine_embedding_loss(m(x), m(x.flip(0)), torch.ones(4))
    s.step(0, 1)


@several.equal("several heads and losses, weighted")
def _(s):
    class Heads(Net):
        def __init__(self):
            super().__init__()
            self.more = nn.ModuleList(nn.Linear(16, CLASSES) for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x) + sum(head(x) for head in self.more)

    s.begin(randomized(Heads()))
    s.step(0, 1)


@several.equal("a meta learner that updates a copy by functional_call")
def _(s):
    model = s.begin(net(dropout=0.0))
    params = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    loss = F.cross_entropy(torch.func.functional_call(model, params, (s.x(),)), s.batch()[1])
    grads = torch.autograd.grad(loss, list(params.values()))
    moved = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads)}
    return torch.func.functional_call(model, moved, (s.x(1),))


@several.refused("one optimizer of two models", "not the model's")
def _(s):
    one, other = net(0), net(1)
    s.continues = False
    s.begin(one, adamw([*one.parameters(), *other.parameters()]))


@several.refused("a loss with parameters of its own, in the model's optimizer", "nn.ModuleList([model, loss])")
def _(s):
    model, loss = net(), nn.Linear(CLASSES, 3)
    s.continues = False
    s.begin(model, adamw([*model.parameters(), *loss.parameters()]))


@several.equal("a loss with parameters of its own, in a ModuleList with the model")
def _(s):
    model = net()
    torch.manual_seed(8)
    loss = nn.Linear(CLASSES, 3)
    s.begin(nn.ModuleList([model, loss]))
    s.loss_of = lambda both, x, y: F.cross_entropy(both[1](both[0](x)), y % 3)
    s.step(0, 1)


@several.refused("a part of a prepared model is prepared", "prepared already")
def _(s):
    s.begin()
    part = s.model.blocks
    optimizer = adamw(part.parameters())
    if s.device:
        offloadd.prepare(part, optimizer, s.config(), run_dir=s.dir / "part")


@several.refused("a model with a prepared part is prepared", "prepared already")
def _(s):
    s.begin()
    whole = nn.Sequential(s.model, nn.Linear(CLASSES, 2))
    if s.device:
        offloadd.prepare(whole, adamw(whole.parameters()), s.config(), run_dir=s.dir / "whole")


@several.refused("two models share a parameter, both prepared", "prepared already")
def _(s):
    one, other = net(0), net(1)
    other.last.weight = one.last.weight
    s.begin(one)
    if s.device:
        offloadd.prepare(other, adamw(other.parameters()), s.config(), run_dir=s.dir / "other")


failing = Theme("errors and interrupts")


class Fails(Block):
    """A block that raises an error when it is told to."""

    error = None

    def forward(self, x):
        x = super().forward(x)
        if Fails.error is not None:
            error, Fails.error = Fails.error, None
            raise error
        return x


def _fails(s, error, within=contextlib.nullcontext):
    """Trains, meets an error in the first block's forward, and goes on."""
    s.begin(net(block=Fails))
    s.step(0)
    Fails.error = error
    try:
        with within():
            s.loss(1)
    except type(error) as caught:
        s.note(str(caught))
    s.step(2, 3)


failing.equal("an error in a block's forward", lambda s: _fails(s, RuntimeError("out of memory")), devices=EVERYWHERE)
failing.equal("KeyboardInterrupt in a block's forward", lambda s: _fails(s, KeyboardInterrupt()))
failing.equal("an error in evaluation", lambda s: _fails(s, ValueError("bad"), torch.no_grad))
failing.equal("StopIteration in a block's forward", lambda s: _fails(s, StopIteration("end")))


@failing.equal("an error in forward in the middle of an accumulation")
def _(s):
    s.begin(net(block=Fails))
    s.backward(0)
    Fails.error = RuntimeError("bad batch")
    with contextlib.suppress(RuntimeError):
        s.loss(1)
    s.backward(2)
    s.optimizer.step()


@failing.equal("an input of another shape")
def _(s):
    s.step(0)
    with contextlib.suppress(RuntimeError):
        s.model(torch.ones(4, 3))
    s.step(1)


@failing.equal("an error in a hook of a gradient, then `zero_grad`", devices=EVERYWHERE)
def _(s):
    told = [RuntimeError("in backward")]

    def hook(grad):
        if told:
            raise told.pop()

    s.w.register_hook(hook)
    with contextlib.suppress(RuntimeError):
        s.backward(0)
    s.optimizer.zero_grad()
    s.step(1, 2)


@failing.refused("a step after a backward that failed", "did not end")
def _(s):
    s.step(0)
    handle = s.w.register_hook(lambda grad: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        s.backward(1)
    handle.remove()
    s.optimizer.step()


@failing.equal("KeyboardInterrupt in backward, then `zero_grad`")
def _(s):
    told = [KeyboardInterrupt()]

    def hook(grad):
        if told:
            raise told.pop()

    s.model.blocks[3].down.weight.register_hook(hook)
    with contextlib.suppress(KeyboardInterrupt):
        s.backward(0)
    s.optimizer.zero_grad()
    s.step(1, 2)


@failing.equal("an error in a module's backward hook")
def _(s):
    told = [ValueError("hook")]

    def hook(module, grads, outs):
        if told:
            raise told.pop()

    s.model.blocks[2].register_full_backward_hook(hook)
    with contextlib.suppress(ValueError):
        s.backward(0)
    s.optimizer.zero_grad()
    s.step(1)


@failing.equal("an error in a module's forward hook")
def _(s):
    handle = s.model.blocks[2].register_forward_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        s.backward(0)
    handle.remove()
    s.step(1)


@failing.equal("an error in a closure")
def _(s):
    def closure():
        s.loss(0).backward()
        raise ValueError("closure")

    s.model
    with contextlib.suppress(ValueError):
        s.optimizer.step(closure)
    s.optimizer.zero_grad()
    s.step(1)


@failing.equal("an error in a step pre-hook")
def _(s):
    handle = s.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    s.backward(0)
    with contextlib.suppress(ZeroDivisionError):
        s.optimizer.step()
    handle.remove()
    s.optimizer.step()


@failing.equal("an error in a step post-hook")
def _(s):
    handle = s.optimizer.register_step_post_hook(lambda *_: 1 / 0)
    s.backward(0)
    with contextlib.suppress(ZeroDivisionError):
        s.optimizer.step()
    handle.remove()
    s.optimizer.zero_grad()
    s.step(1)


@failing.equal("an error in a recomputation", error=RuntimeError)
def _(s):
    from torch.utils.checkpoint import checkpoint

    s.begin(net(block=Fails))
    x = s.model.first(s.x())
    for block in s.model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    Fails.error = RuntimeError("again")
    with contextlib.suppress(RuntimeError):
        s.model.last(x).sum().backward()
    s.optimizer.zero_grad()
    s.step(1)


@failing.equal("an error in `saved_tensors_hooks`")
def _(s):
    with contextlib.suppress(ZeroDivisionError), torch.autograd.graph.saved_tensors_hooks(lambda one: 1 / 0, lambda one: one):
        s.loss(0)
    s.step(1)


@failing.equal("batches that fail are skipped")
def _(s):
    s.begin(net(block=Fails))
    for number in range(4):
        Fails.error = RuntimeError("bad") if number % 2 else None
        try:
            s.step(number)
        except RuntimeError:
            s.optimizer.zero_grad()


def _signalled(s, handler, begin):
    """Trains while `begin` arranges signals, given a function that sends one, and their handler calls `handler`."""
    s.begin()
    before = signal.signal(signal.SIGUSR1, lambda *_: handler(s))
    try:
        begin(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
        s.step(0, 1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def _in_forwards(s, send):
    handles = [block.register_forward_hook(lambda *_: send()) for block in s.model.blocks[:2]]
    s.optimizer.register_step_post_hook(lambda *_: [handle.remove() for handle in handles] and None)


failing.equal(
    "a handler of a signal that saves, in a forward", lambda s: _signalled(s, lambda s: s.note(s.model.state_dict()), lambda send: _in_forwards(s, send))
)
failing.equal("a handler of a signal that evaluates, in a forward", lambda s: _signalled(s, _looks, lambda send: _in_forwards(s, send)))


def _looks(s):
    with torch.no_grad(), torch.random.fork_rng():
        s.note(s.model.blocks[2](torch.ones(1, 16)))


def _after_one(s, handler, owner_of, name):
    """A signal comes where the engine has called a function of its own, once."""

    def begin(send):
        s.step(2)
        if s.run is not None:
            owner = owner_of(s.run.engine.gathering)
            plain, left = getattr(owner, name), [send]
            setattr(owner, name, lambda one: [plain(one), left and left.pop()()])

    _signalled(s, handler, begin)


def _while_weights_come(s, handler):
    _after_one(s, handler, lambda gathering: gathering.memory, "ready")


def _where_a_pass_begins(s, handler):
    """The engine has been told the order of a pass."""
    _after_one(s, handler, lambda gathering: gathering.order, "_announce")


def _evaluates(s):
    with torch.no_grad(), torch.random.fork_rng():
        s.model(s.x())


def _interrupts(name, script):
    failing.refused(name, "set a flag", script, none=EQUAL)


_interrupts("a handler of a signal that saves, where a pass begins", lambda s: _where_a_pass_begins(s, lambda s: s.model.state_dict()))
_interrupts("a handler of a signal that saves, while weights come", lambda s: _while_weights_come(s, lambda s: s.model.state_dict()))
_interrupts("a handler of a signal that evaluates, while weights come", lambda s: _while_weights_come(s, _evaluates))
_interrupts("a handler of a signal that reads moments, while weights come", lambda s: _while_weights_come(s, lambda s: s.optimizer.state_dict()))


@failing.equal("a read that fails", error=IndexError)
def _(s):
    return s.w[99]


@failing.equal("operands of other shapes", error=RuntimeError)
def _(s):
    return s.w @ s.w


@failing.equal("an attribute that is not there", error=AttributeError)
def _(s):
    return s.w.no_such_name


@failing.equal("a backward of something without a gradient", error=RuntimeError)
def _(s):
    s.w.detach().sum().backward()


@failing.equal("a backward of a matrix", error=RuntimeError)
def _(s):
    s.model(s.x()).backward()


@failing.equal("`bool` of a matrix, `float` of a matrix", error=RuntimeError)
def _(s):
    return bool(s.w)


notebooks = Theme("notebooks")


@notebooks.refused("`prepare` twice", "prepared already")
def _(s):
    s.step(0)
    if s.device:
        offloadd.prepare(s.model, s.optimizer, s.config(), run_dir=s.dir / "again")


@notebooks.refused("one run directory for two models", "run_dir")
def _(s):
    s.step(0)
    model = net(1)
    if s.device:
        offloadd.prepare(model, adamw(model.parameters()), s.config(), run_dir=s.dir / "run-0")


def _closed(name, do, devices=MEMORY):
    """A line in which a run is closed after two steps."""

    @notebooks.equal(name, devices=devices)
    def _(s):
        s.step(0, 1)
        if s.run:
            s.run.close()
        return do(s)


def _train_on(s, optimizer):
    s.continues = False
    s.loss(3).backward()
    optimizer.step()
    return s.weights()


def _prepared_again(s):
    """A second `prepare` of the same model with a new optimizer."""
    model = s.trained.pop()[0]
    s.begin(model, adamw(model.parameters()))
    s.step(3, 4)


def _ended(do):
    """What `do` does, with nothing trained after it."""

    def script(s):
        s.continues = False
        return do(s)

    return script


_closed("weights after `close`", _ended(lambda s: s.weights()))
_closed("`state_dict` after `close`", _ended(lambda s: s.model.state_dict()))
_closed("a forward after `close`", _ended(lambda s: s.model(s.x(2))))
_closed("a copy after `close`", _ended(lambda s: copy.deepcopy(s.model)(s.x(2))))
_closed("`model.to(bfloat16)` after `close`", _ended(lambda s: s.model.to(torch.bfloat16).last.weight))
_closed("a new optimizer after `close`", lambda s: _train_on(s, adamw(s.model.parameters())))
_closed("an SGD after `close`", lambda s: _train_on(s, torch.optim.SGD(s.model.parameters(), lr=0.1)))
_closed("the same optimizer after `close`", lambda s: _train_on(s, s.optimizer))
_closed("writes after `close`", _ended(lambda s: [torch.no_grad()(lambda: s.w.mul_(2))(), s.model(s.x(2))][1]))
_closed("`prepare` after `close`", _prepared_again, devices=EVERYWHERE)
_closed("`close` twice", _ended(lambda s: s.run.close() if s.run else None))


def _closed_with(name, change, again=False):
    """A line in which a run is closed with gradients that the script has changed, and a step follows."""

    @notebooks.equal(name)
    def _(s):
        s.step(0)
        s.backward(1)
        change(s)
        if s.run:
            s.run.close()
        s.note({name: param.grad for name, param in s.model.named_parameters()})
        if again:
            s.begin(*s.trained.pop())
            s.backward(2)
        s.optimizer.step()
        return s.weights()


def _step_and_zero(s):
    s.optimizer.step()
    for param in s.model.parameters():
        param.grad.zero_()


_closed_with("gradients when a run is closed", lambda s: None)
_closed_with("gradients changed in place when a run is closed", lambda s: s.w.grad.add_(0.1))
_closed_with("a gradient that a script has given when a run is closed", lambda s: setattr(s.w, "grad", torch.full((32, 16), 0.1)))
_closed_with("a gradient that was dropped when a run is closed", lambda s: setattr(s.w, "grad", None))
_closed_with("gradients that were made zero after a step when a run is closed", _step_and_zero)
_closed_with("gradients that were made zero after a step, and another `prepare`", _step_and_zero, again=True)
_closed_with("gradients made zero by `zero_grad` when a run is closed", lambda s: s.optimizer.zero_grad(set_to_none=False))
_closed_with(
    "gradients that were given after a step when a run is closed",
    lambda s: [s.optimizer.step(), [setattr(param, "grad", torch.full_like(param, 0.1)) for param in s.model.parameters()]],
)


@notebooks.refused("a block frozen between `close` and `prepare`", "freeze what was trained after offloadd.prepare")
def _(s):
    s.step(0)
    if s.run:
        s.run.close()
    s.model.blocks[1].requires_grad_(False)
    model, optimizer = s.trained[-1]
    try:
        s.begin(*s.trained.pop())
    finally:
        # Nothing is changed.
        s.trained, s.continues = [(model, optimizer)], False
        s.note(model.eval()(s.x()))
    s.step(1)


@notebooks.equal("a block frozen after another `prepare`, and unfrozen")
def _(s):
    s.step(0)
    if s.run:
        s.run.close()
    s.begin(*s.trained.pop())
    s.model.blocks[1].requires_grad_(False)
    s.step(1)
    if s.run:
        s.run.close()
    s.model.blocks[1].requires_grad_(True)
    s.begin(*s.trained.pop())
    s.step(2)


def _held_over_close(s, drop=False, zero=False):
    s.continues = False
    s.step(0)
    s.backward(1)
    grad = s.w.grad
    if zero:
        s.optimizer.step()
        grad.zero_()
    if s.run:
        s.run.close()
    if drop:
        s.runs.clear()
        s.trained.clear()
        gc.collect()
    return grad.sum()


notebooks.refused("a gradient held over `close`", "the run is closed", lambda s: _held_over_close(s))
notebooks.refused("a gradient held over `close`, made zero after a step", "the run is closed", lambda s: _held_over_close(s, zero=True))
notebooks.refused("a gradient held over `close`, of a model that is dropped", "the run is closed", lambda s: _held_over_close(s, drop=True))


@notebooks.equal("an adapter merged after `close`")
def _(s):
    class Adapted(Block):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(32, 2) * 0.1), nn.Parameter(torch.randn(2, 16) * 0.1)

        def forward(self, x):
            return super().forward(x) + self.down(F.linear(x, self.a @ self.b))

    model = net(block=Adapted)
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith((".a", ".b")))
    s.begin(model)
    s.step(0, 1)
    s.continues = False
    if s.run:
        s.run.close()
    with torch.no_grad():
        for block in model.blocks:
            block.up.weight += block.a @ block.b
    return s.weights()


@notebooks.equal("a `with` block")
def _(s):
    s.begin()
    with s.run or contextlib.nullcontext():
        s.step(0, 1)
        weights = s.weights()
    s.continues = False
    return weights


@notebooks.equal("an error within a `with` block")
def _(s):
    s.begin()
    s.continues = False
    with contextlib.suppress(ZeroDivisionError), s.run or contextlib.nullcontext():
        s.step(0)
        1 / 0
    return s.weights()


@notebooks.equal("`close` between backward and step")
def _(s):
    s.step(0)
    s.backward(1, 2)
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    if s.run:
        s.run.close()
    s.note([param.grad for param in s.model.parameters()])
    s.optimizer.step()


@notebooks.equal("a cell run twice, with a new model and another directory")
def _(s):
    for _ in range(2):
        s.begin()
        s.step(0, 1)


@notebooks.equal("a cell run twice, with the run's directory, after `close`")
def _(s):
    for _ in range(2):
        s.begin(run_dir=s.dir / "run")
        s.step(0, 1)
        s.continues = False
        if s.run:
            s.run.close()


@notebooks.equal("a model that is dropped ends its run", devices=EVERYWHERE)
def _(s):
    s.step(0)
    run = s.run
    s.runs.clear()
    s.trained.clear()
    s.continues = False
    process = _daemon(run)
    del run
    gc.collect()
    return process is None or not os.path.exists(f"/proc/{process}") or _is_zombie(process)


def _daemon(run):
    """The process of a run's daemon, None where there is none."""
    children = [pid for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) == os.getpid()]
    return next(iter(children), None) if run is not None and run.settings.device == "nvme" else None


def _parent(pid):
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[1])


def _is_zombie(pid):
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    return True


@notebooks.equal("`repr` of a run, `print` of a model")
def _(s):
    s.begin()
    repr(s.run)
    return str(s.model)


@notebooks.equal("`plan_only` changes nothing")
def _(s):
    model = net()
    optimizer = adamw(model.parameters())
    if s.device:
        offloadd.prepare(model, optimizer, s.config(), run_dir=s.dir / "plan", plan_only=True)
    return [model(s.x()), copy.deepcopy(model)(s.x())]


@notebooks.equal("`drain` between steps")
def _(s):
    s.step(0)
    if s.run:
        s.run.drain()
    s.step(1)


@notebooks.equal("an interactive loop: a step, a look, a step")
def _(s):
    for number in range(3):
        s.step(number)
        s.note([s.w.norm(), s.b.mean(), s.root[0]])
        with torch.no_grad():
            s.note(s.model(s.x(9)))


processes = Theme("processes and threads")


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((8,), float(index)), index % CLASSES


@processes.equal("a DataLoader with two workers")
def _(s):
    s.step(0)
    for x, y in torch.utils.data.DataLoader(Numbers(), batch_size=3, num_workers=2):
        loss = F.cross_entropy(s.model(x), y)
        loss.backward()
        s.optimizer.step()
        s.optimizer.zero_grad()
        s.note(loss)


@processes.equal("a DataLoader with persistent workers made before")
def _(s):
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=3, num_workers=1, persistent_workers=True)
    next(iter(loader))
    s.begin()
    for _ in range(2):
        for x, y in loader:
            s.note(F.cross_entropy(s.model(x), y))
    s.step(0)


def _in_fork(do):
    """What a forked process makes of `do`: a number, or how it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = f"{do():.4f}"
        except BaseException as error:
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(reader) as pipe:
        return [status, pipe.read()]


@processes.equal("a fork that ends, and the parent goes on", devices=EVERYWHERE)
def _(s):
    s.step(0)
    s.note(_in_fork(lambda: 1.0))
    s.step(1)


@processes.equal("a fork that ends in order, with `atexit` and `gc`")
def _(s):
    s.step(0)
    process = multiprocessing.get_context("fork").Process(target=gc.collect)
    process.start()
    process.join()
    s.note(process.exitcode)
    s.step(1)


@processes.equal("threads that read weights one after another")
def _(s):
    s.step(0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        s.note(pool.submit(lambda: s.w.norm()).result())
    s.step(1)


@processes.equal("an evaluation in another thread, one after another")
def _(s):
    s.step(0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        s.note(pool.submit(lambda: s.model.eval()(s.x(1)).detach()).result())
    s.model.train()
    s.step(1)


@processes.equal("training in another thread")
def _(s):
    s.begin()
    thread = threading.Thread(target=lambda: s.step(0, 1))
    thread.start()
    thread.join()
    s.step(2)


@processes.equal("`prepare` in another thread")
def _(s):
    thread = threading.Thread(target=lambda: s.begin())
    thread.start()
    thread.join()
    s.step(0, 1)


@processes.equal("a backward in another thread")
def _(s):
    loss = s.loss(0)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    s.optimizer.step()


def _in_thread(do):
    """What `do` returns or raises in another thread, for which this one waits."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()


class _Meeting(Block):
    """Its forward lets something be done in another thread."""

    within = staticmethod(lambda: None)

    def forward(self, x):
        _in_thread(self.within)
        return super().forward(x)


def _within_forward(name, do, **more):
    @processes.refused(name, "two threads use a prepared model at once", **more)
    def _(s):
        s.begin(net(block=_Meeting, dropout=0.0))
        s.step(0)
        s.model.blocks[2].within = lambda: do(s)
        try:
            s.step(1)
        finally:
            del s.model.blocks[2].within


_within_forward("a forward while another thread is in one", lambda s: s.model.blocks[0](torch.ones(1, 16)))
_within_forward("a read while another thread is in a forward", lambda s: s.w.norm(), none=EQUAL)
_within_forward("moments read while another thread is in a forward", lambda s: s.optimizer.state[s.w]["exp_avg"].norm())
_within_forward("`zero_grad` while another thread is in a forward", lambda s: s.optimizer.zero_grad())


@processes.refused("a backward while another thread is in a forward", "two threads use a prepared model at once")
def _(s):
    s.begin(net(block=_Meeting, dropout=0.0))
    loss, refused = s.loss(), []

    def begin():
        try:
            loss.backward()
        except offloadd.NotSupported as error:
            refused.append(error)

    s.model.blocks[2].within = begin if s.run else lambda: None
    s.step(1)
    del s.model.blocks[2].within
    # The other thread trains on as if nothing had been.
    s.note(s.weights())
    if refused:
        raise refused[0]


def _within_backward(name, do, **more):
    @processes.refused(name, "two threads use a prepared model at once", **more)
    def _(s):
        s.step(0)
        handle = s.w.register_hook(lambda grad: _in_thread(lambda: do(s)) and None)
        try:
            s.step(1)
        finally:
            handle.remove()


_within_backward("a forward while another thread is in a backward", lambda s: s.model(s.x()))
_within_backward("a read while another thread is in a backward", lambda s: s.model.blocks[0].up.weight.norm(), none=EQUAL)


class _Looking:
    """What a script tracks, whose state is asked for within a step; `within` is done in another thread then."""

    def __init__(self):
        self.within = lambda: None

    def state_dict(self):
        within, self.within = self.within, lambda: None
        _in_thread(within)
        return {}

    def load_state_dict(self, state):
        pass


@processes.refused("a forward while another thread is in a step", "two threads use a prepared model at once", devices=("nvme",))
def _(s):
    tracked = _Looking()
    s.begin(track=[tracked])
    s.step(0)
    s.w.grad = torch.ones_like(s.w)
    tracked.within = lambda: s.model(s.x())
    s.optimizer.step()


def _within_other(name, stays):
    @processes.equal(name)
    def _(s):
        s.step(0)
        other, found = net(block=_Meeting), []
        other.blocks[0].within = lambda: found.append(s.model.eval()(s.x()).detach())
        with s.run.gathered() if stays and s.run else contextlib.nullcontext():
            other(s.x())
        s.model.train()
        return found


_within_other("a forward while another thread is in one of another model", stays=False)
_within_other("a forward within `run.gathered()` while another thread is in one of another model", stays=True)


def _at_once(name, looks):
    """A line in which several threads look at a model that nothing trains, each of which sees what it has to or is refused."""

    @processes.equal(name, none=ONLY_MOVED)
    def _(s):
        model = s.use(net(dropout=0.0, blocks=8))
        s.continues = False

        def again(look):
            found = []
            for _ in range(60):
                with contextlib.suppress(offloadd.NotSupported), torch.no_grad():
                    found.append(look(s, model))
            return found

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(again, looks))
        with torch.no_grad():
            return [all(torch.equal(one, look(s, model)) for one in of_look) for look, of_look in zip(looks, found)]


_at_once("evaluations of several threads at once", [lambda s, model, number=number: model(s.x(number)) for number in range(4)])
_at_once("reads of several threads at once", [lambda s, model, number=number: model.blocks[number % 2].up.weight.clone() for number in range(4)])


@processes.equal("threads that read, evaluate and train, with a lock")
def _(s):
    s.begin(net(dropout=0.0))
    lock, ended = threading.Lock(), threading.Event()

    def again(do):
        while not ended.is_set():
            with lock, torch.no_grad():
                do()

    looks = [lambda: s.w.norm(), lambda: s.model(s.x(3)), lambda: s.model.state_dict()["last.weight"].sum()]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        looking = [pool.submit(again, do) for do in looks]
        try:
            for number in range(8):
                with lock:
                    s.step(number)
        finally:
            ended.set()
    return [one.result() for one in looking]


@processes.refused("a model sent to a process that is spawned", "state_dict")
def _(s):
    s.step(0)
    multiprocessing.reduction.ForkingPickler.dumps(s.model)


processes.refused("`model.share_memory()`", "offloadd.prepare", lambda s: s.model.share_memory())


processes.refused("`w.share_memory_()`", "offloadd.prepare", lambda s: [s.w.share_memory_(), s.step(0)])


@processes.refused("`torch.distributed.broadcast` of weights", "all ranks have the same values already", none=EQUAL)
def _(s):
    _in_group(s, lambda dist: dist.broadcast(s.w, 0))


@processes.equal("collectives of gradients, and of copies")
def _(s):
    def share(dist):
        s.backward(0)
        for param in s.model.parameters():
            dist.all_reduce(param.grad)
        found = [torch.empty(32, 16)]
        dist.all_gather(found, s.w.detach())
        s.note(found)
        s.optimizer.step()

    _in_group(s, share)


def _in_group(s, do):
    """What `do` makes of torch.distributed in a group of one process."""
    import torch.distributed as dist

    s.begin()
    dist.init_process_group("gloo", init_method=f"file://{s.dir}/group", rank=0, world_size=1)
    try:
        do(dist)
    finally:
        dist.destroy_process_group()


processes.refused(
    "`DistributedDataParallel` around it",
    "DistributedDataParallel",
    lambda s: _in_group(s, lambda dist: nn.parallel.DistributedDataParallel(s.model)),
)

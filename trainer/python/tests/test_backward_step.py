"""`update_in_backward`: a step whose updates begin in its backward has the bits of one that begins after it, or is refused by name."""

import contextlib
import signal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offloadd
from offloadd import _param_units
from offloadd.optim import clip_grad_norm_
from test_only_optimizer import adamw, same, two_groups, values
from test_optimizer import bytes_of
from test_runs import batches, model_of, needs_daemon


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Several units, and parameters that are cut."""
    monkeypatch.setattr(_param_units, "UNIT_ELEMS", 48)


class Way:
    """One way to train, which a subclass changes. `begins` says whether updates begin in backward."""

    dtype, more, steps = torch.float32, {}, 4

    def __init__(self, begins, dir):
        self.begins, self.dir = begins, dir
        # Units whose updates began in the backward of each step.
        self.begun = []

    def run(self):
        """All that must be the same: values, state, and what a loop sees of it."""
        self.make()
        for self.number, x in enumerate(batches(self.steps)):
            self.step(x.to(self.dtype))
        state = self.optimizer.state_dict()
        self.optimizer.close()
        return values(self.model), [one[name] for one in state["state"].values() for name in sorted(one)]

    def make(self):
        self.model = model_of(self.dtype)
        self.optimizer = adamw(two_groups(self.model), self.dir, **self.more)

    def last(self):
        """What is around the last backward of a step."""
        return self.optimizer.update_in_backward() if self.begins else contextlib.nullcontext()

    def loss(self, x):
        return self.model(x).square()

    def step(self, x):
        with self.last():
            self.loss(x).backward()
        self.end()

    def end(self):
        if self.begins:
            self.begun.append(len(self.optimizer._run._begun.units))
        self.optimizer.step()
        self.optimizer.zero_grad()


class Bf16(Way):
    dtype = torch.bfloat16


class Bf16Masters(Way):
    """Their rounding follows from the number of the update."""

    dtype, more = torch.bfloat16, {"master": "bf16", "moments": "bf16"}


class Fp16(Way):
    dtype = torch.float16


class OfLion(Way):
    more = {"kind": offloadd.optim.Lion}


class Early(Way):
    """Gradients are taken in every backward."""

    more = {"overlap_backward": True}


class Accumulated(Way):
    """The last of several backwards is the one within. Some parameters have gradients of the first one only."""

    def step(self, x):
        for part in x.split(2)[:-1]:
            self.loss(part).backward()
        with self.last():
            self.model(x[-2:], [0, 3, 1]).square().backward()
        self.end()


class AccumulatedEarly(Accumulated):
    more = {"overlap_backward": True}


class Some(Way):
    """Parameters that have no gradient in some steps, or in none; and one that a script gives."""

    def make(self):
        self.model = model_of()
        self.model.unused, self.model.given = nn.Linear(3, 2), nn.Linear(2, 2)
        self.optimizer = adamw(self.model.parameters(), self.dir)

    def step(self, x):
        with self.last():
            self.model(x, [0, 3, 1] if self.number == 2 else None).square().backward()
        self.model.given.weight.grad = torch.ones(2, 2) * self.number
        self.end()


class Zeros(Way):
    def end(self):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


class ZeroedWithin(Way):
    def step(self, x):
        with self.last():
            self.optimizer.zero_grad()
            self.loss(x).backward()
        self.optimizer.step()


class Scheduled(Way):
    """Settings that change between steps: learning rate, decay, betas."""

    def make(self):
        super().make()
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=12)

    def end(self):
        super().end()
        self.scheduler.step()
        self.optimizer.param_groups[1]["weight_decay"] = 0.1 * self.number


class Closure(Way):
    def step(self, x):
        def closure():
            self.optimizer.zero_grad()
            with self.last():
                loss = self.loss(x)
                loss.backward()
            return loss

        self.optimizer.step(closure)


class Shared(Way):
    """Parameters that are used twice in one backward."""

    def loss(self, x):
        return self.model(x).square() + self.model(2 * x).square()


class Checkpointed(Way):
    def loss(self, x):
        return checkpoint(self.model, x, use_reentrant=False).square()


class Reentrant(Way):
    """A backward within backward, which makes the gradients."""

    def loss(self, x):
        return checkpoint(self.model, x.requires_grad_(), use_reentrant=True).square()


class Mixed(Way):
    """Clipped steps between, and a scaler that scales by nothing."""

    def step(self, x):
        if self.number % 2:
            return super().step(x)
        self.loss(x).backward()
        clip_grad_norm_(self.model.parameters(), 1e-2)
        torch.amp.GradScaler("cpu", enabled=False).step(self.optimizer)
        self.optimizer.zero_grad()


class Changed(Way):
    """Values that the script gives to parameters between steps."""

    def step(self, x):
        if self.number == 2:
            with torch.no_grad():
                self.model.head.weight.mul_(2)
            self.model.blocks[0].linear.weight.data.add_(0.5)
        super().step(x)


class Reloaded(Way):
    """A checkpoint between two steps, which a new optimizer loads; the scripts's own forward that ends within."""

    def step(self, x):
        if self.number == 2:
            saved = bytes_of([self.model.state_dict(), self.optimizer.state_dict()])
            self.optimizer.close()
            self.dir = self.dir and self.dir.with_name("reloaded")
            self.make()
            self.model.load_state_dict(saved[0])
            self.optimizer.load_state_dict(saved[1])
        with pytest.raises(ZeroDivisionError), self.last():
            self.loss(x)
            raise ZeroDivisionError
        super().step(x)


class Evaluated(Way):
    """What reads parameters between backward and step sees those of before."""

    def end(self):
        with torch.no_grad():
            assert torch.equal(self.model(torch.ones(1, 8)), self.seen)
        super().end()

    def loss(self, x):
        with torch.no_grad():
            self.seen = self.model(torch.ones(1, 8))
        return super().loss(x)


class Resumed(Way):
    """A start that goes on after the last commit, also where the one before has left a step half made."""

    steps, more = 6, {"commit_every": 2}

    def make(self):
        super().make()
        self.optimizer.resume()

    def step(self, x):
        if self.number in (2, 4):
            with pytest.raises(ZeroDivisionError) if self.begins else contextlib.nullcontext(), self.last():
                self.loss(x).backward()
                if self.begins:
                    raise ZeroDivisionError
            self.optimizer.close()
            self.make()
            assert self.optimizer.steps_done == self.number
        super().step(x)


RIGHT = [
    *(Bf16, Bf16Masters, Fp16, OfLion, Early, Accumulated, AccumulatedEarly, Some, Zeros, ZeroedWithin, Scheduled, Closure, Shared, Checkpointed),
    *(Reentrant, Mixed, Changed, Reloaded, Evaluated, Resumed),
]
ON_DRIVES = (Bf16, Some, Reloaded, Resumed)


@needs_daemon
@pytest.mark.parametrize("way", RIGHT, ids=lambda way: way.__name__)
def test_updates_that_begin_in_backward_change_no_bit(tmp_path, way):
    for dir in ([None] if way is not Resumed else []) + ([tmp_path] if way in ON_DRIVES else []):
        expected, state = way(False, dir and dir / "without").run()
        ours = way(True, dir and dir / "with")
        found, our_state = ours.run()
        assert same(found, expected) and same(our_state, state)
        # All but those that have no gradient in this backward.
        assert all(count >= (3 if way in (Accumulated, AccumulatedEarly, Some) else 13) for count in ours.begun), ours.begun


@contextlib.contextmanager
def begun(optimizer, model):
    with optimizer.update_in_backward():
        model(batches(1)[0]).square().backward()
        yield


def scaled(optimizer, model, factor):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with optimizer.update_in_backward():
        scaler.scale(model(batches(1)[0]).square() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def after(change):
    """What is changed between the backward of a step and its end."""

    def run(optimizer, model):
        with begun(optimizer, model):
            pass
        change(optimizer, model)
        optimizer.step()

    return run


def within(change):
    def run(optimizer, model):
        with begun(optimizer, model):
            change(optimizer, model)

    return run


def tied(optimizer, model):
    """A block whose backward runs within backward, twice."""
    with optimizer.update_in_backward():
        x = batches(1)[0].requires_grad_()
        block = lambda x: checkpoint(model.blocks[0], x, use_reentrant=True)
        block(block(x)).sum().backward()


def by_numpy(optimizer, model):
    model.head.weight.grad.numpy()[:] = 0


def set_lr(optimizer, model):
    optimizer.param_groups[0]["lr"] *= 2


def set_back(optimizer, model):
    optimizer.param_groups[0]["lr"] /= 2


@torch.no_grad()
def write(optimizer, model):
    model.head.weight.mul_(2)


def stopped(optimizer, model):
    with contextlib.suppress(KeyboardInterrupt), begun(optimizer, model):
        raise KeyboardInterrupt
    optimizer.step()


def stopped_in_step(optimizer, model):
    with begun(optimizer, model):
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer._run, "_of_params", lambda *_: signal.raise_signal(signal.SIGINT))
        with contextlib.suppress(KeyboardInterrupt):
            optimizer.step()
    optimizer.step()


def stopped_while_taken(optimizer, model):
    memory = optimizer._run.beside.memory
    taken, count = memory.hand_over, [0]

    def hand_over(unit):
        taken(unit)
        count[0] += 1
        if count[0] == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "hand_over", hand_over)
        with optimizer.update_in_backward(), contextlib.suppress(KeyboardInterrupt):
            AGAIN(optimizer, model)
    optimizer.step()


def not_finite(optimizer, model):
    with optimizer.update_in_backward():
        (model(batches(1)[0]).square() * float("inf")).backward()
    optimizer.step()


AGAIN = lambda optimizer, model: model(batches(1)[0]).square().backward()

# What is done, what is said of it, and whether the step can be made all the same, or what has to be done before.
REFUSED = {
    "a second backward within": (within(AGAIN), "gets a second gradient after", False),
    "a second backward after": (after(AGAIN), "was changed or dropped after", False),
    "a block twice, each in a backward of its own": (tied, "gets a second gradient after", False),
    "clipping": (after(lambda optimizer, model: clip_grad_norm_(optimizer, 0.1)), "clip_grad_norm_ before the step", True),
    "torch's clipping": (after(lambda optimizer, model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)), "was changed or dropped after", False),
    "another gradient": (after(lambda optimizer, model: setattr(model.head.bias, "grad", torch.ones(1))), "head.bias was changed or dropped", False),
    "no gradient": (after(lambda optimizer, model: setattr(model.head.bias, "grad", None)), "head.bias was changed or dropped", False),
    "a gradient of numpy": (after(by_numpy), "head.weight was changed or dropped", False),
    "zero_grad": (after(lambda optimizer, model: optimizer.zero_grad()), r"zero_grad\(\) before the step", True),
    "zero_grad of the model": (after(lambda optimizer, model: model.zero_grad()), "was changed or dropped after", False),
    "a scaler": (lambda optimizer, model: scaled(optimizer, model, 1.0), "was changed or dropped after", False),
    "a scaler's overflow": (lambda optimizer, model: scaled(optimizer, model, float("inf")), r"zero_grad\(\) before .* GradScaler", False),
    "a gradient that is not finite": (not_finite, "a gradient is not finite", False),
    "a learning rate": (after(set_lr), "was changed after update_in_backward", set_back),
    "a parameter": (after(write), "head.weight was written after", False),
    "an interrupt": (stopped, "KeyboardInterrupt has ended the backward", False),
    "an interrupt on the way to a tile": (stopped_while_taken, "an exception has ended the backward", False),
    "an interrupt in the step": (stopped_in_step, "was interrupted", False),
    "a step within": (within(lambda optimizer, model: optimizer.step()), "call it after the with block", False),
    "another one within": (within(lambda optimizer, model: optimizer.update_in_backward().__enter__()), "another update_in_backward", False),
    "another one after": (after(lambda optimizer, model: optimizer.update_in_backward().__enter__()), "another update_in_backward", True),
    "a checkpoint": (after(lambda optimizer, model: optimizer.state_dict()), r"optimizer.state_dict\(\) before the step", True),
    "a moment": (after(lambda optimizer, model: optimizer.state[model.head.bias]), "optimizer.state before the step", True),
    "loading": (after(lambda optimizer, model: optimizer.load_state_dict(optimizer_state(model))), r"load_state_dict\(\) before the step", True),
    "a commit": (after(lambda optimizer, model: optimizer.commit()), "a commit before the step", True),
}


def test_a_clipped_step_whose_gradients_were_dropped_is_forgotten():
    model = model_of()
    optimizer = adamw(two_groups(model))
    AGAIN(optimizer, model)
    clip_grad_norm_(optimizer, 0.1)
    model.zero_grad()
    with optimizer.update_in_backward():
        AGAIN(optimizer, model)
    optimizer.step()
    optimizer.close()


def optimizer_state(model):
    return torch.optim.AdamW(two_groups(model), lr=1e-2).state_dict()


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_change_a_step_that_has_begun_is_refused(what):
    action, message, goes_on = REFUSED[what]
    model, plain = model_of(), model_of()
    name_of = {param: name for name, param in model.named_parameters()}
    optimizer = adamw([{**group, "params": [(name_of[param], param) for param in group["params"]]} for group in two_groups(model)])
    theirs = adamw(two_groups(plain))
    for x in batches(2):
        for one, of_one in ((model, optimizer), (plain, theirs)):
            one(x).square().backward()
            of_one.step()
            of_one.zero_grad()
    before = values(model)
    with pytest.raises(offloadd.Error, match=message):
        action(optimizer, model)
    assert action is REFUSED["a parameter"][0] or same(before, values(model)), "parameters have the values of the last step"
    if goes_on:
        if goes_on is not True:
            goes_on(optimizer, model)
        optimizer.step()
        AGAIN(theirs, plain)
        theirs.step()
        assert same(values(model), values(plain)), "what was refused has changed nothing"
    elif goes_on is False:
        with pytest.raises(offloadd.Error):
            optimizer.step()
    optimizer.close()
    theirs.close()


def test_muon_is_refused():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon needs torch 2.9")
    optimizer = offloadd.optim.Muon([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(offloadd.NotSupported, match="with Muon"), optimizer.update_in_backward():
        pass


class Noted:
    """An engine whose calls are noted."""

    def __init__(self, core):
        self.core, self.called = core, []

    def __getattr__(self, name):
        call = getattr(self.core, name)
        return lambda *args: self.called.append((name, args[0] if args else None)) or call(*args)

    def calls_among(self, *names):
        return [name for name, _ in self.called if name in names]

    def units(self, call):
        return [unit for name, unit in self.called if name == call]


@pytest.mark.parametrize("unused", [False, True])
def test_updates_begin_before_the_gradients_of_other_units_are_there(unused):
    model = model_of()
    model.unused = nn.Linear(3, 2)
    optimizer = adamw(model.parameters() if unused else [param for name, param in model.named_parameters() if "unused" not in name])
    optimizer.resume()
    beside = optimizer._run.beside
    core = optimizer._run.core = beside.core = beside.memory._core = Noted(optimizer._run.core)
    for x in batches(2):
        core.called.clear()
        with optimizer.update_in_backward():
            model(x).square().backward()
        begun, came = core.calls_among("scatter", "begin_updates"), core.units("scatter")
        assert begun == ["scatter", "begin_updates"] * (len(beside.units) - unused), "each unit begins before the next one's gradients come"
        core.called.clear()
        optimizer.step()
        # Parameters come back while the updates that have begun go on, where no other follows: first those that began first.
        assert core.calls_among("scatter", "finish", "finish_begun") == (["scatter", "finish"] if unused else ["finish_begun"])
        assert core.units("gather") == came + core.units("scatter")
        optimizer.zero_grad()
    optimizer.close()

"""Habits of training scripts with `offloadd.optim`: each trains as with torch.optim, within 1e-5 in fp32, or is refused by name."""

import contextlib
import copy
import os
import signal

import pytest
import torch
from torch import nn

import offloadd
from offloadd import _param_units
from offloadd.optim import clip_grad_norm_
from test_only_optimizer import ADAMW, LION, adamw
from test_runs import batches, model_of, needs_daemon


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Several units, and parameters that are cut."""
    monkeypatch.setattr(_param_units, "UNIT_ELEMS", 48)


class Script:
    """What a habit works with, plain and ours."""

    def __init__(self, kind, ours):
        self.model, self.kind, self.ours = model_of(), kind, ours
        self.model.kernel = nn.Conv2d(2, 3, (2, 2))
        self.weight = self.model.blocks[1].linear.weight
        # Values that are compared besides the parameters.
        self.notes = []
        # Keeps rounding errors of tiny gradients small.
        self.more = {"eps": 1e-4} if issubclass(kind, torch.optim.AdamW) else {}

    def begin(self, params=None, **more):
        params = self.model.parameters() if params is None else params
        self.optimizer = adamw(params, kind=self.kind, **self.more, **more) if self.ours else self.kind(params, lr=1e-2, **self.more)

    def loss(self, number=0):
        x = batches(12)[number]
        return self.model(x).square().mean() + self.model.kernel(x.view(-1, 2, 2, 2)).square().mean()

    def backward(self, *numbers):
        for number in numbers or (0,):
            self.loss(number).backward()

    def step(self, *numbers):
        for number in numbers:
            self.backward(number)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def clip(self, norm=1e-2):
        return self.clip_only(self.model.parameters(), norm)

    def clip_only(self, params, norm):
        return (clip_grad_norm_ if self.ours else nn.utils.clip_grad_norm_)(params, norm)


HABITS = []


def habit(name, refused=None):
    """A script that begins with an optimizer of its own unless it is given one. `refused` is a phrase of the error, None where it trains as plain."""

    def note(script):
        HABITS.append(pytest.param(script, refused, id=name))
        return script

    return note


# Memory that others have too


@habit("a tensor that was made of .data before is written to, late")
def _(s):
    held = s.weight.data
    s.begin()
    for number in range(6):
        s.step(number)
        held.mul_(0.9)


@habit("an array of numpy is written to, late")
def _(s):
    s.begin()
    s.step(0, 1, 2, 3)
    s.weight.detach().numpy()[:] *= 2
    s.step(4, 5)


@habit("rows change places in an array of numpy, late")
def _(s):
    s.begin()
    s.step(0, 1, 2, 3)
    rows = s.weight.detach().numpy()
    rows[:] = rows[::-1].copy()
    s.step(4, 5)


@habit("parameters are views of a buffer that is written to")
def _(s):
    flat, at = torch.cat([param.detach().reshape(-1) for param in s.model.parameters()]), 0
    for param in s.model.parameters():
        param.data, at = flat[at : at + param.numel()].view_as(param), at + param.numel()
    s.begin()
    for number in range(6):
        s.step(number)
        flat.mul_(0.9)


@habit("two parameters have one memory", refused="has memory with")
def _(s):
    s.model.blocks[0].linear.weight.data = s.weight.data
    s.begin()
    s.step(0)


@habit("two parameters get one memory later", refused="has memory with")
def _(s):
    s.begin()
    s.step(0)
    s.model.blocks[0].linear.weight.data = s.weight.data
    s.step(1)


# Other parameters


@habit("a parameter is in the optimizer twice", refused="is there twice")
def _(s):
    s.begin([*s.model.parameters(), s.weight])
    s.step(0)


@habit("a parameter is taken out of its group and comes back")
def _(s):
    s.begin()
    s.step(0, 1)
    params = s.optimizer.param_groups[0]["params"]
    taken = params.pop(2)
    s.step(2, 3)
    s.model.zero_grad()
    params.append(taken)
    s.step(4)


@habit("a group is deleted")
def _(s):
    params = list(s.model.parameters())
    s.begin([{"params": params[::2]}, {"params": params[1::2]}])
    s.step(0)
    del s.optimizer.param_groups[1]
    s.step(1, 2)


@habit("another parameter takes the place of one", refused="or was not there")
def _(s):
    s.begin()
    s.step(0)
    params = s.optimizer.param_groups[0]["params"]
    other = nn.Parameter(s.weight.detach().clone())
    params[[one is s.weight for one in params].index(True)] = s.model.blocks[1].linear.weight = other
    s.step(1)


@habit("a memory format is changed before the first step")
def _(s):
    s.begin()
    s.model.kernel.to(memory_format=torch.channels_last)
    s.step(0, 1, 2)


@habit("a memory format is changed later", refused="with strides .* now, and was")
def _(s):
    s.begin()
    s.step(0, 1)
    s.model.kernel.to(memory_format=torch.channels_last)
    s.step(2)


@habit("a type is changed later", refused="torch.bfloat16 .* now, and was")
def _(s):
    s.begin()
    s.step(0, 1)
    s.model.head.bfloat16().register_forward_pre_hook(lambda _, given: (given[0].bfloat16(),))
    s.step(2)


@habit("a parameter gets gaps in its memory", refused="with gaps now, and was")
def _(s):
    s.begin()
    s.step(0)
    s.weight.data = torch.stack([s.weight.data, s.weight.data], dim=-1)[..., 0]
    s.step(1)


@habit("parameters are swapped, as tensors")
def _(s):
    s.begin()
    s.step(0)
    other = nn.Parameter(s.weight.detach() * 2)
    torch.utils.swap_tensors(s.weight, other)
    s.step(1, 2)


# Gradients


@habit("a hook takes the gradient away in backward")
def _(s):
    s.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    s.begin(**{"overlap_backward": True} if s.ours else {})
    s.step(0, 1, 2)


@habit("a hook takes gradients away, which come back before the step")
def _(s):
    taken = {}

    def take_gradient(param):
        taken[param], param.grad = param.grad, None

    for param in s.model.parameters():
        param.register_post_accumulate_grad_hook(take_gradient)
    s.begin(**{"overlap_backward": True} if s.ours else {})
    for number in range(3):
        s.backward(number)
        for param, grad in taken.items():
            param.grad = grad
        s.optimizer.step()
        s.optimizer.zero_grad()


@habit("a hook takes a gradient away in update_in_backward")
def _(s):
    s.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    s.begin()
    for number in range(3):
        with s.optimizer.update_in_backward() if s.ours else contextlib.nullcontext():
            s.backward(number)
        s.optimizer.step()
        s.optimizer.zero_grad()


@habit("update_in_backward with a parameter that was taken out of its group", refused="was taken out of its group")
def _(s):
    s.begin()
    s.step(0)
    s.optimizer.param_groups[0]["params"].pop(2)
    with s.optimizer.update_in_backward():
        s.backward(1)


@habit("all gradients are replaced after clipping")
def _(s):
    s.begin()
    s.backward()
    s.clip()
    for param in s.model.parameters():
        param.grad = param.grad.clamp(-1e-3, 1e-3)
    s.optimizer.step()


@habit("gradients are logged after clipping, and kept over steps")
def _(s):
    s.begin()
    for number in range(4):
        s.backward(number)
        s.notes.append(s.clip())
        s.notes += [param.grad.clone() for param in s.model.parameters()]
        s.optimizer.step()
        s.notes += [param.grad.clone() for param in s.model.parameters()]


@habit("a gradient is changed after clipping")
def _(s):
    s.begin()
    for number in range(3):
        s.backward(number)
        s.clip()
        s.weight.grad.mul_(2)
        s.optimizer.step()
        s.optimizer.zero_grad()


@habit("more gradients come after clipping")
def _(s):
    s.begin()
    for number in range(3):
        s.backward(number)
        s.clip()
        s.backward(number + 3)
        s.notes += [s.clip(1e-3)] * (number > 0)
        s.optimizer.step()
        s.optimizer.zero_grad()


@habit("a parameter is written between clipping and the step")
def _(s):
    s.begin()
    for number in range(3):
        s.backward(number)
        s.clip()
        s.weight.data.mul_(0.9)
        s.optimizer.step()
        s.optimizer.zero_grad()


@habit("gradients are clipped twice, and one parameter's once more")
def _(s):
    s.begin()
    for number in range(3):
        s.backward(number)
        s.notes += [s.clip(1e-2), s.clip(1e-3)]
        s.clip_only([s.weight, s.weight], 1e-4)
        s.optimizer.step()
        s.notes += [param.grad.clone() for param in s.model.parameters()]
        s.optimizer.zero_grad()


@habit("one gradient of two parameters is clipped")
def _(s):
    s.begin()
    for number in range(3):
        s.backward(number)
        s.model.blocks[0].linear.weight.grad = s.weight.grad
        s.clip()
        s.optimizer.step()
        s.optimizer.zero_grad()


@habit("one gradient of two optimizers is clipped")
def _(s):
    first, second = s.model.blocks[0].linear.weight, s.model.blocks[1].linear.weight
    s.begin([first])
    with contextlib.closing(adamw([second], kind=s.kind, **s.more)) if s.ours else contextlib.nullcontext(s.kind([second], lr=1e-2, **s.more)) as other:
        for number in range(3):
            s.backward(number)
            first.grad = second.grad
            s.notes.append(s.clip_only([first, second], 1e-2))
            s.optimizer.step()
            other.step()
            s.model.zero_grad()


@habit("a step that is clipped begins in another backward")
def _(s):
    s.begin()
    for number in range(3):
        s.backward(number)
        s.clip()
        with s.optimizer.update_in_backward() if s.ours else contextlib.nullcontext():
            s.backward(number + 3)
        s.optimizer.step()
        s.optimizer.zero_grad()


@habit("a clipped step is skipped, with the model's zero_grad")
def _(s):
    s.begin()
    for number in range(4):
        s.backward(number)
        s.clip()
        if number != 1:
            s.optimizer.step()
        s.model.zero_grad()


# Signals


@habit("a handler of a signal saves while gradients go to their tiles", refused="set a flag")
def _(s):
    s.begin()
    s.step(0)
    beside = s.optimizer._run.beside
    plain = beside._take
    before = signal.signal(signal.SIGUSR1, lambda *_: s.optimizer.state_dict())
    try:
        beside._take = lambda *args: [plain(*args), os.kill(os.getpid(), signal.SIGUSR1)]
        s.step(1)
    finally:
        beside._take = plain
        signal.signal(signal.SIGUSR1, before)


@habit("a handler of a signal saves while parameters come back")
def _(s):
    s.begin()
    s.step(0)
    before = signal.signal(signal.SIGUSR1, lambda *_: s.optimizer.state_dict())
    try:
        if s.ours:
            memory = s.optimizer._run.beside.memory
            plain = memory.ready
            memory.ready = lambda unit: [plain(unit), os.kill(os.getpid(), signal.SIGUSR1)]
        s.step(1)
    finally:
        signal.signal(signal.SIGUSR1, before)


# States


@habit("load_state_dict between clipping and the step")
def _(s):
    s.begin()
    s.step(0, 1)
    state = copy.deepcopy(s.optimizer.state_dict())
    s.step(2)
    s.backward(3)
    s.clip()
    s.optimizer.load_state_dict(state)
    s.optimizer.step()


@habit("load_state_dict after a clipped step that was skipped")
def _(s):
    s.begin()
    s.step(0, 1)
    state = copy.deepcopy(s.optimizer.state_dict())
    s.step(2)
    s.backward(3)
    s.clip()
    s.model.zero_grad()
    s.optimizer.load_state_dict(state)
    s.step(4)


@habit("moments are read before the first step")
def _(s):
    s.begin()
    assert len(s.optimizer.state) == 0 and not s.optimizer.state[s.weight]
    s.step(0)


@habit("moments are set before the first step", refused="use optimizer.load_state_dict")
def _(s):
    s.begin()
    s.optimizer.state[s.weight] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(s.weight)}


@pytest.mark.parametrize("kinds", [ADAMW, LION], ids=["AdamW", "Lion"])
@pytest.mark.parametrize("script, refused", HABITS)
def test_a_habit_trains_as_with_torch_or_is_refused(script, refused, kinds):
    found = []
    for kind, ours in zip(reversed(kinds), (False, True)):
        if refused is not None and not ours:
            continue
        s = Script(kind, ours)
        try:
            with pytest.raises(offloadd.NotSupported, match=refused) if refused is not None else contextlib.nullcontext():
                script(s)
            if refused is None:
                found.append([*s.notes, *(param.detach().clone() for param in s.model.parameters())])
        finally:
            if ours and hasattr(s, "optimizer"):
                s.optimizer.close()
    for one, other in zip(*found) if found else ():
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


@needs_daemon
def test_a_run_in_another_memory_format_is_refused(tmp_path):
    """Its tiles have the elements in the order of memory."""

    def begin(memory_format):
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 2)).to(memory_format=memory_format)
        optimizer = adamw(model.named_parameters(), tmp_path / "run")
        return model, optimizer, optimizer.resume()

    model, optimizer, _ = begin(torch.channels_last)
    model(batches(1)[0].view(-1, 2, 2, 2).repeat(1, 1, 2, 2)).square().mean().backward()
    optimizer.step()
    optimizer.close()
    with pytest.raises(offloadd.LayoutChanged, match="0.weight trained in float32 with strides 8x1x4x2, and the model has it trained in float32"):
        begin(torch.contiguous_format)
    _, optimizer, steps = begin(torch.channels_last)
    assert steps == 1
    optimizer.close()

"""Scripts of random lines, as people write them around backward and step, run plain and with offloadd. Each value that a script sees and each weight must be
equal, or the script is refused by name. Errors that this finds: a gradient, a setting or a state that is silently another one."""

import copy
import os
import random

import pytest
import torch
from torch import nn

import offloadd
from test_runs import config
from toy import Blocks

SEEDS = range(400 if os.environ.get("OFFLOADD_ALL_CASES") else 16)
STEPS = 8


class Script:
    """A model, its optimizer, and what the script's lines keep."""

    def __init__(self, kind, seed, path):
        torch.manual_seed(seed)
        chosen, self.kind, self.path = random.Random(seed), kind, path
        self.model, self.held, self.saved, self.weights, self.schedule, self.run, self.inputs = Blocks(6, 3), None, None, None, None, None, 0
        self.params = list(self.model.parameters())
        at, given = chosen.randrange(1, len(self.params)), {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.05}
        groups = [{"params": self.params[:at]}, {"params": self.params[at:], "lr": 3e-3, "weight_decay": 0.0}]
        if kind == "offloadd.optim":
            self.optimizer = offloadd.optim.AdamW(groups, overlap_backward=chosen.random() < 0.3, **given)
        else:
            self.optimizer = torch.optim.AdamW(groups, **given)
        if kind == "prepare":
            settings = config("cpu", path, optimizer_step=chosen.choice(("immediate", "deferred")))
            settings["zero_optimization"] = chosen.choice((settings["zero_optimization"], {"offload_optimizer": {"device": "cpu"}}, {}))
            self.settings = settings
            self.prepare()

    def prepare(self):
        self.run = offloadd.prepare(self.model, self.optimizer, self.settings, run_dir=self.path / "run")

    def loss(self, part=None):
        self.inputs += 1
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(self.inputs))
        return (self.model if part is None else self.model.blocks[part % 3])(x).square().sum()

    def clip(self, norm, params=None):
        clip = offloadd.optim.clip_grad_norm_ if self.kind == "offloadd.optim" else nn.utils.clip_grad_norm_
        return clip(params or self.params, norm)

    def close(self):
        (self.run or self.optimizer).close()


def changed(change):
    """A line that changes the gradient of one parameter, if it has one."""

    def line(s, number):
        param = s.params[number % len(s.params)]
        return change(s, param) if param.grad is not None else None

    return line


def of_group(key, values):
    def line(s, number):
        s.optimizer.param_groups[number % 2][key] = values[number % len(values)]

    return line


def each(change):
    def line(s, _):
        for param in s.params:
            change(param)

    return line


def hold(s, param):
    s.held = param.grad


def save(s, _):
    s.saved, s.weights = copy.deepcopy(s.optimizer.state_dict()), {name: value.clone() for name, value in s.model.state_dict().items()}


def scheduled(s, _):
    s.schedule = s.schedule or torch.optim.lr_scheduler.StepLR(s.optimizer, 1, 0.7)
    s.schedule.step()


def written(s, number):
    """Weights that are written where the model's state has them, and loaded."""
    state = s.model.state_dict()
    with torch.no_grad():
        list(state.values())[number % len(state)].mul_(0.9)
    s.model.load_state_dict(state)


def again(s, _):
    if s.run:
        s.run.close()
        s.prepare()


BACKWARD = [*[lambda s, _: s.loss().backward()] * 4, lambda s, number: s.loss(number).backward()]
CHANGE = [
    changed(lambda s, param: param.grad.mul_(-2.0)),
    changed(lambda s, param: param.grad.add_(0.01)),
    changed(lambda s, param: param.grad.zero_()),
    changed(lambda s, param: setattr(param, "grad", None)),
    changed(lambda s, param: setattr(param, "grad", torch.full_like(param, 0.02))),
    changed(lambda s, param: setattr(param.grad, "data", torch.full(param.shape, 0.04))),
    changed(lambda s, param: s.clip(0.1, [param])),
    changed(lambda s, param: param.grad.sum()),
    changed(hold),
    lambda s, _: None if s.held is None else s.held.sum(),
    lambda s, _: torch._foreach_mul_([param.grad for param in s.params if param.grad is not None], 0.5),
    lambda s, _: [param.grad.norm() for param in s.params if param.grad is not None],
]
CLIP = [lambda s, _: s.clip(0.05), lambda s, _: s.clip(1e9), lambda s, _: nn.utils.clip_grad_value_(s.params, 0.01)]
STEP = [*[lambda s, _: s.optimizer.step()] * 9, lambda s, _: None]
ZERO = [
    *[lambda s, _: s.optimizer.zero_grad()] * 4,
    lambda s, _: s.optimizer.zero_grad(set_to_none=False),
    lambda s, _: s.model.zero_grad(),
    each(lambda param: setattr(param, "grad", None)),
    each(lambda param: None if param.grad is None else param.grad.zero_()),
]
BETWEEN = [
    of_group("lr", (0.0, 1e-3, 5e-3)),
    of_group("betas", ((0.8, 0.95), (0.9, 0.999))),
    of_group("weight_decay", (0.0, 0.1)),
    lambda s, number: s.params[number % len(s.params)].requires_grad_(False),
    each(lambda param: param.requires_grad_(True)),
    save,
    lambda s, _: None if s.saved is None else s.optimizer.load_state_dict(copy.deepcopy(s.saved)),
    lambda s, _: None if s.weights is None else s.model.load_state_dict(s.weights) and None,
    lambda s, number: dict(s.optimizer.state.get(s.params[number % len(s.params)], {})),
    lambda s, _: s.loss().detach(),
    scheduled,
    written,
    again,
]


def lines(seed):
    """The lines of a script: for each, a function and a number that it may use."""
    chosen, found = random.Random(seed), []

    def add(kinds, counts):
        found.extend((chosen.choice(kinds), chosen.randrange(1 << 20)) for _ in range(chosen.choice(counts)))

    for _ in range(STEPS):
        for kinds, counts in ((BACKWARD, (1, 1, 1, 2, 3)), (CHANGE, (0, 0, 1, 2)), (CLIP, (0, 1)), (STEP, (1,)), (ZERO, (1,)), (BETWEEN, (0, 0, 1, 2))):
            add(kinds, counts)
    return found


def runs(s, line, number):
    """What a line gives, or the error that it raises."""
    try:
        with torch.set_grad_enabled(line in BACKWARD):
            return line(s, number), None
    except Exception as error:
        return None, error


@pytest.mark.parametrize("kind", ["prepare", "offloadd.optim"])
def test_a_script_of_random_lines_computes_the_same_or_is_refused(kind, tmp_path):
    ended = {True: 0, False: 0}
    for seed in SEEDS:
        plain, ours, refused = Script("plain", seed, tmp_path), Script(kind, seed, tmp_path / str(seed)), False
        for place, (line, number) in enumerate(lines(seed)):
            (value, fails), (found, error) = runs(plain, line, number), runs(ours, line, number)
            where = f"seed {seed}, line {place}: {error or fails}"
            refused = isinstance(error, offloadd.Error)
            assert refused or (error is None) == (fails is None), where
            if error is not None:
                break
            torch.testing.assert_close(found, value, rtol=2e-3, atol=1e-4, check_device=False, msg=lambda text, where=where: f"{where}: {text}")
            weights = ours.model.state_dict() if line not in (*BACKWARD, *CHANGE, *CLIP) else {}
            for name, weight in plain.model.state_dict().items() if weights else ():
                torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=2e-5, msg=lambda text, where=where: f"{where}: {text}")
        ended[refused] += 1
        ours.close()
    assert ended[False] > ended[True], ended

"""`offloadd.optim`: the optimizer alone, whose parameters and gradients stay where they are."""

import copy
import functools
import json
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile

import pytest
import torch
from torch import nn

import forks
import offloadd
from offloadd import _beside, _param_units
from offloadd.__main__ import main
from offloadd.optim import clip_grad_norm_
from test_optimizer import bytes_of
from test_runs import PROGRAM, batches, config, model_of, needs_daemon, train

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Several units, and parameters that are cut."""
    monkeypatch.setattr(_param_units, "UNIT_ELEMS", 48)


def adamw(params, dir=None, options=(), kind=offloadd.optim.AdamW, **more):
    """The optimizer with its state in host memory, or on the drive that `dir` stands for."""
    gradients = {} if dir is None else {"gradients": "nvme"}
    return kind(params, lr=1e-2, directory=dir, options={"program": PROGRAM, **gradients, **dict(options)}, **more)


class Lion(torch.optim.Optimizer):
    """The plain definition: the sign of a mean of gradient and momentum, a decay of the weight, and another mean. Its module and its state are those of
    lion_pytorch."""

    __module__ = "lion_pytorch.lion_pytorch"

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.decoupled_wd = False

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].get("exp_avg", torch.zeros_like(param))
                    (beta1, beta2), grad = group["betas"], param.grad
                    update = torch.sign(beta1 * momentum + (1 - beta1) * grad) + group["weight_decay"] * param
                    param.copy_(param - group["lr"] * update)
                    self.state[param]["exp_avg"] = beta2 * momentum + (1 - beta2) * grad


def values(model):
    return [param.detach().clone() for param in model.parameters()]


def same(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


# An optimizer of ours, and the one in PyTorch that it is like.
ADAMW, LION = (offloadd.optim.AdamW, torch.optim.AdamW), (offloadd.optim.Lion, Lion)


@needs_daemon
@pytest.mark.parametrize(
    "dtype, kinds",
    [(torch.float32, ADAMW), (torch.bfloat16, ADAMW), (torch.float16, ADAMW), (torch.float32, LION), (torch.bfloat16, LION), (torch.float16, LION)],
)
def test_it_has_the_bits_of_a_prepared_model(tmp_path, dtype, kinds):
    prepared, (ours, theirs) = model_of(dtype), kinds
    optimizer = theirs(prepared.parameters(), lr=1e-2)
    with offloadd.prepare(prepared, optimizer, {**config("none", tmp_path), "gradient_accumulation_steps": 1}, run_dir=tmp_path / "run"):
        losses = train(prepared, optimizer, batches())
        expected, state = values(prepared), optimizer.state_dict()
    for name, dir, options in [
        ("host memory", None, {}),
        ("drive", tmp_path / "drive", {}),
        ("drive, half of it in memory", tmp_path / "half", {"resident_fraction": 0.5}),
    ]:
        model = model_of(dtype)
        optimizer = adamw(model.parameters(), dir, options, ours)
        addresses = [param.data_ptr() for param in model.parameters()]
        assert train(model, optimizer, batches()) == losses, name
        assert same(values(model), expected), name
        assert [param.data_ptr() for param in model.parameters()] == addresses, "parameters stay where they are"
        torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)
        optimizer.close()


def two_groups(model):
    params = list(model.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.95)}]


@pytest.mark.parametrize("clip", [None, torch.nn.utils.clip_grad_norm_, clip_grad_norm_])
@pytest.mark.parametrize("kinds", [ADAMW, LION])
def test_steps_are_those_of_the_optimizer_in_pytorch(clip, kinds):
    """Within 1e-6 in fp32: groups, a schedule, weight decay that changes, parameters without gradients, accumulated gradients, clipping, closures."""
    found = {}
    for kind in reversed(kinds):
        model = model_of()
        groups, model.unused = two_groups(model), nn.Linear(3, 2)
        # Its memory is in another order than its elements.
        model.kernel = nn.Conv2d(4, 4, (1, 2)).to(memory_format=torch.channels_last)
        optimizer = kind([*groups, {"params": model.unused.parameters()}, {"params": model.kernel.parameters()}], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        norms = []
        for number, x in enumerate(batches(12)):
            for part in x.split(2):
                loss = model(part, None if number % 3 else [0, 3, 1]).square()
                (loss + model.kernel(part.view(1, 4, 1, 4)).square().mean()).backward()
            if clip is not None:
                own = clip if kind is kinds[0] else torch.nn.utils.clip_grad_norm_
                norms.append(float(own(model.parameters(), 0.3)))
            before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
            optimizer.step((lambda: torch.tensor(5.0)) if number == 4 else None)
            assert same(before, [param.grad for param in model.parameters() if param.grad is not None]), "gradients stay too"
            scheduler.step()
            optimizer.param_groups[0]["weight_decay"] = 0.01 * number
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        found[kind] = values(model), norms, optimizer.state_dict()
        if kind is kinds[0]:
            assert len(optimizer._run.beside.units) > 3 and any(len(pieces) > 1 for pieces in optimizer._run.beside.pieces.values())
            optimizer.close()
    (theirs, their_norms, their_state), (ours, our_norms, our_state) = found.values()
    for one, other in zip(theirs, ours):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    torch.testing.assert_close(our_norms, their_norms, rtol=1e-5, atol=0)
    assert our_state["param_groups"] == their_state["param_groups"]
    for key, state in their_state["state"].items():
        torch.testing.assert_close({name: our_state["state"][key][name] for name in state}, state, rtol=1e-4, atol=1e-6)
    assert our_state["state"].keys() == their_state["state"].keys()


def test_clipping_reads_gradients_once(monkeypatch):
    model = model_of()
    optimizer = adamw(model.parameters())
    counted = []
    loss = lambda: model(batches(1)[0]).square().backward()
    loss()
    optimizer.step()
    plain = type(optimizer._run.beside).hand_over
    monkeypatch.setattr(type(optimizer._run.beside), "hand_over", lambda self, grads, **more: counted.append(len(grads)) or plain(self, grads, **more))
    optimizer.zero_grad()
    loss()
    exact = sum(float(param.grad.double().square().sum()) for param in model.parameters()) ** 0.5
    norm = clip_grad_norm_(optimizer, 0.1)
    assert abs(float(norm) - exact) <= 1e-6 * exact
    optimizer.step()
    assert len(counted) == 1
    loss()
    clip_grad_norm_(model.parameters(), 0.1)
    loss()
    optimizer.step()
    assert len(counted) == 3, "more gradients came after they were clipped"
    optimizer.close()
    with pytest.raises(offloadd.NotSupported, match=r"shape \(8,\) is in no optimizer of offloadd.optim"):
        other = nn.Parameter(torch.ones(8))
        other.grad = torch.ones(8)
        clip_grad_norm_([other], 1.0)


def test_gradients_are_looked_at_together(monkeypatch):
    """On a GPU each comparison would wait for all that is computed."""
    model, looked = model_of(), []
    optimizer = adamw(model.parameters(), overlap_backward=True)
    plain, stack = _beside._changed, torch.stack

    def changed(marks, grads):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "stack", lambda ones: looked.append(len(ones)) or stack(ones))
            patch.setattr(torch, "equal", lambda *ones: pytest.fail("a gradient is compared by itself"))
            return plain(marks, grads)

    monkeypatch.setattr(_beside, "_changed", changed)
    for x in batches(3):
        model(x).square().backward()
        clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    # Before the norm and before the step, what was and what is; of the first step only before the step. And what each step begins with, parameters.
    params = len(list(model.parameters()))
    assert looked == [params] * (2 + 4 + 4 + 3 * 2)
    optimizer.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_that_is_dropped_after_clipping_leaves_the_others_clipped(overlap):
    found = []
    for make, clip in ((torch.optim.AdamW, torch.nn.utils.clip_grad_norm_), (functools.partial(adamw, overlap_backward=overlap), clip_grad_norm_)):
        model = model_of()
        optimizer = make(model.parameters()) if clip is clip_grad_norm_ else make(model.parameters(), lr=1e-2)
        for x in batches(3):
            model(x).square().backward()
            # Each norm is far above it, and AdamW sees the gradients' relation from step to step.
            clip(model.parameters(), 1e-3 * float(1 + x.abs().max()))
            model.blocks[0].linear.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(model))
    for one, other in zip(*found):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)


def test_an_interrupt_of_clipping_leaves_gradients_that_are_used_as_they_are():
    """Ctrl-C between the gradients and the note of their factor."""
    found = []
    for ours in (False, True):
        param = nn.Parameter(torch.arange(8.0))
        optimizer = adamw([param], eps=1.0) if ours else torch.optim.AdamW([param], lr=1e-2, eps=1.0)
        for number in range(2):
            param.grad = torch.arange(8.0)
            if ours and number:
                optimizer._run._scales = Interrupted()
                with pytest.raises(KeyboardInterrupt):
                    clip_grad_norm_([param], 1.0)
            else:
                (clip_grad_norm_ if ours else nn.utils.clip_grad_norm_)([param], 1.0)
            optimizer.step()
        found.append(param.detach().clone())
    torch.testing.assert_close(*found)
    optimizer.close()


class Interrupted(dict):
    def __setitem__(self, *_):
        raise KeyboardInterrupt


def test_options_that_an_optimizer_alone_cannot_use_are_refused():
    model = model_of()
    for key, value in (("optimizer_step", "immediate"), ("run_dir", "elsewhere"), ("units", ["Block"]), ("gpu_resident_fraction", 1)):
        with pytest.raises(offloadd.Error, match=f"options has {key}, which an optimizer alone has no use for"):
            adamw(model.parameters(), options={key: value})


def steps_of(way, dir, dtype, **more):
    """Values after steps of one way to train, and the units whose gradients were taken in backward and in each step."""
    model = model_of(dtype)
    model.unused = nn.Linear(3, 2).to(dtype)
    optimizer = adamw(model.parameters(), dir, **more)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2, enabled=way in ("scaler", "scaled"))
    assert optimizer.resume() == 0
    taken, in_step = {True: [], False: []}, False
    beside = optimizer._run.beside
    take = beside._take
    beside._take = lambda unit, *args: taken[in_step].append(unit.index) or take(unit, *args)
    for number, x in enumerate(batches(4)):
        for part in x.split(2 if way == "accumulation" else 4):
            loss = model(part.to(dtype), [0, 3, 1] if way == "some" and number == 2 else None).square()
            scaler.scale(loss).backward()
        if way == "commit":
            optimizer.commit()
        if way == "replaced":
            model.blocks[0].linear.weight.grad = model.blocks[0].linear.weight.grad * 2
        if way == "skipped" and number == 1:
            optimizer.zero_grad()
            continue
        if way in ("ours", "scaler"):
            scaler.unscale_(optimizer)
            (clip_grad_norm_ if way == "ours" else torch.nn.utils.clip_grad_norm_)(model.parameters(), 0.1)
        if way == "data":
            # As numpy and kernels of others, this changes no version.
            for param in model.parameters():
                param.grad is None or param.grad.data.clamp_(-1e-3, 1e-3)
        in_step = True
        scaler.step(optimizer)
        scaler.update()
        in_step = False
        optimizer.zero_grad(set_to_none=way != "zeros")
    units = len(beside.units)
    optimizer.close()
    return values(model), taken, units


@needs_daemon
@pytest.mark.parametrize("dtype, dir", [(torch.float32, False), (torch.bfloat16, True)])
def test_gradients_that_are_taken_in_backward_change_no_bit(tmp_path, capsys, dtype, dir):
    for way in (
        ("plain", "commit", "scaler")
        if dir
        else ("plain", "ours", "zeros", "some", "commit", "skipped", "scaler", "scaled", "data", "accumulation", "replaced")
    ):
        expected, _, _ = steps_of(way, tmp_path / f"{way}-without" if dir else None, dtype)
        capsys.readouterr()
        found, taken, units = steps_of(way, tmp_path / way if dir else None, dtype, overlap_backward=True)
        assert same(found, expected), way
        # The unit that has an unused parameter waits for the step.
        early, late = len(taken[False]), len(taken[True])
        again = way in ("scaler", "scaled", "data", "accumulation", "replaced")
        assert early > 0.7 * 3 * (units - 1) and (late >= 4 * (units - 1) if again else late <= 2 * units), (way, taken)
        assert ("are taken to tiles once more" in capsys.readouterr().err) == again, way


@needs_daemon
@pytest.mark.parametrize("dtype, dir", [(torch.float32, None), (torch.bfloat16, "drive")])
def test_a_state_goes_on_with_the_same_bits(tmp_path, dtype, dir):
    model = model_of(dtype)
    optimizer = adamw(two_groups(model), dir and tmp_path / "whole")
    train(model, optimizer, batches()[:4])
    saved = bytes_of([model.state_dict(), optimizer.state_dict()])
    assert all(type(one) is torch.Tensor for state in saved[1]["state"].values() for one in state.values())
    with pytest.raises(offloadd.NotSupported, match="optimizer.state of"):
        next(iter(optimizer.state.values()))["exp_avg"].zero_()
    expected = train(model, optimizer, batches()[4:]), values(model)
    optimizer.close()
    for steps in (0, 2):
        model = model_of(dtype)
        optimizer = adamw(two_groups(model), dir and tmp_path / f"loaded{steps}")
        train(model, optimizer, batches()[:steps])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert (train(model, optimizer, batches()[4:]), values(model)[0].tolist()) == (expected[0], expected[1][0].tolist())
        assert same(values(model), expected[1])
        optimizer.close()


def test_checkpoints_of_torchs_adamw_are_loaded_and_written():
    plain = model_of()
    theirs = torch.optim.AdamW(two_groups(plain), lr=1e-2)
    train(plain, theirs, batches()[:5])
    model, called = model_of(), []
    optimizer = adamw(two_groups(model))
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("after"))
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(bytes_of(theirs.state_dict()))
    assert called == ["before", "after"]
    train(plain, theirs, batches()[5:])
    train(model, optimizer, batches()[5:])
    for one, other in zip(values(plain), values(model)):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    back = model_of()
    back.load_state_dict(model.state_dict())
    theirs = torch.optim.AdamW(two_groups(back), lr=1e-2)
    theirs.load_state_dict(bytes_of(optimizer.state_dict()))
    train(back, theirs, batches()[:3])
    train(model, optimizer, batches()[:3])
    for one, other in zip(values(back), values(model)):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    optimizer.close()


def test_the_state_of_another_lion_is_loaded_and_that_of_adamw_is_refused(tmp_path):
    plain = model_of()
    theirs = Lion(two_groups(plain), lr=1e-2)
    train(plain, theirs, batches()[:5])
    model = model_of()
    optimizer = adamw(two_groups(model), kind=offloadd.optim.Lion)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(bytes_of(theirs.state_dict()))
    train(plain, theirs, batches()[5:])
    train(model, optimizer, batches()[5:])
    for one, other in zip(values(plain), values(model)):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    states = optimizer.state_dict()["state"].values()
    assert all(state.keys() == {"step", "exp_avg"} for state in states)
    with pytest.raises(offloadd.NotSupported, match="has step, exp_avg, and AdamW's has step, exp_avg and exp_avg_sq"):
        own = adamw(two_groups(model_of()))
        own.load_state_dict({"state": optimizer.state_dict()["state"], "param_groups": own.state_dict()["param_groups"]})
    own.close()
    other = model_of()
    adam = torch.optim.AdamW(two_groups(other), lr=1e-2)
    train(other, adam, batches(1))
    with pytest.raises(offloadd.NotSupported, match="and Lion's has exp_avg: load the state of a Lion"):
        optimizer.load_state_dict({"state": adam.state_dict()["state"], "param_groups": optimizer.state_dict()["param_groups"]})
    optimizer.close()


@pytest.mark.parametrize("prepared", [False, True])
def test_a_state_that_is_refused_leaves_the_groups_as_they_were(tmp_path, prepared):
    """Whether its moments are another's, or there are none yet, or its groups are."""
    lions = Lion(model_of().parameters(), lr=3e-2)
    adams = torch.optim.AdamW(model_of().parameters(), lr=3e-2)
    empty = lions.state_dict()
    for one in (lions, adams):
        for param in one.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        one.step()
    other = {**lions.state_dict(), "param_groups": adams.state_dict()["param_groups"]}
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if prepared else adamw(model.parameters())
    run = offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run") if prepared else optimizer
    for state, message in [(other, "AdamW's has step, exp_avg and exp_avg_sq"), (empty, "group 0 of .*AdamW has no eps"), (lions.state_dict(), "has no eps")]:
        groups = optimizer.state_dict()["param_groups"]
        with pytest.raises(offloadd.NotSupported, match=message):
            optimizer.load_state_dict(state)
        assert optimizer.state_dict()["param_groups"] == groups and groups[0]["lr"] == 1e-2
    expected, plain = model_of(), torch.optim.AdamW
    assert train(model, optimizer, batches()[:2]) == pytest.approx(train(expected, plain(expected.parameters(), lr=1e-2), batches()[:2]), rel=1e-5)
    run.close()


@needs_daemon
@pytest.mark.parametrize("given", [True, False], ids=["of the script", "of the configuration"])
def test_a_prepared_model_is_updated_with_lion_and_goes_on_without(tmp_path, given):
    plain, model = model_of(), model_of()
    theirs = Lion(plain.parameters(), lr=1e-2, weight_decay=0.1)
    losses = train(plain, theirs, batches())
    settings = {**config("nvme", tmp_path), "optimizer": {"type": "Lion", "params": {"lr": 1e-2, "weight_decay": 0.1}}, "gradient_clipping": 0}
    optimizer = Lion(model.parameters(), lr=1e-2, weight_decay=0.1)
    assert train(model, optimizer, batches()[:2]) == losses[:2]
    if not given:
        optimizer = None
        model.load_state_dict(model_of().state_dict())
    engine, optimizer, *_ = offloadd.initialize(model=model, optimizer=optimizer, config=settings, run_dir=tmp_path / "run")
    assert train(model, optimizer, batches()[2 * given : 5]) == pytest.approx(losses[2 * given : 5], rel=1e-4)
    engine.run.close()
    assert train(model, optimizer, batches()[5:8]) == pytest.approx(losses[5:8], rel=1e-4)
    engine, *_ = offloadd.initialize(model=model, optimizer=optimizer, config=settings, run_dir=tmp_path / "two")
    assert train(model, optimizer, batches()[8:]) == pytest.approx(losses[8:], rel=1e-4)
    engine.run.close(keep=False)


def test_values_that_a_script_gives_to_parameters_count():
    def run(make):
        model = model_of()
        optimizer = make(model.parameters(), lr=1e-2)
        train(model, optimizer, batches()[:3])
        model.load_state_dict(model_of().state_dict())
        train(model, optimizer, batches()[:2])
        with torch.no_grad():
            model.head.weight.mul_(2)
        model.blocks[0].linear.weight.data.add_(0.5)
        train(model, optimizer, batches()[:2])
        model.head.bias.data = torch.full_like(model.head.bias, 3.0)
        return train(model, optimizer, batches()[:3]), values(model)

    (theirs, weights), (ours, found) = run(torch.optim.AdamW), run(offloadd.optim.AdamW)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for one, other in zip(weights, found):
        torch.testing.assert_close(other, one, rtol=0, atol=3e-6)


def test_hooks_scalers_and_frameworks_see_an_optimizer_of_torch():
    model, called = model_of(), []
    optimizer = adamw(model.parameters())
    assert isinstance(optimizer, torch.optim.AdamW) and len(optimizer.state) == 0
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    # Nothing has begun.
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))], "lr": 1e-3})
    plain = model_of()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    scalers = [torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1) for _ in range(2)]
    for number, x in enumerate(batches(5)):
        for one, of_one, scaler in ((model, optimizer, scalers[0]), (plain, theirs, scalers[1])):
            loss = one(x).square()
            scaler.scale(loss * float("inf") if number == 2 else loss).backward()
            scaler.unscale_(of_one)
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.3, foreach=True)
            scaler.step(of_one)
            scaler.update()
            of_one.zero_grad()
    assert called == ["before", "after"] * 4 and scalers[0].get_scale() == scalers[1].get_scale()
    for one, other in zip(values(plain), values(model)):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    with pytest.raises(offloadd.NotSupported, match="add_param_group after the optimizer has begun"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
    with pytest.raises(offloadd.NotSupported, match="pickled or copied"):
        copy.deepcopy(optimizer)
    optimizer.close()
    with pytest.raises(offloadd.Error, match="the optimizer is closed"):
        train(model, optimizer, batches(1))


def test_an_interrupted_step_is_finished_first(monkeypatch):
    plain, model = model_of(), model_of()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), batches(3))
    optimizer = adamw(model.parameters())
    train(model, optimizer, batches(2))
    memory, expect, calls = type(optimizer._run.beside.memory), type(optimizer._run.beside.memory).expect, []

    def interrupted(self, unit):
        calls.append(unit)
        if len(calls) in (4, 9):
            raise KeyboardInterrupt
        expect(self, unit)

    monkeypatch.setattr(memory, "expect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, batches()[2:])
    assert optimizer.steps_done == 3 and len(calls) > 10
    for one, other in zip(values(plain), values(model)):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    optimizer.close()


def test_what_is_not_updated_is_refused_by_name(tmp_path):
    frozen = model_of()
    frozen.head.requires_grad_(False)
    optimizer = adamw(frozen.named_parameters())
    train(frozen, optimizer, batches(1))
    frozen.head.requires_grad_(True)
    with pytest.raises(offloadd.NotSupported, match="has a gradient, and required none"):
        train(frozen, optimizer, batches(1))
    optimizer.close()
    wrong = [
        (dict(amsgrad=True), "amsgrad"),
        (dict(moments="fp8"), "offloadd.moments"),
        (dict(master="fp8"), "offloadd.master"),
        (dict(options={"comit_every": 2}), "commit_every"),
        (dict(directory=tmp_path / "not" / "there"), "cannot be made"),
        (dict(socket="/run/offloadd"), "name a directory"),
    ]
    for more, message in wrong:
        with pytest.raises(offloadd.Error, match=message):
            offloadd.optim.AdamW(model_of().parameters(), **more)
    for make, message in [
        (lambda: nn.Parameter(torch.ones(4, device="meta")), "no values yet"),
        (lambda: nn.Parameter(torch.ones(4, dtype=torch.float64)), "w is torch.float64"),
        (lambda: nn.Parameter(torch.ones(1).expand(4)), "share memory"),
    ]:
        with pytest.raises(offloadd.Error, match=message):
            adamw([("w", make())]).resume()


def script(directory, **given):
    """The lines of scripts/only_optimizer.py, and whether it was killed."""
    process = forks.start(HERE / "scripts" / "only_optimizer.py", directory, json.dumps({"options": {"program": PROGRAM, "gradients": "nvme"}, **given}))
    out, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return out.splitlines(), process.returncode != 0


@needs_daemon
@pytest.mark.parametrize("rule, master, moments, begins", [("AdamW", "fp32", "bf16", False), ("AdamW", "bf16", "8bit", True), ("Lion", "fp32", "8bit", False)])
def test_a_script_that_is_killed_resumes_with_the_same_bits(tmp_path, rule, master, moments, begins):
    kind = {"dtype": "bfloat16", "moments": moments, "rule": rule, "master": master, **({"in_backward": False} if begins else {})}
    whole, _ = script(tmp_path / "whole", **kind)
    lines = {}
    kills = [((3, None), 0), ((4, "finish"), 3), ((5, "seal"), 3), ((6, "gather"), 4), ((7, "drain"), 5)]
    if begins:
        kind["in_backward"], kills = True, [((4, "begin_updates"), 0), ((5, "finish_begun"), 3)]
    for kill, resumed in kills if (rule, master) == ("AdamW", "fp32") else kills[:2]:
        found, killed = script(tmp_path / "killed", **kind, kill=kill)
        # Each step is committed when it ends.
        assert killed and found[0] == f"resumed {resumed}", (kill, found)
        lines.update(dict.fromkeys(found[1:]))
    found, killed = script(tmp_path / "killed", **kind)
    assert not killed and list(dict.fromkeys([*lines, *found[1:]])) == whole[1:]


@needs_daemon
def test_a_commit_beside_the_next_step_loses_at_most_one_step(tmp_path, monkeypatch):
    whole, _ = script(tmp_path / "whole", dtype="bfloat16")
    lines, ended = {}, 0
    for kill, steps in [((3, None), 3), ((5, "finish"), 4), ((7, None), 7)]:
        found, killed = script(tmp_path / "killed", dtype="bfloat16", overlap_commit=True, kill=kill)
        assert killed and found[0] in {f"resumed {max(0, ended - 1)}", f"resumed {ended}"}, (kill, found)
        lines.update(dict.fromkeys(found[1:]))
        ended = steps
    found, _ = script(tmp_path / "killed", dtype="bfloat16", overlap_commit=True)
    assert found[0] in {"resumed 6", "resumed 7"} and list(dict.fromkeys([*lines, *found[1:]])) == whole[1:]
    model = model_of()
    optimizer = adamw(model.named_parameters(), tmp_path / "drive", overlap_commit=True)
    optimizer.resume()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._run, "drain", lambda: pytest.fail("a step waited for its commit"))
        train(model, optimizer, batches(3))
    optimizer.close()
    optimizer = adamw(model_of().named_parameters(), tmp_path / "drive")
    assert optimizer.resume() == 3
    optimizer.close()


@pytest.fixture
def daemon(tmp_path):
    """The socket of a daemon that others use too."""
    dir = pathlib.Path(tempfile.mkdtemp(prefix="offloadd-shared-"))
    file, socket = dir / "offloadd.toml", dir / "socket"
    file.write_text(f'socket = "{socket}"\ndevices = ["{dir / "tiles"}"]\narena_bytes_max = "64MiB"\nrequire_locked = false\n')
    subprocess.run([PROGRAM, "format", "--config", file, "--size", "64MiB"], check=True, capture_output=True)
    with subprocess.Popen([PROGRAM, "serve", "--config", file], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert "READY" in process.stdout.readline()
        yield str(socket)
        process.terminate()
    shutil.rmtree(dir)


@needs_daemon
def test_a_daemon_that_others_use_has_the_tiles(tmp_path, daemon):
    alone, _ = script(tmp_path / "alone", dtype="bfloat16")
    _, killed = script(tmp_path / "shared", dtype="bfloat16", socket=daemon, kill=(4, "finish"))
    assert killed and not list((tmp_path / "shared").glob("*.tiles"))
    model = model_of()
    other = adamw(model.named_parameters(), tmp_path / "other", socket=daemon)
    train(model, other, batches()[:5])
    found, _ = script(tmp_path / "shared", dtype="bfloat16", socket=daemon)
    assert found == ["resumed 3", *alone[4:]]
    jobs = subprocess.run([PROGRAM, "job", "list", "--socket", daemon], capture_output=True, text=True, check=True).stdout
    assert {"shared", "other"} <= {line.rpartition("-")[0] for line in re.findall(r"\S+", jobs)}, jobs
    other.close()
    assert main(["delete", str(tmp_path / "other"), "--yes"]) == 0


@needs_daemon
def test_another_optimizer_is_refused_by_name_and_a_new_start_replaces(tmp_path):
    def begin(named, resume=True, **more):
        optimizer = adamw(named, tmp_path / "drive", **more)
        steps = optimizer.resume() if resume else 0
        return optimizer, steps

    model = model_of()
    optimizer, _ = begin(model.named_parameters())
    train(model, optimizer, batches(3))
    with pytest.raises(offloadd.Error, match="give each run its own directory"):
        begin(model_of().named_parameters())
    optimizer.close()
    renamed = [(name.replace("blocks.1.norm", "blocks.1.other"), param) for name, param in model_of().named_parameters()]
    for named, more, message in [
        (renamed, {}, r"begun with blocks.1.norm.weight, which the optimizer does not have now"),
        (list(model_of(torch.bfloat16).named_parameters()), {}, "begun with .* trained in float32, and the model has it trained in bfloat16"),
        ([*model_of().named_parameters(), ("more", nn.Parameter(torch.ones(2)))], {}, "begun without more"),
        ([(name, nn.Parameter(torch.ones(3)) if name == "head.bias" else param) for name, param in model_of().named_parameters()], {}, r"head.bias \(1,\)"),
        (list(reversed(list(model_of().named_parameters()))), {}, "begun with blocks.0.linear.weight .* where the model has head.bias"),
        (list(model_of().named_parameters()), {"moments": "bf16"}, "begun with moments in fp32"),
        (list(model_of().named_parameters()), {"kind": offloadd.optim.Lion}, "begun with AdamW, and the optimizer is now Lion"),
    ]:
        with pytest.raises(offloadd.LayoutChanged, match=message):
            begin(named, **more)
    optimizer, steps = begin(model_of().named_parameters())
    assert steps == 3
    with pytest.raises(offloadd.Error, match="before the first step"):
        optimizer.resume()
    optimizer.close()
    # A start that does not ask for it begins anew.
    new, plain = model_of(), model_of()
    optimizer, _ = begin(new.named_parameters(), resume=False)
    assert train(new, optimizer, batches(3)) == train(plain, adamw(plain.parameters()), batches(3))
    assert optimizer.steps_done == 3
    assert main(["delete", str(tmp_path / "drive"), "--yes"]) == 1
    optimizer.close()
    assert main(["delete", str(tmp_path / "drive"), "--yes"]) == 0 and not (tmp_path / "drive").exists()


@needs_daemon
def test_steps_are_committed_as_often_as_asked(tmp_path):
    found, killed = script(tmp_path / "drive", commit_every=3, kill=(5, None))
    assert killed
    found, _ = script(tmp_path / "drive", commit_every=3)
    assert found[0] == "resumed 3"

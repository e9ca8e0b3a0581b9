"""bfloat16 parameters that are their own masters, rounded stochastically: `offloadd.master` = "bf16"."""

import contextlib

import pytest
import torch
from torch import nn

import offloadd
from test_runs import PROGRAM, batches, config, model_of, needs_daemon, train
from toy import Net, randomize

ROUNDED = {"master": "bf16", "moments": "bf16"}


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(ones, others):
    return ones.keys() == others.keys() and all(torch.equal(ones[name], value) for name, value in others.items())


def test_small_steps_move_the_mean_of_weights_and_a_rounding_to_the_nearest_stands_still(tmp_path):
    """A learning rate of 1e-6 on weights of 1: half of a bfloat16's last bit is 4e-3."""

    def mean(kind, **own):
        weight = nn.Parameter(torch.ones(100_000, dtype=torch.bfloat16))
        optimizer = kind([("weight", weight)], lr=1e-6, betas=(0.0, 0.0), weight_decay=0, **own)
        for _ in range(200):
            weight.grad = -torch.ones_like(weight)
            optimizer.step()
        moved = weight.double().mean().item() - 1
        if own:
            optimizer.close()
        return moved

    assert mean(torch.optim.AdamW) == 0
    assert mean(offloadd.optim.AdamW, options={"program": PROGRAM}, **ROUNDED) == pytest.approx(2e-4, rel=0.1)


def test_losses_with_masters_in_bf16_stay_near_those_with_fp32_ones(tmp_path):
    """Means of 50 steps, from the same weights: within 5 % and 0.002. Those of torch's AdamW, which rounds to the nearest, are at least twice as high."""

    def losses(own):
        model = model_of(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        settings = config("cpu", tmp_path, **(own or {}))
        found = []
        with offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / str(len(own))) if own is not None else contextlib.nullcontext():
            for x in batches(200):
                loss = (model(x.bfloat16()).float() - 3).square()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return [sum(found[at : at + 50]) / 50 for at in range(0, 200, 50)]

    exact, rounded, nearest = losses({}), losses(ROUNDED), losses(None)
    assert exact != rounded and exact[3] < exact[0] / 100
    for one, other in zip(exact, rounded):
        assert abs(other - one) < 0.05 * one + 2e-3, (exact, rounded)
    assert all(far > 2 * one for far, one in zip(nearest[1:], rounded[1:])), (nearest, rounded)


@needs_daemon
@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_tiers_and_a_resume_change_no_bit_and_another_master_is_refused(tmp_path, moments):
    rounded = {"master": "bf16", "moments": moments}

    def steps(first, last, name, device="nvme", **own):
        model = model_of(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with offloadd.prepare(model, optimizer, config(device, tmp_path, **own), run_dir=tmp_path / name) as run:
            losses = train(model, optimizer, batches(last)[first:])
            state = optimizer.state_dict()["state"]
            # The parameter is the master.
            assert all(("master_param" in one) == (own.get("master") != "bf16") for one in state.values())
            if name == "whole":
                run.save_checkpoint(tmp_path / "saved")
            return losses, values(model)

    whole, weights = steps(0, 6, "whole", "cpu", **rounded)
    assert steps(0, 6, "none", "none", **rounded)[0] == whole
    steps(0, 3, "cut", **rounded)
    with pytest.raises(offloadd.LayoutChanged, match="begun with masters in bf16, and offloadd.master is now fp32; set it to bf16"):
        steps(3, 6, "cut", moments=moments)
    losses, resumed = steps(3, 6, "cut", optimizer_step="immediate", **rounded)
    assert losses == whole[3:] and equal(resumed, weights)
    model = model_of(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, config("cpu", tmp_path, moments=moments), run_dir=tmp_path / "other") as run:
        with pytest.raises(offloadd.LayoutChanged, match="master"):
            run.load_checkpoint(tmp_path / "saved")


def test_weights_and_states_that_are_loaded_are_the_ones_that_were_saved(tmp_path):
    """A state with fp32 masters goes to their nearest bfloat16, which are the parameters."""
    found = []
    for own in ({}, ROUNDED):
        model = model_of(torch.bfloat16)
        optimizer = offloadd.optim.AdamW(model.named_parameters(), lr=1e-2, options={"program": PROGRAM}, **own)
        if found:
            model.load_state_dict(found[0][0])
            optimizer.load_state_dict(found[0][1])
            assert equal(values(model), found[0][0])
            assert "master_param" not in optimizer.state_dict()["state"][0]
        train(model, optimizer, batches(3))
        found.append((values(model), optimizer.state_dict()))
        optimizer.close()
    assert not equal(found[0][0], found[1][0])


@pytest.mark.parametrize("alone", [True, False], ids=["an optimizer alone", "a prepared model"])
def test_masters_half_way_between_two_parameters_are_loaded(tmp_path, alone):
    """The engine rounds them away from zero, PyTorch to even."""
    model = model_of(torch.bfloat16)
    masters = [(param.detach().float().view(torch.int32) | 0x8000).view(torch.float32) for param in model.parameters()]
    with torch.no_grad():
        for param, master in zip(model.parameters(), masters):
            # With one bit more than half.
            param.copy_((master.view(torch.int32) | 1).view(torch.float32))
            assert not torch.equal(param, master.bfloat16())
    kind, own = (offloadd.optim.AdamW, {"options": {"program": PROGRAM}}) if alone else (torch.optim.AdamW, {})
    optimizer = kind(model.parameters(), lr=0, weight_decay=0, **own)
    run = None if alone else offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run")
    of_one = lambda master: {"step": torch.tensor(1.0), **{name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}, "master_param": master}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {index: of_one(master) for index, master in enumerate(masters)}})
    before = values(model)
    train(model, optimizer, batches(1))
    assert equal(values(model), before)
    assert all(torch.equal(one["master_param"], master) for one, master in zip(optimizer.state_dict()["state"].values(), masters, strict=True))
    (optimizer if alone else run).close()


def test_a_step_that_overflows_is_skipped_and_rounds_nothing(tmp_path):
    """With a scaler, as scripts have one."""
    model = model_of(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with offloadd.prepare(model, optimizer, config("cpu", tmp_path, **ROUNDED), run_dir=tmp_path / "run"):
        for number, x in enumerate(batches(4)):
            before = values(model)
            loss = model(x.to(torch.bfloat16)).square()
            scaler.scale(loss * (float("inf") if number == 2 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert equal(values(model), before) == (number == 2)


def test_parameters_of_other_types_are_refused_by_name_or_stay_as_they_are(tmp_path):
    for dtype, name in ((torch.float32, "float32"), (torch.float16, "float16")):
        model = model_of(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(offloadd.NotSupported, match=f"offloadd.master = .bf16. is for trained parameters in bfloat16 .*, and these are in {name}"):
            offloadd.prepare(model, optimizer, config("cpu", tmp_path, **ROUNDED), run_dir=tmp_path / name)
    found = []
    for own in ({}, {"master": "bf16"}):
        torch.manual_seed(0)
        model = nn.ModuleDict({"narrow": randomize(Net(2)).bfloat16(), "wide": randomize(Net(2))})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with offloadd.prepare(model, optimizer, config("cpu", tmp_path, **own), run_dir=tmp_path / f"mixed-{len(own)}"):
            for x in batches(3):
                (model["narrow"](x.bfloat16()).float().square() + model["wide"](x).square()).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(values(model))
    same = {name: torch.equal(found[0][name], found[1][name]) for name in found[0]}
    assert all(same[name] for name in same if name.startswith("wide.")) and not all(same.values())


def test_a_plan_counts_six_bytes_of_state_and_fourteen_moved(tmp_path):
    def figures(**own):
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False, dtype=torch.bfloat16) for _ in range(8)])
        optimizer = torch.optim.AdamW(model.parameters())
        settings = config("nvme", tmp_path, **{**own, "gradients": "cpu"})
        found = offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / "run", plan_only=True).figures
        read = sum(found[part + "_read_bytes"] for part in ("forward", "backward", "update"))
        count = sum(param.numel() for param in model.parameters())
        return found["written_bytes"] / count, (read + found["written_bytes"]) / count

    assert figures() == pytest.approx((12, 26), rel=0.02)
    assert figures(moments="bf16") == pytest.approx((8, 18), rel=0.02)
    assert figures(**ROUNDED) == pytest.approx((6, 14), rel=0.02)

"""The state of a prepared optimizer: read, saved, loaded and given back."""

import collections
import gc
import io
import pathlib

import pytest
import torch
from torch.nn.functional import dropout
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import offloadd
from test_runs import batches, config, model_of, needs_daemon, train


def adamw(model):
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}], lr=1e-2)


def prepared(dir, device="cpu", dtype=torch.float32, model=None, optimizer=None, **more):
    model = model_of(dtype) if model is None else model
    optimizer = adamw(model) if optimizer is None else optimizer
    dir.mkdir(exist_ok=True)
    return model, optimizer, offloadd.prepare(model, optimizer, config(device, dir), run_dir=dir / "run", **more)


def bytes_of(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()))


@needs_daemon
@pytest.mark.parametrize("device,dtype", [("cpu", torch.float32), ("nvme", torch.bfloat16), ("nvme", torch.float16), ("none", torch.bfloat16)])
def test_a_state_that_is_saved_and_loaded_goes_on_with_the_same_bits(tmp_path, device, dtype):
    model, optimizer, run = prepared(tmp_path / "whole", device, dtype)
    train(model, optimizer, batches()[:4])
    saved = bytes_of([model.state_dict(), optimizer.state_dict()])
    assert all(type(one) is torch.Tensor for state in saved[1]["state"].values() for one in state.values())
    expected = train(model, optimizer, batches()[4:]), model.state_dict()
    run.close(keep=False)
    model, optimizer, run = prepared(tmp_path / "loaded", device, dtype)
    train(model, optimizer, batches()[:1])
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    losses = train(model, optimizer, batches()[4:])
    assert losses == expected[0]
    assert all(torch.equal(value, expected[1][name]) for name, value in model.state_dict().items())
    run.close(keep=False)


def test_the_state_is_that_of_plain_pytorch(tmp_path):
    plain = model_of()
    theirs = adamw(plain)
    train(plain, theirs, batches())
    model, optimizer, run = prepared(tmp_path)
    assert len(optimizer.state) == 0 and optimizer.state_dict()["state"] == {}
    train(model, optimizer, batches())
    for name in ("step", "exp_avg", "exp_avg_sq"):
        for (_, expected), (_, found) in zip(theirs.state.items(), optimizer.state.items()):
            torch.testing.assert_close(found[name].as_subclass(torch.Tensor), expected[name])
    whole, ours = theirs.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == whole["param_groups"] and ours["state"].keys() == whole["state"].keys()
    torch.testing.assert_close(ours["state"], whole["state"])
    torch.testing.assert_close(*(get_optimizer_state_dict(*of_one)["state"] for of_one in ((model, optimizer), (plain, theirs))))
    for write in (
        lambda: optimizer.state.clear(),
        lambda: optimizer.state[model.head.weight]["exp_avg"].zero_(),
        lambda: optimizer.state[model.head.weight].update(step=0),
        lambda: setattr(optimizer, "state", collections.defaultdict(dict)),
    ):
        with pytest.raises(offloadd.NotSupported, match="optimizer.state"):
            write()
    run.close()


def test_the_state_of_a_plain_optimizer_is_taken_over(tmp_path):
    plain = model_of()
    theirs = adamw(plain)
    losses = train(plain, theirs, batches())
    before = model_of()
    optimizer = adamw(before)
    assert train(before, optimizer, batches()[:4]) == losses[:4]
    saved = bytes_of([before.state_dict(), optimizer.state_dict()])
    # Steps before `prepare`, and a file of plain PyTorch's after it.
    _, _, run = prepared(tmp_path / "before", model=before, optimizer=optimizer)
    assert train(before, optimizer, batches()[4:]) == pytest.approx(losses[4:], rel=1e-5)
    run.close(keep=False)
    model, optimizer, run = prepared(tmp_path / "after")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert train(model, optimizer, batches()[4:]) == pytest.approx(losses[4:], rel=1e-5)
    run.save_checkpoint(tmp_path / "saved", client_state={"epoch": 3})
    again = train(model, optimizer, batches()[:2])
    assert run.load_checkpoint(tmp_path / "saved") == {"epoch": 3} and run.steps_done == 6
    assert train(model, optimizer, batches()[:2]) == again
    wrong = {**saved[1], "state": {0: {"step": 1, "sum": torch.zeros(3)}}}
    with pytest.raises(offloadd.NotSupported, match="has step, sum, and AdamW's has"):
        optimizer.load_state_dict(wrong)
    run.close(keep=False)


@needs_daemon
def test_a_resumed_run_refuses_other_moments_and_keeps_its_own(tmp_path):
    whole = prepared(tmp_path / "whole", "nvme")
    losses = train(whole[0], whole[1], batches())
    whole[2].close(keep=False)
    model, optimizer, run = prepared(tmp_path / "two", "nvme")
    train(model, optimizer, batches()[:4])
    state = optimizer.state_dict()
    run.close(keep=False)
    model, optimizer, run = prepared(tmp_path / "two", "nvme")
    with pytest.raises(offloadd.Error, match="was resumed after step 4"):
        optimizer.load_state_dict(state)
    assert train(model, optimizer, batches()[4:]) == losses[4:]
    run.close(keep=False)


def test_gradients_that_were_made_zero_update_as_in_plain_pytorch(tmp_path):
    """Weight decay and momentum move parameters whose gradients are zero, and not those that have none."""
    found = []
    for offload in (False, True):
        model = model_of()
        optimizer = adamw(model)
        run = prepared(tmp_path, model=model, optimizer=optimizer)[2] if offload else None
        for number, x in enumerate(batches()):
            # The later blocks get no gradients in every other step.
            model(x, order=range(6 if number % 2 == 0 else 2)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number >= 7)
            if number == 5:
                optimizer.step()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        if run is not None:
            run.close(keep=False)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_a_closed_run_gives_model_and_optimizer_back(tmp_path, device):
    plain = model_of()
    theirs = adamw(plain)
    losses = train(plain, theirs, batches())
    model, optimizer, run = prepared(tmp_path / "one", device)
    assert train(model, optimizer, batches()[:3]) == pytest.approx(losses[:3], rel=1e-3)
    run.close()
    assert type(optimizer) is torch.optim.AdamW and all(type(param) is torch.nn.Parameter for param in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert train(model, optimizer, batches()[3:6]) == pytest.approx(losses[3:6], rel=1e-3)
    _, _, run = prepared(tmp_path / "two", device, model=model, optimizer=optimizer)
    assert train(model, optimizer, batches()[6:]) == pytest.approx(losses[6:], rel=1e-3)
    run.close(keep=False)
    if device == "cpu":
        with pytest.raises(offloadd.Error, match="the run is closed"):
            model.head.weight.sum()


def daemons():
    """Processes of this user that serve a run."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        found += [b" ".join(words).decode()] if pathlib.Path(words[0].decode()).name == "offloadd" else []
    return found


@needs_daemon
def test_a_model_that_is_dropped_ends_its_daemon(tmp_path):
    model, optimizer, run = prepared(tmp_path, "nvme")
    losses = train(model, optimizer, batches()[:4])
    assert any(str(tmp_path) in line for line in daemons())
    del model, optimizer, run
    gc.collect()
    assert not any(str(tmp_path) in line for line in daemons())
    model, optimizer, run = prepared(tmp_path, "nvme")
    assert run.steps_done == 4, "and commits its last step"
    run.close(keep=False)
    assert len(losses) == 4


@needs_daemon
def test_a_resumed_loop_that_skips_by_itself_draws_the_same_numbers(tmp_path):
    def steps(dir, until):
        torch.manual_seed(5)
        model, optimizer, run = prepared(tmp_path / dir, "nvme")
        model.head.register_forward_pre_hook(lambda module, args: (dropout(args[0], 0.5),))
        losses = []
        for number, x in enumerate(batches()[:until]):
            if number < run.steps_done:
                continue
            losses += train(model, optimizer, [x])
            # Numbers between two steps, before the next pass begins.
            torch.rand(number)
        run.close(keep=False)
        return losses

    whole = steps("whole", 8)
    before = steps("killed", 4)
    torch.rand(100)
    assert before + steps("killed", 8) == whole

"""What others do to a prepared model: it works as with a plain one, or is refused by name."""

import copy
import io
import os
import pickle

import lightning
import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import offloadd
from test_runs import batches, config, needs_daemon, train
from toy import Block, Net, randomize

REFUSED = {
    "divides the model among the ranks": {
        "DistributedDataParallel": lambda model: nn.parallel.DistributedDataParallel(model),
        "DataParallel": lambda model: nn.DataParallel(model),
        "FullyShardedDataParallel": lambda model: torch.distributed.fsdp.FullyShardedDataParallel(model),
        "fully_shard": lambda model: torch.distributed.fsdp.fully_shard(model),
        "fully_shard of a block": lambda model: torch.distributed.fsdp.fully_shard(model.blocks[1]),
    },
    "cannot be pickled": {
        "torch.save": lambda model: torch.save(model, io.BytesIO()),
        "torch.save of blocks": lambda model: torch.save(model.blocks, io.BytesIO()),
        "torch.save of a linear layer": lambda model: torch.save(model.blocks[0].linear, io.BytesIO()),
        "pickle": lambda model: pickle.dumps({"model": model}),
    },
    "cannot be copied": {
        "deepcopy": lambda model: copy.deepcopy(model),
        "deepcopy of blocks": lambda model: copy.deepcopy(model.blocks),
    },
    "its parameters are in tiles: do it before offloadd.prepare": {
        "half": lambda model: model.half(),
        "to a type": lambda model: model.to(torch.bfloat16),
        "to a device": lambda model: model.to("meta"),
        "a block to a type": lambda model: model.blocks[1].double(),
        "share_memory": lambda model: model.share_memory(),
    },
}


class Sum(nn.Module):
    def forward(self, x):
        return x.sum()


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def model_and_optimizer():
    torch.manual_seed(0)
    model = randomize(Net(4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_what_a_prepared_model_cannot_be_is_said_with_what_to_do_and_leaves_it_as_it_is(tmp_path, group):
    def losses(tries):
        model, optimizer = model_and_optimizer()
        with offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run"):
            for words, of_kind in REFUSED.items() if tries else ():
                for name, do in of_kind.items():
                    with pytest.raises(offloadd.NotSupported, match=words):
                        do(model)
                        pytest.fail(name)
            # Those change nothing.
            assert model.to("cpu", torch.float32) is model and model.float() is model and model.cpu() is model
            return train(model, optimizer, batches(3))

    assert losses(True) == losses(False)


def test_torch_compile_wrappers_are_looked_through_and_a_full_graph_is_told_why_not(tmp_path):
    def losses(ours, wraps):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)), Sum())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        wrapped = torch.compile(model, backend="eager") if wraps == "before" else model
        run = offloadd.prepare(wrapped, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run") if ours else None
        if ours:
            assert run.commits.layout.units[0][0][0] == "0.linear.weight"
            with pytest.raises(Exception, match="leave fullgraph=True out, or compile forwards of blocks"):
                torch.compile(model, backend="eager", fullgraph=True)(batches(1)[0])
        wrapped = torch.compile(model, backend="eager") if wraps == "after" else wrapped
        found = train(wrapped, optimizer, batches(3))
        if ours:
            run.close()
        return found

    for wraps in ("before", "after"):
        assert losses(True, wraps) == pytest.approx(losses(False, wraps), rel=1e-4)


def _set_up_apart(fabric, model, optimizer):
    model = fabric.setup_module(model)
    return model, fabric.setup_optimizers(optimizer)


# Ways to give Lightning's Fabric a model and its optimizer.
FABRIC = {
    "both": lambda fabric, model, optimizer: fabric.setup(model, optimizer),
    "one after the other": _set_up_apart,
    "compiled": lambda fabric, model, optimizer: fabric.setup(torch.compile(model, backend="eager"), optimizer),
}


@pytest.mark.parametrize("first", ["Fabric", "prepare"])
@pytest.mark.parametrize("way", FABRIC)
def test_fabric_is_looked_through_and_saves_and_loads_what_is_in_tiles(tmp_path, way, first):
    fabric = lightning.Fabric(accelerator="cpu", devices=1)

    def found(ours):
        torch._dynamo.reset()
        dir = tmp_path / str(ours)
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)), Sum())
        optimizer, run = torch.optim.AdamW(model.parameters(), lr=1e-2), None
        for step in (first, {"Fabric": "prepare", "prepare": "Fabric"}[first]):
            if step == "Fabric":
                model, optimizer = FABRIC[way](fabric, model, optimizer)
            elif ours:
                run = offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=dir / "run")
        assert run is None or run.commits.layout.units[0][0][0] == "0.linear.weight"
        state = {"model": model, "optimizer": optimizer}
        losses = [_fabric_step(fabric, model, optimizer, batch) for batch in batches(2)]
        fabric.save(dir / "saved.pth", state)
        losses += [_fabric_step(fabric, model, optimizer, batch) for batch in batches(2)]
        fabric.load(dir / "saved.pth", state)
        losses += [_fabric_step(fabric, model, optimizer, batch) for batch in batches(2)]
        saved = torch.load(dir / "saved.pth")
        if ours:
            run.close()
        return losses, saved

    (losses, saved), (plain_losses, plain_saved) = found(True), found(False)
    assert losses == pytest.approx(plain_losses, rel=1e-4) and losses[2:4] == pytest.approx(losses[4:], rel=1e-6)
    assert saved["model"].keys() == plain_saved["model"].keys()
    for name, value in plain_saved["model"].items():
        torch.testing.assert_close(saved["model"][name], value)
    for number, state in plain_saved["optimizer"]["state"].items():
        torch.testing.assert_close(saved["optimizer"]["state"][number], state, rtol=1e-4, atol=1e-5)


def _fabric_step(fabric, model, optimizer, batch):
    loss = model(batch).square().mean()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def test_a_model_in_a_wrapper_that_divides_it_is_refused_before_anything_is_made(tmp_path, group):
    model, optimizer = model_and_optimizer()
    with pytest.raises(offloadd.NotSupported, match="wrapped in DistributedDataParallel, .* call offloadd.prepare before accelerator.prepare"):
        offloadd.prepare(nn.parallel.DistributedDataParallel(model), optimizer, {}, run_dir=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_run_dir_that_cannot_be_used_is_named_and_the_model_stays_as_it_was(tmp_path):
    (tmp_path / "file").write_text("")
    for path, words in [
        (tmp_path / "file" / "run", "file/run cannot be written: Not a directory; name another run_dir"),
        ("/proc/run", "/proc/run cannot be written: No such file or directory"),
        (tmp_path / os.fsdecode(b"\xff"), "is not UTF-8: name another run_dir"),
    ]:
        model, optimizer = model_and_optimizer()
        with pytest.raises(offloadd.Error, match=words):
            offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=path)
        assert not any(module._forward_hooks for module in model.modules())
        assert train(model, optimizer, batches(1))


@needs_daemon
def test_one_run_dir_holds_one_model_at_a_time_of_a_process_whatever_its_name(tmp_path):
    run_dir = tmp_path / 'Läufe 日本 "1"'
    model, optimizer = model_and_optimizer()
    with offloadd.prepare(model, optimizer, config("nvme", tmp_path), run_dir=run_dir):
        train(model, optimizer, batches(1))
        with pytest.raises(offloadd.Error, match=r'日本 "1" has the run of another model of this process \(Net\): give each run its own directory'):
            offloadd.prepare(*model_and_optimizer(), config("nvme", tmp_path), run_dir=run_dir)
        train(model, optimizer, batches(1))
    with offloadd.prepare(*model_and_optimizer(), config("nvme", tmp_path), run_dir=run_dir) as run:
        assert run.steps_done == 2


@needs_daemon
def test_other_frozen_parameters_and_types_than_those_of_the_run_are_named(tmp_path):
    def start(frozen=None, dtype=torch.float32):
        model = randomize(Net(4)).to(dtype)
        for param in model.blocks[frozen].parameters() if frozen is not None else ():
            param.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with offloadd.prepare(model, optimizer, config("nvme", tmp_path), run_dir=tmp_path / "run"):
            train(model, optimizer, batches(1))

    start(frozen=1)
    for given, words in [
        ({"frozen": 2}, "begun with blocks.1.linear.weight frozen in float32, and the model has it trained in float32; freeze the parameters"),
        ({}, "begun with blocks.1.linear.weight frozen in float32"),
        ({"frozen": 1, "dtype": torch.bfloat16}, "begun with blocks.0.linear.weight trained in float32, and the model has it trained in bfloat16"),
    ]:
        with pytest.raises(offloadd.LayoutChanged, match=words):
            start(**given)
    start(frozen=1)

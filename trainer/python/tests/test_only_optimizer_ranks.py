"""`offloadd.optim.AdamW` on several ranks: FSDP2's DTensors, of which each rank has its part, and whole parameters under DistributedDataParallel."""

import contextlib
import os
import pathlib
import re
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import accelerate
import offloadd
import transformers
import transformers.models.llama.modeling_llama
import transformers.trainer
from offloadd import _param_units
from offloadd.optim import clip_grad_norm_
from ranks import Ended, on_ranks
from test_runs import PROGRAM, batches, model_of, needs_daemon

STEPS = 6


def made(ranks, kind, directory, dtype, way, gpu=None, **more):
    """A model and its optimizer. The head has one row, so all ranks but the first have nothing of it."""
    _param_units.UNIT_ELEMS = 48
    model = model_of(dtype)
    # A block that uses the weight of another one is nothing for FSDP.
    model.blocks[2].other = [None]
    if way == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (ranks,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif way == "ddp":
        model = DistributedDataParallel(model)
    if kind == "torch":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"program": PROGRAM, **({"compute_device": gpu} if gpu else {}), **({"gradients": "nvme"} if directory else {})}
    return model, offloadd.optim.AdamW(model.named_parameters(), lr=1e-2, directory=directory, options=options, **more)


def train(rank, ranks, kind, directory=None, dtype=torch.float32, way="fsdp2", steps=STEPS, kill=None, gpu=None, overlap=False, **more):
    """Steps done before, losses, norms, and the whole parameters at the end."""
    more.update({"overlap_backward": True} if overlap else {})
    model, optimizer = made(ranks, kind, directory, dtype, way, gpu, **more)
    first = optimizer.resume() if kind == "offloadd" else 0
    losses, norms = [], []
    for number, x in list(enumerate(batches(steps), 1))[first:]:
        loss = model(x.chunk(ranks)[rank].to(dtype)).square()
        loss.backward()
        if overlap:
            assert len(optimizer._run.beside._early) > 3, "gradients are taken when FSDP has divided them"
        if kind == "offloadd":
            norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        if number == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        losses.append(loss.item())
    found = {name: whole(param).clone() for name, param in model.named_parameters()}
    if kind == "offloadd":
        optimizer.close()
    return first, losses, norms, found


def train_in_8_bits(rank, ranks, directory, kill=None, overlap=False):
    return train(rank, ranks, "offloadd", directory, torch.bfloat16, kill=kill, overlap=overlap, moments="8bit")


def whole(param):
    return param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()


def equal(ones, others):
    return all(torch.equal(ones[name], value) for name, value in others.items())


@needs_daemon
@pytest.mark.parametrize("way", ["fsdp2", "ddp"])
def test_ranks_make_the_steps_of_torchs_adamw(tmp_path, way):
    plain = on_ranks(2, tmp_path / "store", train, "torch", None, torch.float32, way)
    told = on_ranks(2, tmp_path / "store-ours", train, "offloadd", None, torch.float32, way)
    for (_, losses, norms, expected), (_, found, our_norms, weights) in zip(plain, told):
        assert found == pytest.approx(losses, rel=1e-4) and our_norms == pytest.approx(norms, rel=1e-4)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-6)
    assert equal(told[0][3], told[1][3])


@needs_daemon
def test_ranks_that_are_killed_resume_with_the_same_bits_and_others_are_refused(tmp_path):
    expected = on_ranks(2, tmp_path / "store", train_in_8_bits, tmp_path / "whole")
    killed = on_ranks(2, tmp_path / "store-killed", train_in_8_bits, tmp_path / "drive", 3, True)
    assert all(isinstance(one, Ended) for one in killed)
    for other in on_ranks(3, tmp_path / "store-three", train_in_8_bits, tmp_path / "drive"):
        assert isinstance(other, offloadd.LayoutChanged), other
        assert "begun with blocks.0.linear.weight divided over 2 ranks, which is divided over 3 ranks now" in str(other)
    resumed = on_ranks(2, tmp_path / "store-resumed", train_in_8_bits, tmp_path / "drive")
    for (_, losses, norms, weights), (first, found, our_norms, ours) in zip(expected, resumed):
        assert first == 3 and found == losses[3:] and our_norms == norms[3:] and equal(ours, weights)


def differ(rank, ranks):
    """What happens where one rank lacks a gradient, where parameters are copied in groups of ranks, where gradients are to be taken too early, and where one
    rank has other values, at first or later."""
    model, optimizer = made(ranks, "offloadd", None, torch.float32, "ddp")
    model.module(torch.ones(1, 8)).backward()
    if rank:
        model.module.head.bias.grad = None
    told = []
    other = made(ranks, "offloadd", None, torch.float32, "ddp")[1]
    early = made(ranks, "offloadd", None, torch.float32, "ddp", overlap_backward=True)[1]
    begun, own = model_of(), model_of()
    changed = offloadd.optim.AdamW(begun.named_parameters(), options={"program": PROGRAM})
    begun(torch.ones(1, 8)).backward()
    changed.step()
    with torch.no_grad():
        (begun.head.bias if rank == 2 else torch.ones(1)).mul_(2)
        own.blocks[1].norm.weight.add_(rank)
    alone = offloadd.optim.AdamW(own.named_parameters())
    for call in (optimizer.step, lambda: replicas().step(), early.resume, lambda: other.update_in_backward().__enter__(), alone.resume, changed.step):
        with pytest.raises(offloadd.NotSupported) as raised:
            call()
        told.append(str(raised.value))
    return told


def replicas():
    model = model_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")))
    return offloadd.optim.AdamW(model.named_parameters())


@needs_daemon
def test_ranks_that_differ_are_refused_by_name(tmp_path):
    for gradients, placements, early, begun, alone, changed in on_ranks(4, tmp_path / "store", differ):
        assert "module.head.bias has a gradient on one of ranks" in gradients
        assert "blocks.0.linear.weight has the placements" in placements and "HSDP" in placements
        assert "overlap_backward with module.blocks.0.linear.weight, which is whole on each rank" in early
        assert "update_in_backward() with module.blocks.0.linear.weight, which is whole on each rank" in begun
        assert "blocks.1.norm.weight has other values on rank" in alone and "head.bias has other values on rank" in changed


def checkpointed(rank, ranks, kind, directory, way, load=None, save=None):
    """Losses and weights of some steps, the last of six; before or after the first three a checkpoint of torch.distributed.checkpoint.
    Who saves begins updates in backward."""
    model, optimizer = made(ranks, kind, directory, torch.bfloat16, way)
    if load:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.load(state, checkpoint_id=load)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert kind == "torch" or optimizer.steps_done == 3
    losses = []
    for number, x in enumerate(batches(6)[3 if load else 0 :], 1):
        # The same on all ranks: their number changes no gradient, but for rounding.
        begins = save and kind == "offloadd"
        with optimizer.update_in_backward() if begins else contextlib.nullcontext():
            loss = model(x.to(torch.bfloat16)).square()
            loss.backward()
        assert not begins or len(optimizer._run._begun.units) > 3, "updates begin when FSDP has divided the gradients"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if save and number == 3:
            dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=save)
    found = {name.removeprefix("module."): whole(param).clone() for name, param in model.named_parameters()}
    if kind == "offloadd":
        optimizer.close()
    return losses, found


@needs_daemon
def test_a_distributed_checkpoint_goes_on_with_another_number_of_ranks_and_in_plain_pytorch(tmp_path):
    def run(name, ranks, kind, *args):
        found = on_ranks(ranks, tmp_path / f"store-{name}", checkpointed, kind, *args)
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found[0]

    saved = str(tmp_path / "saved")
    losses, weights = run("whole", 2, "offloadd", tmp_path / "drive", "fsdp2", None, saved)
    found, ours = run("ddp", 2, "offloadd", None, "ddp", saved)
    assert found == losses[3:] and equal(ours, weights), "with the bits of the masters, and of steps that begin in backward"
    for name, ranks, kind in (("three", 3, "offloadd"), ("plain", 2, "torch")):
        found, _ = run(name, ranks, kind, None, "fsdp2", saved)
        assert found[0] == losses[3] and found == pytest.approx(losses[3:], rel=0.2), name


PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "optimizer.md"


def snippet(number, dir, names):
    """Runs a snippet of the page with `names`, and returns all names that there are then."""
    text = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[number]
    text = text.replace("/mnt/nvme0/run", str(dir / "run")).replace("directory=", f'options={{"program": {PROGRAM!r}}}, directory=')
    text = text.replace('"directory": ', f'"options": {{"program": {PROGRAM!r}}}, "directory": ')
    exec(compile(text.replace("checkpoints/1000", str(dir / "checkpoint")), f"{PAGE.name}, snippet {number}", "exec"), names)
    return names


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))


def loader(count=4):
    tokens = torch.randint(0, 32, (count, 2, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": one, "labels": one} for one in tokens]


def losses_of(names, dir, batches):
    """The loss of each batch, and a step after it."""
    losses = []
    for batch in batches:
        loss = names["model"](**batch).loss
        loss.backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def of_the_page(rank, ranks, dir, accelerated):
    if accelerated:
        # On processors Accelerate leaves its settings of FSDP out of account.
        state = accelerate.Accelerator(cpu=True).state
        accelerate.PartialState._shared_state["distributed_type"] = state.distributed_type = accelerate.DistributedType.FSDP
        state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        state.fsdp_plugin.transformer_cls_names_to_wrap = ["LlamaDecoderLayer"]
        names = snippet(5, dir, {"model": llama(), "loader": loader()})
        assert names["optimizer"].optimizer.steps_done == 4
        found = whole(names["model"].lm_head.weight).clone(), type(names["model"]).__name__
        names["optimizer"].optimizer.close()
        return found
    names = snippet(2, dir, {"model": llama()})
    losses_of(names, dir, loader())
    snippet(3, dir, names)
    expected = losses_of(names, dir, loader())
    snippet(4, dir, names)
    assert losses_of(names, dir, loader()) == expected
    names["optimizer"].close()


def of_trainer(rank, ranks, dir):
    """Hugging Face's Trainer with `--fsdp`, on torch's optimizer and on ours, which is resumed from a checkpoint."""
    data, losses = [{name: one[0] for name, one in batch.items()} for batch in loader(32)], []
    for number, steps in [(None, 4), (6, 2), (6, 4)]:
        accelerate.state.AcceleratorState._reset_state(True)
        fsdp = {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
        more = {"max_steps": steps, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.1}
        args = transformers.TrainingArguments(str(dir / "out"), fsdp=True, fsdp_config=fsdp, use_cpu=True, report_to=[], per_device_train_batch_size=1, **more)
        # On processors Accelerate leaves its settings of FSDP out of account.
        accelerate.PartialState._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_GPU
        names = {"model": llama(), "args": args, "data": data, "resume": steps == 4}
        if number is None:
            args.save_strategy = "no"
            trainer = transformers.Trainer(llama(), args, train_dataset=data, optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 1e-2}))
            trainer.train()
        else:
            trainer = snippet(number, dir, names)["trainer"]
            assert trainer.optimizer.optimizer.steps_done == steps
            trainer.optimizer.optimizer.close()
        assert type(trainer.model).__name__ == "FSDPLlamaForCausalLM"
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return losses


@needs_daemon
def test_what_the_page_shows_of_trainer_runs(tmp_path):
    for plain, ours, resumed in on_ranks(2, tmp_path / "store", of_trainer, tmp_path):
        assert ours == pytest.approx(plain[:2], rel=1e-4) and resumed[:2] == ours and resumed == pytest.approx(plain, rel=1e-4)


@needs_daemon
def test_what_the_page_shows_runs(tmp_path):
    names = snippet(0, tmp_path, {"model": llama(), "loader": loader()})
    assert names["done"] == 0 and names["optimizer"].steps_done == 4
    again = snippet(0, tmp_path, {"model": llama(), "loader": loader(5)})
    assert again["done"] == 4 and again["optimizer"].steps_done == 5
    model, scheduler = llama(), SimpleNamespace(step=lambda: None)
    begun = snippet(1, tmp_path, {"model": model, "loader": [loader()[:2], loader()[2:]], "scheduler": scheduler})["optimizer"]
    assert begun.steps_done == 2 and begun._run._begun is None
    begun.close()
    for name in ("muon", "fsdp2", "accelerate"):
        (tmp_path / name).mkdir()
    model = llama()
    muon = snippet(8, tmp_path / "muon", {"model": model})["optimizer"]
    model(**loader(1)[0]).loss.backward()
    muon.step()
    assert len(muon.param_groups[0]["params"]) == 21 and sum("momentum_buffer" in one for one in muon.state_dict()["state"].values()) == 21
    muon.close()
    for one in on_ranks(2, tmp_path / "store", of_the_page, tmp_path / "fsdp2", False):
        assert one is None, one
    found = on_ranks(2, tmp_path / "store-accelerate", of_the_page, tmp_path / "accelerate", True)
    assert not isinstance(found[0], Exception), found
    (weight, name), (other, _) = found
    assert name == "FSDPLlamaForCausalLM" and torch.equal(weight, other)

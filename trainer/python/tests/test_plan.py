"""The plan before a run and the reports of one: figures that are true, files in the forms that others read."""

import json
import os
import re
import struct
import tempfile
import types

import pytest
import torch
from torch import nn

import offloadd
from offloadd import _offloadd
from offloadd.__main__ import main
from offloadd._config import settings_of
from offloadd._memory import GpuBytes
from offloadd._nodes import Topology
from offloadd._plan import Plan
from offloadd._sketch import adapt, by_name, cast, quantize
from offloadd._traced import trace
from offloadd._units import units_of
from test_runs import batches, config, model_of, needs_daemon, train


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system in memory at /dev/shm")
def test_files_in_memory_are_warned_of(tmp_path):
    model = model_of()
    plan = lambda dir: offloadd.prepare(model, optimizer_of(model), config("nvme", dir), run_dir=tmp_path / "run", plan_only=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as dir:
        assert f"warning   nvme_path: {dir} keeps its files in memory: a power cut" in str(plan(dir))
    assert "in memory" not in str(plan(tmp_path))


@needs_daemon
def test_a_plan_changes_nothing_and_says_what_the_run_then_has(tmp_path):
    model = model_of()
    before = [param.data_ptr() for param in model.parameters()]
    optimizer = optimizer_of(model)
    settings = config("nvme", tmp_path)
    plan = offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / "run", plan_only=True)
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob("*.tiles"))
    assert before == [param.data_ptr() for param in model.parameters()]
    text = str(plan)
    for line in ("model     0.00 M parameters (float32) in 7 units", "devices   ", "a step    reads ", "(assumed)"):
        assert line in text, text
    assert plan.problems == [] and plan.bound_s > 0
    (tmp_path / "other").mkdir()
    settings["zero_optimization"]["offload_param"]["nvme_path"] = [str(tmp_path), str(tmp_path / "other")]
    two = offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / "run", plan_only=True)
    settings["zero_optimization"]["offload_param"]["nvme_path"] = str(tmp_path)
    # Faster drives get more: each file is larger than its part.
    assert 2 * two.figures["file_bytes"] > 1.1 * two.figures["device_bytes"] and f", a file of {two.figures['file_bytes'] / 2**20:.1f} MiB in each:" in str(two)
    untrained = offloadd.prepare(model, None, settings, run_dir=tmp_path / "run", plan_only=True)
    # Without moments and gradients, and without a second copy of each tile.
    assert 3 * untrained.figures["device_bytes"] < plan.figures["device_bytes"] and untrained.figures["written_bytes"] == 0
    with pytest.raises(offloadd.Error, match="pass the optimizer"):
        offloadd.prepare(model, None, {}, run_dir=tmp_path / "run")
    with offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / "run") as run:
        train(model, optimizer, batches(2))
        assert run.core.host_bytes == plan.figures["host_bytes"]
        assert next(tmp_path.glob("*.tiles")).stat().st_size == plan.figures["file_bytes"]
    model = model_of()
    after = offloadd.prepare(model, optimizer_of(model), settings, run_dir=tmp_path / "run", plan_only=True)
    assert "expected  " in str(after), "the run's own metrics are used"


def test_the_bound_of_an_update_is_that_of_the_masters_format(tmp_path):
    bound_of = {}
    for master in ("fp32", "bf16"):
        model = model_of(torch.bfloat16)
        settings = config("cpu", tmp_path, master=master, update_threads=1)
        bound_of[master] = offloadd.prepare(model, optimizer_of(model), settings, run_dir=tmp_path / "run", plan_only=True).bound_s
    assert bound_of["bf16"] > 1.2 * bound_of["fp32"], "masters that are rounded stochastically are slower"


def test_the_bound_of_an_update_is_that_of_a_ranks_tiles_and_of_what_updates_them(tmp_path):
    model = nn.Sequential(*(nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(4)))
    plan = offloadd.prepare(model, optimizer_of(model), config("cpu", tmp_path, update_threads=1), run_dir=tmp_path / "run", plan_only=True)

    def bound(**values):
        return json.loads(_offloadd.plan(json.dumps({**json.loads(plan.engine_plan), **values})))["bound_s"]

    core, gpu = plan.bound_s, bound(update_threads=0)
    assert bound(update_threads=4) == pytest.approx(core / 4)
    assert bound(ranks=2, tile_elems=4096) == pytest.approx(core / 2, rel=0.15)
    # 16 bytes a parameter on the bus, against 0.35 G parameters a second of a core.
    assert 0 < gpu < core / 2


def test_drives_without_room_are_refused_before_anything_is_made(tmp_path):
    model = model_of()
    with torch.no_grad():
        model.blocks[0].huge = nn.Parameter(torch.zeros(1).expand(10**13))
    settings = config("nvme", tmp_path)
    plan = offloadd.prepare(model, optimizer_of(model), settings, run_dir=tmp_path / "run", plan_only=True)
    assert "the store needs" in plan.problems[0] and "refused   " in str(plan)
    with pytest.raises(offloadd.NoSpace, match="free some space, name directories on more drives"):
        offloadd.prepare(model, optimizer_of(model), settings, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@needs_daemon
def test_gradients_stay_in_host_memory_if_it_has_room(tmp_path, monkeypatch):
    def trained(name, **own):
        model = model_of()
        optimizer = optimizer_of(model)
        (tmp_path / name).mkdir()
        settings = config("nvme", tmp_path / name, **own)
        plan = offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / name / "run", plan_only=True)
        with offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / name / "run"):
            return train(model, optimizer, batches(3)), plan.figures["written_bytes"]

    from_drives, written = trained("nvme", gradients="nvme")
    kept, kept_written = trained("auto", gradients="auto")
    assert kept == from_drives and kept_written < written
    monkeypatch.setattr(offloadd._plan._offloadd, "host_available_bytes", lambda: 1000)
    assert trained("small", gradients="auto")[1] == written
    assert trained("asked", gradients="cpu")[1] == kept_written
    with pytest.raises(offloadd.Error, match='use "auto", "cpu" or "nvme"'):
        offloadd.prepare(model_of(), None, config("nvme", tmp_path, gradients="gpu"), plan_only=True)


def test_the_command_plans_a_model_by_its_size(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config("nvme", tmp_path), "bf16": {"enabled": True}}))
    assert main(["plan", str(path), "--params", "1e6", "--units", "4"]) == 0
    text = capsys.readouterr().out
    assert "model     1.00 M parameters (bfloat16) in 4 units" in text
    assert "bound     " in text and "limited by device writes; reads at " in text
    assert main(["plan", str(path), "--params", "1e13"]) == 1
    told = capsys.readouterr()
    assert "refused   " in told.out and "the store needs" in told.err
    path.write_text("{}")
    assert main(["plan", str(path), "--params", "1e6"]) == 0
    assert "devices   nothing" in capsys.readouterr().out


def test_the_command_says_that_host_memory_is_too_small_and_fails(llama, tmp_path, capsys, monkeypatch):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config("cpu", tmp_path), "bf16": {"enabled": True}}))
    assert main(["plan", str(path), "--params", "1e12"]) == 1
    told = capsys.readouterr()
    assert "warning   tiles take " in told.out
    assert "the run does not fit: tiles take " in told.err and 'set zero_optimization.offload_param.device = "nvme" with an nvme_path' in told.err
    # A model by itself has no configuration in which something could be set.
    monkeypatch.setattr(Plan, "host_available_bytes", property(lambda self: 1, lambda self, value: None), raising=False)
    assert main(["plan", str(llama)]) == 1
    assert capsys.readouterr().err.endswith("are available: give --nvme DIR\n")


def test_the_command_plans_for_another_machine(llama, tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config("nvme", tmp_path, gradients="auto"), "bf16": {"enabled": True}}))

    def planned(*more):
        status = main(["plan", str(path), "--params", "1e7", *more])
        told = capsys.readouterr()
        return status, told.out, told.err

    drives = "reads at 12.40 GB/s, writes at 6.40 GB/s (given)"
    assert drives in planned("--drives", "2x6.2GB/s:3.2GB/s")[1]
    assert drives in planned("--read", "12.4GB/s", "--write", "6.4GB/s")[1]
    assert "reads at 12.40 GB/s (given), writes at 3.20 GB/s (assumed)" in planned("--read", "12.4GB/s")[1]
    status, out, _ = planned("--host-memory", "1TiB")
    assert status == 0 and "; 1.0 TiB available" in out and "gradients 0 B" not in out
    # It decides what is kept there, too.
    status, out, err = planned("--host-memory", "1MiB")
    assert status == 1 and "; 1.0 MiB available" in out and "gradients 0 B" in out and "of host memory, 1.0 MiB are available" in err
    for more, why in (
        (("--drives", "2"), "expected a count and the read and write rate of each drive"),
        (("--read", "6.2"), "add a unit, such as 6.2GB/s"),
        (("--host-memory", "24"), "such as 24GiB"),
        (("--drives", "2x6GB/s:3GB/s", "--read", "6GB/s"), "leave one of them out"),
    ):
        status, _, err = planned(*more)
        assert status == 1 and why in err, err
    assert main(["plan", str(llama), "--drives", "2x6GB/s:3GB/s"]) == 1
    assert "this plan has no state on drives: give --nvme DIR" in capsys.readouterr().err


def test_a_number_of_parameters_is_read_as_people_write_it(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text("{}")
    for text in ("2e6", "2M", "2000000", "0.002B"):
        assert main(["plan", str(path), "--params", text]) == 0
        assert "model     2.00 M parameters" in capsys.readouterr().out
    for text in ("nan", "inf", "many", "7 billion"):
        with pytest.raises(SystemExit):
            main(["plan", str(path), "--params", text])
        assert "expected a count such as" in capsys.readouterr().err


def test_ranks_of_a_machine_share_the_rates_of_its_drives(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config("nvme", tmp_path, gradients="nvme"), "bf16": {"enabled": True}}))

    def bound(ranks, *more):
        assert main(["plan", str(path), "--params", "1e8", "--drives", "1x1GB/s:100MB/s", "--ranks", ranks, *more]) == 0
        return float(re.search(r"bound +([\d.]+) s a (?:step|pass), limited by device", capsys.readouterr().out)[1])

    for more in ((), ("--train", "none")):
        assert bound("4", *more) == pytest.approx(bound("1", *more), rel=0.1)


def test_the_command_plans_few_trained_parameters_beside_a_frozen_model(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config("nvme", tmp_path, gradients="nvme"), "bf16": {"enabled": True}}))

    def planned(*more):
        assert main(["plan", str(path), "--params", "6e8", *more]) == 0
        return capsys.readouterr().out

    def gib(text, line):
        return float(next(one for one in text.splitlines() if one.startswith(line)).split(" GiB")[0].split()[-1])

    few = planned("--trainable", "4.8e6")
    assert "model     604.80 M parameters (bfloat16) in 48 units" in few
    # Two copies of weights and state of what is trained, one of the weights of what is not.
    assert gib(planned(), "devices ") > 24 * 6e8 / 2**30 > 8
    assert 2 * 6e8 / 2**30 < gib(few, "devices ") < 2 * 6e8 / 2**30 + 0.3
    assert main(["plan", str(path), "--params", "1e6", "--trainable", "3"]) == 1
    assert "--trainable 3: each of the model's 24 blocks trains a parameter at least" in capsys.readouterr().err


def test_the_command_leaves_the_schedules_end_to_the_trainer(tmp_path, capsys):
    path = tmp_path / "ds.json"
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    path.write_text(json.dumps({**config("cpu", tmp_path), "scheduler": schedule}))
    assert main(["plan", str(path), "--params", "1e6"]) == 0
    model = model_of()
    optimizer = optimizer_of(model)
    with offloadd.prepare(model, optimizer, path, run_dir=tmp_path / "run"):
        train(model, optimizer, batches(1))
    with pytest.raises(offloadd.Error, match="scheduler.params.total_num_steps is missing"):
        offloadd.initialize(model=model_of(), config=path, run_dir=tmp_path / "other")
    del schedule["params"]["total_num_steps"]
    path.write_text(json.dumps({**config("cpu", tmp_path), "scheduler": schedule}))
    capsys.readouterr()
    assert main(["plan", str(path), "--params", "1e6"]) == 1
    assert "scheduler.params.total_num_steps is missing" in capsys.readouterr().err


def test_the_command_plans_a_model_by_its_name_without_loading_it(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    sizes = dict(n_embd=32, n_layer=3, n_head=2, vocab_size=97, n_positions=16)
    transformers.GPT2Config(architectures=["GPT2LMHeadModel"], **sizes).save_pretrained(tmp_path / "model")
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config("cpu", tmp_path)))
    assert main(["plan", str(path), "--model", str(tmp_path / "model")]) == 0
    assert "(float32) in 4 units" in capsys.readouterr().out
    assert main(["plan", str(path), "--model", str(tmp_path / "nothing")]) == 1
    assert f"no config.json of the model {tmp_path / 'nothing'}: " in capsys.readouterr().err


def test_the_command_plans_a_name_as_it_plans_a_directory(llama, tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    assert main(["plan", str(llama), "--lora", "4"]) == 0
    planned, read = capsys.readouterr().out.splitlines(), transformers.AutoConfig.from_pretrained
    asked = lambda name: read(llama) if name == "someone/some-model" else read(tmp_path / "nothing")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", asked)
    assert main(["plan", "someone/some-model", "--lora", "4"]) == 0
    # Host memory that is available differs.
    assert capsys.readouterr().out.splitlines()[0] == planned[0]
    for name, why in (("someone/other-model", "no config.json of the model someone/other-model: "), ("ds.json", "ds.json cannot be read")):
        assert main(["plan", name]) == 1
        assert why in capsys.readouterr().err


@pytest.mark.parametrize("architectures, why", [(["OtherForCausalLM"], "names the class OtherForCausalLM"), (None, "names no class")])
def test_a_model_whose_class_is_unknown_is_not_planned_as_another(tmp_path, capsys, architectures, why):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    transformers.ViTConfig(architectures=architectures, hidden_size=8, num_hidden_layers=3).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path)]) == 1
    assert why in capsys.readouterr().err


# Class, sizes, and the type of a mixture's experts, whose products are made for bf16. No dropout: the CPU keeps other masks than a GPU.
LLAMA = dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, vocab_size=300)
FAMILIES = {
    "Llama": (LLAMA, torch.float32),
    "Qwen3": ({**LLAMA, "head_dim": 16}, torch.float32),
    "Gemma2": ({**LLAMA, "head_dim": 16}, torch.float32),
    "GPT2LMHead": (dict(n_embd=64, n_layer=4, n_head=4, vocab_size=300, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), torch.float32),
    "BertLMHead": ({**LLAMA, "is_decoder": True, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}, torch.float32),
    "Mixtral": ({**LLAMA, "num_local_experts": 4}, torch.bfloat16),
}


def family(transformers, name, dtype, device):
    config_class = {"GPT2LMHead": "GPT2", "BertLMHead": "Bert"}.get(name, name) + "Config"
    model_class = getattr(transformers, f"{name}ForCausalLM" if name in ("Llama", "Qwen3", "Gemma2", "Mixtral") else f"{name}Model")
    torch.manual_seed(0)
    with torch.device(device):
        return model_class(getattr(transformers, config_class)(**FAMILIES[name][0])).to(dtype).train()


def kept_on_the_cpu(model, ids):
    """Bytes that autograd keeps of a forward, beside parameters and inputs."""
    kept, own = {}, {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), ids)}

    def pack(one):
        storage = one.untyped_storage()
        # What is kept here keeps its address.
        kept[storage.data_ptr()] = storage
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    del loss
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own)


@pytest.mark.parametrize("name", FAMILIES)
def test_planned_activations_are_those_that_a_forward_keeps(name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    dtype = FAMILIES[name][1]
    model = family(transformers, name, dtype, "meta")
    units, _ = units_of(model, None)
    planned = trace(model, units, (2, 48), trains=True)
    wanted = kept_on_the_cpu(family(transformers, name, dtype, "cpu"), torch.randint(300, (2, 48)))
    assert planned.kept_bytes == pytest.approx(wanted, rel=0.1)
    assert planned.peak_bytes > planned.kept_bytes and planned.logits_bytes % (2 * 48 * 300) == 0
    inputs = trace(model, units, (2, 48), trains=True, checkpoints=True)
    assert inputs.kept_bytes < planned.kept_bytes and inputs.peak_bytes < planned.peak_bytes


def test_planned_activations_fall_by_the_inputs_that_wait_in_host_memory():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    model = family(transformers, "Llama", torch.float32, "meta")
    units, _ = units_of(model, None)
    stay, moved = (trace(model, units, (2, 480), trains=True, checkpoints=True, moves=moves) for moves in (False, True))
    one = 2 * 480 * 64 * 4
    # Of four inputs the last one stays. Buffers are whole pages, here of an eighth more.
    assert moved.moved_bytes == 3 * one and 3 * one <= moved.moved_host_bytes <= 3.4 * one
    assert stay.kept_bytes - moved.kept_bytes == 3 * one
    # At the highest moment, in the last block's backward, one has come.
    assert stay.peak_bytes - moved.peak_bytes == 2 * one
    assert stay.moved_bytes == stay.moved_host_bytes == 0


def test_planned_gradients_leave_with_their_unit():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    model = family(transformers, "Llama", torch.float32, "meta")
    units, _ = units_of(model, None)
    planned = trace(model, units, (1, 2), trains=True, checkpoints=True)
    assert planned.peak_bytes < 0.6 * sum(unit.gradient_bytes for unit in units)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A directory of a model without weights."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    directory = tmp_path_factory.mktemp("model")
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **LLAMA).save_pretrained(directory)
    return directory


# Options, and what the lines have of them.
PLANNED = {
    "--seq-len 16 --batch 2": (
        "(bfloat16) in 5 units",
        "with gradient checkpointing, 2 x 16 tokens: weights ",
        "buffers of gradients ",
        "what is computed ",
        " without it",
    ),
    # Three inputs of 2 x 16 x 64 numbers in bf16.
    "--seq-len 16 --batch 2 --activations cpu": (
        ", inputs of blocks 12.0 KiB",
        "with gradient checkpointing and inputs of blocks in host memory, 2 x 16 tokens: weights ",
        ", inputs of blocks of 12.0 KiB each way",
    ),
    "--seq-len 16 --batch 2 --mlp-chunks 4 --lora 4 --quantize nf4": ("with gradient checkpointing, 2 x 16 tokens, MLPs in 4 chunks: weights ",),
    # Each in a tile of its own.
    "--seq-len 64 --batch 2 --activations nvme --nvme {dir}": (
        ", inputs of blocks 48.0 KiB",
        ", and 48.0 KiB for inputs of blocks of each process",
        'set "activations": "nvme" and "activations_bytes": 49152 in offloadd',
        ", inputs of blocks 48.0 KiB), writes ",
        "(inputs of blocks 48.0 KiB)",
        "with gradient checkpointing and inputs of blocks on drives, 2 x 64 tokens: weights ",
    ),
    "--seq-len 16 --loss-chunks 4 --mlp-chunks 2 --lora 4": ("1 x 16 tokens, MLPs in 2 chunks, the loss in 4 chunks: weights ",),
    "--seq-len 16 --lora 4": ("(bfloat16, float32) in 9 units", "buffers of gradients ", "bus       weights of ", ", gradients of "),
    "--seq-len 16 --lora 4 --quantize nf4": ("(bfloat16, float32, uint8) in 13 units", "buffers of gradients "),
    "--seq-len 16 --lora 4 --gpu-memory 3GiB": (
        " of weights stay on the GPU; all weights stay on a GPU with 2.0 GiB of memory",
        "bus       weights of 70.0 KiB to the GPU, gradients of 70.0 KiB from",
    ),
    "--seq-len 16 --lora 4 --gpu-memory 1GiB": ("resident  0 B of ", "none with less than 2.0 GiB"),
    "--seq-len 16 --train none": ("1 x 16 tokens: weights ", "KV cache 8.0 KiB", " s a pass, limited by bus at 50 GB/s (assumed)", "bus       weights of "),
    "--quantize nf4": ("uint8", "devices   nothing"),
    "--lora 4 --nvme {dir}": ("devices   ", "a step    reads "),
}


# Options of a plan, keys of its configuration, KiB that the machine's GPU has free, and what is said of it.
TOO_SMALL = {
    "--gpu-memory 1MiB --lora 4 --batch 9": ({}, 1 << 30, "a step with gradient checkpointing takes ", "1.0 MiB are available: take --mlp-chunks 4 (what is "),
    "--lora 4": ({}, 100, "100.0 KiB are available: take --quantize nf4 (weights "),
    "--lora 4 --quantize nf4": ({}, 100, "take --mlp-chunks 4 (what is computed ", ", --activations cpu (activations ", " or "),
    "--train none": ({}, 100, "a step takes ", "take --quantize nf4 (weights "),
    "--batch 9": ({}, 100, "take --loss-chunks 4 (logits ", ", --activations cpu (activations ", " or "),
    "--batch 9 --mlp-chunks 2 --activations cpu": ({}, 100, "take --loss-chunks 4 (logits "),
    "--batch 9 --mlp-chunks 2 --loss-chunks 2 --activations cpu": ({}, 100, "take fewer or shorter sequences at a time (what is computed "),
    "--batch 1": ({"offload_optimizer": {"device": "cpu"}}, 1, 'zero_optimization.offload_param.device = "cpu" (weights '),
    "": ({"offload_param": {"device": "cpu"}, "own": {"gpu_resident_fraction": 1}}, 2, "offloadd.gpu_resident_fraction lower (weights "),
}


@pytest.mark.parametrize("options", TOO_SMALL)
def test_a_plan_that_a_gpu_has_too_little_memory_for_fails(llama, tmp_path, capsys, monkeypatch, options):
    keys, free, *said = TOO_SMALL[options]
    keys = dict(keys)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("offloadd.__main__.GpuDevice", lambda _: types.SimpleNamespace(memory=lambda: GpuBytes(0, 0, free << 10)))
    path, own = tmp_path / "ds.json", keys.pop("own", {})
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": keys or {"offload_param": {"device": "cpu"}}, "offloadd": own}))
    assert main(["plan", str(path), "--model", str(llama), "--seq-len", "64", *options.split()]) == 1
    told = capsys.readouterr()
    (warning,) = [line.split(None, 1)[1] for line in told.out.splitlines() if line.startswith("warning ")]
    assert f"the run does not fit: {warning}" in told.err
    assert not [one for one in said if one not in warning], warning


def test_a_plan_says_that_a_gpu_has_no_room_without_gradient_checkpointing(llama, capsys):
    def planned(memory):
        assert main(["plan", str(llama), "--seq-len", "64", "--batch", "4", "--gpu-memory", memory]) == 0
        (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("gpu ")]
        return line

    least, most = (float(re.search(found, planned("80GiB"))[1]) for found in (r"([\d.]+) MiB with gradient", r"; ([\d.]+) MiB without it$"))
    assert least < most and planned(f"{int(1024 * (least + most) / 2)}KiB").endswith(" without it, more than is available")


def test_several_ranks_share_the_state_and_each_has_a_gpu(llama, tmp_path, capsys):
    def planned(*more):
        assert main(["plan", str(llama), "--seq-len", "16", *more]) == 0
        return capsys.readouterr().out

    def number(found, text):
        return float(re.search(found, text)[1])

    one, four = planned(), planned("--ranks", "4")
    assert re.search(r"host +[\d.]+ MiB for 4 ranks, [\d.]+ MiB each: ", four) and " on each of 4 GPUs, 1 x 16 tokens" in four
    bus = r"bus +weights of ([\d.]+) KiB"
    assert number(bus, four) == pytest.approx(number(bus, one) / 4, abs=0.1)
    assert number(r"weights ([\d.]+) KiB", four) == number(r"weights ([\d.]+) KiB", one)
    path = tmp_path / "ds.json"
    # Of the samples of a step each rank has one.
    path.write_text(json.dumps({**config("cpu", tmp_path), "train_batch_size": 4, "gradient_accumulation_steps": 1}))
    assert main(["plan", str(path), "--params", "1e8", "--ranks", "4"]) == 0
    host, each = re.search(r"host +([\d.]+) GiB for 4 ranks, ([\d.]+) MiB each", capsys.readouterr().out).groups()
    assert main(["plan", str(path), "--params", "1e8"]) == 0
    assert float(host) == pytest.approx(float(each) / 256, rel=0.02) == pytest.approx(number(r"host +([\d.]+) GiB", capsys.readouterr().out), rel=0.1)


def test_what_the_ranks_of_a_machine_take_together_is_compared_with_its_memory(tmp_path):
    settings, units = settings_of(config("cpu", tmp_path)), units_of(model_of(), None)[0]
    plan = Plan(settings, tmp_path / "run", units, Topology(0, 3, (0,), ("",) * 3))
    plan.host_available_bytes = 2 * plan.host_bytes
    assert "of host memory" in plan.warnings[0]
    plan.host_available_bytes = 3 * plan.host_bytes
    assert plan.warnings == []


@pytest.mark.parametrize("options", PLANNED)
def test_the_command_plans_a_models_directory(llama, tmp_path, capsys, options):
    assert main(["plan", str(llama), *options.format(dir=tmp_path).split()]) == 0
    text = capsys.readouterr().out
    assert not [wanted for wanted in PLANNED[options] if wanted not in text], text
    assert ("gpu  " in text) == ("--seq-len" in options)


def test_a_frozen_base_bounds_a_step_by_the_bus(llama, monkeypatch, capsys):
    # One adapter's update is shorter than its base's way.
    monkeypatch.setattr(offloadd._plan.os, "cpu_count", lambda: 10**6)
    assert main(["plan", str(llama), "--lora", "1", "--seq-len", "16"]) == 0
    assert "s a step, limited by bus" in capsys.readouterr().out


def test_weights_that_stay_add_to_the_gpu_and_take_from_the_bus(llama, tmp_path, capsys):
    path, found = tmp_path / "ds.json", []
    for fraction in (0, 0.5, 1):
        own = {"zero_optimization": {"offload_param": {"device": "cpu"}}, "offloadd": {"gpu_resident_fraction": fraction}}
        path.write_text(json.dumps({"bf16": {"enabled": True}, **own}))
        assert main(["plan", str(path), "--model", str(llama), "--lora", "4", "--seq-len", "16"]) == 0
        text = capsys.readouterr().out
        assert (" of weights stay on the GPU" in text) == (fraction > 0)
        found.append([float(re.search(what + r"weights (?:of )?([\d.]+) KiB", text)[1]) for what in ("bus +", "gpu .*: ")])
    (none, few), (half, more), (all_, most) = found
    assert none > half > all_ == 70.0 and few < more < most


def test_muons_directions_take_gpu_memory_and_cross_the_bus(llama, tmp_path, monkeypatch, capsys):
    # Updates by a million cores are shorter than the bus.
    monkeypatch.setattr(offloadd._plan.os, "cpu_count", lambda: 10**6)
    path = tmp_path / "ds.json"

    def planned(kind, *more, place="offload_param"):
        own = {"optimizer": {"type": kind}, "zero_optimization": {place: {"device": "cpu"}}}
        path.write_text(json.dumps({"bf16": {"enabled": True}, **own}))
        assert main(["plan", str(path), "--model", str(llama), "--seq-len", "1", *more]) == 0
        return capsys.readouterr().out

    def bound_s(text):
        return float(re.search(r"bound +([\d.e-]+) s a step, limited by bus", text)[1])

    adamw, muon = planned("AdamW"), planned("Muon")
    # 43,008 numbers of matrices in each of four blocks, as fp32 gradients. The largest matrix is 160 x 64: three of it and three squares of 64, in bf16.
    line = "Muon      matrices of 672.0 KiB to the GPU, and directions back; 84.0 KiB there"
    assert line in muon and "Muon " not in adamw
    assert bound_s(muon) - bound_s(adamw) == pytest.approx(672 * 1024 / 50e9, rel=0.01)
    assert "matrices of 168.0 KiB to the GPU" in planned("Muon", "--ranks", "4")
    # Weights that stay on the GPU cross no bus, but matrices do.
    assert line in planned("Muon", place="offload_optimizer")
    # Activations are gone by then: the larger of both counts.
    monkeypatch.setattr(offloadd._gpu_plan, "directions_of", lambda units, ranks: offloadd._gpu_plan.Directions(1 << 20, 0))
    assert "gpu       1.6 MiB with" in (text := planned("Muon")) and ", directions 1.0 MiB" in text
    # A plan refuses what a run refuses.
    without_blocks = json.loads((llama / "config.json").read_text()) | {"num_hidden_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(without_blocks))
    assert main(["plan", str(path), "--model", str(tmp_path)]) == 1
    assert "the model has none that is trained" in capsys.readouterr().err


def test_the_command_plans_the_optimizer_and_the_tiles_that_a_run_has(llama, tmp_path, capsys):
    path = tmp_path / "ds.json"

    def planned(found, section, *more):
        path.write_text(json.dumps({"bf16": {"enabled": True}, **section}))
        assert main(["plan", str(path), *more]) == 0
        return float(re.search(found, capsys.readouterr().out)[1])

    offload = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    kinds = ("AdamW", "Lion", "Muon")
    adamw, lion, muon = (planned(r"host +([\d.]+) GiB", {**offload, "optimizer": {"type": kind}}, "--params", "1e9") for kind in kinds)
    assert adamw - lion == pytest.approx(4e9 / 2**30, rel=0.15)
    assert muon == lion
    # A Trainer's names mean what they mean to `attach`, and what the configuration says of moments counts.
    for name, own, less in (("lion_32bit", {}, 4), ("adamw_8bit", {}, 6), ("paged_lion_8bit", {}, 7), ("adamw_8bit", {"moments": "fp32"}, 0)):
        named = planned(r"host +([\d.]+) GiB", {**offload, "offloadd": own}, "--params", "1e9", "--optim", name)
        assert adamw - named == pytest.approx(less * 1e9 / 2**30, rel=0.15, abs=0.01), name
    # Frozen parameters stay with the model where the optimizer alone is offloaded.
    alone = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    in_tiles = [planned(r"model +([\d.]+) M parameters", section, "--model", str(llama), "--lora", "4") for section in (alone, offload)]
    assert in_tiles[0] < 0.5 * in_tiles[1]


def test_planned_adapters_are_those_of_peft(llama):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
    with torch.device("meta"):
        ours = by_name(str(llama))
        theirs = peft.get_peft_model(by_name(str(llama)), peft.LoraConfig(r=4, target_modules="all-linear"))
        adapt(ours, 4)
    trained = lambda model: sorted(tuple(param.shape) for param in model.parameters() if param.requires_grad)
    assert trained(ours) == trained(theirs)


@pytest.mark.parametrize("quantized", [None, "nf4"])
def test_planned_activations_of_adapters_are_those_of_peft(llama, quantized):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make test-tools")
    with torch.device("meta"):
        ours = by_name(str(llama))
        quantize(ours, quantized)
        adapt(ours, 4)
    cast(ours, torch.bfloat16)
    theirs = by_name(str(llama)).to(torch.bfloat16).train()
    for module in list(theirs.model.layers.modules()) if quantized else ():
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear):
                packed = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
                packed.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=packed)
                setattr(module, name, packed.to("cpu"))
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, target_modules="all-linear"))
    wanted = kept_on_the_cpu(theirs, torch.randint(300, (2, 48)))
    assert trace(ours, units_of(ours, None)[0], (2, 48), trains=True).kept_bytes == pytest.approx(wanted, rel=0.1)


def test_plans_that_contradict_themselves_are_refused(llama, tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    path, adam, bert = tmp_path / "ds.json", tmp_path / "adam.json", tmp_path / "bert"
    path.write_text("{}")
    adam.write_text('{"optimizer": {"type": "AdamW"}}')
    transformers.BertConfig(architectures=["BertLMHeadModel"], **FAMILIES["BertLMHead"][0]).save_pretrained(bert)
    for arguments, why in (
        ((llama, "--train", "lora"), "give the rank of the adapters, as in --lora 16"),
        ((llama, "--train", "none", "--lora", 4), "--train none: --lora and --trainable say what is trained"),
        ((llama, "--train", "all", "--quantize", "nf4"), "--train all: quantized layers cannot be trained"),
        ((llama, "--lora", 0), "--lora 0: a rank of 1 at least"),
        ((llama, "--params", 1e6), "one of them only"),
        ((llama, "--units", 3), "--units 3 says how many blocks a model given by --params has"),
        ((path,), "one of them only"),
        ((path, "--params", 1e6, "--optim", "adafactor"), 'optim="adafactor" is not supported: use optim="adamw_torch"'),
        ((adam, "--params", 1e6, "--optim", "lion_8bit"), f'--optim lion_8bit: {adam} has optimizer.type = "AdamW", which a Trainer takes'),
        ((path, "--params", 1e6, "--lora", 4), "the model has no linear layers"),
        ((path, "--model", bert, "--seq-len", 9, "--mlp-chunks", 2), "offloadd.mlp_chunks = 2: the blocks of BertLMHeadModel have no module mlp"),
        *(((llama, *more), f"{more[0]} {more[1]}: GPU memory is planned for sequences") for more in (("--gpu-memory", "3GiB"), ("--batch", 2))),
        *(((llama, *more), "give --seq-len too") for more in (("--activations", "cpu"), ("--mlp-chunks", 2), ("--loss-chunks", 2))),
        ((path, "--params", 1e6, "--seq-len", 16), "--seq-len: GPU memory is planned for a model by its directory"),
        ((llama, "--seq-len", 16, "--activations", "nvme"), "--activations nvme: this plan has no state on drives: give --nvme DIR"),
        ((path, "--model", llama, "--nvme", tmp_path), "--nvme belongs to a plan without a configuration"),
    ):
        assert main(["plan", *map(str, arguments)]) == 1
        assert why in capsys.readouterr().err


def test_a_model_that_needs_values_is_planned_without_its_activations(llama, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lambda self, input_ids, labels=None: input_ids.sum().item())
    assert main(["plan", str(llama), "--seq-len", "16"]) == 0
    assert "and activations that are not known: LlamaForCausalLM does not run without memory" in capsys.readouterr().out


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(directory):
    """(step, names) of the events in a directory of TensorBoard's files."""
    found = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(data[12 : 12 + length])
            data = data[16 + length :]
    return found


@needs_daemon
def test_steps_are_reported_in_the_native_trainers_files_and_cut_back_on_a_resume(tmp_path, capsys):
    settings = {
        **config("nvme", tmp_path),
        "train_batch_size": 4,
        "steps_per_print": 2,
        "tensorboard": {"enabled": True, "output_path": str(tmp_path / "tb"), "job_name": "job"},
        "csv_monitor": {"enabled": True},
    }
    run_dir = tmp_path / "run"

    def go(first, last):
        model = model_of()
        optimizer = optimizer_of(model)
        with offloadd.prepare(model, optimizer, settings, run_dir=run_dir) as run:
            assert run.steps_done == first
            train(model, optimizer, batches(last)[first:])

    go(0, 4)
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["loss"] is None and line["grad_norm"] > 0 and line["lr"] == 1e-2
        assert line["forward_s"] > 0 and line["backward_s"] > 0 and line["host_bytes"] > 0
        assert line["step_s"] >= line["forward_s"] + line["backward_s"]
    assert lines[2]["device_written_bytes"] > 0 and lines[3]["generation"] >= 3
    printed = [line for line in capsys.readouterr().err.splitlines() if "s/step" in line]
    assert [line.split()[2] for line in printed] == ["2", "4"]
    assert "bottleneck: " in printed[0] and "I/O efficiency " in printed[0] and "waited " in printed[0] and "written " in printed[1]
    # A line of a step that was never committed.
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**lines[-1], "step": 5}) + "\n")
    go(4, 6)
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4, 5, 6]
    rates = (run_dir / "csv_monitor" / "DeepSpeedJobName" / "Train_Samples_lr.csv").read_text().split()
    assert rates == ["step,lr", *(f"{4 * step},0.01" for step in range(1, 7))]
    told = events(tmp_path / "tb" / "job")
    assert sum(b"Train/Samples/grad_norm" in event for event in told) == 6
    assert not any(b"train_loss" in event for event in told), "a plain loop's loss is not known"
    assert all(path.name.startswith("events.out.tfevents.") for path in (tmp_path / "tb" / "job").iterdir())


def test_the_engine_reports_the_loss_it_is_given(tmp_path):
    settings = {**config("cpu", tmp_path), "optimizer": {"type": "AdamW"}, "gradient_accumulation_steps": 2}
    settings["train_batch_size"] = 4
    engine, *_ = offloadd.initialize(model=model_of(), config=settings, run_dir=tmp_path / "run")
    losses = []
    for x in batches(4):
        loss = engine(x).square()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    means = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2]
    assert [line["loss"] for line in metrics(tmp_path / "run")] == pytest.approx(means)


class Adapted(nn.Module):
    """A frozen matrix of two tiles and a small adapter."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(512, 512, bias=False).requires_grad_(False), nn.Linear(512, 2, bias=False), nn.Linear(2, 512, bias=False)

    def forward(self, x):
        return x + self.base(x) + self.up(self.down(x))


@needs_daemon
def test_staging_holds_weights_that_are_read_twice_where_most_is_frozen(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(12)))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    frozen = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    with offloadd.prepare(model, optimizer, config("nvme", tmp_path, gradients="cpu", staging_bytes=6 * frozen // 10), run_dir=tmp_path / "run") as run:
        # Of adapters, not of whole tiles.
        assert run.plan.figures["grad_bytes"] < 12 * 16384
        for _ in range(4):
            model(torch.randn(2, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.close(keep=False)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    # Half of the weights wait in slots for backward, and half for the next forward; without, a step reads all but a block twice.
    assert rows[-1]["device_read_bytes"] < 1.5 * frozen, rows[-1]["device_read_bytes"] / frozen

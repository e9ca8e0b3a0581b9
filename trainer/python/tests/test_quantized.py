"""Quantized bases: their packed bytes are in tiles, and training and generation have the bits that they have without.

The references are a run with device none, where the base stays in memory as its library left it, and plain PyTorch (forwards and gradients in the same
bits; its AdamW rounds otherwise than ours).
"""

import functools
import gc
import json
import operator
import os
import pathlib
import sys

import pytest
import torch
from torch import nn

import forks
import offloadd
from offloadd._state_copies import StateCopy
from cases import ALL_CASES
from offloadd.__main__ import main
from offloadd._memory import HostMemory
from offloadd._packed import find_packed, wrap_again
from ranks import Ended, on_ranks
from test_gpu import fake, needs_compiler, start  # noqa: F401
from test_runs import PROGRAM, config, needs_daemon
from test_try_model import WORDS, made
from toy import let_stay

peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make test-tools")
quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: make test-tools")
# Imported here so that ranks, which are forks, find them.
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parent / "scripts"))
from kills import kill_at  # noqa: E402

pytestmark = needs_daemon
EXAMPLE = pathlib.Path(__file__).resolve().parents[1] / "examples" / "qlora.py"
VOCABULARY, WIDTH, STEPS = 64, 64, 20
TORCHAO = {
    "torchao int8": quantization.Int8WeightOnlyConfig,
    "torchao intx": quantization.IntxWeightOnlyConfig,
    "torchao float8": quantization.Float8WeightOnlyConfig,
}


def base(kind, seed=0):
    """A causal model of which each linear layer in a block is quantized."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    if kind in TORCHAO:
        quantization.quantize_(model.model.layers, TORCHAO[kind]())
    else:
        for module in model.model.layers.modules():
            for name, linear in list(module.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(module, name, of_bitsandbytes(kind, linear))
    return model.requires_grad_(False)


def of_bitsandbytes(kind, linear):
    sizes = linear.in_features, linear.out_features
    if kind == "int8":
        found = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
    else:
        storage = torch.bfloat16 if "bf16" in kind else torch.uint8
        found = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type=kind[:3], quant_storage=storage)
    found.load_state_dict({"weight": linear.weight.detach()})
    return found.to("cpu")


def with_adapters(kind, checkpointing=None, seed=0):
    model = base(kind, seed)
    # PEFT looks at these to choose its layers.
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = "storage" in kind or kind == "nf4", kind == "int8"
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
    return model.train()


def with_kernels_of_training(model):
    """A plain model that evaluates as it trains, as prepared ones do: where a processor has bf16 in AVX-512, bitsandbytes would evaluate in bf16."""
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return model


def text(step, rank=0):
    return torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(100 * rank + step))


def adamw(model):
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-4)


def train(rank, ranks, dir, device, kind, checkpointing=None, kill=None, steps=STEPS, gpu=None, stay=0):
    """Losses of the steps of this start, and the state at the end. A fraction of the units stays in memory."""
    if kill and rank == 0:
        kill_at(*kill)
    model = with_adapters(kind, checkpointing)
    optimizer = adamw(model)
    run = offloadd.prepare(model, optimizer, config(device, dir, compute_device=gpu), run_dir=dir / f"run-{device}-{kind}")
    if stay:
        let_stay(run.engine, stay)
    losses = []
    for step in range(run.steps_done, steps):
        loss = model(input_ids=text(step, rank), labels=text(step, rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    run.close()
    return losses, state


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(*map(of_bytes, (value, other[name]))) for name, value in one.items())


def of_bytes(value):
    if hasattr(value, "dequantize") and type(value) not in (torch.Tensor, StateCopy):
        value = value.dequantize()
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


WAYS = [("nf4", "cpu", "reentrant"), ("nf4", "nvme", "other"), ("int8", "cpu", "other"), ("int8", "nvme", "reentrant"), ("torchao int8", "nvme", "reentrant")]
WAYS += [("fp4 in bf16 storage", "cpu", None), ("torchao intx", "cpu", "other"), ("torchao float8", "cpu", "reentrant")]


@pytest.mark.parametrize("kind, device, checkpointing", WAYS)
def test_adapters_train_on_a_quantized_base_as_if_it_were_in_memory(tmp_path, poisoned, kind, device, checkpointing):
    (losses, state), (expected, expected_state) = (
        train(0, 1, tmp_path, where, kind, checkpointing, stay=0.6 if where == "cpu" else 0) for where in (device, "none")
    )
    assert len(losses) == STEPS and losses == expected and losses[-1] < losses[0] and same(state, expected_state)
    plain = with_adapters(kind, checkpointing)
    optimizer = adamw(plain)
    for step in range(3):
        loss = plain(input_ids=text(step), labels=text(step)).loss
        loss.backward()
        assert losses[step] == pytest.approx(loss.item(), rel=0 if step == 0 else 1e-6)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8"])
def test_gradients_are_those_of_plain_pytorch(tmp_path, poisoned, kind):
    found = []
    for device in ("cpu", None):
        model = with_adapters(kind, "reentrant")
        run = device and offloadd.prepare(model, adamw(model), config(device, tmp_path), run_dir=tmp_path / "run")
        model(input_ids=text(0), labels=text(0)).loss.backward()
        found.append({name: param.grad.clone() for name, param in model.named_parameters() if param.requires_grad})
        if run:
            run.close()
    assert len(found[0]) == 30 and same(*found)


@pytest.mark.parametrize("kind, device", [("nf4", "nvme"), ("int8", "cpu"), ("torchao int8", "cpu"), ("torchao float8", "nvme")])
def test_a_quantized_model_that_nothing_trains(tmp_path, poisoned, kind, device):
    prompt = torch.tensor([[1, 5, 9], [1, 7, 8]])
    answer = lambda model: model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    plain = with_kernels_of_training(base(kind).eval())
    expected, state = answer(plain), plain.state_dict()
    for _ in range(1 + (device == "nvme")):
        # The second start compares what the first one wrote.
        model = base(kind).eval()
        run = offloadd.prepare(model, None, config(device, tmp_path), run_dir=tmp_path / "run")
        found = answer(model)
        assert torch.equal(found.sequences, expected.sequences) and all(map(torch.equal, found.logits, expected.logits))
        weight = model.model.layers[3].mlp.up_proj.weight
        assert type(weight).__name__ == "Released" and isinstance(weight, type(plain.model.layers[3].mlp.up_proj.weight))
        if kind not in TORCHAO:
            assert same(model.state_dict(), state)
        run.close()
        assert type(weight) is type(plain.model.layers[3].mlp.up_proj.weight) and same(model.state_dict(), state)
        assert all(map(torch.equal, answer(model).logits, answer(base(kind).eval()).logits)), "a model whose run has ended is a plain one"
    if device == "nvme":
        with pytest.raises(offloadd.LayoutChanged, match="quantized from the same weights"):
            offloadd.prepare(base(kind, seed=1).eval(), None, config(device, tmp_path), run_dir=tmp_path / "run")


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8"])
def test_no_weight_is_in_memory_twice(tmp_path, kind, monkeypatch):
    def packed_bytes():
        """Bytes of integers in the process."""
        storages = {}
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor) and type(one).__name__ not in ("Int8Tensor", "Released") and one.dtype in (torch.int8, torch.uint8):
                storages[one.untyped_storage()._cdata] = one.untyped_storage().nbytes()
        return sum(storages.values())

    gc.collect()
    before = packed_bytes()
    model = base(kind).eval()
    if kind == "int8":
        # Its layers share the memory of their weights from the first forward on.
        model(input_ids=text(0))
    whole = packed_bytes() - before
    most = []
    gathered = HostMemory.expect
    monkeypatch.setattr(HostMemory, "expect", lambda self, unit: (gathered(self, unit), most.append(packed_bytes()))[0])
    with offloadd.prepare(model, None, config("cpu", tmp_path), run_dir=tmp_path / "run"):
        after = packed_bytes() - before
        assert after < whole * 0.1, "what is in tiles is not in memory"
        model(input_ids=text(0))
        assert max(most) - before < whole * 0.4, "one block of five"


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8"] if ALL_CASES else ["nf4"])
def test_two_ranks_that_are_killed_resume_with_the_same_bits(tmp_path, kind):
    whole = on_ranks(2, tmp_path / "whole", train, tmp_path, "none", kind, None, None, 6)
    killed = on_ranks(2, tmp_path / "killed", train, tmp_path, "nvme", kind, "reentrant", ("sealing", 4), 6)
    assert isinstance(killed[0], Ended) and isinstance(killed[1], (Ended, offloadd.RankGone)), killed
    resumed = on_ranks(2, tmp_path / "resumed", train, tmp_path, "nvme", kind, "reentrant", None, 6)
    for (losses, state), (expected, expected_state) in zip(resumed, whole):
        assert 0 < len(losses) < 6 and losses == expected[-len(losses) :] and same(state, expected_state)


ON_GPUS = ("nf4", "int8", "torchao int8")


def on_gpus(rank, ranks, dir, gpu):
    return [train(rank, ranks, dir, "cpu", kind, "reentrant", None, 4, gpu) for kind in ON_GPUS]


@needs_compiler
@pytest.mark.skipif(not ALL_CASES, reason="of make nightly: a minute")
def test_a_gpus_path_has_the_bits_of_the_processors(fake, tmp_path):
    (found,) = on_ranks(1, tmp_path / "store", on_gpus, tmp_path / "gpu", "cuda:0", start=functools.partial(start, fake))
    for (losses, state), (expected, expected_state) in zip(found, on_gpus(0, 1, tmp_path / "cpu", None)):
        assert losses == expected and same(state, expected_state)


def logits_of_ranks(rank, ranks, dir):
    """Logits of models of which each rank has other weights."""
    found = []
    for kind, device in (("nf4", "cpu"), ("nf4", "none"), ("torchao int8", "none")):
        model = with_adapters(kind, seed=rank)
        with offloadd.prepare(model, adamw(model), config(device, dir), run_dir=dir / f"run-{kind}-{device}"):
            found.append(model(input_ids=text(0)).logits.detach())
    return found


def test_ranks_have_the_first_ones_quantized_weights(tmp_path):
    one, other = on_ranks(2, tmp_path / "ranks", logits_of_ranks, tmp_path)
    assert all(map(torch.equal, one, other))
    assert torch.equal(one[0], with_adapters("nf4")(input_ids=text(0)).logits)


@pytest.mark.parametrize("kind", ["nf4", "torchao int8"])
def test_weights_are_read_outside_of_their_block(tmp_path, kind):
    """By a call of a layer alone, and within the forward of another block."""

    def found(model):
        layer = model.model.layers[4].mlp.up_proj
        alone = layer(torch.ones(1, WIDTH))
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out + layer(args[0])[..., :WIDTH])
        return [alone, model(input_ids=text(0)).logits]

    model = base(kind).eval()
    with offloadd.prepare(model, None, config("cpu", tmp_path), run_dir=tmp_path / "run"):
        assert all(map(torch.equal, found(model), found(with_kernels_of_training(base(kind).eval()))))


@pytest.mark.parametrize("kind", ["nf4", "torchao int8"])
def test_bytes_that_a_forward_changes_are_noticed(tmp_path, kind):
    model = base(kind).eval()
    bytes_in = lambda weight: getattr(weight, "qdata", weight)
    model.model.layers[2].mlp.up_proj.register_forward_hook(lambda module, args, out: (bytes_in(module.weight).zero_(), None)[1])
    with offloadd.prepare(model, None, config("cpu", tmp_path), run_dir=tmp_path / "run"):
        with pytest.raises(offloadd.NotSupported, match="model.layers.2.mlp.up_proj.weight was changed in place"):
            model(input_ids=text(0))


def test_a_run_resumes_with_the_base_that_it_began_with_only(tmp_path):
    model = with_adapters("nf4")
    offloadd.prepare(model, adamw(model), config("nvme", tmp_path), run_dir=tmp_path / "run").close()
    other = with_adapters("nf4", seed=1)
    with pytest.raises(offloadd.LayoutChanged, match="layers.0.*quantized from the same weights"):
        offloadd.prepare(other, adamw(other), config("nvme", tmp_path), run_dir=tmp_path / "run")


class HQQLinear(nn.Module):
    """A layer as HQQ has them."""

    __module__ = "hqq.core.quantize"

    def __init__(self, linear):
        super().__init__()
        rows = linear.weight.detach().view(-1, 2 * 16)
        zero, scale = rows.amin(1, keepdim=True), 15 / (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True))
        numbers = ((rows - zero) * scale).round().to(torch.uint8)
        self.W_q = nn.Parameter(numbers[:, ::2] << 4 | numbers[:, 1::2], requires_grad=False)
        self.meta = {"nbits": 4, "shape": linear.weight.shape, "scale": scale, "zero": zero}

    def forward(self, x):
        numbers = torch.stack([self.W_q >> 4, self.W_q & 15], 2).flatten(1)
        return x @ (numbers / self.meta["scale"] + self.meta["zero"]).view(self.meta["shape"]).t()


def of_hqq(rank, ranks, dir):
    """Logits of a model of which each rank has other numbers, and what is said of it."""
    torch.manual_seed(10 * ranks + rank)
    model = nn.Sequential(*(HQQLinear(nn.Linear(64, 64)) for _ in range(4)))
    first = model[0].meta["scale"].clone()
    with offloadd.prepare(model, None, config("nvme", dir), run_dir=dir / "run") as run:
        return model(torch.ones(1, 64)), torch.equal(first, model[0].meta["scale"]), run.plan.params


def test_layers_of_hqq(tmp_path):
    """The package is not installed: it is built from its source."""
    (logits, first, params), (others, same_as_before, _) = on_ranks(2, tmp_path / "store", of_hqq, tmp_path)
    assert torch.equal(logits, others) and first and not same_as_before and params == 4 * 64 * 64
    with pytest.raises(offloadd.LayoutChanged, match="0.W_q frozen in uint8, quantized"):
        of_hqq(0, 1, tmp_path)


class Sparse(nn.Parameter):
    pass


def of_unknown_class(linear):
    linear.weight = Sparse(linear.weight.detach(), requires_grad=False)


def not_quantized(layer):
    def change(linear):
        linear.weight = layer(WIDTH, WIDTH).requires_grad_(False).weight

    return change


def packed_for_one_processor(linear):
    linear.weight = of_bitsandbytes("nf4", linear).weight
    linear.weight.quant_state.packing_format_for_cpu = True


REFUSED = [
    (of_unknown_class, "first.weight is a frozen Sparse of test_quantized, whose bytes cannot be moved: load the model in bf16"),
    (not_quantized(bitsandbytes.nn.Linear4bit), "first.weight is a Params4bit that is not quantized yet: move the model to a device first"),
    (not_quantized(lambda *sizes: bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)), "first.weight is a Int8Params that is not quantized yet"),
    (packed_for_one_processor, "first.weight was packed for this processor alone"),
]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("change, why", REFUSED)
def test_what_cannot_be_held_is_refused_before_anything_is_written(tmp_path, change, why, trained):
    model = nn.Sequential()
    model.first, model.last = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 1)
    change(model.first)
    with pytest.raises(offloadd.NotSupported, match=why):
        offloadd.prepare(model, adamw(model) if trained else None, config("nvme", tmp_path), run_dir=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_forward_leaves_the_bytes_in_their_order(tmp_path):
    """As on a processor with bf16 in AVX-512."""
    model, expected = base("nf4").eval(), with_kernels_of_training(base("nf4").eval())
    layers = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True
    with offloadd.prepare(model, None, config("cpu", tmp_path), run_dir=tmp_path / "run"):
        assert torch.equal(model(input_ids=text(0)).logits, expected(input_ids=text(0)).logits)
    assert len(layers) == 35 and all(layer.support_avx512bf16_for_cpu for layer in layers)


def test_a_wrapper_follows_its_tensors_to_another_device():
    linear = nn.Linear(WIDTH, WIDTH)
    quantization.quantize_(linear, TORCHAO["torchao int8"]())
    param = linear.weight
    # On a GPU each tensor stays the same object too.
    param.qdata, param.scale, param.zero_point = moved = [one.to("meta") for one in (param.qdata, param.scale, param.zero_point)]
    wrap_again(param)
    assert linear.weight is param and isinstance(param, nn.Parameter) and param.device.type == "meta"
    packed = find_packed(param, [])
    assert packed.part is moved[0] and all(map(operator.is_, packed.rest, moved[1:]))
    assert linear(torch.empty(2, WIDTH, device="meta")).shape == (2, WIDTH)


@pytest.mark.parametrize("kind", ["nf4", "fp4 in bf16 storage", "int8"])
def test_initialize_changes_the_type_of_what_is_not_quantized(tmp_path, kind):
    model = base(kind).eval()
    # As of from_pretrained: `to` refuses types.
    model.quantization_method = "bitsandbytes"
    engine, *_ = offloadd.initialize(model=model, config={**config("cpu", tmp_path), "bf16": {"enabled": True}}, run_dir=tmp_path / "run")
    weight, plain = engine.module.model.layers[0].mlp.up_proj.weight, base(kind).model.layers[0].mlp.up_proj.weight
    assert weight.dtype == plain.dtype and engine.module.model.norm.weight.dtype == engine.module.lm_head.weight.dtype == torch.bfloat16
    assert engine(input_ids=text(0)).logits.isfinite().all()
    engine.module._offloadd_run.close()


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8"])
def test_weights_are_written_and_loaded(tmp_path, kind):
    model, plain = base(kind).eval(), base(kind).eval()
    with offloadd.prepare(model, None, config("cpu", tmp_path), run_dir=tmp_path / "run") as run:
        if kind in TORCHAO:
            for write in (run.save_weights, model.save_pretrained):
                with pytest.raises(offloadd.NotSupported, match="layers.0.self_attn.q_proj.weight is several tensors of torchao"):
                    write(tmp_path / "written")
            torch.save(model.state_dict(), tmp_path / "written")
            written = torch.load(tmp_path / "written", weights_only=False)
        else:
            run.save_weights(tmp_path / "written")
            written = load_file(tmp_path / "written")
        assert same(written, plain.state_dict())
        weight = {"model.layers.1.mlp.up_proj.weight": plain.model.layers[1].mlp.up_proj.weight}
        run.load_state_dict(weight, strict=False)
        with pytest.raises(offloadd.NotSupported, match="frozen parameters are written once"):
            run.load_state_dict({name: base(kind, seed=1).model.layers[1].mlp.up_proj.weight for name in weight}, strict=False)


def test_a_plan_counts_packed_bytes(tmp_path, capsys):
    plan = offloadd.prepare(base("nf4"), None, config("nvme", tmp_path), plan_only=True)
    numbers = sum(param.numel() for param in AutoModelForCausalLM.from_config(base("nf4").config).parameters())
    assert plan.params == numbers and plan.types == ["float32", "uint8"]
    in_blocks = 5 * WIDTH * (WIDTH * 2 + WIDTH + 3 * 2 * WIDTH) / 2
    assert in_blocks < plan.figures["forward_read_bytes"] < in_blocks * 2, "four bits a number, and what is not quantized"
    assert not list(tmp_path.iterdir())
    # The command has the same bytes.
    settings, model = tmp_path / "config.json", tmp_path / "model"
    settings.write_text(json.dumps(config("nvme", tmp_path)))
    told = []
    for kept in ({}, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}):
        described = LlamaForCausalLM.config_class(**{**base("nf4").config.to_dict(), "architectures": ["LlamaForCausalLM"], **kept})
        described.save_pretrained(model)
        assert main(["plan", str(settings), "--model", str(model), *([] if kept else ["--quantize", "nf4"])]) == 0
        told.append(capsys.readouterr().out.splitlines())
    of = lambda lines: [line for line in lines if not line.startswith(("host", "bound"))]
    assert of(told[0]) == of(told[1]) == of(str(plan).replace("offloadd-run", "config").splitlines())
    assert main(["plan", str(settings), "--params", "1e6", "--quantize", "nf4"]) == 1 and "the model has no linear layers" in capsys.readouterr().err
    assert main(["plan", str(settings), "--model", str(model), "--trainable", "1e4"]) == 0 and "writes" in capsys.readouterr().out


def test_the_example_resumes_with_the_same_adapters(tmp_path):
    model, text_file, drive = made(tmp_path / "model", hidden_size=WIDTH, intermediate_size=2 * WIDTH), tmp_path / "text", tmp_path / "drive"
    text_file.write_text(" ".join(20 * WORDS))
    drive.mkdir()
    environment = {"PATH": f"{pathlib.Path(PROGRAM).parent}:{os.environ['PATH']}"}
    imports = ["transformers.models.llama.modeling_llama", "peft.tuners.lora.bnb", "bitsandbytes"]
    begin = lambda name: forks.start(EXAMPLE, model, text_file, tmp_path / name, drive, "6", environment=environment, imports=imports)
    whole, killed = begin("whole"), begin("killed")
    for line in killed.stdout:
        if line.startswith("step 3:"):
            killed.kill()
            break
    assert killed.wait() == -9
    expected, errors = whole.communicate()
    assert expected.count("step ") == 6, errors
    found, said = begin("killed").communicate()
    assert "killed: the run resumes after step" in said
    assert 0 < len(found) < len(expected) and expected.endswith(found)
    one, other = (load_file(tmp_path / name / "adapters" / "adapter_model.safetensors") for name in ("whole", "killed"))
    assert len(one) == 5 * 7 * 2 and same(one, other)

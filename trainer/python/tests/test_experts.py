"""Mixtures of experts whose layers are larger than a unit may be: the bits of plain PyTorch, with a few experts in memory at a time."""

import contextlib
import copy
import functools
import json
import os
import signal

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
T = transformers
T.logging.set_verbosity_error()
# Imported once for all ranks.
QWEN, QWEN_CONFIG = T.Qwen3MoeForCausalLM, T.Qwen3MoeConfig

import offloadd  # noqa: E402
from cases import ALL_CASES  # noqa: E402
from offloadd import _zero  # noqa: E402
from offloadd.__main__ import main  # noqa: E402
from offloadd._experts import CutParam, is_common_eager, part_of  # noqa: E402
from offloadd._memory import gpu_weight_bytes  # noqa: E402
from ranks import on_ranks  # noqa: E402
from test_gpu import Ahead  # noqa: E402
from test_runs import config, needs_daemon  # noqa: E402
from toy import Mixture, Offloaded, randomize, same_gradients  # noqa: E402

VOCAB = 97
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB, head_dim=8)
CONFIGS = {
    "qwen3": (QWEN, lambda: QWEN_CONFIG(**SIZES, intermediate_size=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)),
    # With the auxiliary loss of its router.
    "mixtral": (
        T.MixtralForCausalLM,
        lambda: T.MixtralConfig(**SIZES, intermediate_size=16, num_local_experts=6, num_experts_per_tok=3, output_router_logits=True),
    ),
    # With biases, and weights that are transposed.
    "gpt-oss": (T.GptOssForCausalLM, lambda: T.GptOssConfig(**SIZES, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2)),
    # Rows of experts that end in the middle of a processor's vectors.
    "narrow gpt-oss": (T.GptOssForCausalLM, lambda: T.GptOssConfig(**SIZES, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2)),
}
# What holds one expert and not two, of models whose experts need more than 6,700 bytes.
ONE_EXPERT = {"gpt-oss": 26_000, "narrow gpt-oss": 10_000}
# Two experts a group.
BYTES_MAX = 13_000


def make(name="qwen3", how="grouped_mm", checkpointing=None):
    model_class, config_of = CONFIGS[name]
    torch.manual_seed(0)
    model = randomize(model_class(config_of()).train())
    model.set_experts_implementation(how)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=checkpointing == "reentrant"))
        model.enable_input_require_grads()
    return model


def text(step, rows=2, length=12):
    ids = torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def joined(gradients):
    """Gradients by the names of the plain model's parameters."""
    found, parts = {}, {}
    for name, value in gradients.items():
        if of_whole := part_of(name):
            parts.setdefault(of_whole[0], []).append((of_whole[1].start, value))
        else:
            found[name] = value
    return {**found, **{name: torch.cat([value for _, value in sorted(of_whole, key=lambda one: one[0])]) for name, of_whole in parts.items()}}


CASES = [("qwen3", "eager", None), ("qwen3", "grouped_mm", "not reentrant"), ("mixtral", "grouped_mm", "reentrant"), ("mixtral", "eager", None)]
CASES += [("gpt-oss", "eager", "not reentrant"), ("gpt-oss", "grouped_mm", None), ("narrow gpt-oss", "grouped_mm", None)]
ALL = [(name, how, kind) for name in CONFIGS for how in ("eager", "grouped_mm") for kind in (None, "reentrant", "not reentrant")]


def rows_keep_their_bits(experts):
    """Whether this processor gives rows the same bits in a tensor that ends behind them. PyTorch computes the exponential of the last numbers of a tensor,
    which do not fill two vectors, by another function than that of the others."""

    def gate(rows):
        rows = rows.clone().requires_grad_()
        made = experts._apply_gate(rows)
        made.sum().backward()
        return torch.cat([made.detach(), rows.grad], 1)

    rows = torch.randn(48, experts.gate_up_proj.shape[2 if experts.is_transposed else 1])
    whole = gate(rows)
    return all(torch.equal(gate(rows[:count]), whole[:count]) for count in range(1, len(rows)))


@pytest.mark.parametrize("name, how, checkpointing", ALL if ALL_CASES else CASES)
def test_groups_of_packed_experts_have_plain_pytorchs_bits(name, how, checkpointing):
    plain, ours = make(name, how, checkpointing), make(name, how, checkpointing)
    bytes_max = ONE_EXPERT.get(name, 6_700)
    # The eager forward calls each expert with the tensor that it has without groups.
    exact = how == "eager" or rows_keep_their_bits(plain.model.layers[0].mlp.experts)
    assert exact or name == "narrow gpt-oss"
    compare = torch.equal if exact else functools.partial(torch.allclose, rtol=0, atol=2e-7)
    offloaded = Offloaded(ours, unit_bytes_max=bytes_max)
    groups = [unit for unit in offloaded.engine.gathering.units if unit.apart]
    assert len(groups) == 2 * (6 if name == "mixtral" else 8) and all(unit.bytes <= bytes_max for unit in groups)
    for number, step in enumerate((0, 0, 1)):
        batch, announced = text(step), offloaded.core.announcements
        plain.zero_grad()
        expected = plain(**batch).loss
        expected.backward()
        loss = ours(**batch).loss
        # The mean of losses of about 5.
        assert torch.equal(loss, expected) if exact else abs(loss - expected) < 1e-6
        loss.backward()
        assert not offloaded.live(), "a unit stays after backward"
        assert offloaded.core.announcements == announced + 1 or number != 1, "the second pass is as the first one"
        assert not same_gradients(plain, joined(offloaded.take_gradients()), compare)
    # What is in no block, a block without experts, and a group; with checkpoints three more at most.
    assert offloaded.core.here_max <= (6 if checkpointing else 3)
    brought = sum(not gradients and offloaded.engine.gathering.units[unit].apart for gradients, unit in offloaded.core.done)
    assert brought <= (3 if checkpointing else 2) * 3 * len(groups) - (3 * 2 * 2 if checkpointing else 0), (
        "the last of a checkpoint's forward stay for their backward"
    )


def test_experts_of_an_older_transformers_are_in_groups_unless_it_divides_them_among_ranks():
    """transformers 5.17 has neither mark of 5.23, and hooks what it divides."""

    def older(is_hooked):
        model = make()
        for layer in model.model.layers:
            for mark in ("_is_expert_parallel", "has_post_expert_norm"):
                vars(layer.mlp.experts).pop(mark, None)
            if is_hooked:
                layer.mlp.experts._is_hooked = True
        offloaded = Offloaded(model, unit_bytes_max=BYTES_MAX)
        return model, [unit for unit in offloaded.engine.gathering.units if unit.apart]

    model, groups = older(is_hooked=False)
    assert len(groups) == 8 and torch.equal(model(**text(0)).loss, make()(**text(0)).loss)
    assert not older(is_hooked=True)[1]


def test_groups_without_tokens_are_not_brought_and_their_gradients_are_zero():
    plain, ours = make(), make()
    offloaded = Offloaded(ours, unit_bytes_max=BYTES_MAX)
    batch = {"input_ids": torch.tensor([[5]]), "labels": torch.tensor([[5]])}
    chosen = {}
    for number, layer in enumerate(ours.model.layers):
        layer.mlp.gate.register_forward_hook(lambda _, args, out, number=number: chosen.__setitem__(number, set((out[2] // 2).flatten().tolist())))
    plain(**batch).logits.square().sum().backward()
    ours(**batch).logits.square().sum().backward()
    brought = {offloaded.engine.gathering.units[unit].name for gradients, unit in offloaded.core.done if not gradients}
    wanted = {f"model.layers.{layer}.mlp.experts.{2 * group}:{2 * group + 2}" for layer, groups in chosen.items() for group in groups}
    assert {name for name in brought if ":" in name} == wanted and len(wanted) <= 4
    gradients = joined(offloaded.take_gradients())
    assert not same_gradients(plain, gradients)
    assert all((value == 0).flatten(1).all(1).sum() >= 4 for name, value in gradients.items() if ".experts." in name)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_that_are_modules_have_plain_pytorchs_bits(checkpointing):
    torch.manual_seed(0)
    plain = randomize(Mixture())
    ours = copy.deepcopy(plain)
    offloaded = Offloaded(ours, unit_bytes_max=8_000)
    assert sum(unit.apart for unit in offloaded.engine.gathering.units) == 18
    for step in range(3):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        plain(x, checkpointing).backward()
        ours(x, checkpointing).backward()
        assert not offloaded.live() and not same_gradients(plain, offloaded.take_gradients())
    # Of eight.
    assert offloaded.core.here_max <= (5 if checkpointing else 3)


@pytest.mark.parametrize("given", ["hook", "later hook", "gradient"])
def test_packed_experts_with_a_hook_or_a_gradient_stay_whole(given):
    model = make()
    weight, called = model.model.layers[0].mlp.experts.down_proj, []
    if given == "hook":
        weight.register_hook(called.append)
    elif given == "later hook":
        weight.register_post_accumulate_grad_hook(called.append)
    else:
        weight.grad = torch.ones_like(weight)
    offloaded = Offloaded(model, unit_bytes_max=BYTES_MAX)
    groups = [unit.name for unit in offloaded.engine.gathering.units if unit.apart]
    assert len(groups) == 4 and all(name.startswith("model.layers.1.") for name in groups) and type(weight) is not CutParam
    model(**text(0)).loss.backward()
    assert len(called) == (given != "gradient")


def test_eager_experts_that_compute_in_other_types_are_refused(monkeypatch):
    classes = {"nemotron_h": "NemotronHExperts", "openai_privacy_filter": "OpenAIPrivacyFilterExperts", "inkling2": "Inkling2Experts"}
    for name, experts in classes.items():
        module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
        assert not is_common_eager(getattr(module, experts))
    model = make(how="eager")
    experts = type(model.model.layers[0].mlp.experts)
    assert is_common_eager(experts)

    def in_float(self, hidden_states, top_k_index, top_k_weights) -> torch.Tensor:
        return original(self, hidden_states, top_k_index, top_k_weights.float())

    original = experts.forward.__wrapped__
    monkeypatch.setattr(experts.forward, "__wrapped__", in_float)
    is_common_eager.cache_clear()
    Offloaded(model, unit_bytes_max=BYTES_MAX)
    with pytest.raises(offloadd.NotSupported, match="the eager forward of Qwen3MoeExperts, in groups"):
        model(**text(0))
    is_common_eager.cache_clear()


def test_what_a_backward_that_failed_has_brought_does_not_stay():
    model = randomize(Mixture())
    offloaded = Offloaded(model, unit_bytes_max=8_000)
    for layer in model.layers:
        layer.gate.register_forward_hook(lambda _, args, out: out + torch.tensor([0, 9, 0, 0, 0, 9.0]))
    loss = model(torch.randn(3, 16), True)

    def fail(_, args, out):
        raise ValueError

    # In the checkpoint's second forward, when experts were called.
    handle = model.layers[1].experts[5].register_forward_hook(fail)
    with pytest.raises(ValueError):
        loss.backward()
    handle.remove()
    assert offloaded.engine._kept
    offloaded.engine.forget_gradients()
    assert not offloaded.live() and not offloaded.engine._kept


def test_a_pass_without_gradients_before_a_backward_leaves_its_order():
    model = randomize(Mixture())
    offloaded = Offloaded(model, unit_bytes_max=8_000)
    x, announcements = torch.randn(3, 16), []
    for _ in range(3):
        loss = model(x, True)
        with torch.no_grad():
            model(x)
        before = offloaded.core.announcements
        loss.backward()
        announcements.append(offloaded.core.announcements - before)
        offloaded.take_gradients()
    assert announcements[1:] == [0, 0], "the order has the experts of the backward"


def test_a_plan_counts_experts_that_stay_for_their_backward():
    model = randomize(Mixture())
    offloaded = Offloaded(model, unit_bytes_max=8_000)
    gathering = offloaded.engine.gathering
    memory = gathering.memory = Ahead(offloaded.core, gathering.units)
    for _ in range(4):
        model(torch.randn(12, 16), True).backward()
        offloaded.take_gradients()
    modules = {unit.index: module for module, units in gathering.of_module.items() for unit in units}
    assert memory.in_memory_bytes_max <= gpu_weight_bytes(gathering.units, modules)


def test_experts_that_a_pass_skips_neither_stay_nor_change_the_rest_of_the_order():
    torch.manual_seed(0)
    plain = randomize(Mixture())
    ours = copy.deepcopy(plain)
    # For each layer and row the two experts that it takes.
    chosen = []
    for model in (plain, ours):
        for number, layer in enumerate(model.layers):
            choose = lambda _, args, out, number=number: out + 9 * nn.functional.one_hot(torch.tensor(chosen[number]), 6).sum(1)
            layer.gate.register_forward_hook(choose)
    offloaded = Offloaded(ours, unit_bytes_max=8_000)
    memory = offloaded.engine.gathering.memory = Ahead(offloaded.core, offloaded.engine.gathering.units)
    order = offloaded.engine.gathering.order
    every = [(0, 1), (2, 3), (4, 5)]
    for choice in (*[[every] * 3] * 6, [[(0, 2), (2, 3), (4, 5)], every, every], [[(0, 1)] * 3, [(4, 5)] * 3, every], [[(0, 5)] * 3] * 3):
        chosen[:] = choice
        x, skips, before = torch.randn(3, 16), sum(6 - len({*sum(of_layer, ())}) for of_layer in choice), order.deviations
        plain.zero_grad()
        plain(x).backward()
        ours(x).backward()
        assert not offloaded.live() and not same_gradients(plain, offloaded.take_gradients())
        # The order of what the engine does was learned from the first passes.
        assert order.deviations - before <= 2 * skips or choice == [every] * 3
    assert not memory.in_memory
    # What is in no block, a block, an expert, and two units ahead.
    assert memory.in_memory_max <= 5


# Whole runs


def adamw(model):
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-3)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        loss = model(**text(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


def near(found, expected):
    return found.keys() == expected.keys() and all(torch.allclose(found[name], value, atol=2e-6) for name, value in expected.items())


def run_with(path, name, model, device="cpu", **own):
    optimizer = adamw(model)
    return offloadd.prepare(model, optimizer, config(device, path, **own), run_dir=path / name), optimizer


def killed(rank, ranks, path):
    model = make()
    _, optimizer = run_with(path, "run", model, "nvme", unit_bytes_max=BYTES_MAX)
    train(model, optimizer, range(3))
    model(**text(3)).loss.backward()
    os.kill(os.getpid(), signal.SIGKILL)


@needs_daemon
def test_a_run_in_groups_that_is_killed_is_one_without_groups(tmp_path):
    plain, whole = make(), make()
    losses = train(plain, adamw(plain), range(6))
    run, optimizer = run_with(tmp_path, "whole", whole)
    with run:
        expected_losses = train(whole, optimizer, range(6))
        expected, moments = whole.state_dict(), optimizer.state_dict()["state"]
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected_losses), atol=1e-6)
    on_ranks(1, tmp_path / "store", killed, tmp_path)
    model = make()
    names, params = [name for name, _ in model.named_parameters()], list(model.parameters())
    run, optimizer = run_with(tmp_path, "run", model, "nvme", unit_bytes_max=BYTES_MAX)
    done = run.steps_done
    assert done in (2, 3)
    assert train(model, optimizer, range(done, 6)) == expected_losses[done:]
    assert equal(model.state_dict(), expected) and near(expected, plain.state_dict())
    run.close(keep=True)
    assert [name for name, _ in model.named_parameters()] == names and all(one is other for one, other in zip(model.parameters(), params))
    assert equal(dict(model.state_dict()), expected)
    found = optimizer.state_dict()["state"]
    assert found.keys() == moments.keys() and all(torch.equal(found[key]["exp_avg_sq"], moments[key]["exp_avg_sq"]) for key in moments)


@needs_daemon
def test_weights_have_the_models_own_names_and_shapes(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    plain, model = make(), make()
    run, optimizer = run_with(tmp_path, "run", model, unit_bytes_max=BYTES_MAX)
    with run:
        assert any(unit.apart for unit in run.engine.gathering.units)
        assert equal(model.state_dict(), plain.state_dict())
        assert equal(dict(run.weights()), dict(plain.named_parameters()))
        model.save_pretrained(tmp_path / "ours")
        plain.save_pretrained(tmp_path / "plain")
        # One tensor for each expert, as checkpoints of this model have them.
        assert equal(*(safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("ours", "plain")))
        run.save_weights(tmp_path / "all.safetensors")
        assert equal(safetensors.load_file(tmp_path / "all.safetensors"), plain.state_dict())
        experts, expected = model.model.layers[0].mlp.experts, plain.model.layers[0].mlp.experts
        assert torch.equal(experts.gate_up_proj.detach(), expected.gate_up_proj) and experts.gate_up_proj.shape == expected.gate_up_proj.shape
        with torch._C.DisableTorchFunctionSubclass():
            assert experts.gate_up_proj.untyped_storage().nbytes() == 0, "the whole parameter's memory was freed"
        with pytest.raises(offloadd.NotSupported, match="use the parameters of the groups"):
            experts.down_proj.register_hook(print)
        with pytest.raises(offloadd.NotSupported, match="take the gradients of the groups' parameters"):
            torch.autograd.grad(model(**text(0)).loss, experts.down_proj, allow_unused=True)
        for write in (lambda: experts.down_proj.data.zero_(), lambda: nn.init.zeros_(experts.down_proj), lambda: experts.down_proj.set_(torch.ones(1))):
            with pytest.raises(offloadd.NotSupported, match="model.layers.0.mlp.experts.down_proj, whose values are in tiles"):
                write()
        train(model, optimizer, range(1))
        model(**text(1)).loss.backward()
        assert experts.down_proj.grad.shape == expected.down_proj.shape and experts.down_proj.grad.any()
        optimizer.zero_grad()
        other = randomize(make(), 5).state_dict()
        model.load_state_dict(other)
        assert equal(model.state_dict(), other)


@needs_daemon
def test_micro_batches_checkpoints_and_all_weights_in_memory_are_as_without_groups(tmp_path):
    found = []
    for bytes_max in (1 << 30, BYTES_MAX):
        model = make()
        run, optimizer = run_with(tmp_path, str(bytes_max), model, unit_bytes_max=bytes_max)
        with run:
            for step in range(3):
                for part in range(3):
                    # Experts that the first micro-batch uses, the second one or none of them.
                    model(**text(3 * step + part, 1, 1 + 5 * (part == 1))).logits.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            state = model.state_dict()
            with run.gathered() as whole:
                run.engine.gathering.brought_bytes = 0
                made = model.generate(input_ids=torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False)
                assert whole and run.engine.gathering.brought_bytes == 0
            run.save_checkpoint(tmp_path / f"kept-{bytes_max}")
            train(model, optimizer, range(1))
            run.load_checkpoint(tmp_path / f"kept-{bytes_max}")
            assert equal(model.state_dict(), state)
            # What a script computes with the whole parameter reaches the groups.
            weight = model.model.layers[0].mlp.experts.gate_up_proj
            weight.square().sum().backward()
            assert torch.equal(weight.grad, 2 * weight.detach())
            optimizer.zero_grad()
            found.append({**state, "made": made})
    assert equal(*found)


@needs_daemon
def test_a_model_built_without_memory_takes_parts_of_whole_weights(tmp_path):
    make().save_pretrained(tmp_path / "weights", save_original_format=False)
    own = {"unit_bytes_max": BYTES_MAX}
    with offloadd.init():
        model, other = (QWEN(CONFIGS["qwen3"][1]()) for _ in range(2))
    with offloadd.prepare(model, adamw(model), config("cpu", tmp_path, **own), run_dir=tmp_path / "run", weights=tmp_path / "weights"):
        assert equal(model.state_dict(), make().state_dict())
    with pytest.raises(offloadd.NotSupported, match="pass weights="):
        run_with(tmp_path, "other", other, **own)


@needs_daemon
def test_a_plan_has_the_groups(tmp_path, capsys):
    model = make()
    names = [name for name, _ in model.named_parameters()]
    settings = config("cpu", tmp_path, unit_bytes_max=BYTES_MAX)
    assert offloadd.prepare(model, adamw(model), settings, run_dir=tmp_path / "run", plan_only=True).units == 11
    assert [name for name, _ in model.named_parameters()] == names
    model.config.save_pretrained(tmp_path / "model")
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    assert main(["plan", str(tmp_path / "ds.json"), "--model", str(tmp_path / "model")]) == 0
    assert "in 11 units" in capsys.readouterr().out


@needs_daemon
def test_checkpoints_of_single_and_of_packed_experts_are_read_as_without_offload(tmp_path):
    make().save_pretrained(tmp_path / "single")
    make().save_pretrained(tmp_path / "packed", save_original_format=False)
    for kind in ("single", "packed"):
        settings = {**config("nvme", tmp_path, unit_bytes_max=BYTES_MAX), "bf16": {"enabled": True}}
        plain = QWEN.from_pretrained(tmp_path / kind, dtype=torch.bfloat16)
        with _zero.Init(config_dict_or_path=settings):
            model = QWEN.from_pretrained(tmp_path / kind, dtype=torch.bfloat16)
        with offloadd.prepare(model, adamw(model), settings, run_dir=tmp_path / f"run-{kind}") as run:
            assert any(unit.apart for unit in run.engine.gathering.units)
            assert equal(model.state_dict(), plain.state_dict())


@needs_daemon
def test_a_generation_brings_the_groups_that_a_token_chooses(tmp_path):
    plain, model = make().eval(), make().eval()
    with offloadd.prepare(model, None, config("cpu", tmp_path, unit_bytes_max=BYTES_MAX), run_dir=tmp_path / "run") as run:
        brought, gather = [], run.engine.gathering.memory.expect
        run.engine.gathering.memory.expect = lambda unit: (brought.append(unit), gather(unit))
        asked = {"input_ids": torch.tensor([[5, 6]]), "max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(**asked), plain.generate(**asked))
        # Each token takes two experts of eight, in one group or two of four. The first pass has two tokens.
        groups = [unit.bytes for unit in brought if unit.apart]
        assert 12 <= len(groups) <= 2 * (4 + 5 * 2) and run.engine.gathering.order.deviations == 0
        units = run.engine.gathering.units
        assert run.generation.last.part == pytest.approx(
            (sum(unit.bytes for unit in units if not unit.apart) + sum(groups) / 6) / sum(unit.bytes for unit in units)
        )


@needs_daemon
def test_adapters_beside_experts_in_groups(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
    losses = {}
    for kind, bytes_max in (("whole", 1 << 30), ("groups", BYTES_MAX)):
        torch.manual_seed(1)
        model = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        run, optimizer = run_with(tmp_path, kind, model, unit_bytes_max=bytes_max)
        with run:
            assert any(unit.apart for unit in run.engine.gathering.units) == (kind == "groups")
            losses[kind] = train(model, optimizer, range(3))
            model.save_pretrained(tmp_path / f"saved-{kind}")
    assert losses["whole"] == losses["groups"]
    # Adapters of the packed parameters themselves replace them in a forward.
    model = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]))
    run, optimizer = run_with(tmp_path, "parameters", model, unit_bytes_max=BYTES_MAX)
    with run, pytest.raises(offloadd.NotSupported):
        train(model, optimizer, range(1))


@needs_daemon
def test_compiled_blocks_call_the_groups(tmp_path):
    losses = []
    for kind in ("eager", "compiled"):
        model = make()
        for layer in model.model.layers if kind == "compiled" else ():
            layer.compile(backend="eager")
        run, optimizer = run_with(tmp_path, kind, model, unit_bytes_max=BYTES_MAX)
        with run:
            losses.append(train(model, optimizer, range(2)))
    assert losses[0] == losses[1]


@needs_daemon
def test_other_functions_for_experts_and_other_limits_are_refused(tmp_path):
    model = make()
    run, optimizer = run_with(tmp_path, "run", model, "nvme", unit_bytes_max=BYTES_MAX)
    model.config._experts_implementation_internal = "sonicmoe"
    with pytest.raises(offloadd.NotSupported, match="sonicmoe"):
        model(**text(0))
    run.close(keep=False)
    model = make()
    with pytest.raises(offloadd.LayoutChanged, match="offloadd.unit_bytes_max it was begun with"):
        run_with(tmp_path, "run", model, "nvme", unit_bytes_max=2 * BYTES_MAX)
    # Nothing was changed: it can be used as it is.
    assert type(model.model.layers[0].mlp.experts.gate_up_proj) is nn.Parameter and model(**text(0)).loss.isfinite()


def routed(rank, ranks, path, modules):
    if modules:
        torch.manual_seed(0)
        model = Mixture()
        inputs = [{"x": torch.randn(4, 16, generator=torch.Generator().manual_seed(step))} for step in range(3)]
    else:
        model = make()
        # Each rank has one token, which takes a quarter of the experts.
        inputs = [{"input_ids": torch.tensor([[5 + step], [50 + step]])} for step in range(3)]
    optimizer = adamw(model)
    settings = config("cpu", path, unit_bytes_max=8_000 if modules else BYTES_MAX)
    with offloadd.prepare(model, optimizer, settings, run_dir=path / f"run-{ranks}") as run:
        for step, batch in enumerate(inputs):
            # With all weights in memory too.
            with run.gathered() if step == 1 else contextlib.nullcontext():
                found = model(**{name: value.chunk(ranks)[rank] for name, value in batch.items()})
                loss = found * ranks if modules else found.logits.square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}


@needs_daemon
@pytest.mark.parametrize("modules", [False, True])
def test_ranks_whose_tokens_choose_other_experts_are_one_rank(tmp_path, modules):
    expected = routed(0, 1, tmp_path, modules)
    for found in on_ranks(2, tmp_path / "store", routed, tmp_path, modules):
        assert not isinstance(found, Exception), found
        assert near(found, expected)

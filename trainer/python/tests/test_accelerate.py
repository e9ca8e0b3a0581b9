"""Accelerate, PEFT and Hugging Face's Trainer: final weights are those of the same script without offload."""

import contextlib

import pytest
import torch
from torch import nn

import offloadd
from test_runs import batches, config, needs_daemon

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make test-tools")
peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
transformers.logging.set_verbosity_error()

# Large: AdamW makes whole steps of gradients that are rounding only, such as those of a key's bias.
EPS = 1e-3

SIZES = dict(n_embd=32, n_layer=4, n_head=2, vocab_size=97, n_positions=16, resid_pdrop=0.1, attn_pdrop=0.0)


def model_of(lora=False):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    if not lora:
        return model
    wanted = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], lora_dropout=0.1, init_lora_weights=False)
    return peft.get_peft_model(model, wanted)


def data(count=24):
    generator = torch.Generator().manual_seed(2)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 97, (count, 12), generator=generator)]


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def distance(found, expected):
    """The relative difference of all weights together."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name] - value).double().square().sum()) for name, value in expected.items())
    return (apart / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5


def everywhere(train, tmp_path):
    """Runs `train` without this library, and with it on each device; compares what it returns."""
    expected = train(None, None)
    none = train(config("none", tmp_path), tmp_path / "none")
    assert distance(none, expected) < 1e-6
    for device, step in [("cpu", "immediate"), ("nvme", "deferred")]:
        found = train(config(device, tmp_path, optimizer_step=step), tmp_path / device)
        assert same_bits(found, none), device


def with_accelerate(lora, settings, run_dir):
    model = model_of(lora)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3, eps=EPS, weight_decay=0.1)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 2, 12)
    loader = torch.utils.data.DataLoader(data(), batch_size=2, shuffle=True)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    run = None
    if settings is not None:
        run = offloadd.prepare(model, optimizer, settings, run_dir=run_dir, track=[scheduler])
    given = model
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert model is given
    torch.manual_seed(3)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if run is not None:
        assert run.steps_done == 12
    found = weights(accelerator.unwrap_model(model))
    if run is not None:
        run.close()
    return found


@needs_daemon
@pytest.mark.parametrize("lora", [False, True])
def test_accelerates_loop_ends_with_the_same_weights(tmp_path, lora):
    everywhere(lambda settings, run_dir: with_accelerate(lora, settings, run_dir), tmp_path)


def accelerated(ours, way, tmp_path, **given):
    """Losses, the type that blocks compute in, and whether anything was compiled."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(1)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **given)
    model = nn.Sequential(nn.Linear(8, 16), *(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)), nn.Linear(16, 5))
    types = set()
    model[2].register_forward_hook(lambda module, args, output: types.add(output.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    take_over = lambda: offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run") if ours else contextlib.nullcontext()
    with take_over() if way != "after" else contextlib.nullcontext():
        losses, autocast = [], contextlib.nullcontext
        if way == "alone":
            model, optimizer = accelerator.prepare(model), accelerator.prepare(optimizer)
        elif way == "prepare_model":
            model, optimizer = accelerator.prepare_model(model), accelerator.prepare_optimizer(optimizer)
        elif way == "autocast":
            optimizer, autocast = accelerator.prepare(optimizer), accelerator.autocast
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        with take_over() if way == "after" else contextlib.nullcontext():
            for number, x in enumerate(batches(8)):
                if way == "unwrapped" and number == 4:
                    model = accelerator.unwrap_model(model, keep_torch_compile=False)
                with accelerator.accumulate(model), autocast():
                    loss = torch.nn.functional.cross_entropy(model(x), torch.arange(4))
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
            with torch.no_grad():
                losses.append(float(accelerator.gather_for_metrics(model(x)).float().sum()))
    return losses, types, torch._dynamo.utils.counters["frames"]["ok"] > 0


@pytest.mark.parametrize(
    "way, compiles",
    [*((way, False) for way in ("before", "after", "alone", "prepare_model", "autocast", "unwrapped")), ("before", True), ("after", True)],
)
def test_mixed_precision_and_compilation_are_accelerates_in_every_way_in(tmp_path, way, compiles):
    given = {"mixed_precision": "bf16", **({"dynamo_backend": "eager"} if compiles else {})}
    expected, types, compiled = accelerated(False, way, tmp_path, **given)
    losses, *others = accelerated(True, way, tmp_path, **given)
    # Before the first step the bits are the same; later, weights that differ in their last bit may be rounded another way.
    assert losses[:2] == expected[:2] and losses == pytest.approx(expected, rel=1e-3) and others == [types, compiled]
    assert torch.bfloat16 in types and compiled == compiles


def test_what_accelerate_would_do_to_parameters_in_tiles_is_refused_by_name(tmp_path, monkeypatch):
    accelerate.state.AcceleratorState._reset_state(True)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = accelerate.Accelerator(cpu=True)
    with offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run"):
        for name in ("FSDP", "MEGATRON_LM", "DEEPSPEED"):
            monkeypatch.setattr(accelerator.state, "distributed_type", accelerate.DistributedType[name])
            with pytest.raises(offloadd.NotSupported, match=f"Accelerate's {'DeepSpeed plugin' if name == 'DEEPSPEED' else name} around a prepared model"):
                accelerator.prepare(model, optimizer)
        monkeypatch.setattr(accelerator.state, "distributed_type", accelerate.DistributedType.NO)
        monkeypatch.setattr(accelerate.Accelerator, "mixed_precision", "fp8")
        with pytest.raises(offloadd.NotSupported, match='mixed_precision="fp8" replaces layers'):
            accelerator.prepare(nn.Sequential(model))
    # Closed: it is a model like others.
    monkeypatch.undo()
    assert accelerator.prepare(optimizer).optimizer is optimizer


@needs_daemon
def test_lora_adapters_are_saved_whole_and_load_into_a_plain_model(tmp_path):
    model = model_of(lora=True)
    base = {name: value.clone() for name, value in model.state_dict().items() if "lora" not in name}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, config("nvme", tmp_path), run_dir=tmp_path / "run"):
        for one in data(4):
            model(input_ids=one["input_ids"][None], labels=one["labels"][None]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = weights(model)
        assert all(torch.equal(found[name], value) for name, value in base.items()), "frozen weights moved"
        model.save_pretrained(tmp_path / "adapter")
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").state_dict()
    adapters = [name for name in found if "lora" in name]
    assert len(adapters) == 8
    for name in adapters:
        assert torch.equal(loaded[name], found[name]) and found[name].abs().sum() > 0, name


class StopAt(transformers.TrainerCallback):
    """Ends the training as an error does, after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("stopped")


def with_trainer(output_dir, settings, run_dir, lora=False, resume=None, stop_at=None, **more):
    model = model_of(lora)
    args = transformers.TrainingArguments(
        str(output_dir), per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-3, adam_epsilon=EPS,
        warmup_steps=2, seed=5, logging_steps=1, eval_strategy="steps", eval_steps=2, use_cpu=True, disable_tqdm=True,
        report_to=[], **{"save_steps": 3, **more},
    )  # fmt: skip
    trainer = transformers.Trainer(model, args, train_dataset=data(), eval_dataset=data(8), callbacks=[StopAt(stop_at)])
    run = offloadd.hf.attach(trainer, settings, run_dir=run_dir) if settings is not None else None
    try:
        trainer.train(resume_from_checkpoint=resume)
        found = weights(model)
    finally:
        if run is not None:
            run.close()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return found, evaluated


@needs_daemon
def test_the_trainer_evaluates_adapters_in_between_and_ends_with_the_same_weights(tmp_path):
    import offloadd.hf  # noqa: F401

    evaluations = []

    def train(settings, run_dir):
        found, evaluated = with_trainer(tmp_path / f"out-{run_dir and run_dir.name}", settings, run_dir, lora=True)
        evaluations.append(evaluated)
        return found

    everywhere(train, tmp_path)
    plain, *ours = evaluations
    assert len(plain) == 6 and ours[0] == pytest.approx(plain, rel=1e-6)
    assert ours[1:] == [ours[0]] * 2


@needs_daemon
def test_resuming_the_trainer_goes_on_after_the_last_committed_step(tmp_path, capsys):
    import offloadd.hf  # noqa: F401

    settings = {**config("nvme", tmp_path), "steps_per_print": 1}
    whole, evaluated = with_trainer(tmp_path / "whole", settings, tmp_path / "a")
    # The configuration names the run's directory, as the argument does in the other run.
    settings["offloadd"]["run_dir"] = str(tmp_path / "b")
    with pytest.raises(RuntimeError, match="stopped"):
        with_trainer(tmp_path / "out", settings, None, stop_at=7)
    assert (tmp_path / "b" / "metrics.jsonl").exists()
    capsys.readouterr()
    # The Trainer's newest checkpoint is that of step 6; the run's last committed step is the 7th.
    rest, found = with_trainer(tmp_path / "out", settings, None, resume=True)
    steps = [line.split()[2] for line in capsys.readouterr().err.splitlines() if "s/step" in line]
    assert steps == ["8", "9", "10", "11", "12"]
    assert same_bits(rest, whole) and found == evaluated


@needs_daemon
@pytest.mark.parametrize("steps, config, fp32", [(1, None, False), (2, None, True), (2, 1, False), (1, "auto", False)])
def test_the_trainers_micro_batches_decide_the_type_of_gradients_unless_the_configuration_does(tmp_path, steps, config, fp32):
    import offloadd.hf  # noqa: F401

    args = transformers.TrainingArguments(str(tmp_path / "out"), gradient_accumulation_steps=steps, use_cpu=True, report_to=[])
    trainer = transformers.Trainer(model_of(), args, train_dataset=data())
    settings = {} if config is None else {"gradient_accumulation_steps": config}
    with offloadd.hf.attach(trainer, settings, run_dir=tmp_path / "run") as run:
        assert run.settings.fp32_gradients == fp32


def test_a_trainer_that_is_attached_keeps_its_precision(tmp_path):
    import offloadd.hf

    def run(ours):
        accelerate.state.AcceleratorState._reset_state(True)
        model, types = model_of(), set()
        model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda module, args, output: types.add(output.dtype))
        args = transformers.TrainingArguments(
            str(tmp_path / "out"), per_device_train_batch_size=8, num_train_epochs=1, learning_rate=1e-3, adam_epsilon=EPS, seed=5, logging_steps=1,
            use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no", bf16=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, args, train_dataset=data())
        with offloadd.hf.attach(trainer, config("cpu", tmp_path), run_dir=tmp_path / "run") if ours else contextlib.nullcontext():
            trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], types

    expected, in_plain = run(False)
    losses, types = run(True)
    assert losses[0] == expected[0] and losses == pytest.approx(expected, rel=1e-4)
    assert types == in_plain == {torch.bfloat16}

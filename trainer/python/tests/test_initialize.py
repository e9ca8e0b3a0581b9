"""DeepSpeed's interface: the losses and weights of plain PyTorch, counters, checkpoints, schedules."""

import json

import pytest
import torch
from torch import nn

import offloadd
import offloadd._config
import offloadd._initialize
from test_runs import PROGRAM, batches, config, model_of, needs_daemon
from test_runs import train as train_plainly
from toy import Net, randomize

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}}


def settings(device, dir, **more):
    return {**config(device, dir, optimizer_step=more.pop("optimizer_step", "deferred")), "optimizer": ADAMW, **more}


def engine_of(tmp_path, device="cpu", run_dir="run", **more):
    return offloadd.initialize(model=model_of(), config=settings(device, tmp_path, **more), run_dir=tmp_path / run_dir)


def train(engine, inputs):
    losses = []
    for x in inputs:
        loss = engine(x).square()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine):
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_accumulation_clipping_and_schedule_are_those_of_a_plain_loop(tmp_path, device):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    expected, rates, norms = [], [], []
    for number, x in enumerate(batches(8), 1):
        loss = model(x).square()
        (loss / 2).backward()
        expected.append(loss.item())
        if number % 2 == 0:
            # Linear warm-up over 4 steps: the first step has the start's rate, the second that of iteration 0.
            optimizer.param_groups[0]["lr"] = [0.0, 0.0, 0.0025, 0.005][number // 2 - 1]
            rates.append(optimizer.param_groups[0]["lr"])
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    engine, wrapped, loader, scheduler = engine_of(
        tmp_path,
        device,
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
    )
    assert loader is None and engine.optimizer is wrapped and engine.lr_scheduler is scheduler
    found, seen_rates, seen_norms = [], [], []
    for number, x in enumerate(batches(8), 1):
        assert engine.is_gradient_accumulation_boundary() == (number % 2 == 0)
        rate = engine.get_lr()[0]
        found += train(engine, [x])
        assert engine.was_step_applied() == (number % 2 == 0)
        if number == 3:
            # Between two passes of a step, whose gradients stay.
            engine.save_checkpoint(tmp_path / "saved")
        if number % 2 == 0:
            seen_rates.append(rate)
            seen_norms.append(engine.get_global_grad_norm())
    assert seen_rates == pytest.approx(rates)
    assert seen_norms == pytest.approx(norms, rel=1e-5)
    assert found == pytest.approx(expected, rel=1e-5)
    assert (engine.global_steps, engine.micro_steps, engine.run.steps_done) == (4, 8, 4)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (8, 2)
    assert engine.global_samples == 32 and engine.blocks is engine.module.blocks
    engine.destroy()


def test_the_model_goes_to_the_gpu_that_there_is_unless_the_configuration_names_a_place(tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def asked(**own):
        found = []

        def prepare(model, optimizer, config, run_dir, **more):
            found.append((offloadd._config.settings_of(config).compute_device, run_dir))
            raise Stop

        monkeypatch.setattr(offloadd._initialize, "prepare", prepare)
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({**settings("cpu", tmp_path), "offloadd": own}))
        with pytest.raises(Stop):
            offloadd.initialize(model=model_of(), config=str(path))
        return found[0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert asked() == (None, tmp_path / "offloadd-ds")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert asked() == ("cuda:3", tmp_path / "offloadd-ds"), "the run's directory is still the one of the file's name"
    assert asked(compute_device="cpu") == ("cpu", tmp_path / "offloadd-ds")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert asked()[0] == "cuda:1"


def test_gradients_are_clipped_to_deepspeeds_default_unless_the_configuration_has_a_norm(tmp_path):
    for number, (more, norm) in enumerate([({}, 1.0), ({"gradient_clipping": "auto"}, 1.0), ({"gradient_clipping": 0}, 0.0)]):
        engine, *_ = engine_of(tmp_path, run_dir=f"run{number}", **more)
        assert engine.gradient_clipping() == norm, more
        engine.destroy()


def test_bf16_brings_the_model_to_its_type(tmp_path):
    engine, *_ = engine_of(tmp_path, bf16={"enabled": True})
    assert {param.dtype for param in engine.module.parameters()} == {torch.bfloat16}
    train(engine, [x.bfloat16() for x in batches(2)])
    engine.destroy()


def test_bf16_skips_a_step_that_is_not_finite_if_the_configuration_says_so(tmp_path):
    engine, *_ = engine_of(tmp_path, bf16={"enabled": True, "check_grad_overflow": True})
    x = batches(1)[0].bfloat16()
    train(engine, [x])
    before = weights(engine)
    engine.backward(engine(x).square() * float("inf"))
    engine.step()
    assert same(before, weights(engine)) and not engine.was_step_applied() and (engine.skipped_steps, engine.cur_scale) == (1, 1.0)
    train(engine, [x])
    assert not same(before, weights(engine)) and engine.run.steps_done == 2
    engine.destroy()


def test_fp16_skips_a_step_that_overflows_and_halves_the_scale(tmp_path):
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine, *_ = engine_of(tmp_path, fp16=fp16)
    x = batches(1)[0].half()
    train(engine, [x])
    before = weights(engine)
    assert (engine.cur_scale, engine.global_steps, engine.run.steps_done) == (256.0, 1, 1)
    engine.backward(engine(x).square() * 1e5)
    engine.step()
    assert same(before, weights(engine)) and not engine.was_step_applied()
    assert (engine.cur_scale, engine.global_steps, engine.skipped_steps, engine.run.steps_done) == (128.0, 2, 1, 1)
    train(engine, [x])
    assert not same(before, weights(engine)) and engine.run.steps_done == 2
    engine.destroy()


@needs_daemon
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_a_checkpoint_brings_back_the_bits_the_schedule_and_what_the_script_kept(tmp_path, device):
    more = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 3}}}
    inputs = batches(8)
    engine, *_ = engine_of(tmp_path, device, **more)
    train(engine, inputs[:4])
    assert engine.save_checkpoint(tmp_path / "saved", client_state={"seen": 4})
    rest = train(engine, inputs[4:])
    end = weights(engine)
    # Back in the same run, and in another one.
    path, client = engine.load_checkpoint(tmp_path / "saved")
    assert path == str(tmp_path / "saved" / "global_step4") and client == {"seen": 4}
    assert (engine.global_steps, engine.run.steps_done) == (4, 4)
    assert train(engine, inputs[4:]) == rest and same(weights(engine), end)
    engine.destroy()
    other, *_ = engine_of(tmp_path, device, run_dir="other", **more)
    train(other, inputs[:1])
    assert other.load_checkpoint(tmp_path / "saved", tag="global_step4")[1] == {"seen": 4}
    assert train(other, inputs[4:]) == rest and same(weights(other), end)
    other.destroy()
    if device == "nvme":
        # The loaded state is committed: the next start resumes from it.
        again, *_ = engine_of(tmp_path, device, run_dir="other", **more)
        assert again.global_steps == 8 and same(weights(again), end)
        again.destroy()


def test_checkpoints_that_cannot_be_loaded_are_refused_by_name(tmp_path):
    engine, *_ = engine_of(tmp_path)
    assert engine.load_checkpoint(tmp_path / "nothing") == (None, None)
    train(engine, batches(1))
    engine.save_checkpoint(tmp_path / "saved", tag="one")
    before = weights(engine)
    with pytest.raises(offloadd.NotSupported, match="plain data"):
        engine.save_checkpoint(tmp_path / "saved", tag="two", client_state={"model": nn.Linear(1, 1)})
    with pytest.raises(offloadd.Error, match="must be the name of a directory"):
        engine.save_checkpoint(tmp_path / "saved", tag="a/b")
    with pytest.raises(offloadd.NotSupported, match="loaded whole"):
        engine.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
    tiles = tmp_path / "saved" / "one" / "tiles.0"
    data = bytearray(tiles.read_bytes())
    data[len(data) // 2] ^= 1
    tiles.write_bytes(data)
    with pytest.raises(offloadd.Damaged, match="is damaged: .*; load another tag"):
        engine.load_checkpoint(tmp_path / "saved")
    assert same(before, weights(engine))
    train(engine, batches(1))
    engine.destroy()
    small = model_of()
    small.head = nn.Linear(8, 2)
    other, *_ = offloadd.initialize(model=small, config=settings("cpu", tmp_path), run_dir=tmp_path / "small")
    engine, *_ = engine_of(tmp_path, run_dir="third")
    engine.save_checkpoint(tmp_path / "saved", tag="whole")
    with pytest.raises(offloadd.LayoutChanged, match=r"begun with head.weight \(1, 8\) where the model has head.weight \(2, 8\)"):
        other.load_checkpoint(tmp_path / "saved", tag="whole")
    other.destroy(), engine.destroy()


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_run_and_a_checkpoint_in_another_memory_format_are_refused(tmp_path, device):
    """Tiles have the elements in the order of memory."""

    def prepared(memory_format, name):
        model = nn.Sequential(*(nn.Conv2d(3, 3, 2) for _ in range(3))).to(memory_format=memory_format)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return offloadd.prepare(model, optimizer, config(device, tmp_path), run_dir=tmp_path / name)

    with prepared(torch.channels_last, "first") as run:
        run.save_checkpoint(tmp_path / "saved")
    message = "0.weight trained in float32 with strides 12x1x6x3, and the model has it trained in float32;"
    if device == "nvme":
        with pytest.raises(offloadd.LayoutChanged, match=message):
            prepared(torch.contiguous_format, "first")
    with prepared(torch.contiguous_format, "second") as run, pytest.raises(offloadd.LayoutChanged, match=message):
        run.load_checkpoint(tmp_path / "saved")
    with prepared(torch.channels_last, "third") as run:
        run.load_checkpoint(tmp_path / "saved")


def test_16_bit_weights_are_loaded_by_plain_pytorch(tmp_path):
    engine, *_ = engine_of(tmp_path, bf16={"enabled": True})
    train(engine, [x.bfloat16() for x in batches(1)])
    engine.save_16bit_model(tmp_path / "out")
    plain = model_of(torch.bfloat16)
    plain.load_state_dict(torch.load(tmp_path / "out" / "pytorch_model.bin"))
    assert same(plain.state_dict(), weights(engine))
    engine.destroy()


def frozen_of(seed=0):
    torch.manual_seed(seed)
    model = randomize(Net(), seed)
    model.blocks[1].requires_grad_(False)
    return model


def test_only_what_is_trained_is_written_and_the_frozen_rest_must_be_the_same(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    engine, *_ = offloadd.initialize(model=frozen_of(), config=settings("cpu", tmp_path), run_dir=tmp_path / "run")
    train(engine, batches(2))
    engine.save_checkpoint(tmp_path / "saved", tag="two")
    expected = weights(engine)
    engine.save_16bit_model(tmp_path, "all.safetensors")
    engine.save_16bit_model(tmp_path, "trained.safetensors", exclude_frozen_parameters=True)
    assert same(safetensors.load_file(tmp_path / "all.safetensors"), expected)
    trained = safetensors.load_file(tmp_path / "trained.safetensors")
    assert same(trained, {name: value for name, value in expected.items() if not name.startswith("blocks.1.")})
    rest = train(engine, batches(4)[2:])
    engine.load_checkpoint(tmp_path / "saved")
    assert same(weights(engine), expected) and train(engine, batches(4)[2:]) == rest
    elems = sum(unit.elems for unit in engine.run.engine.gathering.units if unit.trained)
    engine.destroy()
    assert elems * 12 <= (tmp_path / "saved" / "two" / "tiles.0").stat().st_size < elems * 12 + (16 << 10)
    other, *_ = offloadd.initialize(model=frozen_of(seed=4), config=settings("cpu", tmp_path), run_dir=tmp_path / "other")
    with pytest.raises(offloadd.LayoutChanged, match="frozen"):
        other.load_checkpoint(tmp_path / "saved", tag="two")
    other.destroy()


def test_keys_without_effect_are_named_at_the_start(tmp_path, capsys):
    more = {"aio": {"queue_depth": 8}, "fp16": {"enabled": False, "auto_cast": True}, "wandb": {"enabled": False}}
    engine, *_ = engine_of(tmp_path, **more)
    engine.destroy()
    assert "DeepSpeed's keys without effect here: aio, fp16.auto_cast\n" in capsys.readouterr().err


@needs_daemon
def test_the_loader_it_makes_goes_on_with_the_next_batch_after_a_restart(tmp_path):
    data = torch.utils.data.TensorDataset(torch.arange(24).float()[:, None] * torch.ones(8))

    def seen(stop_after):
        torch.manual_seed(5)
        engine, _, loader, _ = offloadd.initialize(
            model=model_of(),
            training_data=data,
            config=settings("nvme", tmp_path, train_batch_size=4),
            run_dir=tmp_path / "run",
        )
        found = []
        for (x,) in loader:
            if len(found) == stop_after:
                break
            found.append(x[:, 0].tolist())
            train(engine, [x])
        engine.destroy()
        return found

    first, second = seen(2), seen(99)
    assert len(first) == 2 and len(second) == 4
    assert sorted(sum(first + second, [])) == list(range(24))


def test_what_is_missing_or_not_built_is_refused_with_what_to_do(tmp_path):
    def start(**given):
        given = {"model": model_of(), "config": settings("cpu", tmp_path), **given}
        offloadd.initialize(run_dir=tmp_path / "run", **given)

    plain = config("cpu", tmp_path)
    cases = [
        ({"model": None}, "pass the model"),
        ({"config": {**plain, "optimizer": {"type": "Lamb"}}}, 'optimizer.type: "Lamb" is not supported: use "AdamW", "Adam" or "Lion"'),
        ({"config": settings("cpu", tmp_path, scheduler={"type": "Cosine"})}, "scheduler.type"),
        (
            {"config": settings("cpu", tmp_path, scheduler={"type": "WarmupLR", "params": {"total_num_steps": 3}})},
            "WarmupLR has no parameter total_num_steps",
        ),
        ({"config": settings("cpu", tmp_path, pipeline={"stages": 2})}, "pipeline is not supported"),
        ({"config": {**plain, "zero_optimization": {"zero_quantized_weights": True}}}, "zero_quantized_weights is not supported"),
        ({"config": {**plain, "zero_optimization": 3}}, "zero_optimization: expected a table"),
        ({"config": settings("cpu", tmp_path, train_batch_size=7, gradient_accumulation_steps=2)}, "not a multiple"),
        ({"mpu": object()}, "mpu: groups of ranks are those that UlyssesSPAttentionHF"),
        ({"mesh_param": (1, 2)}, "all ranks compute the whole model"),
        ({"config": settings("cpu", tmp_path, sequence_parallel_size=2)}, "sequence_parallel_size: 2: it must be at least 1 and divide"),
    ]
    for given, message in cases:
        with pytest.raises(offloadd.Error, match=message):
            start(**given)
    assert not (tmp_path / "run").exists()


def test_a_configuration_file_says_where_the_run_lies(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(settings("cpu", tmp_path)))
    engine, *_ = offloadd.initialize(model=model_of(), config=path)
    assert engine.run.run_dir == tmp_path / "offloadd-ds_config"
    engine.destroy()
    path.write_text(json.dumps({**settings("cpu", tmp_path), "offloadd": {"run_dir": str(tmp_path / "there")}}))
    engine, *_ = offloadd.initialize(model=model_of(), config=path)
    assert engine.run.run_dir == tmp_path / "there"
    engine.destroy()


def zero_2(dir, device, **more):
    """DeepSpeed's settings that offload the optimizer alone."""
    (dir / "nvme").mkdir(parents=True, exist_ok=True)
    place = {"device": device, "nvme_path": str(dir / "nvme")}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    return {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0, "optimizer": optimizer,
        "zero_optimization": {"stage": 2, "offload_optimizer": place}, "offloadd": {"program": PROGRAM}, **more,
    }  # fmt: skip


@needs_daemon
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("initialized", [False, True])
def test_offload_optimizer_without_offload_param_leaves_parameters_with_the_model(tmp_path, device, initialized):
    def begin(name, device):
        model = model_of(torch.bfloat16)
        config = zero_2(tmp_path / name, device, bf16={"enabled": True})
        if initialized:
            engine, optimizer, _, _ = offloadd.initialize(model=model, config=config, run_dir=tmp_path / name / "run")
            return model, optimizer, engine.run
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, offloadd.prepare(model, optimizer, config, run_dir=tmp_path / name / "run")

    model, optimizer, run = begin("none", "none")
    expected = train_plainly(model, optimizer, batches())
    weights = model.state_dict()
    run.close()
    model, optimizer, run = begin(device, device)
    assert "parameters stay with the model" in run.describe()
    addresses = [param.data_ptr() for param in model.parameters()]
    losses = train_plainly(model, optimizer, batches()[:6])
    assert [param.data_ptr() for param in model.parameters()] == addresses and all(unit.here for unit in run.engine.gathering.units)
    # Without a backward: a script may look at any parameter.
    assert all(type(param) is nn.Parameter for param in model.parameters())
    if device == "nvme":
        assert list((tmp_path / device / "nvme").glob("*.tiles"))
        run.close(keep=False)
        model, optimizer, run = begin(device, device)
        assert run.steps_done == 6
    losses += train_plainly(model, optimizer, batches()[6:])
    assert losses == expected and all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    run.close()

"""What scripts do with DeepSpeed's engine beside `backward` and `step`: each line of the tables computes what DeepSpeed does, or is refused by name."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import offloadd
from test_initialize import engine_of, same, settings, train, weights
from test_runs import batches, model_of

ACCUMULATED = 3

# Ways to run the backward of a micro-batch of an accumulation.
BACKWARDS = {
    "engine.backward": lambda engine, loss: engine.backward(loss),
    "engine.backward of a loss that is divided": lambda engine, loss: engine.backward(loss / ACCUMULATED, scale_wrt_gas=False),
    "loss.backward": lambda engine, loss: loss.backward(),
    "torch.autograd.backward": lambda engine, loss: torch.autograd.backward([loss]),
    "loss.backward of two parts": lambda engine, loss: ((0.25 * loss).backward(retain_graph=True), (0.75 * loss).backward()),
    "engine.scale": lambda engine, loss: engine.scale(loss).backward(),
}


def trained(engine, backward, inputs):
    for x in inputs:
        backward(engine, engine(x).square())
        engine.step()
    found = weights(engine)
    engine.destroy()
    return found


def close(one, other):
    return all(torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-6) for name in other)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_gradients_of_each_kind_of_backward_are_divided_by_the_accumulation(tmp_path, device):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}}
    more = {"gradient_accumulation_steps": ACCUMULATED, "gradient_clipping": 0.0, "optimizer": optimizer}
    inputs = batches(2 * ACCUMULATED)
    model = model_of()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.0)
    for number, x in enumerate(inputs, 1):
        (model(x).square() / ACCUMULATED).backward()
        if number % ACCUMULATED == 0:
            plain.step()
            plain.zero_grad()
    wrong = []
    for number, (name, backward) in enumerate(BACKWARDS.items()):
        engine, *_ = offloadd.initialize(model=model_of(), config={**settings(device, tmp_path), **more}, run_dir=tmp_path / f"run{number}")
        if not close(trained(engine, backward, inputs), model.state_dict()):
            wrong.append(name)
    assert not wrong


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6}, "gradient_clipping": 0.0}


def test_fp16_takes_scaled_losses_only(tmp_path):
    inputs = [x.half() for x in batches(3)]
    expected, scaled = (trained(engine_of(tmp_path, run_dir=name, **FP16)[0], BACKWARDS[name], inputs) for name in ("engine.backward", "engine.scale"))
    assert same(expected, scaled)
    engine, *_ = engine_of(tmp_path, run_dir="refused", **FP16)
    train(engine, inputs[:1])
    for before in ([], [lambda: engine.scale(engine(inputs[1]).square()).backward()]):
        # A scale is that of one loss.
        for backward in before:
            backward()
        with pytest.raises(offloadd.NotSupported, match=r"engine.scale\(loss\).backward\(\)"):
            engine(inputs[1]).square().backward()
        engine.optimizer.zero_grad()
    engine.backward(engine(inputs[1]).square())
    with pytest.raises(offloadd.NotSupported, match=r"call engine.step\(\)"):
        engine.optimizer.step()
    engine.step()
    train(engine, inputs[2:])
    assert same(weights(engine), expected)
    engine.destroy()


def test_an_optimizer_of_fp16_steps_again_after_its_engine(tmp_path):
    """By itself, and under a second engine."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = [x.half() for x in batches(3)]
    given = {name: value for name, value in settings("cpu", tmp_path, **FP16).items() if name != "optimizer"}
    for number, x in enumerate(inputs[:2]):
        engine, *_ = offloadd.initialize(model=model, optimizer=optimizer, config=given, run_dir=tmp_path / f"run{number}")
        train(engine, [x])
        assert engine.run.steps_done == 1
        engine.destroy()
    before = weights(engine)
    model(inputs[2]).square().backward()
    optimizer.step()
    assert not same(weights(engine), before)


def test_a_loss_that_passes_through_another_engines_model_is_scaled_once(tmp_path):
    """A generator's through its critic, whose engine has another scale."""
    x = batches(1)[0].half()
    critic, *_ = engine_of(tmp_path, run_dir="critic", **FP16)
    generator, *_ = engine_of(tmp_path, run_dir="generator", fp16={"enabled": True, "initial_scale_power": 4})
    for backward in (BACKWARDS["engine.backward"], BACKWARDS["engine.scale"]):
        backward(critic, critic(x).square())
        critic.step()
        critic.zero_grad()
        backward(generator, critic(x * generator(x)).square())
        generator.step()
    assert critic.run.steps_done == generator.run.steps_done == 2
    critic.destroy(), generator.destroy()


def test_an_engine_is_a_module_around_its_model(tmp_path):
    engine, *_ = engine_of(tmp_path)
    assert isinstance(engine, nn.Module)
    train(engine, batches(2))
    names = {f"module.{name}": value for name, value in engine.module.state_dict().items()}
    assert same(engine.state_dict(), names) and [name for name, _ in engine.named_parameters()] == [
        f"module.{name}" for name, _ in engine.module.named_parameters()
    ]
    assert list(engine.state_dict({}, "a.")) == [f"a.{name}" for name in names]
    assert list(nn.ModuleDict({"a": engine}).state_dict()) == [f"a.{name}" for name in names]
    other = nn.Module()
    other.module = model_of()
    other.load_state_dict(engine.state_dict())
    before = weights(engine)
    train(engine, batches(3)[2:])
    engine.load_state_dict(other.state_dict())
    assert same(weights(engine), before) and same(engine.module_state_dict(), before)
    assert not engine.eval().training and not engine.module.training and engine.train().module.training
    with pytest.raises(offloadd.NotSupported, match="before offloadd.prepare"):
        engine.to(torch.bfloat16)
    engine.destroy()


def test_what_neither_an_engine_nor_its_model_has_is_refused_by_name(tmp_path):
    engine, *_ = engine_of(tmp_path)
    for name, what in {
        "train_batch": "as one module",
        "set_train_batch_size": "gradient_accumulation_steps in the conf",
        "curriculum_enabled": "leave it",
    }.items():
        assert not hasattr(engine, name)
        with pytest.raises(offloadd.NotSupported, match=f"'{name}'.*{what}"):
            getattr(engine, name)
    assert engine.blocks is engine.module.blocks and engine.optimizer_params() == settings("cpu", tmp_path)["optimizer"]["params"]
    assert (engine.get_batch_info(), engine.get_mom(), engine.loss_scale(), engine.dynamic_loss_scale()) == ((1, 1, 1), [(0.8, 0.95)], 0, True)
    engine.destroy()


def test_an_error_in_a_property_of_the_model_is_not_taken_for_a_missing_name(tmp_path):
    model = model_of()
    type(model).broken = property(lambda self: self.blocks.nothing)
    try:
        engine, *_ = offloadd.initialize(model=model, config=settings("cpu", tmp_path), run_dir=tmp_path / "run")
        with pytest.raises(AttributeError) as found:
            engine.broken
        assert not isinstance(found.value, offloadd.NotSupported)
        engine.destroy()
    finally:
        del type(model).broken


def test_an_engine_that_only_reads_has_the_names_of_one_that_trains(tmp_path):
    given = {name: value for name, value in settings("cpu", tmp_path).items() if name != "optimizer"}
    data = torch.utils.data.TensorDataset(torch.arange(3.0))
    for device in ("none", "cpu"):
        where = {"zero_optimization": {}} if device == "none" else {}
        engine, *_ = offloadd.initialize(model=model_of(), config={**given, **where}, run_dir=tmp_path / device)
        counts = engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples, engine.cur_scale
        assert (counts, engine.get_batch_info(), engine.was_step_applied()) == ((0, 0, 0, 0, 1.0), (1, 1, 1), False)
        assert engine.is_gradient_accumulation_boundary()
        assert (engine.get_lr(), engine.get_mom(), engine.get_global_grad_norm(), engine.gradient_clipping()) == ([], [], None, 1.0)
        for route in ("train", "eval"):
            assert sorted(x.item() for (x,) in engine.deepspeed_io(data, route=route)) == [0, 1, 2]
        engine.zero_grad(set_to_none=True)
        for name, load in {"model.bin": torch.load, "model.safetensors": load_file}.items():
            assert engine.save_16bit_model(tmp_path / device, name)
            assert same(load(tmp_path / device / name), weights(engine)), name
        engine.destroy()


def test_a_loader_has_deepspeeds_order_and_arguments(tmp_path):
    data = torch.utils.data.TensorDataset(torch.arange(10.0))
    engine, _, loader, _ = offloadd.initialize(model=model_of(), config=settings("cpu", tmp_path), training_data=data, run_dir=tmp_path / "run")
    expected = [float(index) for index in torch.utils.data.DistributedSampler(data, 1, 0)]
    assert [x.item() for (x,) in loader] == expected
    assert [x.tolist() for (x,) in engine.deepspeed_io(data, 4, "eval")] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
    own = torch.utils.data.DistributedSampler(data, 1, 0)
    own.set_epoch(7)
    expected = [float(index) for index in own]
    assert [x.item() for (x,) in engine.deepspeed_io(data, data_sampler=own)] == expected, "a script's sampler has the script's epoch"
    assert [x.item() for (x,) in engine.deepspeed_io(data, data_sampler=torch.utils.data.SequentialSampler(data), num_local_io_workers=0)] == list(range(10))
    engine.destroy()
    config = {**settings("cpu", tmp_path), "dataloader_drop_last": True}
    engine, *_ = offloadd.initialize(model=model_of(), config=config, run_dir=tmp_path / "dropped")
    assert [x.tolist() for (x,) in engine.deepspeed_io(data, 4, "eval")] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    engine.destroy()

"""The plan before a run and the reports of one: figures that are true, files in the forms that others read."""

import json
import struct

import pytest
import torch
from torch import nn

import offloadd
from offloadd.__main__ import main
from test_runs import batches, config, model_of, needs_daemon, train


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


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


def test_the_command_says_that_host_memory_is_too_small_and_fails(tmp_path, capsys, monkeypatch):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config("cpu", tmp_path), "bf16": {"enabled": True}}))
    assert main(["plan", str(path), "--params", "1e12"]) == 1
    told = capsys.readouterr()
    assert "warning   tiles take " in told.out
    assert "the run does not fit: tiles take " in told.err and 'set zero_optimization.offload_param.device = "nvme"' in told.err


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
    assert "--model" in capsys.readouterr().err


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

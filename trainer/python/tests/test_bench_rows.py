"""Rows of trainer/bench can be started: the trainer accepts their run files, and the package starts as they start it."""

import argparse
import json
import pathlib
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[3]
BENCH = ROOT / "trainer/bench"
sys.path += [str(BENCH), str(BENCH / "package")]

import energy  # noqa: E402
import optimizers  # noqa: E402
import planned  # noqa: E402
import rows  # noqa: E402

import offloadd.optim  # noqa: E402

MACHINE = ["--gpu-memory", "139GiB", "--host-memory", "1TiB", "--cores", "16", "--drives", "4x6.2GB/s:3.2GB/s"]


@pytest.mark.parametrize("name", rows.ROWS)
def test_the_trainer_accepts_a_rows_run_file(tmp_path, name):
    row = rows.ROWS[name]
    (tmp_path / "text").write_bytes(bytes(range(256)) * 1024)
    drives = [tmp_path / f"drive{number}" for number in range(row.get("drives", 1))]
    for drive in drives:
        drive.mkdir()
    paths = [str(drive) for drive in drives]
    text = rows.run_file(row, rows.MODELS["1.3b"], data=str(tmp_path / "text"), directory=str(tmp_path / "run"), nvme_paths=paths, steps=3)
    (tmp_path / "run.toml").write_text(text)
    command = [ROOT / "target/debug/trainer", "plan", tmp_path / "run.toml", "--json", *MACHINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    # Its file systems may be too small for the row.
    problems = [one for one in json.loads(done.stdout)["problems"] if one["kind"] != "device_space"]
    assert not problems, problems


@pytest.mark.parametrize("mode", ["none", "cpu", "nvme"])
def test_the_packages_rows_start(tmp_path, mode):
    (tmp_path / "drive").mkdir()
    shape = {"hidden": 64, "layers": 2, "heads": 4, "ff": 160, "vocab": 300, "seq": 32, "micro": 2, "steps": 3}
    words = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    command = [
        sys.executable,
        BENCH / "pytorch_client.py",
        mode,
        "--out",
        tmp_path,
        "--directory",
        tmp_path / "drive",
        "--program",
        ROOT / "target/debug/offloadd",
    ]
    done = subprocess.run([*map(str, command), *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 3


def planned_by_client():
    """The row nvme of the client."""
    words = [word for name, value in {"hidden": 64, "layers": 2, "heads": 4, "ff": 160, "vocab": 300}.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, BENCH / "pytorch_client.py", "nvme", "--out", "none", "--plan", *words]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return 24 * (2 * 300 * 64 + 2 * (4 * 64**2 + 3 * 64 * 160 + 2 * 64) + 64), json.loads(done.stdout)["device_bytes"]


def planned_of_adapters(base):
    import adapters

    args = argparse.Namespace(model="8b", tiny=True, layers=2, adapters="bfloat16")
    model, optimizer = adapters.sketched(base, args)
    trained = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    frozen = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    return 24 * trained + frozen, planned.device_bytes(model, optimizer)


def planned_of_generation():
    import generation

    model = generation.on_meta(generation.SHAPES["8b"] | generation.TINY | {"num_hidden_layers": 2})
    return sum(param.nbytes for param in model.parameters()), planned.device_bytes(model)


def planned_of_mixture(train):
    import mixture
    import transformers

    args = argparse.Namespace(tiny=True, layers=2, train=train, unit_bytes_max=None)
    with torch.device("meta"):
        model = mixture.adapted(transformers.AutoModelForCausalLM.from_config(mixture.config_of(args), dtype=torch.bfloat16), args)
    sums = [sum(param.numel() for param in model.parameters() if param.requires_grad == trained) for trained in (True, False)]
    return 24 * sums[0] + 2 * sums[1], mixture.device_bytes_of(args)


def planned_of_seven_models():
    import seven_models

    model = seven_models.built("GPT-2", seven_models.sizes_of("GPT-2", tiny=True), "meta")
    return 24 * sum(param.numel() for param in model.parameters()), seven_models.planned_bytes("GPT-2", tiny=True)


SIZES = {
    "client": planned_by_client,
    "LoRA": lambda: planned_of_adapters("lora"),
    "QLoRA": lambda: planned_of_adapters("qlora"),
    "generation": planned_of_generation,
    "experts": lambda: planned_of_mixture("all"),
    "experts, LoRA": lambda: planned_of_mixture("lora"),
    "seven models": planned_of_seven_models,
}


@pytest.mark.parametrize("script", SIZES)
def test_test_drives_have_the_size_of_the_plan(script):
    """12 bytes for each trained parameter, twice on drives, and those of frozen parameters once; tiles are rounded up."""
    least, found = SIZES[script]()
    assert least <= found <= 1.5 * least + 30 * (1 << 16), (script, least, found)
    assert planned.drive_bytes(found, 2) * 2 > found


def test_an_update_moves_the_bytes_of_its_tiles():
    model = torch.nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
    optimizer = offloadd.optim.AdamW(model.named_parameters())
    optimizer.resume()
    # 12 bytes of state read and written, and a gradient.
    assert planned.update_bytes(optimizer._run.plan) == pytest.approx(26 * model.weight.numel(), rel=0.05)
    optimizer.close()


def test_a_step_of_all_layers_is_computed_from_steps_of_some(tmp_path):
    (tmp_path / "drive").mkdir()
    out = tmp_path / "out"
    command = [BENCH / "layers.py", "--bin", ROOT / "target/debug", "--model", "tiny", "--layers", 1, 3, "--steps", 3, "--out", out]
    done = subprocess.run([sys.executable, *map(str, command), "--directory", str(tmp_path / "drive")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "layers.json").read_text())
    first, last = found["measured"]
    assert [first["layers"], last["layers"]] == [1, 3] and last["parameters"] > first["parameters"]
    assert found["computed"]["step_s"] == pytest.approx(first["step_s"] + 7 * (last["step_s"] - first["step_s"]) / 2)
    assert found["computed"]["layers"] == 8 and "8 layers, computed: " in done.stdout


class CountingGpu:
    """NVML, of which one GPU counts."""

    counts, refuses = [1_000, 251_500, 400_000], False

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, device):
        return 0 if uuid == b"GPU-12" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, device, count):
        count._obj.value = self.counts.pop(0)
        return 3 if self.refuses else 0


def test_the_energy_of_a_gpu_is_counted_between_readings():
    gpu = CountingGpu()
    meter = energy.GpuEnergy("12", gpu)
    assert [meter.joules_since_last() for _ in range(2)] == [250.5, 148.5]
    gpu.counts, gpu.refuses = [0], True
    assert meter.joules_since_last() is None
    assert energy.GpuEnergy("13", CountingGpu()).joules_since_last() is None
    steps = [{"gpu_energy_j": joules} for joules in (9.0, 1.0, 2.0)]
    assert energy.middle_joules(steps) == 2.0 and energy.middle_joules([]) is None
    assert energy.middle_joules([*steps, {"step_s": 1.0}]) is None


def test_a_clipped_update_on_drives_follows_forward_and_backward():
    figures = {"staging_bytes": 20, "read_bytes_per_s": 10.0, "write_bytes_per_s": 5.0}
    drive_s = optimizers.drive_time(figures, 60, 100, overlaps_commit=False)
    assert drive_s == 20.0
    # What waits in staging is written in the next step.
    assert optimizers.drive_time(figures, 60, 100, overlaps_commit=True) == 16.0
    # What staging has read meanwhile is there when the update begins.
    assert optimizers.drive_time({**figures, "write_bytes_per_s": 1e9}, 60, 100, overlaps_commit=False) == 4.0
    # Forward and backward take 7 seconds, the bus 3.
    assert optimizers.step_bound((7.0, 0.0), [3.0, drive_s], 20.0) == 27.0
    assert optimizers.step_bound((2.0, 5.0), [3.0, drive_s], 20.0) == 22.0
    assert optimizers.step_bound((2.0, 5.0), [3.0, 0.0], 20.0) == 20.0

"""Whole runs with the real engine: the same bits wherever the state lives, however often the run is killed."""

import json
import math
import os
import pathlib
import re
import shutil

import pytest
import torch

import forks
import offloadd
from offloadd import _buffers
from offloadd._config import settings_of
from test_engine import adapted, frozen_block, frozen_but_the_head, norms_in_fp32
from toy import Net, randomize

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = os.environ.get("OFFLOADD_PROGRAM") or next(
    (str(path) for kind in ("debug", "release") if (path := HERE.parents[2] / "target" / kind / "offloadd").exists()), shutil.which("offloadd")
)
needs_daemon = pytest.mark.skipif(PROGRAM is None, reason="offloadd is not built: cargo build -p offloadd")
STEPS = 10


def config(device, dir, **own):
    return {
        "zero_optimization": {"stage": 3, "offload_param": {"device": device, "nvme_path": str(dir)}},
        # On drives gradients pass through staging too: sums are read back.
        "offloadd": {"program": PROGRAM, **({"gradients": "nvme"} if device == "nvme" else {}), **own},
    }


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 8, generator=generator) for _ in range(count)]


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return randomize(Net(6)).to(dtype)


def train(model, optimizer, inputs, micro_batches=1):
    losses = []
    for number, x in enumerate(inputs, 1):
        loss = model(x.to(next(model.parameters()).dtype)).square()
        loss.backward()
        if number % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def offloaded(tmp_path, name, device, dtype=torch.float32, micro_batches=1, **own):
    """Losses and weights of a run."""
    model = model_of(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dir = tmp_path / name
    dir.mkdir(exist_ok=True)
    with offloadd.prepare(model, optimizer, config(device, dir, **own), run_dir=dir / "run"):
        losses = train(model, optimizer, batches(), micro_batches)
        return losses, model.state_dict()


@needs_daemon
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wherever_the_state_lives_losses_and_weights_have_the_same_bits(tmp_path, dtype):
    expected, weights = offloaded(tmp_path, "none", "none", dtype, micro_batches=2)
    for device in ("none", "cpu", "nvme"):
        for step in ("immediate", "deferred"):
            for fraction in (0.0, 0.5, 1.0) if device == "nvme" else (0.0,):
                name = f"{device}-{step}-{fraction}"
                losses, found = offloaded(tmp_path, name, device, dtype, 2, optimizer_step=step, resident_fraction=fraction)
                assert losses == expected, name
                assert all(torch.equal(found[key], value) for key, value in weights.items()), name


@needs_daemon
@pytest.mark.parametrize("make", [frozen_block, frozen_but_the_head, adapted, norms_in_fp32])
def test_frozen_parameters_and_several_types_have_the_same_bits_wherever_they_live(tmp_path, make):
    def run(name, device, **own):
        torch.manual_seed(0)
        model = randomize(make())
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        (tmp_path / name).mkdir(exist_ok=True)
        inputs, losses = batches(6), []
        # The second half is a resumed run of its own.
        for half in (inputs[:3], inputs[3:]) if device == "nvme" else (inputs,):
            with offloadd.prepare(model, optimizer, config(device, tmp_path / name, **own), run_dir=tmp_path / name / "run"):
                losses += train(model, optimizer, half)
                state = model.state_dict()
            model = randomize(make(), seed=7)
            optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        return losses, state

    expected, weights = run("none", "none")
    assert expected[0] != expected[-1]
    for device, step, fraction in [("cpu", "deferred", 0.0), ("nvme", "immediate", 0.5), ("nvme", "deferred", 0.0)]:
        losses, found = run(f"{device}-{step}", device, optimizer_step=step, resident_fraction=fraction)
        assert losses == expected, (device, step)
        assert all(torch.equal(found[key], value) for key, value in weights.items()), (device, step)


@pytest.mark.parametrize("wanted, rounds", [({}, False), ({"data_types": {"grad_accum_dtype": "bf16"}}, True), ({"gradient_accumulation_steps": 1}, True)])
def test_sums_of_bf16_gradients_are_not_rounded_unless_asked_for(tmp_path, wanted, rounds):
    inputs = batches(8)
    gradients = []
    for x in inputs:
        plain = model_of(torch.bfloat16)
        plain(x.bfloat16()).square().backward()
        gradients.append({name: param.grad for name, param in plain.named_parameters()})
    exact = {name: sum(one[name].float() for one in gradients) for name in gradients[0]}
    model = model_of(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, {**config("cpu", tmp_path), **wanted}, run_dir=tmp_path / "run"):
        for x in inputs:
            model(x.bfloat16()).square().backward()
        different = 0
        for name, param in model.named_parameters():
            norm = float(param.grad.norm())
            different += abs(norm - float(exact[name].double().norm())) > 1e-6 * norm
        optimizer.step()
        optimizer.zero_grad()
        found = model.state_dict()
    assert (different > 0) == rounds
    masters = {name: param.detach().float().requires_grad_() for name, param in model_of(torch.bfloat16).named_parameters()}
    for name, master in masters.items():
        master.grad = exact[name]
    torch.optim.AdamW(masters.values(), lr=1e-2).step()
    if not rounds:
        assert all(torch.equal(found[name], master.detach().bfloat16()) for name, master in masters.items())


@pytest.mark.parametrize("groups", [False, True])
def test_twenty_steps_are_those_of_torchs_adamw(tmp_path, groups):
    """Within 1e-6; with clipping, whose norm torch sums in another order, within 1e-5."""

    def run(prepare):
        torch.manual_seed(0)
        model = randomize(Net(6))
        half = len(list(model.parameters())) // 2
        params = list(model.parameters())
        parts = [{"params": params[:half], "lr": 3e-4, "betas": (0.8, 0.9)}, {"params": params[half:], "weight_decay": 0.3}]
        optimizer = torch.optim.AdamW(parts if groups else params, lr=1e-3)
        with prepare(model, optimizer):
            losses = []
            for number, x in enumerate(batches(20)):
                # Blocks that a step does not use have no gradient: they neither move nor decay.
                loss = (model(x, order=[0, 1, 2, 3, 4, 5] if number % 3 else [0, 3, 5]) - 3).square()
                loss.backward()
                if groups:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses, [param.detach().clone() for param in model.parameters()]

    import contextlib

    expected, weights = run(lambda model, optimizer: contextlib.nullcontext())
    found, ours = run(lambda model, optimizer: offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run"))
    assert found == pytest.approx(expected, rel=1e-5 if groups else 1e-6)
    for one, other in zip(weights, ours):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_losses_with_moments_in_bf16_stay_near_torchs_adamw(tmp_path):
    """Means of 50 steps within 2 % of torch's, where weights differ from the first steps on."""
    import contextlib

    def losses(moments=None):
        torch.manual_seed(0)
        model = randomize(Net(6))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        settings = config("cpu", tmp_path, moments=moments)
        with offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / moments) if moments else contextlib.nullcontext():
            found = []
            for x in batches(300):
                loss = (model(x) - 3).square()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    means = lambda found: [sum(found[at : at + 50]) / 50 for at in range(0, 300, 50)]
    torchs, fp32, bf16 = losses(), losses("fp32"), losses("bf16")
    assert fp32 != bf16
    assert means(fp32) == pytest.approx(means(torchs), rel=1e-3)
    assert means(bf16) == pytest.approx(means(torchs), rel=2e-2)


@needs_daemon
def test_moments_of_another_type_are_refused_and_the_same_ones_resume_bit_for_bit(tmp_path):
    def steps(first, last, moments, name):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = config("nvme", tmp_path, moments=moments)
        with offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / name):
            for x in batches(last)[first:]:
                (model(x) - 3).square().backward()
                optimizer.step()
                optimizer.zero_grad()
            return model.state_dict()

    whole = steps(0, 6, "bf16", "whole")
    steps(0, 3, "bf16", "cut")
    with pytest.raises(offloadd.LayoutChanged, match="begun with moments in bf16, and offloadd.moments is now fp32; set it to bf16"):
        steps(3, 6, "fp32", "cut")
    resumed = steps(3, 6, "bf16", "cut")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def start(run_dir, dir, environment=(), **own):
    """Starts scripts/train.py; `own` has what is the script's beside settings of the run."""
    dir.mkdir(exist_ok=True)
    scripts = {key: own.pop(key) for key in ("workers", "kill", "buffer_elems", "limit_bytes") if key in own}
    settings = json.dumps({**config("nvme", dir, **own), **scripts})
    return forks.start(HERE / "scripts" / "train.py", run_dir, settings, environment=environment)


def lines_of(process):
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return out.splitlines()


@needs_daemon
def test_workers_of_a_loader_live_through_fork_and_change_nothing(tmp_path):
    alone = lines_of(start(tmp_path / "alone", tmp_path / "a"))
    assert lines_of(start(tmp_path / "workers", tmp_path / "b", workers=2))[-1] == alone[-1]


@needs_daemon
def test_another_model_is_refused_by_the_first_parameter_that_differs(tmp_path):
    model = model_of()
    settings = config("nvme", tmp_path)
    with offloadd.prepare(model, torch.optim.AdamW(model.parameters()), settings, run_dir=tmp_path / "run"):
        pass
    model = Net(6, width=16)
    with pytest.raises(offloadd.LayoutChanged, match=r"blocks.0.linear.weight \(8, 8\) where the model has blocks.0.linear.weight \(16, 16\)"):
        offloadd.prepare(model, torch.optim.AdamW(model.parameters()), settings, run_dir=tmp_path / "run")


@needs_daemon
def test_a_flipped_bit_is_a_typed_error_and_never_a_weight(tmp_path):
    model = model_of()
    settings = config("nvme", tmp_path)
    with offloadd.prepare(model, torch.optim.AdamW(model.parameters()), settings, run_dir=tmp_path / "run"):
        marked = model.blocks[3].linear.weight.detach().numpy().tobytes()
    (file,) = tmp_path.glob("*.tiles")
    data = file.read_bytes()
    at = data.find(marked)
    assert at > 0
    with open(file, "r+b") as handle:
        while at >= 0:
            handle.seek(at + 5)
            handle.write(bytes([data[at + 5] ^ 1]))
            at = data.find(marked, at + 1)
    model = model_of()
    run = offloadd.prepare(model, torch.optim.AdamW(model.parameters()), settings, run_dir=tmp_path / "run")
    with pytest.raises(offloadd.Damaged, match="damaged"):
        model(batches(1)[0])
    with pytest.raises(offloadd.Error):
        run.close()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ofloadd": {}}, "unknown key `ofloadd`; did you mean `offloadd`?"),
        ({"offloadd": {"comit_every": 1}}, "unknown key `offloadd.comit_every`; did you mean `offloadd.commit_every`?"),
        ({"offloadd": {"optimizer_step": "late"}}, 'offloadd.optimizer_step: "late": use "deferred" or "immediate"'),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "nvme_path is missing: name a directory"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, 'offload_param.device: "disk": use "none", "cpu" or "nvme"'),
        ({"zero_optimization": {"offload_params": {"device": "nvme"}}}, "did you mean `zero_optimization.offload_param`?"),
        ({"zero_optimization": {"offload_param": "nvme"}}, 'offload_param: expected a table, got "nvme"'),
        ({"zero_optimization": {"cpu_offload_params": True}}, "cpu_offload_params is not supported: write zero_optimization.offload_param"),
        ({"fp16": {"enable": True}}, "unknown key `fp16.enable`; did you mean `fp16.enabled`?"),
        ({"offloadd": ["units"]}, 'offloadd: expected a table, got ["units"]'),
        ({"offloadd": {"units": "Block"}}, 'offloadd.units: expected a list of texts, for example ["a", "b"], got "Block": write ["Block"]'),
        ({"offloadd": {"commit_every": "10"}}, 'offloadd.commit_every: expected a whole number, got "10": leave out the quotes'),
        ({"offloadd": {"commit_every": 0}}, "offloadd.commit_every: 0: must be at least 1"),
        ({"offloadd": {"resident_fraction": 2}}, "offloadd.resident_fraction: 2: must be 0 to 1"),
        ({"offloadd": {"gpu_resident_fraction": -0.1}}, "offloadd.gpu_resident_fraction: -0.1: must be 0 to 1"),
        ({"offloadd": {"program": "/nowhere/offloadd"}}, "offloadd.program: /nowhere/offloadd is not a file"),
        ({"gradient_clipping": "1"}, 'gradient_clipping: expected a number, got "1": leave out the quotes'),
        ({"train_batch_size": 0, "pipeline": {"stages": 2}}, "2 settings are wrong\n  pipeline is not supported: leave it out"),
        ("nowhere.json", "nowhere.json cannot be read: No such file or directory"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_changed(tmp_path, change, message):
    model = model_of()
    with pytest.raises(offloadd.Error, match=re.escape(message)):
        offloadd.prepare(model, torch.optim.AdamW(model.parameters()), change, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert model(batches(1)[0]).isfinite()


@needs_daemon
def test_a_resumed_run_with_batches_of_another_size_skips_as_many_samples(tmp_path):
    data, seen = torch.cat(batches(6)), []
    size = len(data) // 6
    for batch_size, steps in ((size, 2), (size // 2, None)):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        with offloadd.prepare(model, optimizer, config("nvme", tmp_path), run_dir=tmp_path / "run") as run:
            for x in run.batches(torch.utils.data.DataLoader(data, batch_size=batch_size)):
                seen.append(x)
                train(model, optimizer, [x])
                if run.steps_done == steps:
                    break
    assert len(seen) == 2 + 4 * 2 and torch.equal(torch.cat(seen), data)


def test_auto_counts_as_left_out_below_offloadd_too():
    given = settings_of({"offloadd": {"gpu_resident_fraction": "auto", "run_dir": "auto", "commit_every": None}})
    assert given.gpu_resident_fraction is None and settings_of({"offloadd": {"gpu_resident_fraction": 0}}).gpu_resident_fraction == 0
    assert (given.resident_fraction, given.run_dir, given.commit_every) == (0.0, None, 1)
    assert given.default_dir == pathlib.Path("offloadd-run").absolute()
    # The trainer's "auto" is as much as fits, and this default is 0.
    with pytest.raises(offloadd.Error, match='offloadd.resident_fraction: "auto": the package does not choose it'):
        settings_of({"offloadd": {"resident_fraction": "auto"}})


def test_a_file_is_read_as_deepspeed_reads_it_and_what_it_ignores_is_told(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(
        """{ // comments
            "_comment": "mine", "comms_config": {"verbose": true}, "compile": {"deepcompile": true}, "amd_specific": {"anything": 1},
            "bfloat16": {"enabled": true}, "zero_optimization": true, "steps_per_print": Infinity, "gradient_clipping": 5e-1,
            "offloadd": {"units": ["Block"],},
        }"""
    )
    given = settings_of(path)
    assert (given.precision, given.device, given.gradient_clipping, given.units) == ("bfloat16", "none", 0.5, ("Block",))
    assert given.default_dir == tmp_path / "offloadd-ds" and given.without_effect == ("compile", "amd_specific")
    model = model_of()
    with offloadd.prepare(model, torch.optim.AdamW(model.parameters()), path, run_dir=tmp_path / "run"):
        told = capsys.readouterr().err
    assert "offloadd: DeepSpeed's keys without effect here: compile, amd_specific\n" in told
    assert "_comment" in told and "comms_config" in told and "has no effect" in told
    # A dict of a script has objects too.
    import numpy

    given = settings_of({"steps_per_print": math.inf, "gradient_clipping": numpy.float32(0.5), "offloadd": {"units": (Net,), "run_dir": tmp_path}})
    assert (given.units, given.run_dir, given.gradient_clipping) == ((Net,), tmp_path, 0.5)
    with pytest.raises(offloadd.NotSupported, match="^ds.json: 2 settings are wrong\n"):
        path.write_text('{"elasticity": {"enabled": true}, "stage": 3, "zero_optimization": {"stage": 5}}')
        settings_of(path)


def test_an_object_that_cannot_be_tracked_is_refused(tmp_path):
    model = model_of()
    with pytest.raises(offloadd.Error, match="track has a str, which has no state_dict"):
        offloadd.prepare(model, torch.optim.AdamW(model.parameters()), {}, run_dir=tmp_path / "run", track=["scheduler"])
    assert not (tmp_path / "run").exists()


@needs_daemon
def test_a_start_says_whether_the_run_begins_resumes_or_is_replaced(tmp_path, capsys):
    settings, said = config("nvme", tmp_path), []
    for resume in (True, True, False):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        with offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / "run", resume=resume):
            train(model, optimizer, batches(1))
        said += [line for line in capsys.readouterr().err.splitlines() if "parameters in 7 units" in line]
    assert [line.split("the run ")[1].split(";")[0] for line in said] == [
        "begins",
        "resumes after step 1",
        "begins anew and replaces an earlier run of 2 steps",
    ]


def test_gradients_in_tiles_are_scaled_and_read(tmp_path):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run"):
        optimizer.step()
        model(batches(1)[0]).backward()
        grad = model.head.weight.grad
        assert grad.shape == model.head.weight.shape and "norm=" in repr(grad)
        norm = grad.norm()
        grad.div_(2)
        grad.mul_(0.5)
        assert norm > 0 and grad.norm() == norm / 4
        assert grad.clone().norm() == pytest.approx(float(norm) / 4)
        optimizer.zero_grad()
        assert model.head.weight.grad is None
        optimizer.step()


def resident_mib():
    return int(re.search(r"RssAnon:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) / 1024


@needs_daemon
@pytest.mark.parametrize("kind", ["prepare", "optim"])
def test_memory_that_a_script_has_freed_is_the_systems_after_the_start(tmp_path, kind):
    model = model_of()
    blocks = [torch.ones(60_000, dtype=torch.uint8) for _ in range(2000)]
    # What is in use above freed memory makes the C library keep that.
    above = blocks[-1]
    del blocks
    before = resident_mib()
    if kind == "prepare":
        offloadd.prepare(model, torch.optim.AdamW(model.parameters()), config("cpu", tmp_path), run_dir=tmp_path / "run").close()
    else:
        optimizer = offloadd.optim.AdamW(model.parameters(), options={"program": PROGRAM})
        optimizer.resume()
        optimizer.close()
    assert before - resident_mib() > 80 and above[0] == 1


def test_a_prepared_model_is_not_prepared_twice(tmp_path):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    with offloadd.prepare(model, optimizer, {}, run_dir=tmp_path / "a"):
        with pytest.raises(offloadd.Error, match="prepared already"):
            offloadd.prepare(model, optimizer, {}, run_dir=tmp_path / "b")


def test_without_a_device_parameters_are_the_newest_after_each_step(tmp_path):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, {}, run_dir=tmp_path / "run"):
        for x in batches(2):
            before = model.head.weight.detach().clone()
            train(model, optimizer, [x])
            assert not torch.equal(model.head.weight, before)


def test_weights_read_after_a_step_are_the_newest(tmp_path):
    """Also those that a forward without a backward has left in memory."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run"):
        model(batches(1)[0]).backward()
        before = model.head.weight.detach().clone()
        model(batches(1)[0])
        optimizer.step()
        assert not torch.equal(model.head.weight, before)


@needs_daemon
def test_buffers_of_a_module_that_passes_have_made_are_named_where_a_run_resumes_without_it(tmp_path, capsys):
    for start in range(2):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        with offloadd.prepare(model, optimizer, config("nvme", tmp_path), run_dir=tmp_path / "run"):
            model.blocks[1].cache = torch.nn.BatchNorm1d(4, affine=False)
            train(model, optimizer, batches(1))
        said = capsys.readouterr().err
        assert ("begin anew: blocks.1.cache.running_mean, blocks.1.cache.running_var, " in said) == bool(start)


@needs_daemon
def test_a_run_that_does_not_resume_begins_anew_and_keeps_what_is_frozen(tmp_path):
    def run(seed, base=0, **how):
        def made(seed):
            torch.manual_seed(0)
            return randomize(Net(6), seed)

        model = made(seed)
        model.blocks[1].load_state_dict(made(base).blocks[1].state_dict())
        model.blocks[1].requires_grad_(False)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        with offloadd.prepare(model, optimizer, config("nvme", tmp_path), run_dir=tmp_path / "run", **how) as begun:
            return begun.steps_done, train(model, optimizer, batches(3)), {name: value.clone() for name, value in model.state_dict().items()}

    _, losses, weights = run(0)
    assert run(5, resume=False)[0] == 0
    steps, again, found = run(0, resume=False)
    assert (steps, again) == (0, losses) and all(torch.equal(found[name], value) for name, value in weights.items())
    with pytest.raises(offloadd.NotSupported, match="frozen parameters of another model .blocks.1"):
        run(0, base=3, resume=False)
    # The refusal changed nothing.
    assert run(7)[0] == 3


@needs_daemon
def test_a_run_whose_directory_was_deleted_begins_anew_and_says_so(tmp_path, capsys):
    def run(blocks):
        torch.manual_seed(0)
        model = randomize(Net(blocks), 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with offloadd.prepare(model, optimizer, config("nvme", tmp_path), run_dir=tmp_path / "run") as begun:
            return begun.steps_done, train(model, optimizer, batches(3))

    first = run(6)
    shutil.rmtree(tmp_path / "run")
    capsys.readouterr()
    assert run(6) == first
    said = "".join(capsys.readouterr())
    assert "begins anew: removed the tiles of an earlier run" in said and ".tiles" in said
    # Another model is none of the deleted run's.
    shutil.rmtree(tmp_path / "run")
    assert run(5)[0] == 0


@needs_daemon
def test_nobody_else_can_read_the_files_of_a_run_in_a_directory_that_was_there(tmp_path):
    run_dir = tmp_path / "part" / "run"
    run_dir.mkdir(mode=0o755, parents=True)
    before = os.umask(0o022)
    try:
        offloaded(tmp_path, "part", "nvme")
    finally:
        os.umask(before)
    open_to_others = [one for one in run_dir.rglob("*") if not one.is_symlink() and one.stat().st_mode & 0o077]
    assert (run_dir / "metrics.jsonl").exists() and open_to_others == []


@needs_daemon
def test_a_store_that_is_older_than_the_metrics_is_named(tmp_path, capsys):
    def run(steps):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with offloadd.prepare(model, optimizer, config("nvme", tmp_path), run_dir=tmp_path / "run") as begun:
            train(model, optimizer, batches(steps))
            return begun.steps_done

    assert run(2) == 2
    (tiles,) = tmp_path.glob("*.tiles")
    older = tiles.read_bytes()
    assert run(3) == 5
    capsys.readouterr()
    tiles.write_bytes(older)
    assert run(1) == 3
    said = "".join(capsys.readouterr())
    assert "metrics.jsonl has steps up to 5" in said and f"the store on {tiles} is at step 2" in said
    assert run(1) == 4
    assert "metrics.jsonl has steps" not in "".join(capsys.readouterr())


@needs_daemon
def test_a_run_does_not_begin_anew_below_a_mount_point_whose_drive_is_gone(tmp_path, monkeypatch):
    """The tiles are not taken for those of a run whose directory was deleted."""
    drive, known = tmp_path / "drive", tmp_path / "state" / "offloadd"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def start(where, nvme):
        model = model_of()
        with offloadd.prepare(model, torch.optim.AdamW(model.parameters()), config("nvme", nvme), run_dir=where):
            pass

    (nvme := tmp_path / "nvme").mkdir()
    start(drive / "run", nvme)
    tiles = list(nvme.glob("*.tiles"))
    assert tiles
    known.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(drive)
    drive.mkdir()
    (known / "mount-points").write_text(f"{drive}\n")
    for where, on in ((drive / "run", nvme), (tmp_path / "other", drive)):
        with pytest.raises(offloadd.Error, match="is on a drive that is not mounted: .* Nothing was written"):
            start(where, on)
    assert not any(drive.iterdir()) and not (tmp_path / "other").exists()
    assert list(nvme.glob("*.tiles")) == tiles
    (known / "mount-points").unlink()


@needs_daemon
@pytest.mark.parametrize("what", ["run_dir", "nvme_path"])
def test_a_directory_that_is_no_text_is_named(tmp_path, what):
    bad = tmp_path / os.fsdecode(b"bad\xff")
    bad.mkdir()
    model = model_of()
    with pytest.raises(offloadd.Error, match=rf"{what} .*bad.* is not UTF-8: name another {what}"):
        offloadd.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            config("nvme", bad if what == "nvme_path" else tmp_path),
            run_dir=bad if what == "run_dir" else tmp_path / "run",
        )


def test_buffers_of_an_older_commit_are_read():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    model[0].register_buffer("made", torch.ones(2))
    buffers = _buffers.Buffers(model)
    values = {name: torch.full_like(one, 5) for name, one in model.named_buffers()}
    assert buffers.restore({"buffers": values}) == []
    assert all(torch.equal(one, values[name]) for name, one in model.named_buffers())

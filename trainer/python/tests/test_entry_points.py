"""Scripts that use DeepSpeed: run unmodified by `offloadd-run`, and refused by name where offloadd does not answer."""

import json
import os
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import forks
from test_runs import HERE, config, lines_of, needs_daemon

PACKAGE = HERE.parent / "python"


def below_offloadd_run():
    """Variables of a process that `offloadd-run` starts."""
    return {"OFFLOADD_AS_DEEPSPEED": "1", "PYTHONPATH": os.pathsep.join([str(PACKAGE / "offloadd" / "_site"), str(PACKAGE)])}


def offloadd_run(*arguments, **more):
    path = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "offloadd.launch", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=180,
        **more,
    )


def plain_losses():
    """Losses of tests/scripts/says_deepspeed.py with torch alone, clipped as DeepSpeed does by default."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8192, 32), *(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 1))
    model[0].weight.data[0] = 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for ids in [torch.randint(0, 8192, (4, 6), generator=generator) for _ in range(6)]:
        loss = (model(ids).mean(1) - 1).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@needs_daemon
def test_a_script_with_deepspeeds_interface_runs_unmodified_and_what_is_missing_is_refused_by_name(tmp_path):
    settings = {**config("nvme", tmp_path), "train_batch_size": 4}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    script = [HERE / "scripts" / "says_deepspeed.py", "--deepspeed_config", tmp_path / "ds.json", "--saved", tmp_path / "saved"]
    result = offloadd_run(*script)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("offloadd: answers to `import deepspeed`") == 1
    lines = result.stdout.splitlines()
    assert lines[-1] == "done"
    assert [float(one) for line in lines if line.startswith("losses") for one in line.split()[1:]] == pytest.approx(plain_losses(), rel=1e-6)
    refused = [line for line in lines if line.startswith("refused NotSupported deepspeed.")]
    assert len(refused) == 5 and all("is not supported by offloadd" in line for line in refused)
    assert "pipelines are not supported" in refused[0] and "pipelines are not supported" in refused[4]
    assert not list(tmp_path.glob("offloadd-building-*"))


def test_the_calls_of_deepspeeds_examples_train_as_plain_pytorch_does(tmp_path):
    result = offloadd_run(HERE / "scripts" / "like_examples.py", tmp_path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["classifier", "checkpoints", "fine-tuning", "fine-tuning", "reward", "done"]


# The file of the guide, with its comments.
_AMD_GUIDE = """{
  "train_batch_size": 8,
  "gradient_accumulation_steps": 1,
  "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
  "fp16": {"enabled": false, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 14 /* lower */, "hysteresis": 2, "min_loss_scale": 1},
  "zero_optimization": {
    "stage": 2,  // 0 to 3
    "allgather_partitions": true, "allgather_bucket_size": 1e8, "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": 1e8,
    "contiguous_gradients": true, "offload_optimizer": {"device": "cpu", "pin_memory": true}
  },
  "gradient_clipping": 1.0,
  "steps_per_print": 100,
  "amd_specific": {"rocm_mem_pool_init": true, "rocm_stream_priority": true}
}"""


def test_the_calls_of_the_amd_guide_run_or_are_refused_by_name(tmp_path):
    (tmp_path / "ds.json").write_text(_AMD_GUIDE)
    script = [HERE / "scripts" / "like_amd_guide.py", "--deepspeed", "--deepspeed_config", tmp_path / "ds.json", "--saved", tmp_path / "saved"]
    result = offloadd_run(*script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "version True", "initialized True torch.float16", "trained 12", "loaded 11", "offloaded True",
        "refused deepspeed.pipe True", "refused deepspeed.utils.debug True", "refused True",
    ]  # fmt: skip
    assert "amd_specific" in result.stderr


@needs_daemon
def test_torchrun_starts_the_same_script_in_two_ranks(tmp_path):
    # Equal batches on both ranks have the losses of one.
    settings = {**config("nvme", tmp_path), "train_batch_size": 8}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    script = [HERE / "scripts" / "says_deepspeed.py", "--deepspeed_config", tmp_path / "ds.json", "--saved", tmp_path / "saved"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    result = offloadd_run("--", *torchrun, *script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines().count("done") == 2 and result.stderr.count("offloadd: answers to `import deepspeed`") == 1
    # Lines of both ranks, in any order.
    told = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("losses")]
    assert sorted(map(float, sum(told, []))) == pytest.approx(sorted(2 * plain_losses()), rel=1e-6)


@needs_daemon
def test_accelerate_launch_starts_two_ranks_with_its_deepspeed_plugin_on_the_cpu(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed: make test-tools")
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    (tmp_path / "ds.json").write_text(json.dumps({**config("nvme", tmp_path), **settings}))
    zero3 = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_machines": 1, "machine_rank": 0, "num_processes": 2,
        "use_cpu": False, "deepspeed_config": {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": True},
    }  # fmt: skip
    (tmp_path / "zero3.yaml").write_text(json.dumps(zero3))
    script = HERE / "scripts" / "on_accelerate.py"
    alone = {"ACCELERATE_USE_CPU": "1", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}
    (tmp_path / "plain").mkdir()
    expected = lines_of(forks.start(script, tmp_path / "plain", environment=alone, imports=["accelerate"]))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", tmp_path / "zero3.yaml"]
    result = offloadd_run("--", *launch, script, tmp_path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("offloadd: answers to `import deepspeed`") == 1
    losses = lambda lines: [float(line.split()[1]) for line in lines if line.startswith("loss")]
    assert len(losses(expected)) == 12 and losses(result.stdout.splitlines()) == pytest.approx(losses(expected), rel=1e-6)
    weights = torch.load(tmp_path / "weights.pt")
    for name, value in torch.load(tmp_path / "plain" / "weights.pt").items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_started_is_said_with_what_to_do(tmp_path):
    for arguments, message in [
        ([], "name a script"),
        (["--"], "name a command after --"),
        (["missing.py"], "missing.py: no such file"),
        (["bash"], "for a command write: offloadd-run -- bash"),
        (["--nproc", "0", __file__], "--nproc 0: must be at least 1"),
        (["--", "no-such-command"], "no-such-command cannot be started: No such file or directory"),
    ]:
        result = offloadd_run(*arguments)
        assert result.returncode == 2 and message in result.stderr, result.stderr
        assert "torch" not in result.stderr


def test_an_error_of_offloadds_ends_in_one_message_and_the_exit_status_says_whose_error_it_was(tmp_path):
    # A package of the script's may lie in another place than this interpreter's.
    packages = tmp_path / "lib" / "dist-packages"
    packages.mkdir(parents=True)
    (packages / "package_of_another_place.py").write_text("import offloadd\ndef fail():\n    raise offloadd.NotSupported('not here: do that')\n")
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nif sys.argv[1] == 'ours':\n    sys.path.append({str(packages)!r}); import package_of_another_place\n"
        "    package_of_another_place.fail()\nraise ValueError('own')\n"
    )
    ours = offloadd_run("--nproc", 2, script, "ours")
    assert ours.returncode == 3 and "Traceback" not in ours.stderr, ours.stderr
    # torchrun ends the other rank, which may have said it, too.
    assert f"offloadd: not here: do that\n  in {script}, line 4\n" in ours.stderr, ours.stderr
    own = offloadd_run(script, "own")
    assert own.returncode == 1 and "Traceback" in own.stderr and own.stderr.endswith("ValueError: own\n"), own.stderr


def test_a_launcher_ends_like_the_processes_it_started():
    from offloadd import _ending

    def ended(error, module):
        """Whether a launcher's `error`, raised in a function of `module`, says that all processes ended with errors of offloadd's."""
        launcher = {"__name__": module, "error": error}
        exec("def launch():\n    raise error", launcher)
        try:
            launcher["launch"]()
        except BaseException as caught:
            return _ending._ended_below(caught, caught.__traceback__)

    class ChildFailedError(Exception):
        def __init__(self, *codes):
            self.failures = dict(enumerate(types.SimpleNamespace(exitcode=code) for code in codes))

    of_command = lambda status: subprocess.CalledProcessError(status, ["python"])
    assert (
        ended(ChildFailedError(3, -15), "torch.distributed.run")
        and not ended(ChildFailedError(-15), "torch.distributed.run")
        and not ended(ChildFailedError(3, 1), "torch.distributed.run")
    )
    assert ended(of_command(3), "accelerate.commands.launch")
    assert not ended(of_command(1), "accelerate.commands.launch") and not ended(of_command(3), "__main__")


def test_as_deepspeed_refuses_once_the_real_one_is_imported(tmp_path):
    (tmp_path / "deepspeed.py").write_text("")
    code = "import deepspeed, offloadd.as_deepspeed"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(tmp_path)])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode and "deepspeed is imported already: import offloadd.as_deepspeed before it" in result.stderr


def test_another_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the other ran')")
    script = tmp_path / "script.py"
    script.write_text("import importlib.util, sys\nprint(importlib.util.find_spec('deepspeed').origin, 'torch' in sys.modules)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(tmp_path)])}
    command = [sys.executable, "-m", "offloadd.launch", "--", sys.executable, str(script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    # Once for the launcher, once below it.
    assert result.stdout.splitlines() == ["the other ran", "the other ran", "None False"], result.stderr

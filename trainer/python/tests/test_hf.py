"""Hugging Face's Trainer: the losses it has without this library, and a kill in the middle that changes no bit."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-tools")

import forks  # noqa: E402
from test_runs import HERE, config, lines_of, needs_daemon  # noqa: E402


def start(output_dir, settings):
    script = HERE / "scripts" / "hf_trainer.py"
    return forks.start(script, output_dir, json.dumps(settings), imports=["transformers.trainer", "transformers.models.bert.modeling_bert"])


def losses(lines):
    return {line.split()[1]: [float(one) for one in line.split()[2:]] for line in lines if line.startswith("loss ")}


@needs_daemon
def test_trainer_has_the_losses_of_plain_pytorch_and_a_kill_changes_no_bit(tmp_path):
    settings = config("nvme", tmp_path)
    plain = lines_of(start(tmp_path / "plain", None))
    whole = lines_of(start(tmp_path / "whole", settings))
    expected, found = losses(plain), losses(whole)
    assert len(found) == 18 and found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-5), step
    ours, theirs = torch.load(tmp_path / "whole" / "final.pt"), torch.load(tmp_path / "plain" / "final.pt")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name.endswith("key.bias"):
            # Their true gradient is zero: Adam turns rounding into steps.
            continue
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)

    for stop_at in (4, 9):
        process = start(tmp_path / "killed", settings)
        for line in process.stdout:
            if line.startswith("step") and int(line.split()[1]) == stop_at:
                process.kill()
        process.wait()
    end = lines_of(start(tmp_path / "killed", settings))
    assert 7 <= int(end[0].split()[1]) <= 9
    assert all(found[step] == values for step, values in losses(end).items())
    assert [line for line in end if line.startswith("done")] == [line for line in whole if line.startswith("done")]

"""Lightning with this library's strategy: the losses, metrics and weights of Lightning's own, and a kill that changes no bit."""

import json
import sys

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed: make test-tools")

import forks  # noqa: E402
from test_entry_points import offloadd_run  # noqa: E402
from test_runs import HERE, config, lines_of, needs_daemon  # noqa: E402


def start(out, settings, *more):
    return forks.start(HERE / "scripts" / "on_lightning.py", out, json.dumps(settings), *more, imports=["lightning.pytorch"])


def numbers(lines):
    """Losses by step and batch, and metrics by step."""
    told = [line.split() for line in lines if line.startswith(("loss", "metric"))]
    return {(kind, *where): float(value) for kind, *where, value in told}


@needs_daemon
def test_fit_is_that_of_lightnings_own_strategy_and_a_kill_changes_no_bit(tmp_path):
    settings = config("nvme", tmp_path)
    expected, whole = lines_of(start(tmp_path / "plain", None)), lines_of(start(tmp_path / "whole", settings))
    assert len(numbers(whole)) == 36 + 3 and numbers(whole) == pytest.approx(numbers(expected), rel=1e-6, abs=1e-8)
    weights, ours = (torch.load(tmp_path / name / "final.pt") for name in ("plain", "whole"))
    assert ours.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)

    # In the middle of an epoch, between two passes of a step.
    killed = start(tmp_path / "killed", settings, "kill", 17)
    assert killed.communicate()[0].splitlines()[0] == "resumes None" and killed.returncode == -9
    rest = lines_of(start(tmp_path / "killed", settings))
    assert "resumes step=15" in rest and len(numbers(rest)) == 6 + 1
    assert numbers(rest).items() <= numbers(whole).items() and rest[-2:] == whole[-2:]
    assert all(torch.equal(value, ours[name]) for name, value in torch.load(tmp_path / "killed" / "final.pt").items())


_NAMES_DEEPSPEED = """
import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

torch.set_num_threads(1)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = torch.tanh(block(batch))
        loss = batch.square().mean()
        print("loss", loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


for number, strategy in enumerate(["ddp", "deepspeed_stage_3_offload", DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)]):
    torch.manual_seed(0)
    model, data = Model(), torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=str(number),
    )
    trainer.fit(model, data)
    print(type(trainer.strategy).__module__)
"""


def test_lightnings_deepspeed_strategy_is_ours_below_offloadd_run(tmp_path):
    (tmp_path / "script.py").write_text(_NAMES_DEEPSPEED)
    result = offloadd_run(tmp_path / "script.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith(("lightning.", "offloadd."))] == ["lightning.pytorch.strategies.ddp", *["offloadd.lightning"] * 2]
    losses = [float(line.split()[1]) for line in lines if line.startswith("loss")]
    assert losses[4:] == pytest.approx(2 * losses[:4], rel=1e-6)


def test_a_machine_without_lightning_is_told_what_to_install(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.strategies", "pytorch_lightning", "pytorch_lightning.strategies"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "offloadd.lightning", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install lightning"):
        import offloadd.lightning  # noqa: F401

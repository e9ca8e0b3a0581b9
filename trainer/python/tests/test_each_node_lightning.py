"""Lightning on nodes that share no directory (checkpoint.use_node_local_storage)."""

import os
import shutil
import warnings

import pytest
import torch
from torch import nn

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: make test-tools")

from test_each_node import Machines, mount, mounts  # noqa: E402, F401
from test_nodes import drives, equal  # noqa: E402
from test_runs import config, needs_daemon  # noqa: E402
from toy import randomize  # noqa: E402

pytestmark = needs_daemon
WIDTH = 256


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(3)))

    def training_step(self, batch, batch_idx):
        return self.blocks(torch.sin(batch[:, None] * torch.arange(WIDTH))).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(rank, ranks, path, machines, stop_at, resumes):
    """Trains up to a step, from the checkpoint of an earlier one. Returns the names of this machine's checkpoints and the weights."""
    import offloadd.lightning

    warnings.filterwarnings("ignore")
    mount(path / f"machine-{machines[rank]}", path / "out")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", NODE_RANK=str(rank))
    settings = {**config("cpu", drives(path, rank)), "checkpoint": {"use_node_local_storage": True}}
    torch.manual_seed(0)
    model = randomize(Model())
    pl.seed_everything(4, verbose=False)
    saved = pl.callbacks.ModelCheckpoint(path / "out", filename="{step}", every_n_train_steps=2, save_top_k=1, monitor="step", mode="max")
    strategy = offloadd.lightning.Strategy(settings, run_dir=path / "run")
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, num_nodes=ranks, max_steps=stop_at, callbacks=[saved], default_root_dir=path / "root",
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.arange(48).float(), batch_size=2, shuffle=True)
    trainer.fit(model, data, ckpt_path=path / f"out/step={stop_at - 2}.ckpt" if resumes else None)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    strategy._run.close()
    return sorted(one.name for one in (path / "out").iterdir()), weights


def test_fit_resumes_with_the_same_bits_after_any_node_was_lost_and_old_checkpoints_are_removed_on_all_nodes(tmp_path, mounts):
    def train(machines, stop_at, resumes):
        told = machines.told([0, 1], stop_at, resumes, work=fit)
        assert not any(isinstance(one, Exception) for one in told), told
        return told

    machines, unbroken = Machines(tmp_path), Machines(tmp_path / "unbroken")
    for lost, stop_at in ((1, 2), (0, 4), (None, 6)):
        found = train(machines, stop_at, stop_at > 2)
        if lost is not None:
            shutil.rmtree(machines.dir(lost))
    machines.same([0, 1], "step=6.ckpt")
    for (_, weights), (names, expected) in zip(found, train(unbroken, 6, False)):
        # Lightning keeps those that it resumed from.
        assert equal(weights, expected) and names == ["step=6.ckpt"]

"""A user's script with Lightning: `on_lightning.py OUT JSON [kill STEP]`, without offload where the JSON is null. It resumes from its last
checkpoint if there is one, and is killed after STEP."""

import json
import os
import pathlib
import signal
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
out, config, kill_at = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[4]) if "kill" in sys.argv else None
ranks = int(os.environ.get("WORLD_SIZE", 1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(24, 24), nn.Dropout(0.1 if ranks == 1 else 0.0)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(x)))


class Model(pl.LightningModule):
    def __init__(self, width=24):
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(width, width, bias=False)
        # One parameter under two names.
        self.again = self.head

    def forward(self, x):
        return self.again(torch.tanh(self.head(self.blocks(x)))).mean(-1)

    def loss(self, batch):
        return (self(torch.sin(batch[:, None] * torch.arange(24))) - batch / 48).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), on_epoch=True, sync_dist=ranks > 1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Tell(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        print("loss", trainer.global_step, batch_idx, outputs["loss"].item(), flush=True)

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            print("metric", trainer.global_step, trainer.callback_metrics["val_loss"].item(), flush=True)


class Loader(torch.utils.data.DataLoader):
    """A loader that keeps its position itself: to restore it too would skip batches twice."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise SystemExit("the loader's own position was restored")


def loader(first, count, shuffle):
    return Loader(torch.arange(first, first + count).float(), batch_size=4 // ranks, shuffle=shuffle)


if config is None:
    strategy = "ddp"
else:
    import offloadd.lightning

    strategy = offloadd.lightning.Strategy(config)
pl.seed_everything(4, verbose=False)
model = Model(24)
saved = pl.callbacks.ModelCheckpoint(out / "saved", monitor="val_loss", save_top_k=1, save_last=True, every_n_train_steps=None)
steps = pl.callbacks.ModelCheckpoint(out / "steps", filename="{step}", save_top_k=-1, every_n_train_steps=3)
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", devices=ranks, max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.5,
    callbacks=[Tell(), saved, steps], default_root_dir=out, logger=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
given = sorted((out / "steps").glob("*.ckpt"), key=lambda path: path.stat().st_mtime) if (out / "steps").exists() else []
print("resumes", given[-1].stem if given else None, flush=True)
trainer.fit(model, loader(0, 48, True), loader(48, 8, False), ckpt_path=given[-1] if given else None)
print("tested", trainer.validate(model, loader(48, 8, False), ckpt_path="best", verbose=False), flush=True)
trainer.save_checkpoint(out / "weights.ckpt", weights_only=True)
if trainer.is_global_zero:
    plain = Model.load_from_checkpoint(out / "weights.ckpt")
    torch.save({name: value.clone() for name, value in plain.state_dict().items()}, out / "final.pt")
print("done", flush=True)

"""A user's script: trains a small model with dropout and prints what the weights are at the end. Started again, it resumes."""

import hashlib
import json
import pathlib
import random
import sys

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import offloadd  # noqa: E402

torch.set_num_threads(1)
run_dir, config, epochs = sys.argv[1], json.loads(sys.argv[2]), 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(48, 48), nn.Dropout(0.1), nn.BatchNorm1d(48)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


torch.manual_seed(4), random.seed(4)
model = nn.Sequential(nn.Sequential(*(Block() for _ in range(5))), nn.Linear(48, 1))
# Too large for a commit's own record: it lies in a file beside the run.
model.register_buffer("seen", torch.zeros(config.pop("buffer_elems", 1)))
optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 2e-3}, {"params": model[1].parameters(), "weight_decay": 0.1}], lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
data = torch.utils.data.TensorDataset(torch.arange(40).float())
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=int(config.pop("workers", 0)))
limit = config.pop("limit_bytes", None)
if limit:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
kill = config.pop("kill", None)
if kill:
    import kills

    kills.kill_at(*kill)
print("begins", flush=True)
run = offloadd.prepare(model, optimizer, config, run_dir=run_dir, track=[scheduler])
print("resumed", run.steps_done, flush=True)
for _ in range(epochs):
    for (batch,) in run.batches(loader):
        model.seen += batch.sum()
        x = torch.sin(batch[:, None] * torch.arange(48)) + random.random()
        loss = (model(x) - batch[:, None] / 40).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print("step", run.steps_done, loss.item().hex(), flush=True)
model.eval()
digest = hashlib.sha256()
for name, value in model.state_dict().items():
    digest.update(name.encode() + value.numpy().tobytes())
print("done", digest.hexdigest(), flush=True)
run.close()

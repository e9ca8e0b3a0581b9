"""A training loop of one's own on this library: a small language model that learns to count.

    python plain.py RUN_DIR DEVICE_DIR [STEPS]      # DEVICE_DIR exists already, on an NVMe drive
    torchrun --nproc-per-node 2 plain.py RUN_DIR DEVICE_DIR [STEPS]

Kill it at any time and start it again: it resumes after the last committed step and ends with the same weights. With torchrun, each
process computes a part of each batch and keeps a part of the state.
"""

import hashlib
import os
import sys

import torch
from torch import nn

import offloadd

if len(sys.argv) < 3:
    sys.exit("usage: python plain.py RUN_DIR DEVICE_DIR [STEPS]")
run_dir, device_dir, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 40
VOCABULARY, LENGTH, WIDTH = 101, 16, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x, mask):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf, device=ids.device).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
counts = (torch.arange(8 * steps)[:, None] * 7 + torch.arange(LENGTH + 1)) % VOCABULARY
ranks, sampler = int(os.environ.get("WORLD_SIZE", 1)), None
if ranks > 1:
    torch.distributed.init_process_group("gloo")
    sampler = torch.utils.data.DistributedSampler(counts)
loader = torch.utils.data.DataLoader(counts, batch_size=8 // ranks, shuffle=sampler is None, sampler=sampler)

config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": device_dir}}}
run = offloadd.prepare(model, optimizer, config, run_dir=run_dir, track=[scheduler])
print("resumed", run.steps_done, flush=True)
for batch in run.batches(loader):
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print("step", run.steps_done, f"{loss.item():.6f}", flush=True)
fingerprint = hashlib.sha256()
for value in model.state_dict().values():
    fingerprint.update(bytes(value.contiguous().view(torch.uint8).flatten().tolist()))
print("done", fingerprint.hexdigest(), flush=True)
run.close()

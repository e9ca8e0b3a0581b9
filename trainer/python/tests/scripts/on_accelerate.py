"""A script with Accelerate's loop, as people write it: it does not know who answers to `import deepspeed`."""

import pathlib
import sys

import accelerate
import torch
from torch import nn

torch.set_num_threads(1)
# A scheduler then counts steps of all ranks, not of each.
accelerator = accelerate.Accelerator(dataloader_config=accelerate.DataLoaderConfiguration(split_batches=True))
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), *(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
data = torch.randint(0, 64, (48, 6), generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for number, ids in enumerate(loader):
    with accelerator.accumulate(model):
        loss = (model(ids).mean(1) - 1).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.print("loss", accelerator.gather(loss.detach()).mean().item())
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save({name: value.clone() for name, value in weights.items()}, pathlib.Path(sys.argv[1]) / "weights.pt")
accelerator.end_training()

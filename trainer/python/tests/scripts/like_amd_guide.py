"""The calls of guides to DeepSpeed on AMD GPUs ("DeepSpeed Guide for AMD GPUs", of the ML stack for ROCm), in the order in which they show them.

Prints a line for each part. Losses are those of plain PyTorch.
"""

import argparse
import copy
import importlib

import deepspeed
import torch
from deepspeed.checkpointing import checkpoint
from torch import nn
from torch.nn.functional import mse_loss

torch.set_num_threads(1)
parser = argparse.ArgumentParser()
parser.add_argument("--saved")
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
print("version", deepspeed.__version__.split(".")[0].isdigit())

# A check of the installation.
layer = nn.Linear(10, 10)
engine, optimizer, _, _ = deepspeed.initialize(
    model=layer, optimizer=torch.optim.Adam(layer.parameters()), config={"train_batch_size": 8, "fp16": {"enabled": True}}
)
print("initialized", engine.fp16_enabled(), next(engine.parameters()).dtype)
engine.destroy()


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.costly, self.last = nn.Linear(10, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.last(checkpoint(self.costly, torch.relu(self.first(x))))


# Training with the file: its optimizer is there too, and the one of the script counts.
torch.manual_seed(0)
deepspeed.init_distributed(dist_backend="gloo", verbose=True)
model = Small()
plain = copy.deepcopy(model)
engine, optimizer, loader, schedule = deepspeed.initialize(args=args, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.001), training_data=None)
assert loader is None
plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.001)
for step in range(12):
    inputs, labels = torch.randn(8, 10).to(engine.device), torch.randn(8, 10).to(engine.device)
    plain_optimizer.param_groups[0]["lr"] = engine.get_lr()[0]
    loss = mse_loss(engine(inputs), labels)
    engine.backward(loss)
    engine.step()
    expected = mse_loss(plain(inputs.cpu()), labels.cpu())
    plain_optimizer.zero_grad()
    expected.backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    plain_optimizer.step()
    torch.testing.assert_close(loss.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-7)
print("trained", engine.global_steps)
engine.save_checkpoint(args.saved, tag="step12", client_state={"step": step})
_, client = engine.load_checkpoint(args.saved)
print("loaded", client["step"])
engine.destroy()

# All state away from the GPU.
offloaded = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    "zero_allow_untested_optimizer": True,
}
with deepspeed.zero.Init(config_dict_or_path=offloaded):
    model = Small()
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=offloaded)
losses = []
for _ in range(5):
    losses.append(mse_loss(engine(inputs), labels))
    engine.backward(losses[-1])
    engine.step()
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    assert all(param.isfinite().all() for param in model.parameters())
print("offloaded", bool(losses[-1] < losses[0]))

# What is not done here.
for name, attribute in (("deepspeed.pipe", "PipelineModule"), ("deepspeed.utils.debug", "debug_memory_report")):
    try:
        getattr(importlib.import_module(name), attribute)
    except ImportError as error:
        print("refused", name, "is not supported by offloadd" in str(error))
try:
    engine.set_curriculum_learning_params(curriculum_type="seqlen", min_difficulty=32)
except AttributeError as error:
    print("refused", "set_curriculum_learning_params" in str(error))
engine.destroy()

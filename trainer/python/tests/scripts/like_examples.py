"""Small scripts with the calls of DeepSpeed's examples: a classifier with a loader of the engine's, a masked model with checkpoints, fine-tuning
of answers with groups of parameters and a schedule of the script's, a reward model on pairs, and two engines that train against each other.

Each trains beside plain PyTorch, and prints the largest difference of their losses.
"""

import argparse
import copy
import math
import pathlib
import sys

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed import get_accelerator
from deepspeed.accelerator import get_accelerator as of_module
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer  # noqa: F401
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

torch.set_num_threads(1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.pool = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2)
        self.layers = nn.ModuleList(nn.Linear(6 * 4 * 4 if number == 0 else 24, 24) for number in range(3))
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.convolution(x))).flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


class Language(nn.Module):
    """Tokens to a number each, or to scores of the next token."""

    def __init__(self, outputs=32):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, outputs)
        self.checkpointed = False

    def gradient_checkpointing_enable(self):
        self.checkpointed = True

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x) if self.checkpointed and self.training else block(x)
        return self.head(x)

    def loss(self, scores, ids):
        return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def told(name, ours, plain, within):
    difference = max(abs(a - b) for a, b in zip(ours, plain))
    print(name, f"{difference:.3g}")
    assert len(ours) == len(plain) and difference < within and all(map(math.isfinite, ours)), (name, ours, plain)


def ids(count, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 32, (4, 8), generator=generator) for _ in range(count)]


def plain_losses(model, optimizer, batches, loss_of, schedule=None, clip=1.0, accumulated=1):
    losses = []
    for number, batch in enumerate(batches, 1):
        loss = loss_of(model, batch)
        (loss / accumulated).backward()
        losses.append(loss.item())
        if number % accumulated == 0:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
    return losses


def classify(args):
    settings = {
        "train_batch_size": 4, "steps_per_print": 2000, "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "bf16": {"enabled": False},
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 15},
        "zero_optimization": {"stage": 2, "allgather_partitions": True, "reduce_bucket_size": 50000000, "cpu_offload": False},
    }  # fmt: skip
    torch.manual_seed(1)
    net = Classifier()
    plain = copy.deepcopy(net)
    data = torch.utils.data.TensorDataset(torch.randn(24, 3, 12, 12), torch.randint(0, 10, (24,)))
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=filter(lambda p: p.requires_grad, net.parameters()), training_data=data, config=settings
    )
    device, seen, losses = get_accelerator().device_name(engine.local_rank), [], []
    assert not engine.bfloat16_enabled() and not engine.fp16_enabled()
    for images, labels in loader:
        seen.append((images, labels))
        loss = F.cross_entropy(engine(images.to(device)), labels.to(device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.8, 0.999), weight_decay=3e-7)
    told("classifier", losses, plain_losses(plain, optimizer, seen, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])), 1e-6)
    engine.eval()
    engine.destroy()


def checkpoints(args):
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    torch.manual_seed(2)
    model = Language()
    model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def train(batches):
        losses = []
        for batch in batches:
            loss = model.loss(model(batch), batch)
            model.backward(loss)
            model.step()
            losses.append(loss.item())
        return losses

    train(ids(2))
    model.save_checkpoint(save_dir=args.directory / "bert", client_state={"checkpoint_step": 2})
    first = train(ids(3, seed=4))
    _, client = model.load_checkpoint(load_dir=args.directory / "bert")
    assert client["checkpoint_step"] == 2
    told("checkpoints", train(ids(3, seed=4)), first, 1e-9)
    model.destroy()


def chat_settings(offload):
    device = "cpu" if offload else "none"
    return {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3, "overlap_comm": True, "offload_param": {"device": device}, "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7, "memory_efficient_linear": False,
        },
        "bfloat16": {"enabled": False},
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
        "tensorboard": {"enabled": False, "output_path": "/ds_tensorboard_logs/", "job_name": "step1_model_tensorboard"},
    }  # fmt: skip


def groups_of(model):
    decays = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    return [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def finetune(args, offload):
    torch.manual_seed(3)
    model = Language()
    plain = copy.deepcopy(model)
    recursive_setattr(model, "head", recursive_getattr(model, "head"))
    optimizer = (DeepSpeedCPUAdam if offload else FusedAdam)(groups_of(model), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, _, schedule = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, config=chat_settings(offload), lr_scheduler=schedule, dist_init_required=True
    )
    model.gradient_checkpointing_enable()
    model.train()
    losses = []
    for batch in ids(6):
        loss = model.loss(model(batch), batch)
        model.backward(loss)
        model.step()
        losses.append(loss.item())
    model.tput_timer.update_epoch_count()
    model.eval()
    with torch.no_grad():
        assert model(ids(1)[0]).isfinite().all()
    plain_optimizer = torch.optim.AdamW(groups_of(plain), lr=1e-3, betas=(0.9, 0.95))
    plain_schedule = torch.optim.lr_scheduler.LambdaLR(plain_optimizer, lambda step: 1 / (1 + step))
    expected = plain_losses(plain, plain_optimizer, ids(6), lambda model, batch: model.loss(model(batch), batch), plain_schedule, accumulated=2)
    told("fine-tuning", losses, expected, 1e-5)
    found = {}
    for name, param in model.module.named_parameters():
        away = [param] if hasattr(param, "ds_id") and param.ds_status == ZeroParamStatus.NOT_AVAILABLE else []
        with deepspeed.zero.GatheredParameters(away, enabled=bool(away)):
            # On the CPU a view of memory that is released.
            found[name] = param.data.cpu()
    torch.save(found, args.directory / "saved.bin")
    found = torch.load(args.directory / "saved.bin")
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    model.destroy()


def reward(args):
    torch.manual_seed(4)
    model = Language(outputs=1)
    plain = copy.deepcopy(model)

    def loss_of(model, batch):
        values = model(batch).squeeze(-1)
        chosen, rejected = values.chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    model, *_ = deepspeed.initialize(
        model=model, optimizer=FusedAdam(groups_of(model), lr=1e-3, betas=(0.9, 0.95)), args=args, config=chat_settings(offload=True)
    )
    losses = []
    for batch in ids(4):
        loss = loss_of(model, batch)
        model.backward(loss)
        model.step()
        losses.append(loss.item())
    optimizer = torch.optim.AdamW(groups_of(plain), lr=1e-3, betas=(0.9, 0.95))
    told("reward", losses, plain_losses(plain, optimizer, ids(4), loss_of, accumulated=2), 1e-5)
    model.destroy()


def two_engines(args):
    """As a generator and its judge."""
    torch.manual_seed(5)
    settings = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.5, 0.999]}}}
    made, judge = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6)), nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    engines = [deepspeed.initialize(args=args, model=one, model_parameters=one.parameters(), config=settings)[0] for one in (judge, made)]
    judged, making = engines
    for _ in range(2):
        fake = making(torch.randn(4, 4))
        loss = judged(torch.randn(4, 6)).mean() - judged(fake.detach()).mean()
        judged.backward(loss)
        judged.step()
        loss = judged(fake).mean()
        making.backward(loss)
        making.step()
        judged.zero_grad()
    assert math.isfinite(loss.item()) and [engine.global_steps for engine in engines] == [2, 2]
    for engine in engines:
        engine.destroy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    # As DeepSpeed's launcher passes it.
    of_module().set_device(args.local_rank)
    assert args.local_rank == 0
    get_accelerator().manual_seed_all(1)
    classify(args)
    checkpoints(args)
    finetune(args, offload=True)
    finetune(args, offload=False)
    reward(args)
    two_engines(args)
    print("done")
    sys.exit()

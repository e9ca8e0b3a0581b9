"""A script with DeepSpeed's interface, as people write it: it does not know who answers."""

import argparse
import copy
import importlib.metadata
import importlib.util
import sys

import deepspeed
import torch
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.io import PyFileWriter
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils import (
    RepeatingLoader,
    logger,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from deepspeed.utils.logging import log_dist
from torch import nn

torch.set_num_threads(1)
# Ranks share it: torchrun has each word written for itself.
sys.stdout.reconfigure(write_through=False, line_buffering=True)
parser = argparse.ArgumentParser()
parser.add_argument("--saved")
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.version("deepspeed") == deepspeed.__version__
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
    # The embedding is large enough to be built in a file.
    model = nn.Sequential(nn.Embedding(8192, 32), *(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 1))
with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=0):
    model[0].weight.data[0] = 0.5
assert float(model[0].weight[0].detach().sum()) == 16.0
plain = copy.deepcopy(model)
optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-2, adamw_mode=True)
engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
assert isinstance(engine, deepspeed.DeepSpeedEngine)
generator = torch.Generator().manual_seed(1)
inputs = [torch.randint(0, 8192, (4, 6), generator=generator) for _ in range(6)]


def train(some):
    losses = []
    for ids in some:
        loss = (engine(ids).mean(1) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


print("losses", *train(inputs[:3]))
engine.save_checkpoint(args.saved, client_state={"seen": 3})
whole = {name: value.clone() for name, value in model.state_dict().items()}
rest = train(inputs[3:])
_, client = engine.load_checkpoint(args.saved)
assert client == {"seen": 3} and train(inputs[3:]) == rest
print("losses", *rest)

# What the optimizer keeps of a parameter is what torch.optim keeps; it can be changed.
plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
for ids in inputs[:4]:
    plain_optimizer.zero_grad()
    (plain(ids).mean(1) - 1).square().mean().backward()
    if ids is not inputs[3]:
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()
engine.load_checkpoint(args.saved)
weight, bias = model[2].weight, model[3].bias
assert safe_get_full_grad(weight) is None
for name in ("exp_avg", "exp_avg_sq"):
    torch.testing.assert_close(safe_get_full_optimizer_state(weight, name), plain_optimizer.state[plain[2].weight][name], rtol=1e-5, atol=1e-9)
torch.testing.assert_close(safe_get_full_fp32_param(weight), plain[2].weight.detach(), rtol=1e-6, atol=1e-7)
assert safe_get_full_fp32_param(nn.Parameter(torch.ones(2))) is None
before = safe_get_full_optimizer_state(bias, "exp_avg")
safe_set_full_fp32_param(weight, torch.full((32, 32), 0.125))
safe_set_full_optimizer_state(weight, torch.zeros(32, 32), "exp_avg")
assert torch.equal(safe_get_full_fp32_param(weight), torch.full((32, 32), 0.125)) and float(weight.detach().sum()) == 128.0
assert not safe_get_full_optimizer_state(weight, "exp_avg").any() and torch.equal(safe_get_full_optimizer_state(bias, "exp_avg"), before)
safe_set_full_fp32_param(weight, plain[2].weight)
engine.backward((engine(inputs[3]).mean(1) - 1).square().mean())
torch.testing.assert_close(safe_get_full_grad(weight), plain[2].weight.grad, rtol=1e-4, atol=1e-8)
safe_set_full_grad(weight, torch.zeros(32, 32))
assert not safe_get_full_grad(weight).any()
engine.step()
# Neither momentum nor gradient: the parameter stays.
assert torch.equal(safe_get_full_fp32_param(weight), plain[2].weight) and not torch.equal(safe_get_full_fp32_param(bias), plain[3].bias)

# Small parts of the interface.
device = deepspeed.get_accelerator()
device.set_device(0)
device.manual_seed_all(1)
assert device.device_name() == ("cuda" if torch.cuda.is_available() else "cpu") and device.memory_allocated() >= 0
see_memory_usage("in the middle", force=True)
log_dist("of one rank", ranks=[0])
loader = RepeatingLoader([1, 2])
assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
total = torch.ones(2)
deepspeed.comm.all_reduce(total, op=deepspeed.comm.ReduceOp.SUM, log_name="ours")
assert total.tolist() == [deepspeed.comm.get_world_size()] * 2
with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
    layer = nn.Linear(3, 3)
assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32
linear, x = nn.Linear(10, 7), torch.randn(3, 10)
tiled = deepspeed.zero.TiledLinear(10, 7, in_splits=3, out_splits=2, init_linear=linear)
torch.testing.assert_close(tiled(x), linear(x))
assert [tuple(one.shape) for one in deepspeed.zero.TiledLinear(10, 7, out_splits=2, bias=False, combine_out_splits=False)(x)] == [(3, 4), (3, 3)]
torch.testing.assert_close(deepspeed.checkpointing.checkpoint(linear, x), linear(x))
read = deepspeed.DeepSpeedConfig(args.deepspeed_config)
assert read.train_micro_batch_size_per_gpu == 4 and not read.fp16_enabled and not hasattr(read, "sparse_attention")
assert OffloadDeviceEnum.nvme == "nvme" and TORCH_DISTRIBUTED_DEFAULT_PORT == 29500
with PyFileWriter(f"{args.saved}.{rank}") as file:
    torch.save(torch.ones(2), file)
assert torch.load(f"{args.saved}.{rank}").tolist() == [1, 1]
engine.tput_timer.update_epoch_count()
engine.offload_states(), engine.reload_states()
assert not engine.fp16_enabled() and not engine.bfloat16_enabled() and engine.optimizer_name() is None

# As trl gathers the head's weight.
status = importlib.import_module("deepspeed.runtime.zero.partition_parameters").ZeroParamStatus
assert all(param.ds_status != status.AVAILABLE for param in model.parameters())

# Read; change what is to be read, which DeepSpeed loses in silence; change for good.
engine.load_checkpoint(args.saved)
refused = ""
try:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        assert all(torch.equal(param.data, whole[name]) for name, param in model.named_parameters())
        model[2].weight.data.zero_()
except Exception as error:
    refused = str(error)
assert refused.startswith("2.weight was changed in place") and "pass modifier_rank=0" in refused, refused
assert torch.equal(model[2].weight, whole["2.weight"])
with deepspeed.zero.GatheredParameters([model[2].weight, model[3].bias], modifier_rank=0):
    if rank == 0:
        model[2].weight.data.fill_(0.25)
found = engine._zero3_consolidated_16bit_state_dict()
assert torch.equal(found["2.weight"], torch.full((32, 32), 0.25)) and torch.equal(found["3.bias"], whole["3.bias"])
assert not torch.equal(found["2.weight"], whole["2.weight"])
train(inputs[:1])
assert (model[2].weight - 0.25).abs().max() < 0.02

# A reference model needs no optimizer.
reference, *others = deepspeed.initialize(model=nn.Linear(4, 4), config={"train_batch_size": 4, "zero_optimization.stage": 3})
assert others == [None, None, None] and reference.eval()(torch.zeros(2, 4)).shape == (2, 4)

# A missing name is refused by name; a script that asks first sees that it is missing.
for wanted in ("deepspeed.pipe", "deepspeed.moe.layer", "deepspeed.sequence.layer"):
    try:
        importlib.import_module(wanted)
        sys.exit(f"{wanted} was imported")
    except ImportError as error:
        print("refused", type(error).__mro__[1].__name__, error)
try:
    deepspeed.init_inference(model)
    sys.exit("init_inference was answered")
except Exception as error:
    print("refused", type(error).__mro__[1].__name__, error)
try:
    from deepspeed import PipelineModule  # noqa: F401
except ImportError as error:
    print("refused", type(error).__mro__[1].__name__, error)
for asked in (lambda: split_params_into_different_moe_groups_for_optimizer({}), lambda: FusedAdam(plain.parameters(), amsgrad=True)):
    try:
        asked()
        sys.exit("it was answered")
    except Exception as error:
        logger.warning(f"refused: {error}")
        assert type(error).__name__ == "NotSupported"
# Compiled before training by scripts that only want it there.
built = deepspeed.ops.op_builder.CPUAdamBuilder().load()
assert not hasattr(built, "create_adam") and not hasattr(deepspeed.ops.op_builder, "AsyncIOBuilder")
assert not hasattr(deepspeed.ops.adam, "OnebitAdam") and not hasattr(device, "nothing_of_this_name")
print("done")

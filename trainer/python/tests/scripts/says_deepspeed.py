"""A script with DeepSpeed's interface, as people write it: it does not know who answers."""

import argparse
import importlib.metadata
import importlib.util
import sys

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
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

# As trl gathers the head's weight.
status = importlib.import_module("deepspeed.runtime.zero.partition_parameters").ZeroParamStatus
assert all(param.ds_status != status.AVAILABLE for param in model.parameters())

# Read, change nothing; read without keeping the change; change for good.
engine.load_checkpoint(args.saved)
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    assert all(torch.equal(param.data, whole[name]) for name, param in model.named_parameters())
    model[2].weight.data.zero_()
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
for wanted in ("deepspeed.pipe", "deepspeed.moe.layer", "deepspeed.utils.groups"):
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
assert not hasattr(deepspeed.ops.adam, "OnebitAdam")
print("done")

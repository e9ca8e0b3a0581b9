"""Moments in 8 bits: their values are those of bitsandbytes, a training with them is near one with its AdamW8bit, and checkpoints of several ranks
have them."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offloadd.optim
from ranks import on_ranks
from test_runs import PROGRAM, needs_daemon

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make test-tools")

BLOCK = 256
# Of momentums and of variances.
MAPS = [bitsandbytes.functional.create_dynamic_map(signed) for signed in (True, False)]
NAMES = ("exp_avg", "exp_avg_sq")


def blocks_of(moment):
    flat = moment.flatten()
    return nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def stored(moment, values):
    """What a moment becomes: of each block, the nearest values and the largest magnitude, as bitsandbytes' own definition in PyTorch has them. Its
    compiled one for processors takes a value near the nearest one. Here no variance above 0 becomes 0."""
    blocks = blocks_of(moment)
    largest = blocks.abs().amax(1, keepdim=True)
    codes = torch.bucketize(blocks * (1.0 / largest.clamp(min=1e-38)), (values[:-1] + values[1:]) / 2)
    if values is MAPS[1]:
        codes = torch.maximum(codes, (blocks > 0).long())
    return (values[codes] * largest).flatten()[: moment.numel()].view_as(moment)


def loaded(moments):
    """Moments of one parameter, as they are read after they were loaded."""
    param = nn.Parameter(torch.zeros_like(moments[0]))
    optimizer = offloadd.optim.AdamW([param], moments="8bit", options={"program": PROGRAM})
    state = {"step": torch.tensor(1.0), **dict(zip(NAMES, moments))}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})
    found = optimizer.state_dict()["state"][0]
    optimizer.close()
    return [found[name] for name in NAMES]


def test_every_value_of_bitsandbytes_maps_stays_as_it_is():
    for scale in (1.0, 1e-4, 3.0):
        moments = [values * scale for values in MAPS]
        assert all(map(torch.equal, loaded(moments), moments))


def test_a_moment_becomes_the_nearest_value_of_its_block():
    torch.manual_seed(1)
    scales = 10.0 ** torch.randint(-12, 3, (40, 1))
    momentum = torch.randn(40, 137) * scales
    moments = [momentum, (momentum * torch.rand(40, 137)).square()]
    assert all(map(torch.equal, loaded(moments), map(stored, moments, MAPS)))


def model_of():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(64, 70), nn.GELU(), nn.Linear(70, 8))


def trained(make, steps=20):
    """Trains a model with the optimizer that `make` makes. Returns its weights and losses, and the optimizer."""
    model, losses = model_of(), []
    optimizer = make(model.parameters())
    random = torch.Generator().manual_seed(3)
    for _ in range(steps):
        inputs = torch.randn(16, 64, generator=random)
        loss = (model(inputs) - inputs[:, :8].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [param.detach().clone() for param in model.parameters()], losses, optimizer


SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Defined(torch.optim.Optimizer):
    """AdamW in PyTorch's operations, whose moments are stored after each step."""

    def __init__(self, params):
        super().__init__(params, SETTINGS)

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        for param in group["params"]:
            state = self.state[param]
            state["step"] = step = state.get("step", 0) + 1
            momentum, variance = (state.get(name, torch.zeros_like(param)) for name in NAMES)
            momentum = beta1 * momentum + (1 - beta1) * param.grad
            variance = beta2 * variance + (1 - beta2) * param.grad.square()
            param.mul_(1 - group["lr"] * group["weight_decay"])
            denominator = (variance / (1 - beta2**step)).sqrt() + 1e-8
            param.sub_(group["lr"] / (1 - beta1**step) * momentum / denominator)
            state.update(zip(NAMES, map(stored, (momentum, variance), MAPS)))


def ours(params):
    return offloadd.optim.AdamW(params, moments="8bit", options={"program": PROGRAM}, **SETTINGS)


def test_a_step_stores_the_values_of_the_definition():
    weights, _, optimizer = trained(ours, steps=1)
    expected, _, defined = trained(Defined, steps=1)
    torch.testing.assert_close(weights, expected)
    for found, state in zip(optimizer.state_dict()["state"].values(), defined.state.values()):
        for name in NAMES:
            torch.testing.assert_close(found[name], state[name])


def test_twenty_steps_are_near_the_definition_and_bitsandbytes():
    weights, losses, optimizer = trained(ours)
    optimizer.close()
    first = [param.detach() for param in model_of().parameters()]
    moved = sum((param - before).square().sum() for param, before in zip(weights, first)).sqrt()
    plain = trained(lambda params: torch.optim.AdamW(params, **SETTINGS))
    far = {}
    for name, (others, other_losses, _) in {
        "definition": trained(Defined),
        "bitsandbytes": trained(lambda params: bitsandbytes.optim.AdamW8bit(params, min_8bit_size=0, **SETTINGS)),
        "fp32": plain,
    }.items():
        far[name] = (sum((param - other).square().sum() for param, other in zip(weights, others)).sqrt() / moved).item()
        assert losses == pytest.approx(other_losses, rel=0.02), name
    assert far["definition"] < 1e-3, far
    assert 0 < far["bitsandbytes"] < 0.1 and 0 < far["fp32"] < 0.1, far


def steps_of(model, optimizer, numbers):
    """Losses of steps with inputs that are the same on all ranks."""
    losses = []
    for number in numbers:
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
        loss = (model(inputs) - inputs[:, :8].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loaded_into(model, optimizer, checkpoint):
    """The optimizer's state of a distributed checkpoint, which is loaded into a model and its optimizer."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["optimizer"]["state"]


def checkpointed(rank, ranks, checkpoint):
    """Losses after a checkpoint, and again in a model that has loaded it."""
    found = []
    for loads in (False, True):
        model = model_of()
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        optimizer = ours(model.named_parameters())
        if loads:
            loaded_into(model, optimizer, checkpoint)
        else:
            steps_of(model, optimizer, range(3))
            dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=checkpoint)
        found.append(steps_of(model, optimizer, range(3, 6)))
        optimizer.close()
    return found


@needs_daemon
def test_a_distributed_checkpoint_gives_as_many_ranks_the_same_bits_and_one_rank_the_nearest_values(tmp_path):
    told = on_ranks(2, tmp_path / "store", checkpointed, str(tmp_path / "saved"))
    for losses, again in told:
        assert again == losses
    plain, model = model_of(), model_of()
    saved = loaded_into(plain, torch.optim.AdamW(plain.parameters(), **SETTINGS), str(tmp_path / "saved"))
    optimizer = ours(model.named_parameters())
    loaded_into(model, optimizer, str(tmp_path / "saved"))
    kept = []
    for state, before in zip(optimizer.state_dict()["state"].values(), saved.values()):
        for name, values in zip(NAMES, MAPS):
            found, same, other = map(blocks_of, (state[name], before[name], stored(before[name], values)))
            kept.append((found == same).all(1))
            assert torch.equal(found[~kept[-1]], other[~kept[-1]])
    assert 0 < torch.cat(kept).sum() < len(torch.cat(kept)), "the second rank's part begins in the midst of a block, and the first one's with one"
    assert steps_of(model, optimizer, range(3, 6)) == pytest.approx(told[0][0], rel=0.02)
    optimizer.close()

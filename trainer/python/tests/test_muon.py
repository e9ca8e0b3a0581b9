"""Muon: matrices by its rule, all else by AdamW, against `torch.optim.Muon`."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forks
import offloadd
from offloadd import _param_units
from offloadd._config import settings_of
from offloadd._directions import give_directions
from offloadd._interrupts import Interrupts
from offloadd._plan import Plan
from offloadd.optim import clip_grad_norm_
from ranks import Ended, on_ranks
from test_optimizer import bytes_of
from test_runs import PROGRAM, needs_daemon

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Several units, of one matrix and of some."""
    monkeypatch.setattr(_param_units, "UNIT_ELEMS", 400)


class Layer(nn.Module):
    """Tall, wide and square matrices; one lies in memory by its columns."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.mix, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 23, bias=False), nn.Linear(23, 8)
        self.up.weight = nn.Parameter(self.up.weight.detach().T.contiguous().T)

    def forward(self, x):
        return x + self.down(torch.tanh(self.mix(torch.tanh(self.up(self.norm(x))))))


class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(8, 1)

    def forward(self, x, skip=()):
        for number, layer in enumerate(self.layers):
            x = layer(x) if number not in skip else x
        return self.head(x).square().mean()


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(dtype)


def batches(count=8):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 8, generator=generator) for _ in range(count)]


def parts(model):
    """Matrices of blocks, and all else, with their names."""
    named = list(model.named_parameters())
    is_matrix = lambda name, param: param.dim() == 2 and name.startswith("layers")
    return [one for one in named if is_matrix(*one)], [one for one in named if not is_matrix(*one)]


def made(model, dir=None, options=(), **given):
    """The optimizer with its state in host memory, or on the drive that `dir` stands for: matrices by Muon, all else by AdamW."""
    own = {"program": PROGRAM, **({} if dir is None else {"gradients": "nvme"}), **dict(options)}
    matrices, rest = parts(model)
    groups = given.pop("groups", lambda named: [{"params": named}])(matrices)
    return offloadd.optim.Muon([{"params": rest, "use_muon": False, "lr": 1e-2}, *groups], lr=2e-2, directory=dir, options=own, **given)


def theirs(model, **given):
    matrices, rest = parts(model)
    matrices = given.pop("groups", lambda named: [param for _, param in named])(matrices)
    return torch.optim.Muon(matrices, lr=2e-2, **given), torch.optim.AdamW([param for _, param in rest], lr=1e-2)


def train(model, optimizers, inputs, clip=None):
    losses = []
    for number, x in enumerate(inputs):
        loss = model(x.to(next(model.parameters()).dtype), (1,) if number % 3 == 2 else ())
        loss.backward()
        if clip is not None:
            clip(model.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model):
    return [param.detach().clone() for param in model.parameters()]


def same(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def two_groups(named):
    other = {"params": named[1::2], "lr": 5e-3, "momentum": 0.8, "nesterov": False, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}
    return [{"params": named[::2]}, other]


def clip_in_double(params, max_norm):
    """Clipping as it is defined: PyTorch's sums in fp32, and a direction in bf16 magnifies the last bit of a gradient."""
    grads = [param.grad for param in params if param.grad is not None]
    norm = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
    for grad in grads:
        grad.mul_(min(1.0, max_norm / (norm + 1e-6)))


def steps(params, optimizers, clip=None):
    """Steps with gradients that depend on no weight, for the same reason; some have none."""
    generator = torch.Generator().manual_seed(5)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12) for optimizer in optimizers]
    for number in range(8):
        for at, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator)
            param.grad = None if (number + at) % 5 == 0 else grad * 10 ** (at % 4 - 2)
        if clip is not None:
            clip(params, 0.5)
        for one in (*optimizers, *schedulers):
            one.step()


@pytest.mark.parametrize("given", [{}, {"groups": two_groups}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "weight_decay": 0.0}])
@pytest.mark.parametrize("clip", [None, clip_grad_norm_])
def test_steps_are_those_of_the_optimizer_in_pytorch(clip, given):
    """Within 1e-6 in fp32: groups, a schedule, parameters without gradients, clipping."""
    plain, model = model_of(), model_of()
    expected, optimizer = theirs(plain, **given), made(model, **given)
    steps(list(plain.parameters()), expected, clip and clip_in_double)
    addresses = [param.data_ptr() for param in model.parameters()]
    steps(list(model.parameters()), [optimizer], clip)
    for one, other in zip(values(plain), values(model)):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    assert [param.data_ptr() for param in model.parameters()] == addresses
    ours = optimizer.state_dict()
    for own, group in zip(ours["param_groups"][1:], expected[0].param_groups, strict=True):
        assert {key: own[key] for key in group if key != "params"} == {key: value for key, value in group.items() if key != "params"}
    states = optimizer.state
    for one, other in zip(plain.parameters(), model.parameters()):
        of_param = expected[0].state.get(one) or expected[1].state[one]
        torch.testing.assert_close({name: states[other][name] for name in of_param}, of_param, rtol=1e-4, atol=1e-6)
    assert len(optimizer._run.beside.units) > 5
    optimizer.close()


def test_training_goes_as_with_the_optimizers_in_pytorch():
    plain, model = model_of(), model_of()
    optimizer = made(model)
    expected = train(plain, theirs(plain), batches(), torch.nn.utils.clip_grad_norm_)
    assert train(model, [optimizer], batches(), clip_grad_norm_) == pytest.approx(expected, rel=1e-2)
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_matrices_are_rounded_from_masters_that_torchs_muon_makes(dtype):
    model = model_of(dtype)
    matrices = [param for _, param in parts(model)[0]]
    optimizer = offloadd.optim.Muon(matrices, lr=2e-2)
    masters = [param.detach().float().requires_grad_() for param in matrices]
    plain = torch.optim.Muon(masters, lr=2e-2)
    for x in batches(4):
        model(x.to(dtype)).backward()
        for param, master in zip(matrices, masters):
            master.grad = param.grad.float()
        optimizer.step()
        plain.step()
        model.zero_grad()
    for param, master, state in zip(matrices, masters, optimizer.state_dict()["state"].values(), strict=True):
        torch.testing.assert_close(state["master_param"], master.detach(), rtol=0, atol=1e-6)
        assert torch.equal(param.detach(), state["master_param"].to(dtype))
    optimizer.close()


@needs_daemon
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wherever_the_state_lies_and_when_gradients_come_the_bits_are_the_same(tmp_path, dtype):
    found = []
    for name, dir, options, given in [
        ("host memory", None, {}, {}),
        ("host memory, gradients in backward", None, {}, {"overlap_backward": True}),
        ("drive", tmp_path / "drive", {}, {}),
        ("drive, half of it in memory", tmp_path / "half", {"resident_fraction": 0.5}, {"overlap_backward": True, "commit_every": 3}),
    ]:
        model = model_of(dtype)
        optimizer = made(model, dir, options, **given)
        found.append((train(model, [optimizer], batches(), clip_grad_norm_), values(model)))
        assert found[0][0] == found[-1][0] and same(found[0][1], found[-1][1]), name
        optimizer.close()


def test_state_goes_to_and_from_torchs_muon():
    plain, model, back = model_of(), model_of(), model_of()
    of = lambda one: [param for _, param in parts(one)[0]]
    before = theirs(plain, groups=two_groups)[0]
    ours = offloadd.optim.Muon(two_groups(parts(model)[0]), lr=2e-2)
    steps(of(plain), [before])
    steps(of(model)[:4], [ours])
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(bytes_of(before.state_dict()))
    steps(of(plain), [before])
    steps(of(model), [ours])
    back.load_state_dict(model.state_dict())
    after = theirs(back, groups=two_groups)[0]
    after.load_state_dict(bytes_of(ours.state_dict()))
    steps(of(back), [after])
    steps(of(plain), [before])
    for one, found in zip(values(plain), values(back)):
        torch.testing.assert_close(found, one, rtol=0, atol=2e-6)
    ours.close()


def test_state_goes_on_with_the_same_bits():
    model, other = model_of(torch.bfloat16), model_of(torch.bfloat16)
    optimizer, loaded = made(model), made(other)
    train(model, [optimizer], batches()[:4])
    other.load_state_dict(model.state_dict())
    saved = bytes_of(optimizer.state_dict())
    loaded.load_state_dict(saved)
    assert train(other, [loaded], batches()[4:]) == train(model, [optimizer], batches()[4:]) and same(values(other), values(model))
    states = saved["state"]
    first, last = (next(key for key in states if name in states[key]) for name in ("exp_avg", "momentum_buffer"))
    states[first], states[last] = states[last], states[first]
    with pytest.raises(offloadd.NotSupported, match="and AdamW's has step, exp_avg and exp_avg_sq: load the state of an AdamW"):
        loaded.load_state_dict(saved)
    states[first] = states[last]
    with pytest.raises(offloadd.NotSupported, match="has step, exp_avg, exp_avg_sq, master_param, and Muon's has momentum_buffer: load the state of a Muon"):
        loaded.load_state_dict(saved)
    optimizer.close()
    loaded.close()


def interrupt(patch, at):
    """Lets Ctrl-C come before this one of the directions. Returns a list with an entry for each that was made."""
    calls, orthogonal = [], offloadd._directions._muon.orthogonal

    def interrupted(*args):
        calls.append(None)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return orthogonal(*args)

    patch.setattr(offloadd._directions._muon, "orthogonal", interrupted)
    return calls


def test_an_interrupt_waits_for_the_end_of_a_step(monkeypatch):
    found = []
    for at in (None, 3, 4):
        model = model_of()
        optimizer = made(model)
        with monkeypatch.context() as patch:
            calls = interrupt(patch, at)
            for number, x in enumerate(batches(3)):
                model(x).backward()
                clip_grad_norm_(model.parameters(), 0.1)
                with pytest.raises(KeyboardInterrupt) if at and not number else contextlib.nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
        found.append(values(model))
        assert same(found[0], found[-1]) and len(calls) > 9
        optimizer.close()


def test_handlers_are_put_back_where_that_of_ctrl_c_raises_as_soon_as_it_is(monkeypatch):
    came, put = [], signal.signal
    before = [put(signal.SIGUSR1, lambda *_: came.append(1)), put(signal.SIGINT, signal.default_int_handler)]
    own = signal.getsignal(signal.SIGUSR1)

    def raising(number, handler):
        put(number, handler)
        if handler is signal.default_int_handler:
            signal.raise_signal(signal.SIGINT)

    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(signal, "signal", raising)
            with Interrupts().later():
                signal.raise_signal(signal.SIGUSR1)
                assert not came
        assert signal.getsignal(signal.SIGUSR1) is own and came
    finally:
        put(signal.SIGUSR1, before[0]), put(signal.SIGINT, before[1])


def test_a_direction_is_made_where_the_buffer_is():
    """As with parameters on the processor and a compute_device: here the device without values stands for a GPU."""
    model = model_of()
    optimizer = made(model)
    train(model, [optimizer], batches(1))
    run, made_there = optimizer._run, []
    unit = next(unit for unit in run.beside.units if unit.muon)
    memory = SimpleNamespace(mixtures=lambda unit: torch.empty(unit.room_elems, device="meta"), give_directions=made_there.append)
    give_directions([unit], run._group_of(), run._group_of(), memory, run.ranks)
    assert made_there == [unit]
    optimizer.close()


def test_what_is_no_matrix_is_refused_by_name():
    model = model_of()
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        offloadd.optim.Muon(model.parameters())
    optimizer = made(model)
    optimizer.add_param_group({"params": [("scale", nn.Parameter(torch.ones(3)))]})
    with pytest.raises(offloadd.NotSupported, match=r"scale has the shape \(3,\), and Muon updates matrices: put it into a group with use_muon=False"):
        optimizer.resume()
    for key in ("moments", "master"):
        with pytest.raises(offloadd.NotSupported, match=f'{key} = "bf16" with Muon'):
            made(model_of(), options={key: "bf16"}).resume()
    with pytest.raises(ValueError, match="Adjust learning rate function"):
        made(model_of(), adjust_lr_fn="other")


def test_a_matrix_keeps_the_rule_that_it_began_with():
    model = model_of()
    optimizer = made(model)
    train(model, [optimizer], batches(1))
    rest, matrices = optimizer.param_groups
    before = values(model)

    def refused(name, rule):
        model(batches(1)[0]).backward()
        for call in (optimizer.step, lambda: clip_grad_norm_(optimizer, 1.0)):
            with pytest.raises(offloadd.NotSupported, match=f"{name} is in a group that is updated by {rule} now"):
                call()

    matrices["use_muon"] = False
    refused("layers.0.up.weight", "AdamW")
    matrices["use_muon"] = True
    rest["params"].append(matrices["params"].pop())
    refused("layers.2.down.weight", "AdamW")
    matrices["params"].append(rest["params"].pop())
    matrices["params"].append(rest["params"].pop(0))
    refused("layers.0.norm.weight", "Muon")
    rest["params"].insert(0, matrices["params"].pop())
    # As torch.optim.Muon has them: all groups are Muon's.
    state = optimizer.state_dict()
    del state["param_groups"][0]["use_muon"]
    with pytest.raises(offloadd.NotSupported, match="group 0 of the optimizer's state is updated by Muon, and this optimizer's by AdamW: .*use_muon=False"):
        optimizer.load_state_dict(state)
    # As the reference implementation has them.
    state["param_groups"][0]["use_muon"] = False
    del state["param_groups"][1]["nesterov"], state["param_groups"][1]["ns_steps"]
    with pytest.raises(offloadd.NotSupported, match="group 1 of .*Muon has no nesterov, ns_steps, which the update of Muon needs"):
        optimizer.load_state_dict(state)
    assert same(values(model), before) and optimizer.param_groups == [rest, matrices]
    optimizer.step()
    optimizer.close()


@needs_daemon
def test_another_rule_or_other_matrices_in_the_directory_are_refused(tmp_path):
    model = model_of()
    optimizer = made(model, tmp_path / "run")
    train(model, [optimizer], batches(2))
    optimizer.close()
    matrices, rest = parts(model_of())
    own = {"directory": tmp_path / "run", "options": {"program": PROGRAM, "gradients": "nvme"}}
    aux = lambda named: {"params": named, "use_muon": False}
    for make, message in [
        (lambda: offloadd.optim.AdamW([*rest, *matrices], **own), "begun with .*"),
        (lambda: offloadd.optim.Muon([aux(rest), {"params": matrices[1:]}], **own), "begun with layers.0.up.weight, which the optimizer does not have now"),
        (lambda: offloadd.optim.Muon([aux([*rest, matrices[0]]), {"params": matrices[1:]}], **own), "begun with .*"),
    ]:
        with pytest.raises(offloadd.LayoutChanged, match=message):
            make().resume()


def test_the_plan_has_the_bytes(tmp_path, monkeypatch):
    """Of a bf16 parameter and a step: those of its tiles on drives, twice, and what is read and written."""
    monkeypatch.setattr(_param_units, "UNIT_ELEMS", 32 << 20)
    named = [(f"weight{number}", nn.Parameter(torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"))) for number in range(4)]
    settings = settings_of({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}})
    for rule, expected in (("AdamW", (24, 14, 12)), ("Muon", (16, 12, 8))):
        muon = {id(param) for _, param in named} if rule == "Muon" else set()
        units = _param_units.param_units(named, [(param.numel(),) for _, param in named], 0, muon)
        plan = Plan(dataclasses.replace(settings, rule=rule), tmp_path / "run", units)
        reads = sum(plan.figures[f"{part}_read_bytes"] for part in ("forward", "backward", "update"))
        found = (plan.figures["device_bytes"], reads, plan.figures["written_bytes"])
        assert [one / plan.params for one in found] == pytest.approx(expected, rel=0.01), rule


@needs_daemon
def test_a_script_that_is_killed_resumes_with_the_same_bits(tmp_path):
    def script(directory, **given):
        process = forks.start(HERE / "scripts" / "muon.py", directory, json.dumps(given))
        out, errors = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), errors
        return out.splitlines(), process.returncode != 0

    whole, _ = script(tmp_path / "whole")
    lines = {}
    for kill, resumed in [((3, None), 0), ((4, "write_gradients"), 3), ((5, "drain"), 3)]:
        found, killed = script(tmp_path / "killed", kill=kill)
        assert killed and found[0] == f"resumed {resumed}", (kill, found)
        lines.update(dict.fromkeys(found[1:]))
    found, killed = script(tmp_path / "killed")
    assert not killed and list(dict.fromkeys([*lines, *found[1:]])) == whole[1:]


def of_ranks(rank, ranks, way, dtype, directory=None, kill=None):
    """Steps done before, and whole parameters and their states at the end. All ranks see the same batch, so their gradients are those of one."""
    _param_units.UNIT_ELEMS = 400
    model = model_of(dtype)
    if way == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,))
        for param in model.parameters():
            param.data = param.data.contiguous()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    own = DistributedDataParallel(model) if way == "ddp" else model
    # Parameters that are whole on each rank are not taken in backward.
    optimizer = made(model, directory, overlap_backward=way == "fsdp2")
    first = optimizer.resume()
    for number, x in list(enumerate(batches(6), 1))[first:]:
        own(x.to(dtype)).backward()
        clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
        if number == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        model.zero_grad()
    state = optimizer.state_dict()["state"].values()
    whole = lambda value: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    found = first, [whole(param) for param in model.parameters()], [whole(value) for one in state for value in one.values()]
    optimizer.close()
    return found


@needs_daemon
@pytest.mark.parametrize("way, dtype", [("ddp", torch.bfloat16), ("fsdp2", torch.float32)])
def test_two_ranks_make_the_steps_of_one(tmp_path, way, dtype):
    """Rows of a matrix are on both ranks, of some an odd number."""
    _, expected, momenta = of_ranks(0, 1, "one", dtype)
    for first, found, ours in on_ranks(2, tmp_path / "store", of_ranks, way, dtype):
        for one, other in zip([*expected, *momenta], [*found, *ours], strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    if way == "fsdp2":
        drive = tmp_path / "drive"
        assert all(isinstance(one, Ended) for one in on_ranks(2, tmp_path / "store-killed", of_ranks, way, dtype, drive, 3))
        for first, resumed, _ in on_ranks(2, tmp_path / "store-resumed", of_ranks, way, dtype, drive):
            assert first == 3 and same(resumed, found)

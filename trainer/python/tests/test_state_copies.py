"""Copies that `state_dict()` gives of what lies in tiles: whatever writes to them is told, and what writes no values is not."""

import collections
import copy

import pytest
import torch
from torch import nn

import offloadd
import offloadd.optim
from offloadd._state_copies import StateCopies
from test_weights import prepared, transformers_model

X = torch.ones(2, 4)


def net():
    torch.manual_seed(0)
    return nn.Sequential(collections.OrderedDict(first=nn.Linear(4, 4), last=nn.Linear(4, 1)))


def of_model(run):
    """A tensor of a model's state."""
    return run.model.state_dict()["first.weight"]


def of_optimizer(run):
    """One of an optimizer's."""
    return run.optimizer.state_dict()["state"][0]["exp_avg"]


def stepped(tmp_path, **more):
    """A run after a step, so that it has moments."""
    model = net()
    run, optimizer = prepared(model, tmp_path, **more)
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return run


OWNERS = {of_model: "first.weight of model.state_dict", of_optimizer: "exp_avg of parameter 0 of optimizer.state_dict"}


def left(run):
    with run:
        pass


# The ends of a run.
ENDS = {"with": left, "close": lambda run: run.close(), "exit": lambda run: run._at_exit(), "a model that is dropped": lambda run: run.__del__()}


@pytest.mark.parametrize("owner", OWNERS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("end", ENDS)
def test_a_state_that_was_written_and_not_loaded_is_named_at_the_end(tmp_path, capsys, end, owner):
    run = stepped(tmp_path)
    owner(run).zero_()
    ENDS[end](run)
    assert run.closed and f"not have what was written to its state: {OWNERS[owner]}() was changed in place" in capsys.readouterr().err


def test_an_optimizer_alone_names_it_too(tmp_path, capsys):
    model = net()
    optimizer = offloadd.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    optimizer.close()
    assert "the optimizer does not have what was written to its state: exp_avg of parameter 0" in capsys.readouterr().err


# What would write or give the values of tiles, without those of the script.
READS = {
    "save_weights": (of_model, lambda run, path: run.save_weights(path / "weights")),
    "weights": (of_model, lambda run, path: dict(run.weights())),
    "state_dict": (of_model, lambda run, path: run.model.state_dict()),
    "save_checkpoint": (of_model, lambda run, path: run.save_checkpoint(path / "kept")),
    "save_checkpoint of moments": (of_optimizer, lambda run, path: run.save_checkpoint(path / "kept")),
    "state_dict of moments": (of_optimizer, lambda run, path: run.optimizer.state_dict()),
    "a pass": (of_model, lambda run, path: run.model(X)),
    "a step": (of_optimizer, lambda run, path: run.optimizer.step()),
}


@pytest.mark.parametrize("what", READS)
def test_a_state_that_was_written_is_loaded_before_anything_reads_tiles(tmp_path, what):
    owner, read = READS[what]
    with stepped(tmp_path) as run:
        owner(run).zero_()
        with pytest.raises(offloadd.NotSupported, match=f"{OWNERS[owner]}.. was changed in place"):
            read(run, tmp_path)
        assert not (tmp_path / "weights").exists() and not (tmp_path / "kept").exists()


def test_save_pretrained_refuses_what_was_written(tmp_path):
    base, batch = transformers_model("llama")
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
    for name, model in (("model", base), ("adapters", peft.get_peft_model(transformers_model("llama")[0], peft.LoraConfig(r=2, target_modules=["q_proj"])))):
        run, _ = prepared(model, tmp_path, name=name)
        with run:
            next(value for value in model.state_dict().values() if value.dim() > 1).zero_()
            with pytest.raises(offloadd.NotSupported, match="of model.state_dict.. was changed in place"):
                model.save_pretrained(tmp_path / "saved")


def jitted(one):
    torch.jit.script(zeroed)(one)


def zeroed(one: torch.Tensor):
    one.zero_()


def averaged(one):
    """As a module's that has it by `assign`, and an average of weights."""
    reference = nn.Linear(4, 4)
    reference.load_state_dict({"weight": one, "bias": one[0]}, assign=True)
    reference.weight.data.mul_(0.9)


# Writes to a tensor of a state, whatever makes them.
WRITES = {
    "in place": lambda one: one.mul_(2),
    "a row": lambda one: one[0].zero_(),
    "data": lambda one: one.data.zero_(),
    "out": lambda one: torch.add(one, 1, out=one),
    "a list": lambda one: torch._foreach_mul_([one], 2.0),
    "copy": lambda one: copy.copy(one).zero_(),
    "torch.jit": jitted,
    "torch.compile": lambda one: torch.compile(lambda one: one.zero_(), backend="aot_eager")(one),
    "a module's that has it": averaged,
}


@pytest.mark.parametrize("what", WRITES)
def test_writes_to_a_state_are_noted(tmp_path, what):
    with stepped(tmp_path) as run:
        one = of_model(run)
        with torch.no_grad():
            WRITES[what](one)
        with pytest.raises(offloadd.NotSupported, match="first.weight of model.state_dict.. was changed in place"):
            run.model(X)
        run.model.load_state_dict({**run.model.state_dict(), "first.weight": one})
        run.model(X)
        assert torch.equal(of_model(run), one)
        with pytest.raises(offloadd.NotSupported, match="dlpack of first.weight"):
            torch.from_dlpack(one)


def converted(one):
    """A module of a script's own, whose parameters have another memory than the state that they were made of."""
    reference = nn.Linear(4, 4)
    reference.load_state_dict({"weight": one, "bias": one[0]}, assign=True)
    reference.double()
    with torch.no_grad():
        reference.weight.mul_(0.9).add_(1)
        reference.float().weight.data.mul_(2)


# What changes no value of a state.
ALLOWED = {
    "unsqueeze_": lambda one: one.unsqueeze_(0),
    "squeeze_": lambda one: one.squeeze_(),
    "t_": lambda one: one.t_(),
    "transpose_": lambda one: one.transpose_(0, 1),
    "swapaxes_": lambda one: one.swapaxes_(0, 1),
    "swapdims_": lambda one: one.swapdims_(0, 1),
    "as_strided_": lambda one: one.as_strided_((2,), (1,)),
    "requires_grad_": lambda one: one.requires_grad_(),
    "a module that was converted": converted,
    "set_": lambda one: one.set_(torch.ones(3)).zero_(),
    "vmap": lambda one: torch.vmap(lambda x: one.t() @ x)(torch.ones(3, 4)),
    "vmap of a state": lambda one: torch.vmap(lambda x: x.t())(one[None]),
    "grad of a function": lambda one: torch.func.grad(lambda w: (one * w).square().sum())(torch.ones(4, 4)),
    "a deep copy": lambda one: copy.deepcopy(one).zero_(),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_what_writes_no_values_of_a_state_is_no_write(tmp_path, capsys, what):
    with stepped(tmp_path) as run:
        one = of_model(run)
        before = one.clone()
        ALLOWED[what](one)
        run.model(X)
        assert torch.equal(of_model(run), before)
    assert "warning" not in capsys.readouterr().err


def test_compiled_modules_read_a_state_by_assign():
    copies, plain, reference = StateCopies("model"), nn.Linear(4, 4), nn.Linear(4, 4)
    reference.load_state_dict({name: copies.guard(one.clone(), name, [name]) for name, one in plain.state_dict().items()}, assign=True)
    assert torch.equal(torch.compile(reference, backend="aot_eager")(X), plain(X))
    copies.refuse_writes()


class OfOthers(torch.Tensor):
    """A tensor with a class of its own, as DTensors are."""


def test_tensors_of_other_classes_keep_them():
    one = torch.ones(2).as_subclass(OfOthers)
    assert type(StateCopies("model").guard(one, "weight", [1])) is OfOthers


@pytest.mark.parametrize("owner", OWNERS, ids=lambda one: one.__name__)
def test_a_checkpoint_that_is_loaded_replaces_what_was_written(tmp_path, owner):
    with stepped(tmp_path) as run:
        before = owner(run).clone()
        run.save_checkpoint(tmp_path / "kept")
        owner(run).zero_()
        run.load_checkpoint(tmp_path / "kept")
        run.model(X).sum().backward()
        run.optimizer.zero_grad()
        assert torch.equal(owner(run), before)

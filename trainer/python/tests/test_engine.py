"""Gathering, releasing and handing over around forward and backward, in cases models of one family do not meet."""

import contextlib
import copy
import functools
import math
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offloadd
from random_models import Fails
from toy import Block, Net, Offloaded, randomize, same_gradients


def pair(make=Net):
    torch.manual_seed(0)
    plain = randomize(make())
    torch.manual_seed(0)
    return plain, Offloaded(randomize(make()))


def both(plain, ours, batch, **kwargs):
    expected, loss = plain(batch, **kwargs), ours.model(batch, **kwargs)
    assert torch.equal(expected, loss)
    return expected, loss


def test_a_weight_used_by_another_block_is_gathered_for_it_and_for_its_backward():
    plain, ours = pair()
    for _ in range(3):
        plain.zero_grad()
        expected, loss = both(plain, ours, torch.randn(4, 8))
        expected.backward(), loss.backward()
        assert not same_gradients(plain, ours.take_gradients())
    assert not ours.live()


def test_an_order_that_changes_every_step_gives_the_same_bits():
    plain, ours = pair()
    for order in ([0, 1, 2, 3], [0, 2, 3], [3, 1, 0, 0], [1], [3, 1, 0, 0], [3, 1, 0, 0]):
        plain.zero_grad()
        expected, loss = both(plain, ours, torch.randn(4, 8), order=order)
        expected.backward(), loss.backward()
        assert not same_gradients(plain, ours.take_gradients())


def test_random_orders_and_passes():
    generator = torch.Generator().manual_seed(5)
    draw = lambda end: int(torch.randint(0, end, (), generator=generator))
    for seed in range(30):
        plain, ours = pair(lambda: Net(2 + seed % 4))
        for _ in range(4):
            plain.zero_grad()
            losses = []
            for _ in range(1 + draw(3)):
                order = [draw(len(plain.blocks)) for _ in range(1 + draw(5))]
                losses.append(both(plain, ours, torch.randn(3, 8, generator=generator), order=order))
                if draw(2):
                    for expected, loss in losses:
                        expected.backward(), loss.backward()
                    losses.clear()
                if draw(4) == 0:
                    with torch.no_grad():
                        both(plain, ours, torch.randn(3, 8, generator=generator), order=order[::-1])
            for expected, loss in losses:
                expected.backward(), loss.backward()
            assert not same_gradients(plain, ours.take_gradients()), seed
            assert not ours.live(), seed


def test_two_forwards_before_one_backward_and_a_graph_used_twice():
    plain, ours = pair()
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    (plain(first) * plain(second)).backward()
    (ours.model(first) * ours.model(second)).backward()
    assert not same_gradients(plain, ours.take_gradients())
    plain.zero_grad()
    expected, loss = both(plain, ours, first)
    for one in (expected, loss):
        one.backward(retain_graph=True)
        one.backward()
    assert not same_gradients(plain, ours.take_gradients())


def frozen_block():
    net = Net()
    net.blocks[1].requires_grad_(False)
    net.unused = nn.Linear(8, 8)
    return net


def frozen_but_the_head():
    net = Net()
    net.blocks.requires_grad_(False)
    return net


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank addition, as LoRA has it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted():
    net = Net().requires_grad_(False)
    for block in net.blocks:
        block.linear = Adapted(block.linear)
    return net


def norms_in_fp32():
    net = adapted().to(torch.bfloat16)
    for block in net.blocks:
        block.norm.float().requires_grad_(True)
        block.norm.register_forward_pre_hook(lambda module, args: (args[0].float(),))
        block.norm.register_forward_hook(lambda module, args, output: output.bfloat16())
    return net


@pytest.mark.parametrize("make", [frozen_block, frozen_but_the_head, adapted, norms_in_fp32])
def test_frozen_parameters_and_several_types_come_and_go_with_their_block(make):
    plain, ours = pair(make)
    dtype = plain.head.weight.dtype
    for order in (None, None, [3, 1, 2, 0]):
        plain.zero_grad()
        for _ in range(2):
            expected, loss = both(plain, ours, torch.randn(4, 8, dtype=dtype), order=order)
            expected.backward(), loss.backward()
            assert not ours.live()
        found = ours.take_gradients()
        assert not same_gradients(plain, found)
        assert found.get("unused.weight") is None
    assert not any(unit.flat.untyped_storage().size() for unit in ours.engine.gathering.units), "frozen ones are released too"
    for unit in ours.engine.gathering.units:
        assert len({(param.dtype, param.requires_grad) for param in unit.params}) == 1
        assert unit.trained or (True, unit.index) not in ours.core.done, "nothing frozen has gradients"


def test_tied_weights_belong_to_the_root():
    def make():
        net = Net()
        net.blocks[3].linear.weight = net.blocks[1].linear.weight
        return net

    plain, ours = pair(make)
    assert ours.names[id(ours.model.blocks[1].linear.weight)] in [ours.names[id(p)] for unit in ours.engine.gathering.units if unit.root for p in unit.params]
    expected, loss = both(plain, ours, torch.randn(4, 8))
    expected.backward(), loss.backward()
    assert not same_gradients(plain, ours.take_gradients())


def test_a_released_parameter_keeps_its_metadata_and_gives_its_values():
    plain, ours = pair()
    weight, expected = ours.model.blocks[0].linear.weight, plain.blocks[0].linear.weight
    assert isinstance(weight, nn.Parameter) and weight.shape == expected.shape and weight.dtype == expected.dtype
    assert not any(unit.flat.untyped_storage().size() for unit in ours.engine.gathering.units)
    assert sum(param.numel() for param in ours.model.parameters()) == sum(param.numel() for param in plain.parameters())
    assert torch.equal(weight.mean(), expected.mean())
    assert torch.equal(weight.detach(), expected)
    assert torch.equal(weight.t(), expected.t()), "a view outlives the call"
    state = ours.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert not ours.live()


def test_what_cannot_be_done_to_a_released_parameter_is_refused_by_name():
    _, ours = pair()
    weight = ours.model.blocks[0].linear.weight
    with pytest.raises(offloadd.NotSupported, match="pickled"):
        pickle.dumps(weight)
    with torch.no_grad(), pytest.raises(offloadd.NotSupported, match="before offloadd.prepare"):
        weight.zero_()


def test_a_forward_and_a_backward_that_fail_leave_nothing_behind():
    plain, ours = pair()
    handle = ours.model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours.model(torch.randn(4, 8))
    handle.remove()
    handle = ours.model.blocks[1].register_forward_pre_hook(lambda module, args: (Fails.apply(args[0]),))
    with pytest.raises(ValueError, match="on purpose"):
        ours.model(torch.randn(4, 8)).backward()
    handle.remove()
    batch = torch.randn(4, 8)
    assert ours.engine.gradients.half_backward, "half a backward is known"
    ours.model(batch)
    assert ours.engine.gradients.broken
    ours.engine.forget_gradients()
    assert not ours.engine.gradients.broken and not ours.engine.gradients.half_backward
    expected, loss = both(plain, ours, batch)
    expected.backward(), loss.backward()
    assert not same_gradients(plain, ours.take_gradients())


def test_units_are_found_and_can_be_named():
    net = Net()
    from offloadd._units import units_of

    names = lambda wanted=None: [unit.name for unit in units_of(Net(), wanted)[0]]
    assert names() == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "(root)"]
    assert names([Block]) == names()
    assert names(["blocks.[01]"]) == ["blocks.0", "blocks.1", "(root)"]
    assert names(["Net"]) == ["(root)"]
    with pytest.raises(offloadd.Error, match="units: no module"):
        names(["Blok"])
    net.half()
    net.blocks[2].norm.float().requires_grad_(False)
    found = [unit.name for unit in units_of(net, None)[0]]
    assert found == ["blocks.0", "blocks.1", "blocks.2 (float16)", "blocks.2 (float32, frozen)", "blocks.3", "(root)"]
    assert [unit.name for unit in units_of(net, None, frozen=False)[0]] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "(root)"]
    with pytest.raises(offloadd.NotSupported, match="float64"):
        units_of(net.double(), None)
    with pytest.raises(offloadd.Error, match="nothing to train"):
        units_of(net.requires_grad_(False), None)


def test_an_evaluation_between_backward_and_step_leaves_gradients_and_clipping_alone():
    plain, ours = pair()
    expected, loss = both(plain, ours, torch.randn(4, 8))
    expected.backward(), loss.backward()
    with torch.inference_mode():
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (plain, ours.model)]
    torch.testing.assert_close(*norms)
    with torch.no_grad():
        both(plain, ours, torch.randn(4, 8))
    both(plain, ours, torch.randn(4, 8))
    grad = ours.model.head.weight.grad
    assert torch.equal(grad * torch.ones(8), grad.clone()), "reading it changes nothing"
    torch.testing.assert_close(grad.clone(), plain.head.weight.grad)
    assert float(grad.scale) == pytest.approx(0.1 / float(norms[0]), rel=1e-4), "the factor of clipping is kept"
    batch = torch.randn(4, 8)
    with pytest.raises(offloadd.NotSupported, match="clip after the last backward"):
        ours.model(batch).backward()


def test_a_step_needs_of_pytorch_what_its_oldest_version_has(monkeypatch):
    # The oldest takes one tensor and no list of them.
    plain = torch.autograd.graph.increment_version
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda one: plain([one]) if isinstance(one, torch.Tensor) else 1 / 0)
    _, ours = pair()
    ours.model(torch.randn(4, 8)).backward()
    before = ours.model.head.weight._version
    ours.engine.updated()
    assert ours.model.head.weight._version == before + 1


def test_gradients_set_to_none_by_hand_are_forgotten():
    plain, ours = pair()
    for _ in range(3):
        for model in (plain, ours.model):
            for param in model.parameters():
                param.grad = None
        expected, loss = both(plain, ours, torch.randn(4, 8))
        expected.backward(), loss.backward()
        assert ours.engine.gradients.square_sums.keys() == ours.engine.gradients.handles.keys()
    assert not same_gradients(plain, ours.take_gradients())
    loss = ours.model(torch.randn(4, 8))
    loss.backward()
    ours.model.head.weight.grad = None
    assert [ours.names[key] for key in ours.engine.gradients.looked_at()[0]] == ["head.weight"]
    with pytest.raises(offloadd.NotSupported, match="drop all of them"):
        ours.model(torch.randn(4, 8)).backward()
    ours.engine.forget_gradients()
    ours.model(torch.randn(4, 8)).backward()
    ours.model.head.weight.grad = torch.zeros(1, 8)
    with pytest.raises(offloadd.NotSupported, match="dropped or changed and more came"):
        ours.model(torch.randn(4, 8)).backward()


def test_a_graph_of_before_a_step_is_refused_as_plain_pytorch_does():
    plain, ours = pair()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    batch = torch.randn(4, 8)
    stale = both(plain, ours, batch)
    for loss in both(plain, ours, batch):
        loss.backward()
    optimizer.step()
    ours.take_gradients()
    for loss in stale:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradients_of_gradients_are_refused_by_name():
    _, ours = pair()
    loss = ours.model(torch.randn(4, 8))
    with pytest.raises(offloadd.NotSupported, match="create_graph"):
        loss.backward(create_graph=True)
    ours.engine.forget_gradients()
    ours.model(torch.randn(4, 8)).backward()
    assert not ours.live()


def test_an_interrupt_in_a_forward_leaves_nothing_behind():
    plain, ours = pair()
    batch = torch.randn(4, 8)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = ours.model.blocks[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        ours.model(batch)
    handle.remove()
    expected, loss = both(plain, ours, batch)
    assert not ours.engine.forwards, "the next forward begins a pass"
    expected.backward(), loss.backward()
    assert not same_gradients(plain, ours.take_gradients())
    assert not ours.live()


def test_parts_of_a_model_called_by_themselves_have_plain_pytorchs_bits():
    plain, ours = pair()
    for _ in range(3):
        plain.zero_grad()
        batch, losses = torch.randn(4, 8), []
        for model in (plain, ours.model):
            y = model.blocks[1](model.blocks[3](batch))
            loss = torch.nn.functional.linear(y, model.head.weight, model.head.bias).sum()
            loss = loss + model.blocks[0].linear.weight.square().sum() + (y @ model.blocks[2].linear.weight.t()).mean()
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        assert not ours.live()
        assert not same_gradients(plain, ours.take_gradients())


def test_the_data_of_a_released_parameter_can_be_read_and_not_changed():
    plain, ours = pair()
    data = ours.model.head.weight.data
    assert torch.equal(data, plain.head.weight.data) and type(data + 0) is torch.Tensor
    with pytest.raises(offloadd.NotSupported, match="clamp_ changes"):
        data.clamp_(-1, 1)
    with pytest.raises(offloadd.NotSupported, match="__setitem__ changes"):
        data[0] = 1
    assert type(copy.deepcopy(data)) is torch.Tensor and type(pickle.loads(pickle.dumps(data))) is torch.Tensor


def test_freezing_a_part_during_training_is_seen():
    plain, ours = pair()
    for frozen in (False, True, False):
        for model in (plain, ours.model):
            model.blocks[1].requires_grad_(not frozen)
        plain.zero_grad()
        expected, loss = both(plain, ours, torch.randn(4, 8))
        expected.backward(), loss.backward()
        found = ours.take_gradients()
        assert (found["blocks.1.linear.weight"] is None) == frozen
        assert all(param.grad is None and found[name] is None or torch.equal(param.grad, found[name]) for name, param in plain.named_parameters())


def test_few_units_are_here_at_once_and_each_comes_twice():
    """Once for its forward, once for its backward; with parameters that have no gradient and inputs that are handed through too."""

    class Hands(Block):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, pair):
            x, bias = pair
            return super().forward(x + bias), bias

    class HandsThrough(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Hands() for _ in range(6))
            self.bias = nn.Parameter(torch.ones(8))

        def forward(self, x):
            pair = x, self.bias * 2
            for block in self.blocks:
                pair = block(pair)
            return pair[0].sum()

    plain, ours = pair(HandsThrough)
    for _ in range(3):
        plain.zero_grad()
        ours.core.done.clear()
        (plain(torch.ones(2, 8)) * plain(torch.zeros(2, 8))).backward()
        (ours.model(torch.ones(2, 8)) * ours.model(torch.zeros(2, 8))).backward()
        gathered = [unit for scatter, unit in ours.core.done if not scatter and unit != 6]
        assert gathered == 2 * [0, 1, 2, 3, 4, 5] + 2 * [5, 4, 3, 2, 1, 0]
        assert ours.core.here_max <= 3, "the root, a unit and the one before it"
        assert not same_gradients(plain, ours.take_gradients())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_compiled_by_torch_compile_come_and_go_and_have_the_bits_of_those_compiled_alone(checkpointing):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(6))
            for block in self.blocks:
                block.compile(backend=backend)

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
            return x.sum()

    plain, ours = pair(Compiled)
    for _ in range(3):
        plain.zero_grad()
        ours.core.done.clear()
        batch = torch.randn(4, 8)
        expected = plain(batch)
        alone, _ = len(graphs), graphs.clear()
        loss = ours.model(batch)
        assert len(graphs) <= alone, "hooks are not compiled"
        graphs.clear()
        assert torch.equal(expected, loss)
        expected.backward(), loss.backward()
        assert [unit for scatter, unit in ours.core.done if not scatter] == [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
        assert ours.core.here_max <= 2, "a block and the one before it"
        assert not same_gradients(plain, ours.take_gradients())
    assert not ours.live()


def test_the_roots_weights_are_seen_between_forward_and_backward():
    plain, ours = pair()
    losses = []
    for model in (plain, ours.model):
        torch.manual_seed(1)
        loss = model(torch.randn(4, 8))
        hidden = torch.randn(4, 8, requires_grad=True)
        loss = loss + torch.nn.functional.linear(hidden, model.head.weight).sum()
        with torch.no_grad():
            # Releases what the first forward has left.
            model(torch.randn(4, 8))
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    assert not same_gradients(plain, ours.take_gradients())


def test_pinned_units_come_once_for_many_forwards_and_again_after_a_step():
    plain, ours = pair()
    with torch.no_grad(), contextlib.ExitStack() as pins:
        for unit in ours.engine.gathering.units:
            pins.enter_context(ours.engine.gathering.pinned(unit))
        came = len(ours.core.done)
        for batch in torch.randn(3, 4, 8):
            both(plain, ours, batch)
        assert len(ours.core.done) == came and len(ours.live()) == len(ours.engine.gathering.units)
        ours.core.params[0] += 1
        ours.engine.stale()
        ours.model(batch)
        assert len(ours.core.done) == came + len(ours.engine.gathering.units) and torch.equal(ours.engine.gathering.units[0].flat, ours.core.params[0])
    assert not ours.live()


def test_a_gradient_that_comes_before_any_unit():
    """The value of a parameter that was in memory when it was used: no unit is brought for it."""
    plain, ours = pair()
    batch = torch.randn(4, 8)
    for model in (plain, ours.model):
        sums = []
        model.register_forward_pre_hook(lambda module, args: sums.append(module.head.bias.sum()))
        model(batch).backward()
        model(batch)
        sums[-1].backward()
    assert not same_gradients(plain, ours.take_gradients())


def test_a_gradients_norm_follows_what_it_was_scaled_with():
    plain, ours = pair()
    expected, loss = both(plain, ours, torch.randn(4, 8))
    expected.backward(), loss.backward()
    # A factor that changes in place, and one parameter that is scaled alone.
    factor, params, wanted = torch.tensor(0.5), list(ours.model.parameters()), list(plain.parameters())
    for number in (0.5, 0.25):
        factor.fill_(number)
        for mine, other in zip(params, wanted):
            mine.grad.mul_(factor), other.grad.mul_(factor)
        params[0].grad.div_(3.0), wanted[0].grad.div_(3.0)
        for _ in range(2):
            norms = [torch.linalg.vector_norm(param.grad) for param in params]
            assert torch.allclose(torch.stack(norms), torch.stack([param.grad.norm() for param in wanted]))
            norms[1].zero_()
    assert torch.allclose(torch.nn.utils.clip_grad_norm_(params, 1.0), torch.nn.utils.clip_grad_norm_(wanted, 1.0))


READS = {
    "chunk": lambda w: w.chunk(2)[1],
    "split": lambda w: w.split(3)[-1],
    "iteration": lambda w: list(w)[2],
    "unbind": lambda w: w.unbind(1)[0],
    "one view of another": lambda w: w.view(-1)[1:].reshape(7, -1)[0],
    "two released": lambda w: w.t() @ w,
    "array": lambda w: torch.from_numpy(w.detach().numpy().copy()),
    "frozen array": lambda w: torch.from_numpy(numpy.array(w.requires_grad_(False).numpy())),
    "new tensor": lambda w: torch.tensor(w),
    "storage": lambda w: torch.empty(0).set_(w.untyped_storage(), 0, w.shape, w.stride()),
    "values and indices": lambda w: torch.sort(w)[0],
    "dictionary": lambda w: {"a": [w.t()]}["a"][0],
    "deep copy": lambda w: copy.deepcopy([w, w])[1],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_an_operation_returns_outlives_the_parameters_memory(read):
    plain, ours = pair()
    found = [read(model.blocks[1].linear.weight) for model in (plain, ours.model)]
    assert not ours.live()
    for unit in ours.engine.gathering.units:
        # Memory that was given back belongs to somebody else.
        unit.access.allow()
        unit.flat.untyped_storage().resize_(unit.bytes)
        unit.flat.fill_(math.nan)
        unit.flat.untyped_storage().resize_(0)
        unit.access.forbid()
    assert torch.equal(*found)


WRITES = {
    "in place": lambda w: w.mul_(0.9),
    "by data": lambda w: w.data.clamp_(-0.05, 0.05),
    "through a view": lambda w: w.view(-1)[0].fill_(3),
    "through detach": lambda w: w.detach().t().copy_(torch.eye(8)),
    "out": lambda w: torch.mul(w, 2, out=w),
    "of several": lambda w: torch._foreach_mul_([w], 0.5),
    "another storage": lambda w: setattr(w, "data", w * 2),
    "drawn": lambda w: nn.init.normal_(w),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_weight_that_is_changed_in_forward_is_named(write):
    _, ours = pair()
    changed = ours.model.blocks[1].linear

    def before(module, args):
        with torch.no_grad():
            write(module.weight)

    handle = changed.register_forward_pre_hook(before)
    batch = torch.randn(4, 8)
    with pytest.raises(offloadd.NotSupported, match=r"blocks.1.linear.weight was changed in place|assigning .data of"):
        ours.model(batch)
    handle.remove()
    ours.model(batch).backward()
    with pytest.raises(offloadd.NotSupported, match="blocks.1.linear.weight"), torch.no_grad():
        write(changed.weight)
    assert not ours.live() and not any(map(torch.isnan, ours.model.state_dict()["blocks.1.linear.weight"].view(-1)))


def test_a_weight_that_numpy_changes_in_forward_is_named():
    _, ours = pair()
    ours.model.blocks[1].linear.register_forward_pre_hook(lambda module, args: module.weight.detach().numpy().fill(0))
    with pytest.raises(offloadd.NotSupported, match=r"blocks.1.linear.weight was changed in place"):
        ours.model(torch.randn(4, 8))


def test_parameters_have_addresses_of_their_own_until_the_next_step():
    _, ours = pair()
    params = [*ours.model.parameters(), ours.model.blocks[1].linear.weight]
    for ask in (lambda w: w.data_ptr(), lambda w: w.data.data_ptr(), lambda w: w.untyped_storage().data_ptr(), lambda w: w[0].data_ptr()):
        assert len(set(map(ask, params))) == len(params) - 1
    ours.engine.updated()
    assert not ours.engine.reading.addressed


def test_reading_into_other_tensors_is_no_write():
    plain, ours = pair()
    means = []
    for model in (plain, ours.model):
        mean = copy.deepcopy(plain)
        with torch.no_grad():
            for one, param in zip(mean.parameters(), model.parameters()):
                one.mul_(0.9).add_(param, alpha=0.1)
            torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()), 0.5)
            torch.mul(model.head.weight, 2, out=mean.head.weight)
            torch._foreach_copy_(list(mean.blocks.parameters())[:2], list(model.blocks.parameters())[:2])
        means.append(mean.state_dict())
    assert all(torch.equal(*values) for values in zip(means[0].values(), means[1].values()))


def test_gradients_can_be_changed_in_place():
    plain, ours = pair()
    for change in (
        lambda params: torch.nn.utils.clip_grad_value_(params, 1e-3),
        lambda params: params[0].grad.view(-1)[3:5].fill_(3),
        lambda params: [param.grad.add_(param.grad.sign(), alpha=0.1) for param in params],
        lambda params: params[2].grad.zero_(),
        lambda params: setattr(params[1], "grad", torch.ones_like(params[1])),
        lambda params: params[0].grad.data.neg_(),
    ):
        expected, loss = both(plain, ours, torch.randn(4, 8))
        expected.backward(), loss.backward()
        for model in (plain, ours.model):
            change(list(model.parameters()))
            if model is ours.model:
                ours.engine.gradients.settle_changes(ours.engine.gradients.looked_at()[1])
        found = ours.take_gradients()
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.grad, rtol=1e-6, atol=0)
        plain.zero_grad()


def test_gradients_of_the_last_step_are_not_added_to():
    _, ours = pair()
    batch = torch.randn(4, 8)
    ours.model(batch).backward()
    ours.engine.updated()
    grad = ours.model.head.weight.grad
    assert grad is not None, "as in plain PyTorch"
    ours.model(batch).backward()
    for use in (torch.Tensor.norm, torch.Tensor.clone, lambda grad: grad.mul_(2)):
        with pytest.raises(offloadd.Error, match="call zero_grad"):
            use(ours.model.head.weight.grad)
    for zero in (lambda: ours.engine.forget_gradients(), lambda: [setattr(param, "grad", None) for param in ours.model.parameters()],
                 lambda: [param.grad.zero_() for param in ours.model.parameters()]):  # fmt: skip
        ours.engine.forget_gradients()
        ours.model(batch).backward()
        ours.engine.updated()
        zero()
        ours.model(batch).backward()


def test_hooks_after_accumulation_see_the_gradient_whenever_they_were_registered():
    plain, ours = pair()
    seen = ([], [])

    def hook(found, param):
        found.append(param.grad.clone())
        param.grad.mul_(2)

    for model, found in zip((plain, ours.model), seen):
        for param in (model.head.weight, model.blocks[2].linear.weight):
            param.register_post_accumulate_grad_hook(functools.partial(hook, found))
    expected, loss = both(plain, ours, torch.randn(4, 8))
    expected.backward(), loss.backward()
    assert len(seen[0]) == 2 and all(torch.equal(*values) for values in zip(*seen))
    assert not same_gradients(plain, ours.take_gradients())
    ours.model(torch.randn(4, 8)).backward()
    with pytest.raises(offloadd.NotSupported, match="runs after gradients were accumulated"):
        ours.model(torch.randn(4, 8)).backward()


def test_transforms_of_torch_func_work_on_a_prepared_model():
    plain, ours = pair()
    batch = torch.randn(4, 8)

    def by_sample(model):
        loss = lambda params, x: torch.func.functional_call(model, params, (x[None],))
        params = dict(model.named_parameters())
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, batch)

    expected, found = by_sample(plain), by_sample(ours.model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    tangents = {name: torch.ones_like(param) for name, param in plain.named_parameters()}
    forward = [torch.func.jvp(lambda params: torch.func.functional_call(model, params, (batch,)), (dict(model.named_parameters()),), (tangents,))
               for model in (plain, ours.model)]  # fmt: skip
    assert all(torch.equal(*values) for values in zip(*forward))
    assert torch.equal(*(torch.func.grad(lambda x: model(x))(batch) for model in (plain, ours.model)))
    expected, loss = both(plain, ours, batch)
    expected.backward(), loss.backward()
    assert not same_gradients(plain, ours.take_gradients())

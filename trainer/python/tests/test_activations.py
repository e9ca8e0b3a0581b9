"""Inputs of checkpointed blocks in host memory, on a stand-in of a GPU's stream of copies: the bits of plain PyTorch, and nothing is left behind."""

import contextlib
import copy
import functools
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offloadd.optim
from offloadd._activations import _open
from offloadd._config import settings_of
from offloadd._copies import Form, GpuCopies
from stand_in import StandIn
from test_runs import config, needs_daemon
from toy import Offloaded, randomize, same_gradients


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.2)

    def forward(self, x, scale=None):
        y = self.down(torch.nn.functional.silu(self.up(x)))
        return x + self.drop(y if scale is None else y * scale)


class Net(nn.Module):
    """Blocks that are checkpointed, in one of several ways."""

    def __init__(self, reentrant, blocks=5, width=16):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(width, width), nn.ModuleList(Block(width) for _ in range(blocks)), nn.Linear(width, 1)
        self.reentrant, self.way = reentrant, lambda block, x: (block, x)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(*self.way(block, x), use_reentrant=self.reentrant)
        return self.head(x).square().mean()


class Moved(Offloaded):
    """A model whose blocks' inputs wait in host memory."""

    def __init__(self, model):
        super().__init__(model)
        self.copies = StandIn()
        self.engine.move_activations(self.copies)
        self.pool = self.engine.activations.pool
        self.copies.poison(self.pool)
        model.zero_grad = lambda: (self.engine.forget_gradients(), self.core.begin_step())

    def is_empty(self):
        """Whether all buffers are back, without the collector of cycles, and nothing of blocks' inputs is on the device."""
        return sum(one.nbytes for one in self.pool._free) == self.pool.nbytes == self.copies.pinned and self.copies.here == 0

    def close(self):
        self.engine.activations.close()
        assert self.copies.pinned == 0


@contextlib.contextmanager
def pair(reentrant, **more):
    plain = randomize(Net(reentrant, **more))
    ours = Moved(copy.deepcopy(plain))
    try:
        yield plain, ours
    finally:
        ours.close()
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction), "torch has its function again"


def both(plain, ours, work):
    """Does the same with both, with the same random numbers. Returns the results."""
    state, opened = torch.get_rng_state(), list(_open)
    # Of models that are not prepared, inputs leave too.
    _open.clear()
    expected = work(plain)
    _open.extend(opened)
    torch.set_rng_state(state)
    return expected, work(ours)


def compare(plain, ours, steps=3, work=lambda model, x: model(x).backward()):
    """Some steps of both, of which gradients are compared."""
    for step in range(steps):
        plain.zero_grad()
        x = torch.randn(4, 6, 16)
        both(plain, ours.model, lambda model: work(model, x))
        different = same_gradients(plain, ours.take_gradients())
        assert not different
        if step == 1:
            pins = ours.copies.pins
    assert steps < 2 or ours.copies.pins == pins, "buffers were made again"
    assert ours.copies.left and ours.is_empty()


def twice(model, x):
    """Two micro-batches, each with its backward."""
    model(x[:2]).backward(), model(x[2:]).backward()


def two_forwards(model, x):
    """One backward of two forwards."""
    (model(x[:2]) + model(x[2:])).backward()


def crossed(model, x):
    """The first forward's backward comes last."""
    first, second = model(x[:2]), model(x[2:])
    second.backward(), first.backward()


def again(model, x):
    """Two backward passes through one graph."""
    loss = model(x)
    loss.backward(retain_graph=True), loss.backward()


def evaluated(model, x):
    """An evaluation between a forward and its backward."""
    loss = model(x)
    model.eval()
    with torch.no_grad():
        model(x)
    model(x)
    model.train()
    loss.backward()


def abandoned(model, x):
    """Losses that nobody uses."""
    model(x), model(x[:1])
    model(x).backward()


def interrupted(model, x):
    """Forwards and backwards that fail in the middle."""
    fails = []

    def fail(*_):
        if fails:
            raise ValueError(fails.pop())

    handles = [model.blocks[3].up.register_forward_hook(fail), model.blocks[1].up.register_full_backward_hook(fail)]
    fails.append("forward")
    with pytest.raises(ValueError, match="forward") as held:
        model(x)
    if model.reentrant:
        # As where a handler tries again: the exception holds the frames of the forward. The other kind leaves torch's own hooks in place then.
        model(x).backward()
        model(x).backward()
    del held
    # The forward of a backward fails.
    loss = model(x)
    fails.append("backward")
    with pytest.raises(ValueError, match="backward"):
        loss.backward()
    del loss
    for handle in handles:
        handle.remove()
    model.zero_grad()
    model(x).backward()


def lengths(model, x):
    """Sequences of many lengths, of a page and more."""
    for length in (1, 6, 3, 5, 2):
        model(x[:, :length].repeat(16, 1, 1)).backward()


WAYS = [twice, two_forwards, crossed, again, evaluated, abandoned, interrupted, lengths]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_have_the_bits_of_plain_pytorch_and_nothing_stays(reentrant, way):
    with pair(reentrant) as (plain, ours):
        compare(plain, ours, work=way)
        if way is lengths:
            # The first input of the last block stays where it is.
            assert len(ours.pool._free) == 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_inputs_leave_during_the_next_block_and_come_one_block_ahead(reentrant):
    with pair(reentrant, blocks=8) as (_, ours):
        model, activations, told, inputs = ours.model, ours.engine.activations, [], []
        leave, bring_back = ours.copies.leave, ours.copies.bring_back
        ours.copies.leave = lambda one, buffer: told.append("leaves") or leave(one, buffer)
        ours.copies.bring_back = lambda buffer, form: told.append("comes") or bring_back(buffer, form)

        def begins(block, args):
            told.append("block")
            inputs.append(weakref.ref(args[0].untyped_storage()))
            here.append(sum(one() is not None for one in inputs))

        for block in model.blocks:
            block.register_forward_pre_hook(begins)
        here = []
        loss = model(torch.randn(4, 6, 16))
        # The last block's input does not leave: its backward is the first.
        assert told == ["block", *["leaves", "block"] * 7]
        # That of the block, and the one that leaves.
        assert max(here) == 2 and sum(one() is not None for one in inputs) == 1
        told.clear(), here.clear(), inputs.clear()
        loss.backward()
        assert told == [*["comes", "block"] * 7, "block"]
        assert max(here) <= 2 and ours.copies.here_max == 2 * 4 * 6 * 16 * 4
        assert activations.moved_bytes == 7 * 4 * 6 * 16 * 4
        ours.take_gradients()


# What a block gets beside its input, and whether its inputs leave.
def shared_scale(model):
    scale = (model.embed.weight[0] * 2).square()
    return lambda block, x: (block, x, scale)


def a_weight(model):
    return lambda block, x: ((lambda x, weight: block(x) @ weight), x, model.embed.weight)


def a_view_of_a_weight(model):
    return lambda block, x: ((lambda x, weight: block(x) * weight), x, model.embed.weight[1])


def a_weight_of_another_module(model):
    other = nn.Parameter(torch.ones(16))
    return lambda block, x: ((lambda x, scale: block(x, scale)), x, other.view(16))


def rows_apart(model):
    """Inputs that are not dense."""
    return lambda block, x: (block, torch.cat([x, x], -1)[..., ::2])


def transposed(model):
    return lambda block, x: (block, x.transpose(0, 1).contiguous().transpose(0, 1))


def in_half(model):
    """Inputs that are parts of a larger tensor."""
    return lambda block, x: ((lambda a, b: torch.cat([block(a), block(b)])), x[:2], x[2:])


def with_a_graph_of_its_own(model):
    """A block that computes a gradient in its forward."""

    def run(block, x):
        # Nothing but a block's inputs passes hooks.
        assert not model.reentrant or torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        with torch.enable_grad():
            y = block(x.detach().requires_grad_()).square().sum()
            found = torch.autograd.grad(y, [y])[0]
        return block(x) * found

    return lambda block, x: (functools.partial(run, block), x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "way, moves",
    [
        *((way, True) for way in (shared_scale, transposed, in_half, with_a_graph_of_its_own)),
        *((way, False) for way in (a_weight, a_view_of_a_weight, a_weight_of_another_module, rows_apart)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_only_what_is_no_weight_leaves(reentrant, way, moves):
    def work(model, x):
        model.way = way(model)
        model(x).backward()

    with pair(reentrant) as (plain, ours):
        if moves:
            compare(plain, ours, work=work)
            return
        x = torch.randn(4, 6, 16)
        both(plain, ours.model, lambda model: work(model, x))
        different = same_gradients(plain, ours.take_gradients())
        assert not different and not ours.copies.left and not ours.copies.pins


def after_the_forward(model, inputs, change):
    """A change of a block's input that the script still has."""
    model.blocks[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    return lambda: change(inputs[0])


def while_it_leaves(model, inputs, change):
    """A change through an alias, while the next block runs."""
    model.blocks[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    model.blocks[2].register_forward_pre_hook(lambda *_: [change(one) for one in inputs] and None)
    return lambda: None


def of_another_argument(model, inputs, change):
    """A change of an argument that stays."""
    inputs.append(torch.ones(16))
    model.way = lambda block, x: (block, x, inputs[0])
    return lambda: change(inputs[0])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("when", [after_the_forward, while_it_leaves, of_another_argument], ids=lambda when: when.__name__)
def test_a_change_in_place_is_refused_as_plain_pytorch_refuses_it(reentrant, when):
    def work(model, x, change):
        inputs = []
        changes = when(model, inputs, change)
        loss = model(x)
        with torch.no_grad():
            changes()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        inputs.clear()
        model.zero_grad()

    for change in (lambda one: one.zero_(), lambda one: one[0].add_(1), lambda one: one.detach().mul_(2)):
        with pair(reentrant) as (plain, ours):
            both(plain, ours.model, lambda model: work(model, torch.randn(4, 6, 16), change))
            assert ours.copies.left and ours.is_empty()


def test_hooks_of_others_and_passes_without_gradients_are_left_alone():
    with pair(False) as (plain, ours):
        x = torch.randn(4, 6, 16)
        with torch.no_grad():
            both(plain, ours.model, lambda model: model(x))
        for context in (torch.autograd.graph.save_on_cpu(), torch.autograd.graph.disable_saved_tensors_hooks("no hooks")):
            with contextlib.suppress(RuntimeError), context:
                ours.model(x)
        assert not ours.copies.pins
        x.requires_grad_()
        nested = lambda model: checkpoint(model, x, use_reentrant=False).backward()
        both(plain, ours.model, nested)
        assert not same_gradients(plain, ours.take_gradients())
        assert ours.is_empty()


def test_a_script_hears_once_that_its_blocks_are_not_checkpointed(capsys):
    with pair(False) as (_, ours):
        forward = Block.forward
        for _ in range(2):
            x = torch.randn(4, 6, 16)
            for block in ours.model.blocks:
                x = forward(block, x)
            ours.model.head(x).sum().backward()
            ours.take_gradients()
        assert capsys.readouterr().err.count("no input of a checkpointed block left the GPU: call model.gradient_checkpointing_enable()") == 1


def family(name):
    """A tiny model of transformers, and how a step computes its loss."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    llama = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=4, vocab_size=99)
    config = {
        "Llama": lambda: transformers.LlamaConfig(attention_dropout=0.1, **llama),
        "GPT2": lambda: transformers.GPT2Config(n_embd=32, n_layer=4, n_head=2, vocab_size=99, n_positions=16),
        "Bert": lambda: transformers.BertConfig(is_decoder=True, **llama),
        "T5": lambda: transformers.T5Config(d_model=32, d_ff=64, d_kv=16, num_layers=3, num_heads=2, vocab_size=99, decoder_start_token_id=0),
    }[name]()
    classes = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel", "Bert": "BertLMHeadModel", "T5": "T5ForConditionalGeneration"}
    torch.manual_seed(0)
    return getattr(transformers, classes[name])(config).train()


def compare_family(plain, reentrant, moved=Moved, **inputs):
    plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ours = moved(copy.deepcopy(plain))
    try:
        for _ in range(2):
            plain.zero_grad()
            ids = torch.randint(99, (2, 9))
            losses = both(plain, ours.model, lambda model: [loss := model(input_ids=ids, labels=ids, **inputs).loss, loss.backward()][0].item())
            different = same_gradients(plain, ours.take_gradients())
            assert losses[0] == losses[1] and not different
        assert ours.copies.left >= 6 and ours.is_empty()
    finally:
        ours.close()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "T5"])
def test_families_of_transformers_have_the_bits_of_plain_pytorch(name, reentrant):
    # With dropout, and with a cache that checkpointing switches off.
    compare_family(family(name), reentrant, **{"use_cache": True} if name != "Bert" else {})


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_beside_a_frozen_model_have_the_bits_of_plain_pytorch(reentrant):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
    model = family("Llama")
    model.enable_input_require_grads()
    compare_family(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)), reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_blocks_have_the_bits_of_plain_pytorch(reentrant):
    torch._dynamo.reset()
    with pair(reentrant, blocks=3) as (plain, ours):
        for model in (plain, ours.model):
            model.eval()
            for block in model.blocks:
                block.compile(backend="aot_eager")
        compare(plain, ours, steps=2)


@needs_daemon
def test_on_a_processor_the_key_says_that_it_has_no_effect(tmp_path, capsys):
    model = Net(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, config("cpu", tmp_path, activations="cpu"), run_dir=tmp_path / "run") as run:
        assert run.engine.activations is None
    assert 'offloadd.activations = "cpu" has no effect' in capsys.readouterr().err
    with pytest.raises(offloadd.Error, match="offloadd.activations"):
        settings_of({"offloadd": {"activations": "disk"}})
    with pytest.raises(offloadd.Error, match="options has activations"):
        offloadd.optim.AdamW(model.parameters(), options={"activations": "cpu"})


def test_a_gpus_copies_wait_for_each_other_and_pin_what_they_use(monkeypatch):
    told, pinned = [], {}

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            told.append(f"{self.name} waits for {event}")

        def record_event(self):
            told.append(f"{self.name} records")
            return "copy"

        def synchronize(self):
            told.append("all copies end")

    cuda = types.SimpleNamespace(cudaError=types.SimpleNamespace(success=0), cudaHostUnregister=pinned.pop)
    cuda.cudaHostRegister = lambda address, size, _: int(size > 1 << 20) or pinned.update({address: size}) or 0
    streams = iter([Stream("compute"), Stream("other")])
    now = next(streams)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("copies"))

    @contextlib.contextmanager
    def stream(entered):
        told.append(f"on {entered.name}")
        yield
        told.append(f"off {entered.name}")

    def copy_(one, other, non_blocking=False):
        told.append(f"copy, {non_blocking=}")
        return plain_copy(one, other)

    plain_copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now)
    copies = GpuCopies(torch.device("cpu"))
    one = torch.randn(3, 5, dtype=torch.bfloat16).t()
    buffer = copies.pin(4096)
    assert list(pinned.values()) == [4096]
    a_copy = ["copies waits for compute", "on copies", "copy, non_blocking=True", "copies records", "off copies"]
    copies.leave(one, buffer).wait()
    assert told == [*a_copy, "compute waits for copy"]
    told.clear()
    back, copy = copies.bring_back(buffer, Form.from_tensor(one))
    assert told == a_copy
    assert torch.equal(back, one) and back.stride() == one.stride() and back.dtype == one.dtype
    told.clear()
    now = next(streams)
    copy.wait()
    assert told == ["compute waits for copy", "other waits for copy"], "the memory is of the first stream, its user may be on another one"
    copies.unpin(buffer)
    assert not pinned and told[-1] == "all copies end"
    with pytest.raises(offloadd.Error, match="cannot be pinned"):
        copies.pin(2 << 20)

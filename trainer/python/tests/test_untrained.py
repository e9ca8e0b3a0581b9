"""Models that nothing trains: their weights are written once, come when they are needed, and give the bits of plain PyTorch."""

import re

import pytest
import torch

import offloadd
from offloadd import _opening
from offloadd._memory import HostMemory
from ranks import on_ranks
from test_runs import config, needs_daemon
from toy import Net, Offloaded, randomize

pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
# Imported here so that ranks, which are forks, find them.
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

VOCABULARY = 97


def llama(seed=0, dtype=torch.bfloat16, layers=6):
    """A causal model with random weights, norms included."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    return randomize(model, seed).to(dtype).eval()


def prompts(rows=3, length=7):
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(4))


def prepared(model, device, dir, **more):
    return offloadd.prepare(model, None, config(device, dir), **{"run_dir": dir / "run", **more})


WAYS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=0.8, top_k=20),
    "beams": dict(do_sample=False, num_beams=3),
    "without a cache": dict(do_sample=False, use_cache=False),
}


@needs_daemon
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_what_is_generated_has_the_bits_of_plain_pytorch(tmp_path, poisoned, device, capfd):
    plain, model = llama(), llama()

    def generated(model, **how):
        torch.manual_seed(6)
        out = model.generate(prompts(), max_new_tokens=9, return_dict_in_generate=True, output_logits=True, **how)
        return [out.sequences, *out.logits]

    expected = {name: generated(plain, **how) for name, how in WAYS.items()}
    with prepared(model, device, tmp_path) as run:
        assert not any(unit.here for unit in run.engine.gathering.units) and len(run.engine.gathering.units) == 7
        for name, how in WAYS.items():
            assert all(map(torch.equal, expected[name], generated(model, **how))), name
        assert not any(unit.here for unit in run.engine.gathering.units)
        elems = sum(unit.elems for unit in run.engine.gathering.units)
        # Two bytes a parameter, rounded up to whole tiles.
        assert 2 * elems <= run.core.device_bytes < 4 * elems
        # The last way: each pass computes the next token of each row.
        made = run.generation.last
        assert (made.rows, made.tokens, made.passes) == (3, 27, 9)
        assert run.generation.bound.by == {"cpu": "host memory", "nvme": "drives"}[device]
    line = "generated 27 tokens of 3 sequence.s. in .* tokens/s; bound .* tokens/s: 9 passes over .* of weights at .* GB/s from "
    assert len(re.findall(line, capfd.readouterr().err)) == 1, "one line a minute"
    assert all(map(torch.equal, expected["greedy"], generated(model))), "close() gives a plain model back"
    assert all(param.requires_grad for param in model.parameters())


@pytest.fixture
def writes(monkeypatch):
    """Grows by one with each run that writes weights."""
    found, plain = [], _opening.fill
    monkeypatch.setattr(_opening, "fill", lambda *args, **more: (found.append(True), plain(*args, **more)))
    return found


@needs_daemon
def test_a_second_start_finds_the_weights_that_the_first_one_wrote(tmp_path, writes, capfd):
    expected = llama()(prompts()).logits
    for said in ("writes the weights", "has the weights that an earlier start wrote"):
        model = llama()
        with prepared(model, "nvme", tmp_path):
            assert torch.equal(model(prompts()).logits, expected)
        assert f"trains nothing and {said}" in capfd.readouterr().err
    assert len(writes) == 1


@needs_daemon
def test_other_weights_are_refused_with_the_model_as_it_was_and_replace_the_old_ones_where_the_run_begins_anew(tmp_path, writes):
    zeros = llama()
    weight = lambda model: model.model.layers[4].mlp.up_proj.weight.detach().view(-1)
    weight(zeros)[0] = 0.0
    prepared(zeros, "nvme", tmp_path).close()
    # Equal numbers, other bits.
    weight(zeros)[0] = -0.0
    with pytest.raises(offloadd.NotSupported, match=r"model.layers.4.mlp.up_proj.weight differs.*python -m offloadd delete"):
        prepared(zeros, "nvme", tmp_path)
    logits = zeros(prompts()).logits
    with prepared(zeros, "nvme", tmp_path, resume=False):
        assert weight(zeros)[0].view(torch.int16) == -(2**15) and torch.equal(zeros(prompts()).logits, logits)
    smaller = llama(layers=5)
    with pytest.raises(offloadd.LayoutChanged, match="it was begun with model.layers.5.self_attn.q_proj.weight"):
        prepared(smaller, "nvme", tmp_path)
    prepared(smaller, "nvme", tmp_path, resume=False).close()
    assert len(writes) == 3 and len(list(tmp_path.glob("*.tiles"))) == 1


@needs_daemon
@pytest.mark.parametrize("resume", [True, False])
def test_a_directory_in_which_a_model_is_trained_is_left_alone(tmp_path, resume):
    model = randomize(Net(6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, config("nvme", tmp_path), run_dir=tmp_path / "run"):
        model(torch.randn(4, 8)).backward()
        optimizer.step()
    with pytest.raises(offloadd.LayoutChanged, match="a run that trains .* lies there.*model.save_pretrained"):
        prepared(randomize(Net(6)), "nvme", tmp_path, resume=resume)
    model = randomize(Net(6))
    with offloadd.prepare(model, torch.optim.AdamW(model.parameters()), config("nvme", tmp_path), run_dir=tmp_path / "run") as run:
        assert run.steps_done == 1


def kill_while_writing(rank, count, dir):
    import os
    import signal

    from offloadd._gathering import Gathering

    left, plain = [3], Gathering.release

    def release(self, unit):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(self, unit)

    Gathering.release = release
    prepared(llama(), "nvme", dir)


def kill_while_generating(rank, count, dir):
    import os
    import signal

    model = llama()
    with prepared(model, "nvme", dir):
        calls = []
        model.model.layers[3].register_forward_hook(lambda *_: calls.append(0) if len(calls) < 2 else os.kill(os.getpid(), signal.SIGKILL))
        model.generate(prompts(), max_new_tokens=9, do_sample=False)


@needs_daemon
@pytest.mark.parametrize("kill, found", [(kill_while_writing, False), (kill_while_generating, True)])
def test_a_start_after_a_kill_writes_the_weights_unless_they_were_whole(tmp_path, writes, kill, found):
    assert on_ranks(1, tmp_path / "store", kill, tmp_path)[0].args == (-9,)
    plain, model = llama(), llama()
    with prepared(model, "nvme", tmp_path):
        given = [one.generate(prompts(), max_new_tokens=9, do_sample=False) for one in (plain, model)]
    assert torch.equal(*given) and len(writes) == (not found)


def generate_on_rank(rank, count, device, dir):
    """What a rank generates from its own prompts, and the bytes of its tiles. Only the first rank has the weights."""
    plain, model = llama(), llama(seed=rank)
    own = prompts(rows=2 + rank)
    how = dict(max_new_tokens=6 + 3 * rank, do_sample=False)
    expected = plain.generate(own, **how)
    run = prepared(model, device, dir)
    same = torch.equal(model.generate(own, **how), expected)
    bytes_ = run.core.device_bytes
    run.close(keep=False)
    return same, bytes_


@needs_daemon
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_two_ranks_share_one_copy_of_the_first_ones_weights(tmp_path, device):
    elems = sum(param.numel() for param in llama().parameters())
    for start in range(2 if device == "nvme" else 1):
        found = on_ranks(2, tmp_path / f"store{start}", generate_on_rank, device, tmp_path)
        assert [same for same, _ in found] == [True, True], found
    # Each rank has its part, whose tiles have few numbers and are padded.
    assert 2 * elems <= sum(bytes_ for _, bytes_ in found)


class Ahead(HostMemory):
    """Brings units ahead, in the calling thread, and writes down what was expected when a unit was used."""

    ahead = 2

    def __init__(self, core, units):
        super().__init__(core, units)
        self.in_memory, self.seen = [], []

    def expect(self, unit):
        assert unit.index not in self.in_memory, "it is here"
        self.in_memory.append(unit.index)
        super().expect(unit)

    def ready(self, unit):
        self.seen.append((unit.index, tuple(self.in_memory)))

    def release(self, unit):
        self.in_memory.remove(unit.index)
        super().release(unit)


def test_the_first_units_of_the_next_pass_come_while_the_last_one_of_this_pass_computes():
    plain, model = randomize(Net(4)), Net(4)
    model.load_state_dict(plain.state_dict())
    ours = Offloaded(model, trains=False)
    memory = ours.engine.gathering.memory = Ahead(ours.core, ours.engine.gathering.units)
    batch = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(6):
            before, memory.seen = ours.core.announcements, []
            assert torch.equal(model(batch), plain(batch))
    # Block 2 uses block 0's weight; 4 is the root, which stays until the pass ends.
    assert ours.core.announcements == before + 1, "an order with units ahead was not learned"
    assert [unit for unit, _ in memory.seen] == [4, 0, 1, 2, 0, 3]
    # The first two of the next pass are the root, which is still here, and block 0.
    assert memory.seen[-1] == (3, (4, 3, 0))


def devices_after_prepare(rank, count, dir):
    from torch.utils import _device

    # As in a process that has used no such block yet.
    _device._device_constructors.cache_clear()
    with prepared(randomize(Net(4)), "cpu", dir), torch.device("meta"):
        return torch.tensor([1.0]).device.type, torch.empty(1).device.type


def test_a_block_of_a_device_makes_tensors_there_after_a_model_was_prepared(tmp_path):
    # Otherwise transformers loads later models with buffers that have no values.
    assert on_ranks(1, tmp_path / "store", devices_after_prepare, tmp_path) == [("meta", "meta")]

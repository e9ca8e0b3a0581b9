"""All weights in memory for a while, memory given back between passes, and weights for another program: the bits of plain PyTorch."""

import contextlib
import itertools

import pytest
import torch

import offloadd
from offloadd import _whole, _zero
from offloadd._memory import HostMemory
from ranks import on_ranks
from test_runs import config, needs_daemon
from toy import let_stay

pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
from test_untrained import llama, prompts  # noqa: E402

pytestmark = needs_daemon
HOW = dict(max_new_tokens=5, do_sample=False)


def adapted(model):
    # Ranks, which are forks, do without.
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


MODELS = {"all trained": llama, "nothing trained": llama, "adapters trained": lambda **how: adapted(llama(**how))}


class Beside:
    """A model in tiles, and the same in memory: a plain one, or one whose steps alone are ours."""

    def __init__(self, kind, device, dir):
        made = [MODELS[kind](dtype=torch.float32) for _ in range(2)]
        self.plain, self.model = made
        self.optimizers = [torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2) for one in made] if kind != "nothing trained" else []
        self.run = offloadd.prepare(self.model, self.optimizers[-1] if self.optimizers else None, config(device, dir), run_dir=dir / "run")
        if self.optimizers:
            offloadd.prepare(self.plain, self.optimizers[0], config("none", dir), run_dir=dir / "plain")
        self.units = self.run.engine.gathering.units

    def check(self, meanwhile=lambda: None):
        """Compares what is generated, and a step of training if there is one; `meanwhile` comes between its forward and its backward."""
        assert torch.equal(self.plain.generate(input_ids=prompts(), **HOW), self.model.generate(input_ids=prompts(), **HOW))
        with torch.set_grad_enabled(bool(self.optimizers)):
            losses = [one(input_ids=prompts(), labels=prompts()).loss for one in (self.plain, self.model)]
        assert torch.equal(*losses)
        meanwhile()
        for loss, optimizer in zip(losses, self.optimizers):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def brought(monkeypatch):
    """Grows by a unit's number whenever one is brought."""
    found, plain = [], HostMemory.expect
    monkeypatch.setattr(HostMemory, "expect", lambda self, unit: (found.append(unit.index), plain(self, unit)))
    return found


@pytest.mark.parametrize("kind, device", [("all trained", "nvme"), ("nothing trained", "cpu"), ("adapters trained", "nvme")])
def test_weights_that_were_gathered_are_brought_once_for_any_number_of_tokens(tmp_path, brought, kind, device):
    ours = Beside(kind, device, tmp_path)
    with ours.run:
        for _ in range(2):
            ours.check()
            brought.clear()
            with ours.run.gathered() as whole:
                assert whole and sorted(brought) == list(range(len(ours.units)))
                for _ in range(2):
                    assert torch.equal(ours.plain.generate(input_ids=prompts(), **HOW), ours.model.generate(input_ids=prompts(), **HOW))
                assert len(brought) == len(ours.units)
                # What is trained is brought again after a step.
                ours.check()
            assert not any(unit.here or unit.pins for unit in ours.units)
        ours.check()
        if kind == "nothing trained":
            assert "bound" not in ours.run.generation.last.line(None)


def test_weights_that_do_not_fit_are_brought_for_each_token_and_the_cost_is_said_once(tmp_path, monkeypatch, brought, capfd):
    ours = Beside("all trained", "nvme", tmp_path)
    with ours.run:
        bytes_ = sum(unit.bytes for unit in ours.units)
        for free, headroom, fits in [(bytes_ - 1, 0, False), (bytes_, 0, True), (bytes_, 1, False), (bytes_, None, False), (2 * bytes_, None, True)]:
            monkeypatch.setattr(_whole._offloadd, "host_available_bytes", lambda: free)
            with ours.run.gathered(headroom) as whole:
                assert whole == fits, (free, headroom)
                brought.clear()
                ours.model.generate(input_ids=prompts(), **HOW)
                assert len(brought) == (0 if fits else HOW["max_new_tokens"] * len(ours.units))
            ours.check()
        # What TRL does below offloadd-run.
        _zero.remember(ours.run)
        monkeypatch.setattr(_whole._offloadd, "host_available_bytes", lambda: bytes_)
        with _zero.GatheredParameters(list(ours.model.parameters())):
            assert not any(unit.here for unit in ours.units)
            assert torch.equal(ours.plain.generate(input_ids=prompts(), **HOW), ours.model.generate(input_ids=prompts(), **HOW))
        monkeypatch.undo()
        with _zero.GatheredParameters(list(ours.model.parameters())):
            assert all(unit.here for unit in ours.units)
    said = [line for line in capfd.readouterr().err.splitlines() if "do not fit" in line]
    assert len(said) == 1 and " s a token (" in said[0] and "from drives" in said[0], said


def test_writes_within_are_refused_by_name_and_change_nothing(tmp_path):
    ours = Beside("all trained", "cpu", tmp_path)
    with ours.run:
        with pytest.raises(offloadd.NotSupported, match="model.layers.2.mlp.up_proj.weight was changed in place"), ours.run.gathered(), torch.no_grad():
            ours.model.model.layers[2].mlp.up_proj.weight.mul_(2)
        ours.check()
        with pytest.raises(offloadd.Error, match="within a forward"):
            ours.model.model.layers[1].register_forward_hook(lambda *_: ours.run.gathered().__enter__())
            ours.model(input_ids=prompts())


def add_to_data(param):
    param.data += 1


# Ways to write to a parameter that is in memory. Each counts in another place: `.data` has a counter of its own.
WRITES = {
    "add_": lambda param: param.add_(1),
    "copy_": lambda param: param.copy_(torch.ones_like(param)),
    "a view": lambda param: param.view(-1)[:3].zero_(),
    "detach()": lambda param: param.detach().mul_(2),
    "foreach": lambda param: torch._foreach_mul_([param], 2.0),
    "init": torch.nn.init.ones_,
    ".data.copy_": lambda param: param.data.copy_(torch.ones_like(param)),
    ".data +=": add_to_data,
    ".data =": lambda param: setattr(param, "data", torch.ones_like(param)),
}
CONTEXTS = {
    "gathered": lambda run: run.gathered(),
    "to read": lambda run: _zero.GatheredParameters(list(run.model.parameters())),
    "to write": lambda run: _zero.GatheredParameters(list(run.model.parameters()), modifier_rank=0),
}
# By kind of model: the error of a write where it is not kept, and whether `modifier_rank=0` keeps it.
REFUSED = {
    "all trained": ({"gathered": "to be read.*run.load_state_dict", "to read": "to be read.*pass modifier_rank=0"}, True),
    "nothing trained": ({"gathered": "to be read.*run.load_state_dict", "to read": "to be read.*pass modifier_rank=0"}, True),
    "adapters trained": ({"gathered": "to be read.*written once", "to read": "to be read.*written once", "to write": "is frozen"}, False),
}


def pass_often(model):
    """So many passes that sums of bits are not compared any more."""
    for _ in range(6):
        with torch.no_grad():
            model(input_ids=prompts())


@pytest.mark.parametrize("kind", REFUSED)
def test_each_write_to_gathered_weights_is_kept_or_refused_by_name_at_the_end(tmp_path, kind):
    errors, kept = REFUSED[kind]
    model = MODELS[kind](dtype=torch.float32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2) if kind != "nothing trained" else None
    run = offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run")
    _zero.remember(run)
    pass_often(model)
    name, param = next((name, param) for name, param in model.named_parameters() if name.endswith("layers.2.mlp.up_proj.weight"))
    for context, write in itertools.product(CONTEXTS, WRITES):
        before, expected = param.detach().clone(), None
        error = "assigning .data of a parameter" if write == ".data =" else f"{name} .*{errors[context]}" if context in errors else None
        with pytest.raises(offloadd.NotSupported, match=error) if error else contextlib.nullcontext():
            with CONTEXTS[context](_zero.run_of(param)), torch.no_grad():
                WRITES[write](param)
                expected = param.detach().clone()
        with torch.no_grad():
            model(input_ids=prompts())
        after = param.detach().clone()
        assert torch.equal(after, before if error else expected) and (error is None) == (context == "to write" and kept and write != ".data ="), (
            context,
            write,
        )
    _zero.run_of(param).close(keep=False)


@pytest.mark.parametrize("context", ["gathered", "to read"])
def test_adapters_may_be_merged_while_weights_are_gathered_and_are_unmerged_before_the_end(tmp_path, context):
    ours = Beside("adapters trained", "cpu", tmp_path)
    _zero.remember(ours.run)
    layer = ours.model.base_model.model.model.layers[2].self_attn.q_proj
    with ours.run:
        for _ in range(2):
            # TRL gives merged weights to a server so.
            with CONTEXTS[context](ours.run), torch.no_grad():
                with CONTEXTS["to read"](ours.run):
                    pass
                ours.model.merge_adapter()
                assert torch.allclose(ours.model(input_ids=prompts()).logits, ours.plain(input_ids=prompts()).logits, atol=1e-4)
                ours.model.unmerge_adapter()
            ours.check()
            pass_often(ours.model)
        with pytest.raises(offloadd.NotSupported, match="q_proj.base_layer.weight was changed in place while it was in memory to be read"):
            with CONTEXTS[context](ours.run), torch.no_grad():
                ours.model.merge_adapter()
                layer.base_layer.weight.data.mul_(2)
                ours.model.unmerge_adapter()
        with pytest.raises(offloadd.NotSupported, match=r"q_proj: adapters were merged while .* call unmerge_adapter\(\) before the end"):
            with CONTEXTS[context](ours.run):
                ours.model.merge_adapter()


def test_weights_that_stay_are_the_tiles_after_merging_rounded_them(tmp_path):
    model = MODELS["adapters trained"](dtype=torch.float32).to(torch.bfloat16)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    with offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run") as run, torch.no_grad():
        let_stay(run.engine, 1)
        pass_often(model)
        before = model(input_ids=prompts()).logits
        with run.gathered():
            model.merge_adapter()
            model.unmerge_adapter()
        assert torch.equal(model(input_ids=prompts()).logits, before)


@pytest.mark.parametrize("kind", ["all trained", "adapters trained"])
def test_memory_that_was_released_comes_again_with_the_same_bits(tmp_path, kind):
    ours = Beside(kind, "nvme", tmp_path)

    def release():
        ours.run.release()
        assert not any(unit.here or unit.expected for unit in ours.units)
        assert ours.run.engine.gathering.memory._buffer is None

    with ours.run:
        for _ in range(3):
            ours.check(release)
            release()
        with pytest.raises(offloadd.Error, match="run.gathered.. or GatheredParameters has ended"), ours.run.gathered():
            ours.run.release()


@pytest.mark.parametrize("kind", MODELS)
def test_weights_come_with_their_names_one_unit_at_a_time_and_may_be_kept(tmp_path, kind):
    ours = Beside(kind, "nvme", tmp_path)
    with ours.run:
        ours.check()
        found = {}
        for name, value in ours.run.weights():
            assert name not in found and sum(unit.here for unit in ours.units) <= 1
            found[name] = value
        expected = dict(ours.plain.state_dict())
        assert found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())
        for value in found.values():
            value.zero_()
        ours.check()


def sample_on_rank(rank, count, dir):
    """As many generations as the rank has, within `gathered`, and a digest of the weights after a step."""
    plain, model = llama(dtype=torch.float32), llama(dtype=torch.float32)
    model.model.embed_tokens.weight = model.lm_head.weight
    plain.model.embed_tokens.weight = plain.lm_head.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = offloadd.prepare(model, optimizer, config("nvme", dir), run_dir=dir / "run")
    same = []
    with run.gathered() as whole:
        for number in range(1 + 2 * rank):
            own = prompts(rows=1 + number)
            same.append(torch.equal(plain.generate(own, **HOW), model.generate(own, **HOW)))
    model(input_ids=prompts(), labels=prompts()).loss.backward()
    optimizer.step()
    run.release()
    weights = dict(run.weights())
    run.close(keep=False)
    return whole, same, sorted(weights), sum(value.double().sum().item() for value in weights.values())


def test_ranks_generate_as_often_as_each_likes_and_have_all_weights(tmp_path):
    first, second = on_ranks(2, tmp_path / "store", sample_on_rank, tmp_path)
    assert first[:2] == (True, [True]) and second[:2] == (True, [True] * 3)
    assert first[2:] == second[2:] and "lm_head.weight" not in first[2]


def follow_on_rank(rank, count, dir):
    """The logits of a reference that is changed twice, as TRL does: on the first rank, between passes."""
    plain, engine = llama(dtype=torch.float32), offloadd.initialize(model=llama(dtype=torch.float32), config=config("nvme", dir), run_dir=dir / "run")[0]
    same = []
    for factor in (0.5, -2.0):
        with _zero.GatheredParameters(list(engine.parameters()), modifier_rank=0), torch.no_grad():
            for param, of_plain in zip(engine.parameters(), plain.parameters()):
                of_plain.mul_(factor)
                if rank == 0:
                    param.data.mul_(factor)
        with torch.no_grad():
            same.append(torch.equal(engine(input_ids=prompts()).logits, plain(input_ids=prompts()).logits))
    tiles = len(list(dir.glob("*.tiles")))
    engine.destroy()
    return same, tiles, engine.run


def test_a_reference_follows_what_the_first_rank_gives_it(tmp_path):
    assert on_ranks(2, tmp_path / "store", follow_on_rank, tmp_path) == [([True, True], 1, None)] * 2

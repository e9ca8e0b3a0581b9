"""Weights out of a prepared model and into it: the bits of the plain functions, with one block in memory at a time."""

import contextlib
import json

import pytest
import torch
from torch import nn

import offloadd
from test_engine import adapted, frozen_block, norms_in_fp32
from test_runs import batches, config, model_of, needs_daemon, train
from toy import Net, randomize


@contextlib.contextmanager
def counted(run):
    """The most bytes of units that were in memory at once, in a list of one."""
    engine, most = run.engine, [0]
    plain = engine.gathering.gather

    def gather(unit, record=True):
        plain(unit, record)
        most[0] = max(most[0], sum(one.bytes for one in engine.gathering.units if one.here))

    engine.gathering.gather = gather
    yield most
    engine.gathering.gather = plain


def largest_block(run):
    return max(sum(unit.bytes for unit in units) for units in run.engine.gathering.unit_groups)


def prepared(model, tmp_path, name="run", device="cpu", **more):
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    settings = more.pop("settings", None) or config(device, tmp_path)
    return offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / name, **more), optimizer


def net(seed=0, make=Net):
    torch.manual_seed(seed)
    return randomize(make(), seed)


def transformers_model(name, seed=0):
    pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    import test_families

    model_class, make_config, batch = test_families.FAMILIES[name]
    torch.manual_seed(seed)
    return randomize(model_class(make_config()), seed), batch


@pytest.mark.parametrize("shard", ["1GB", "30KB"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "bart", "mixtral", "qwen3-moe", "vit"])
def test_save_pretrained_writes_what_the_plain_one_writes_a_block_at_a_time(tmp_path, name, shard):
    safetensors = pytest.importorskip("safetensors.torch")
    model, batch = transformers_model(name)
    run, optimizer = prepared(model, tmp_path)
    with run:
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with counted(run) as most:
            model.save_pretrained(tmp_path / "ours", max_shard_size=shard)
        assert 0 < most[0] <= largest_block(run)
        assert all(not unit.here for unit in run.engine.gathering.units)
        state = model.state_dict()
    plain, _ = transformers_model(name, seed=1)
    plain.load_state_dict(state)
    # A loss notes the kind of problem in the configuration.
    plain(**batch())
    plain.save_pretrained(tmp_path / "plain", max_shard_size=shard)
    weights, others = {}, {}
    for directory in ("ours", "plain"):
        weights[directory], others[directory] = {}, {}
        for path in (tmp_path / directory).iterdir():
            if path.suffix == ".safetensors":
                weights[directory][path.name] = safetensors.load_file(path)
            else:
                others[directory][path.name] = json.loads(path.read_text())
    if shard == "1GB" or "mo" not in name and "mixtral" not in name:
        assert weights["ours"].keys() == weights["plain"].keys() and others["ours"] == others["plain"]
    else:
        # The plain one keeps experts together that were one tensor; here each counts by itself.
        assert len(weights["ours"]) > 3 and others["ours"].keys() == others["plain"].keys()
    assert (len(weights["ours"]) > 1) == (shard == "30KB")
    found, expected = [{name: value for one in weights[directory].values() for name, value in one.items()} for directory in ("ours", "plain")]
    assert found.keys() == expected.keys() and len(found) > 10
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    loaded = type(plain).from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


@pytest.mark.parametrize("make", [Net, frozen_block, norms_in_fp32])
def test_save_weights_writes_the_state_of_any_model(tmp_path, make):
    safetensors = pytest.importorskip("safetensors.torch")
    model = net(make=make)
    run, _ = prepared(model, tmp_path)
    with run:
        with counted(run) as most:
            run.save_weights(tmp_path / "model.safetensors")
        assert 0 < most[0] <= largest_block(run)
    found = safetensors.load_file(tmp_path / "model.safetensors")
    expected = net(make=make).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert not list(tmp_path.glob("*.part"))


@needs_daemon
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_loaded_weights_are_trained_on_with_the_moments_there_were(tmp_path, device, dtype):
    other = {name: value for name, value in net(seed=5).to(dtype).state_dict().items() if not name.startswith("blocks.1")}
    model = net().to(dtype)
    run, optimizer = prepared(model, tmp_path, device=device)
    with run:
        losses = train(model, optimizer, batches(3))
        with counted(run) as most:
            answer = model.load_state_dict(other, strict=False)
        assert answer.missing_keys == [name for name in model.state_dict() if name.startswith("blocks.1")]
        assert device == "none" or most[0] == 0, "nothing trained is gathered"
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in other.items())
        losses += train(model, optimizer, batches(6)[3:])
    # The same with PyTorch's own optimizer over fp32 masters.
    plain, masters = net().to(dtype), None
    masters = [param.detach().float().requires_grad_() for param in plain.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    expected = []
    for number, x in enumerate(batches(6)):
        if number == 3:
            plain.load_state_dict(other, strict=False)
            names = [name for name, _ in plain.named_parameters()]
            with torch.no_grad():
                for name, master in zip(names, masters):
                    if name in other:
                        master.copy_(other[name])
        loss = plain(x.to(dtype)).square()
        plain.zero_grad()
        loss.backward()
        for param, master in zip(plain.parameters(), masters):
            master.grad = None if param.grad is None else param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(plain.parameters(), masters):
                param.copy_(master)
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 2e-2)


@needs_daemon
def test_loaded_weights_survive_a_resume_and_a_resumed_run_refuses_others(tmp_path):
    other = net(seed=5).state_dict()
    run, optimizer = prepared(net(), tmp_path, device="nvme")
    with run:
        train(run.model, optimizer, batches(2))
        run.model.load_state_dict(other)
    model = net(seed=9)
    run, optimizer = prepared(model, tmp_path, device="nvme")
    with run:
        assert run.steps_done == 2
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in other.items())
        with pytest.raises(offloadd.Error, match="would replace what was trained"):
            model.load_state_dict(net(seed=6).state_dict())
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in other.items())
        run.load_state_dict(net(seed=6).state_dict())
        assert torch.equal(model.head.weight.detach(), net(seed=6).head.weight)
        train(model, optimizer, batches(1))
        model.load_state_dict(other)
        assert torch.equal(model.head.weight.detach(), other["head.weight"])


def test_weights_that_do_not_fit_are_refused_and_change_nothing(tmp_path):
    model = net(make=adapted)
    before = net(make=adapted).state_dict()
    run, optimizer = prepared(model, tmp_path)
    with run:
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**before, "blocks.0.linear.down.weight": torch.zeros(3, 3)})
        with pytest.raises(offloadd.NotSupported, match="assign"):
            model.load_state_dict(before, assign=True)
        with pytest.raises(offloadd.NotSupported, match="blocks.0.linear.base.weight is frozen"):
            model.load_state_dict(net(seed=3, make=adapted).state_dict())
        loss = model(batches(1)[0])
        loss.backward()
        with pytest.raises(offloadd.Error, match="between backward and step"):
            model.load_state_dict(before)
        optimizer.zero_grad()
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in before.items())
        adapters = {name: value + 1 for name, value in before.items() if "down" in name or "up" in name}
        model.load_state_dict({**before, **adapters})
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in {**before, **adapters}.items())


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("make", [Net, adapted])
def test_a_model_built_without_memory_is_filled_from_a_file(tmp_path, make, device):
    safetensors = pytest.importorskip("safetensors.torch")
    expected = net(make=make)
    safetensors.save_file(expected.state_dict(), tmp_path / "model.safetensors")
    with offloadd.init():
        model = make()
    assert all(param.is_meta for param in model.parameters())
    parameters = list(model.parameters())
    run, optimizer = prepared(model, tmp_path, device=device, weights=tmp_path)
    with run:
        assert all(one is other for one, other in zip(parameters, model.parameters())), "an optimizer made before has them"
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
        losses = train(model, optimizer, batches(3))
    run, optimizer = prepared(expected, tmp_path, name="other", device=device)
    with run:
        assert train(expected, optimizer, batches(3)) == losses


def test_a_model_built_without_memory_begins_by_itself_a_block_at_a_time(tmp_path):
    with offloadd.init():
        model = Net()
    torch.manual_seed(3)
    run, _ = prepared(model, tmp_path)
    with run:
        found = model.state_dict()
    assert torch.equal(found["blocks.2.norm.weight"], torch.ones(8))
    bound = 8**-0.5
    for name, value in found.items():
        assert value.isfinite().all()
        if "linear" in name:
            assert 0.3 * bound < value.std() < bound and value.abs().max() <= bound, name

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.weight).sum()

    with offloadd.init():
        model = Bare()
    with pytest.raises(offloadd.NotSupported, match="reset_parameters"):
        prepared(model, tmp_path, name="bare")
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"other": torch.ones(3)}, tmp_path / "other.safetensors")
    with offloadd.init():
        model = Bare()
    with pytest.raises(offloadd.Error, match="has no weight"):
        prepared(model, tmp_path, name="missing", weights=tmp_path / "other.safetensors")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mixtral"])
def test_transformers_models_built_without_memory_begin_with_their_own_numbers(tmp_path, name):
    plain, batch = transformers_model(name)
    import test_families

    model_class, make_config, _ = test_families.FAMILIES[name]
    with offloadd.init():
        model = model_class(make_config())
    assert all(param.is_meta for param in model.parameters())
    torch.manual_seed(1)
    run, optimizer = prepared(model, tmp_path)
    with run:
        found = model.state_dict()
        torch.manual_seed(1)
        expected = model_class(make_config()).state_dict()
        for key, value in expected.items():
            assert value.shape == found[key].shape
            torch.testing.assert_close(found[key].float().std(), value.float().std(), rtol=0.5, atol=0.02, msg=key)
            torch.testing.assert_close(found[key].float().mean(), value.float().mean(), rtol=0.1, atol=0.02, msg=key)
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        assert loss.isfinite()


def test_a_peft_model_saves_its_adapters_and_gathers_nothing_frozen(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-tools")
    safetensors = pytest.importorskip("safetensors.torch")
    base, batch = transformers_model("llama")
    torch.manual_seed(2)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    run, optimizer = prepared(model, tmp_path)
    with run:
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done, plain = [], run.engine.gathering.gather
        run.engine.gathering.gather = lambda unit, record=True: (done.append(unit), plain(unit, record))
        model.save_pretrained(tmp_path / "adapters")
        run.engine.gathering.gather = plain
        assert done and all(unit.trained for unit in done)
        state = model.state_dict()
    found = safetensors.load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    expected = {name.replace(".default.", "."): value for name, value in state.items() if "lora" in name}
    assert found.keys() == expected.keys() and len(found) == 12
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert any(value.abs().max() > 0 for name, value in found.items() if "lora_B" in name), "they were trained"


@needs_daemon
def test_a_state_dict_reads_each_unit_once(tmp_path, monkeypatch):
    model = model_of()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with offloadd.prepare(model, torch.optim.AdamW(model.parameters()), config("nvme", tmp_path), run_dir=tmp_path / "run") as run:
        read, expect = [], run.engine.gathering.memory.expect
        monkeypatch.setattr(run.engine.gathering.memory, "expect", lambda unit: (read.append(unit.index), expect(unit)))
        found = model.state_dict()
        assert read == [unit.index for unit in run.engine.gathering.units]
        assert list(found) == list(expected) and all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_weights_in_memory_have_storages_of_their_own(tmp_path, device):
    """Those that stay with the model, and those that a run gives back: libraries take tensors of one storage for one."""
    model = net()
    model.more, model.tied = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), model.head
    run, optimizer = prepared(model, tmp_path, device=device)
    train(model, optimizer, batches(2))
    if device == "cpu":
        run.close(keep=True)
    for param in model.parameters():
        assert param.untyped_storage().nbytes() == param.numel() * param.element_size() and param.storage_offset() == 0
    state, before = model.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    assert state["tied.weight"].untyped_storage()._cdata == state["head.weight"].untyped_storage()._cdata
    assert state["more.weight"].stride() == model.more.weight.stride() == (8, 1, 4, 2)
    if device == "none":
        train(model, optimizer, batches(3)[2:])
        # As in plain PyTorch, the state is the model's memory.
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        assert not torch.equal(before["head.weight"], model.head.weight)
        run.close()
    model.share_memory()
    del run, optimizer
    assert all(param.isfinite().all() for param in model.parameters())


class ScriptFailed(Exception):
    """Of a script's own."""


def end_with(run, how):
    """Ends a run in a way a script has. Raises what the script sees."""
    if how == "close":
        run.close()
    elif how == "with":
        with run:
            pass
    elif how == "exit":
        run._close_at_exit()
    else:
        with contextlib.suppress(ScriptFailed), run:
            raise ScriptFailed


@needs_daemon
@pytest.mark.parametrize("how", ["close", "with", "exit", "failure"])
@pytest.mark.parametrize("write", [lambda w: w.mul_(0.5), lambda w: w.data.mul_(0.5), lambda w: w.set_(torch.zeros_like(w))], ids=["w", "data", "set_"])
def test_a_write_after_the_last_step_is_neither_in_the_commit_nor_in_the_closed_model_and_is_named(tmp_path, capfd, write, how):
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    settings = {"zero_optimization": {"stage": 2, "offload_optimizer": place}, "offloadd": {"program": config("none", tmp_path)["offloadd"]["program"]}}
    model = net()
    run, optimizer = prepared(model, tmp_path, settings=settings)
    train(model, optimizer, batches(2))
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model.blocks[1].linear.weight
    with torch.no_grad():
        write(weight)
    with pytest.raises(offloadd.NotSupported, match="blocks.1.linear.weight") if how in ("close", "with") else contextlib.nullcontext():
        end_with(run, how)
    if how in ("exit", "failure"):
        assert "warning: " in (said := capfd.readouterr().err) and "blocks.1.linear.weight" in said
    if how != "exit":
        # A run that ends with the interpreter gives nothing back.
        assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
        with torch.no_grad():
            weight.add_(1)
        assert torch.equal(weight, trained["blocks.1.linear.weight"] + 1) and model.blocks[1].linear.weight is weight
    resumed = net(1)
    run, optimizer = prepared(resumed, tmp_path, settings=settings)
    assert run.steps_done == 2 and all(torch.equal(value, trained[name]) for name, value in resumed.state_dict().items())
    run.close()

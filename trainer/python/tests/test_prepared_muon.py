"""Muon in prepared models: matrices by its rule, all else by AdamW, against `torch.optim.Muon` and `torch.optim.AdamW`."""

import json
import pathlib
import signal

import pytest
import torch
from torch import nn

import forks
import offloadd
from offloadd._config import settings_of
from offloadd._muon import MuonWithAdamW, block_matrices
from offloadd._schedules import optimizer_of, schedule_of
from ranks import on_ranks
from test_muon import bytes_of, clip_in_double, interrupt, same, values
from test_runs import PROGRAM, config, needs_daemon

HERE = pathlib.Path(__file__).resolve().parent
STEPS = 6


class Layer(nn.Module):
    """Tall, wide and square matrices, one of which lies in memory by its columns, and what is no matrix. Gradients depend on no weight: a direction in bf16
    magnifies the last bit of one."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.mix, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 23, bias=False), nn.Linear(23, 8)
        self.square, self.places = nn.Linear(16, 16, bias=False), nn.Embedding(4, 6)
        self.conv, self.experts = nn.Conv2d(2, 3, 2), nn.Parameter(torch.randn(3, 4, 5))
        self.up.weight = nn.Parameter(self.up.weight.detach().T.contiguous().T)

    def forward(self, x, seed):
        generator = torch.Generator().manual_seed(seed)
        for number, param in enumerate(self.parameters()):
            factor = torch.randn(param.shape, generator=generator).to(param.dtype) * 10.0 ** (number % 4 - 2)
            x = x + (param * factor).sum()
        return x


class Model(nn.Module):
    """More blocks than buffers; an embedding and a head that are one."""

    def __init__(self, layers=5):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(7, 8), nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(8, 7)
        self.head.weight = self.embed.weight

    def forward(self, seed, skip=()):
        x = self.embed.weight.sum() * 0.01 + self.head(torch.full((1, 8), 0.1, dtype=self.head.weight.dtype)).sum()
        for number, layer in enumerate(self.layers):
            x = layer(x, 10 * seed + number) if number not in skip else x
        return x


def model_of(dtype=torch.float32, layers=5):
    torch.manual_seed(0)
    return Model(layers).to(dtype)


MATRICES = ("up.weight", "mix.weight", "down.weight", "square.weight")


def parts(model):
    """Matrices of blocks, and all else."""
    named = list(model.named_parameters())
    is_matrix = lambda name: name.startswith("layers") and name.endswith(MATRICES)
    return [param for name, param in named if is_matrix(name)], [param for name, param in named if not is_matrix(name)]


OTHER = {"lr": 5e-3, "momentum": 0.8, "nesterov": False, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}


def ours(model):
    """One optimizer whose groups say it."""
    matrices, rest = parts(model)
    return offloadd.optim.Muon(
        [{"params": rest, "use_muon": False, "lr": 1e-2, "weight_decay": 0.2}, {"params": matrices[::2]}, {"params": matrices[1::2], **OTHER}], lr=2e-2
    )


def theirs(model):
    matrices, rest = parts(model)
    return [torch.optim.Muon([{"params": matrices[::2]}, {"params": matrices[1::2], **OTHER}], lr=2e-2), torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.2)]


def train(model, optimizers, steps, micro_batches=1, clip=None):
    """Some blocks get no gradient in some steps."""
    for step in steps:
        for micro_batch in range(micro_batches):
            skip = (1,) if step % 3 == 2 else ()
            (model(100 * step + micro_batch, skip) / micro_batches).backward()
        if clip is not None:
            clip(list(model.parameters()), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


def prepared(model, optimizer, device, dir, clip=0.0, **own):
    dir.mkdir(exist_ok=True)
    settings = {**config(device, dir, **own), "gradient_clipping": clip}
    if device == "beside":
        settings["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    return offloadd.prepare(model, optimizer, settings, run_dir=dir / "run")


def close(one, other, atol=1e-6):
    torch.testing.assert_close(other, one, rtol=1e-6, atol=atol)


@pytest.mark.parametrize(
    "make", [ours, lambda model: torch.optim.Muon([{"params": parts(model)[0][::2]}, {"params": parts(model)[0][1::2], **OTHER}], lr=2e-2)]
)
@pytest.mark.parametrize("micro_batches, clip", [(1, 0.0), (2, 0.5)])
def test_steps_are_those_of_the_optimizers_in_pytorch(tmp_path, make, micro_batches, clip):
    plain, model = model_of(), model_of()
    optimizer = make(model)
    whole = theirs(plain)[: 2 if make is ours else 1]
    train(plain, whole, range(STEPS), micro_batches, clip_in_double if clip else None)
    with prepared(model, optimizer, "cpu", tmp_path / "run", clip):
        train(model, [optimizer], range(STEPS), micro_batches)
        for one, other in zip(values(plain), values(model)):
            close(one, other)
        expected = {id(mine): (whole[0].state.get(param) or whole[-1].state.get(param)) for param, mine in zip(plain.parameters(), model.parameters())}
        for param, state in optimizer.state.items():
            for name, value in expected[id(param)].items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
        assert len(optimizer.state) == sum(one is not None and len(one) > 0 for one in expected.values())
    # A plain optimizer afterwards.
    train(plain, whole, range(STEPS, STEPS + 2))
    train(model, [optimizer], range(STEPS, STEPS + 2))
    for one, other in zip(values(plain), values(model)):
        close(one, other, 2e-6)


CONFIG = {
    "optimizer": {"type": "Muon", "params": {"muon_lr": 2e-2, "adam_lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "betas": [0.8, 0.99], "ns_steps": 4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 4, "warmup_type": "linear"}},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
}


def test_a_configuration_of_deepspeed_makes_both(tmp_path):
    """What each kind of parameter is updated by, with a schedule that keeps the ratio of the rates."""
    plain, model = model_of(), model_of()
    assert block_matrices(model, None) == {id(param) for param in parts(model)[0]}
    shared = model_of()
    shared.layers[1].mix.weight = shared.layers[0].mix.weight
    assert block_matrices(shared, None) == {id(param) for param in parts(shared)[0]} - {id(shared.layers[0].mix.weight)}
    matrices, rest = parts(plain)
    own = {"betas": (0.8, 0.99), "weight_decay": 0.1}
    optimizers = [torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1, momentum=0.9, ns_steps=4), torch.optim.AdamW(rest, lr=1e-2, **own)]
    # As torch.optim takes them.
    groups = [{"params": model.head.weight}, {"params": [model.head.bias]}, {"params": model.layers.parameters()}]
    engine, optimizer, _, _ = offloadd.initialize(
        model=model, model_parameters=groups, config={**config("cpu", tmp_path), **CONFIG, "offloadd": {"program": PROGRAM}}, run_dir=tmp_path / "run"
    )
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False, False, False]
    assert all(len(group["params"]) for group in optimizer.param_groups)
    rates = []
    for step in range(STEPS):
        rates.append([group["lr"] for group in optimizer.param_groups])
        for one, rate in zip(optimizers, rates[-1]):
            one.param_groups[0]["lr"] = rate
            one.zero_grad()
        plain(step).backward()
        engine.backward(model(step))
        for one in optimizers:
            one.step()
        engine.step()
    for one, other in zip(values(plain), values(model)):
        close(one, other)
    assert rates[0] < rates[2] < rates[-1] == [2e-2, 1e-2, 1e-2, 1e-2]
    engine.run.close()


def rates_of(settings, optimizer):
    """The rates of the groups after each of six steps of a new schedule."""
    schedule, rates = schedule_of(settings, optimizer), []
    for _ in range(6):
        optimizer.step()
        schedule.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def test_a_configured_schedule_keeps_the_ratio_of_the_rates_of_a_scripts_groups():
    model = model_of()
    optimizer, settings = ours(model), settings_of({"scheduler": CONFIG["scheduler"]})
    # The second one finds rates that the first one has brought to 0.
    for _ in range(2):
        rates = rates_of(settings, optimizer)
        assert rates[0] < rates[2] < rates[-1] == pytest.approx([1e-2, 2e-2, 5e-3])
        for group in optimizer.param_groups:
            group["lr"] = 0.0


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_configured_schedule_that_follows_another_begins_with_the_same_rate(kind):
    model = model_of()
    settings = settings_of({"scheduler": {"type": kind, "params": {"total_num_steps": 4, "warmup_num_steps": 2}}})
    for optimizer in ours(model), torch.optim.AdamW(model.parameters(), lr=1e-2):
        first, second = rates_of(settings, optimizer), rates_of(settings, optimizer)
        assert first == second and max(second)[0] == pytest.approx(1e-2)


@pytest.mark.parametrize(
    "more, expected",
    [
        ({"lr": 5e-3}, [(5e-3, True), (2e-2, True), (5e-3, False), (1e-2, False)]),
        ({"use_muon": False}, [(2e-2, True), (1e-2, False), (1e-2, False)]),
        ({"use_muon": False, "lr": 5e-3}, [(2e-2, True), (5e-3, False), (1e-2, False)]),
        ({"weight_decay": 0.5}, [(2e-2, True), (2e-2, True), (1e-2, False), (1e-2, False)]),
    ],
)
def test_what_a_group_says_of_itself_stays_with_a_configured_muon(more, expected):
    model = model_of()
    first, *others = model.layers
    groups = [{"params": first.parameters(), **more}, {"params": [*nn.ModuleList(others).parameters(), *model.head.parameters()]}]
    optimizer = optimizer_of(settings_of({"optimizer": CONFIG["optimizer"]}), model, groups)
    assert [(group["lr"], group["use_muon"]) for group in optimizer.param_groups] == expected
    assert sum(group["weight_decay"] == 0.5 for group in optimizer.param_groups) == 2 * ("weight_decay" in more)
    assert len({id(param) for group in optimizer.param_groups for param in group["params"]}) == len(list(model.parameters()))


def test_clipping_for_an_optimizer_alone_is_refused_by_name(tmp_path):
    model = model_of()
    optimizer = ours(model)
    with prepared(model, optimizer, "cpu", tmp_path / "run"):
        model(0).backward()
        for given in (optimizer, model.parameters()):
            with pytest.raises(offloadd.NotSupported, match="is in no optimizer of offloadd.optim: call torch.nn.utils.clip_grad_norm_"):
                offloadd.optim.clip_grad_norm_(given, 1.0)


def test_a_step_that_overflows_is_skipped(tmp_path):
    model = model_of()
    given = {**config("cpu", tmp_path), **CONFIG, "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}, "offloadd": {"program": PROGRAM}}
    engine, optimizer, _, _ = offloadd.initialize(model=model, config=given, run_dir=tmp_path / "run")
    for step in range(3):
        before = [*values(model), *(value.clone() for state in optimizer.state_dict()["state"].values() for value in state.values())]
        engine.backward(model(step).float() * (float("inf") if step == 1 else 1.0))
        engine.step()
        after = [*values(model), *(value.clone() for state in optimizer.state_dict()["state"].values() for value in state.values())]
        assert engine.was_step_applied() == (step != 1) == (len(before) != len(after) or not same(before, after))
    engine.run.close()


def test_a_model_without_blocks_has_no_matrices_for_muon(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    given = {**config("cpu", tmp_path), **CONFIG, "offloadd": {"program": PROGRAM}}
    with pytest.raises(offloadd.Error, match="for the matrices of blocks, and the model has none that is trained: name its blocks in offloadd.units"):
        offloadd.initialize(model=model, config=given, run_dir=tmp_path / "run")


@needs_daemon
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wherever_the_state_lies_the_bits_are_the_same(tmp_path, dtype):
    found = []
    for name, device, own in [
        ("memory", "none", {}),
        ("host memory, updates at once", "cpu", {"optimizer_step": "immediate"}),
        ("host memory, parameters with the model", "beside", {}),
        ("drive", "nvme", {}),
        ("drive, half of it in memory", "nvme", {"resident_fraction": 0.5, "commit_every": 3}),
    ]:
        model = model_of(dtype)
        optimizer = ours(model)
        with prepared(model, optimizer, device, tmp_path / name.replace(" ", ""), **own) as run:
            train(model, [optimizer], range(STEPS), 2, torch.nn.utils.clip_grad_norm_)
            found.append(values(model))
            assert all(unit.muon == all(param.dim() == 2 for param in unit.params) for unit in run.engine.gathering.units[:-1])
        assert same(found[0], found[-1]), name


def of_ranks(rank, ranks, dir):
    model = model_of()
    optimizer = ours(model)
    with prepared(model, optimizer, "nvme", dir) as run:
        # All ranks see the same batch, so their gradients are those of one.
        train(model, [optimizer], range(run.steps_done, STEPS), 1, torch.nn.utils.clip_grad_norm_)
        state = optimizer.state_dict()["state"]
        return values(model), [value.clone() for one in state.values() for value in one.values()]


@needs_daemon
def test_two_ranks_make_the_steps_of_one(tmp_path):
    expected = of_ranks(0, 1, tmp_path / "one")
    for found in on_ranks(2, tmp_path / "store", of_ranks, tmp_path / "two"):
        for ones, others in zip(expected, found, strict=True):
            for one, other in zip(ones, others, strict=True):
                close(one, other)


@needs_daemon
def test_a_script_that_is_killed_resumes_with_the_same_bits(tmp_path):
    def script(name, kill=None):
        process = forks.start(HERE / "scripts" / "prepared_muon.py", tmp_path / name, json.dumps({"kill": kill}))
        out, errors = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), errors
        return out.splitlines(), process.returncode != 0

    whole, _ = script("whole")
    lines = {}
    for kill in ([2, None], [3, "update_revised"], [4, "write_gradients"], [5, "finish"]):
        found, killed = script("killed", kill)
        assert killed and found, kill
        lines.update(dict.fromkeys(found))
    found, killed = script("killed")
    assert not killed and list(dict.fromkeys([*lines, *found])) == whole


@needs_daemon
def test_a_checkpoint_is_loaded(tmp_path):
    model = model_of(torch.bfloat16)
    optimizer = ours(model)
    with prepared(model, optimizer, "nvme", tmp_path / "one") as run:
        train(model, [optimizer], range(3))
        run.save_checkpoint(tmp_path / "saved")
        state = bytes_of(optimizer.state_dict())
        train(model, [optimizer], range(3, STEPS))
        expected = values(model)
        run.load_checkpoint(tmp_path / "saved")
        train(model, [optimizer], range(3, STEPS))
        assert same(values(model), expected)
        run.load_checkpoint(tmp_path / "saved")
        weights = model.state_dict()
        other = model_of(torch.bfloat16)
        loaded = ours(other)
        with prepared(other, loaded, "cpu", tmp_path / "other"):
            other.load_state_dict(weights)
            loaded.load_state_dict(state)
            train(other, [loaded], range(3, STEPS))
            assert same(values(other), expected)
    model = model_of(torch.bfloat16)
    plain = torch.optim.AdamW(model.parameters())
    with prepared(model, plain, "cpu", tmp_path / "adamw") as run, pytest.raises(offloadd.LayoutChanged):
        run.load_checkpoint(tmp_path / "saved")


@needs_daemon
def test_another_division_of_the_parameters_is_refused(tmp_path):
    model = model_of()
    with prepared(model, ours(model), "nvme", tmp_path / "run"):
        pass
    for make in (lambda model: torch.optim.AdamW(model.parameters()), lambda model: MuonWithAdamW(parts(model)[0][1:])):
        model = model_of()
        with pytest.raises(offloadd.LayoutChanged, match="it was begun with layers.0.up.weight .* by Muon|it was begun with layers.0"):
            prepared(model, make(model), "nvme", tmp_path / "run")


def test_an_interrupt_waits_for_the_end_of_a_step(tmp_path, monkeypatch):
    found = []
    for at in (None, 1, 7):
        model = model_of()
        optimizer = ours(model)
        with monkeypatch.context() as patch, prepared(model, optimizer, "cpu", tmp_path / f"at-{at}") as run:
            calls = interrupt(patch, at)
            for step in range(3):
                model(step).backward()
                try:
                    optimizer.step()
                    assert step or at is None
                except KeyboardInterrupt:
                    assert step == 0
                optimizer.zero_grad()
                assert run.steps_done == step + 1
            found.append(values(model))
        assert same(found[0], found[-1]) and len(calls) > 9


@needs_daemon
def test_a_step_that_fails_among_directions_commits_nothing(tmp_path, monkeypatch):
    model = model_of()
    optimizer = ours(model)
    run = prepared(model, optimizer, "nvme", tmp_path / "run")
    train(model, [optimizer], range(2))
    run.drain()
    expected = values(model)
    calls, orthogonal = [], offloadd._directions._muon.orthogonal

    def fails(*args):
        calls.append(None)
        if len(calls) == 7:
            raise torch.OutOfMemoryError("no memory for a direction")
        return orthogonal(*args)

    with monkeypatch.context() as patch:
        patch.setattr(offloadd._directions._muon, "orthogonal", fails)
        model(2).backward()
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    for call in (optimizer.zero_grad, run.drain, optimizer.step):
        with pytest.raises(offloadd.Error, match="a step that changed optimizer state was not finished: start again, which resumes after the last commit"):
            call()
    with pytest.raises(offloadd.Error):
        run.close()
    model = model_of()
    optimizer = ours(model)
    with prepared(model, optimizer, "nvme", tmp_path / "run") as run:
        assert run.steps_done == 2 and same(values(model), expected)


REFUSED = {
    "what is no matrix": (lambda m: _with_group(MuonWithAdamW(parts(m)[0]), list(m.layers[0].conv.parameters())[:1]), "layers.0.conv.weight has the shape"),
    "experts": (lambda m: _with_group(MuonWithAdamW(parts(m)[0]), [m.layers[0].experts]), r"experts has the shape \(3, 4, 5\), and Muon updates matrices"),
    "two optimizers": (
        lambda m: theirs(m),
        "2 optimizers: a run has one; put all parameters into its groups, for Muon and AdamW into those of offloadd.optim.Muon",
    ),
    "a directory": (lambda m: offloadd.optim.Muon(parts(m)[0], overlap_backward=True), "with overlap_backward of an optimizer of offloadd.optim"),
    "bf16 moments": (lambda m: ours(m), 'moments = "bf16" with Muon, whose momentum and masters lie in fp32'),
    "another adjustment": (lambda m: _changed(ours(m), adjust_lr_fn="square"), "adjust_lr_fn='square'"),
}


def _with_group(optimizer, params):
    optimizer.add_param_group({"params": params})
    return optimizer


def _changed(optimizer, **more):
    optimizer.param_groups[1].update(more)
    return optimizer


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(tmp_path, what):
    make, message = REFUSED[what]
    model = model_of()
    own = {"moments": "bf16"} if what == "bf16 moments" else {}
    before = values(model)
    with pytest.raises(offloadd.NotSupported, match=message):
        optimizer = make(model)
        prepared(model, optimizer, "cpu", tmp_path / "run", **own)
        model(0).backward()
        optimizer.step()
    if what != "another adjustment":
        assert same(values(model), before)


def test_a_matrix_keeps_the_rule_that_it_began_with(tmp_path):
    model = model_of()
    optimizer = ours(model)
    with prepared(model, optimizer, "cpu", tmp_path / "run"):
        model(0).backward()
        optimizer.param_groups[1]["use_muon"] = False
        with pytest.raises(offloadd.NotSupported, match="layers.0.up.weight is in a group that is updated by AdamW now, and Muon has"):
            optimizer.step()
        optimizer.param_groups[1]["use_muon"] = True
        optimizer.step()
        state = optimizer.state_dict()
        del state["param_groups"][0]["use_muon"]
        with pytest.raises(offloadd.NotSupported, match="group 0 of the optimizer's state is updated by Muon, and this optimizer's by AdamW"):
            optimizer.load_state_dict(state)


def test_lora_and_frozen_parameters(tmp_path):
    """Only the two matrices of an adapter are trained."""

    def made():
        torch.manual_seed(1)
        model = nn.Module()
        model.layers = nn.ModuleList(
            nn.ModuleDict({"base": nn.Linear(8, 8), "a": nn.Linear(8, 2, bias=False), "b": nn.Linear(2, 8, bias=False)}) for _ in range(4)
        )
        for layer in model.layers:
            layer["base"].requires_grad_(False)
        return model

    def loss_of(model, seed):
        generator = torch.Generator().manual_seed(seed)
        return sum((param * torch.randn(param.shape, generator=generator)).sum() for param in model.parameters() if param.requires_grad)

    plain, model = made(), made()
    trained = [param for param in plain.parameters() if param.requires_grad]
    expected = torch.optim.Muon(trained, lr=2e-2)
    optimizer = torch.optim.Muon([param for param in model.parameters() if param.requires_grad], lr=2e-2)
    model.forward, plain.forward = (lambda seed: loss_of(model, seed)), (lambda seed: loss_of(plain, seed))
    with prepared(model, optimizer, "cpu", tmp_path / "run"):
        for step in range(3):
            plain.forward(step).backward()
            model(step).backward()
            expected.step(), optimizer.step()
            expected.zero_grad(), optimizer.zero_grad()
        for one, other in zip(values(plain), values(model)):
            close(one, other)


def test_the_snippet_of_the_page_trains(tmp_path):
    # It imports transformers, which the scripts that import this file do without.
    from test_only_optimizer_ranks import llama, loader

    page = (HERE.parents[2] / "docs" / "pytorch.md").read_text().partition("\n## Muon\n")[2]
    code, configured = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "json"))
    code = code.replace('"ds_config.json"', "given").replace("runs/muon", str(tmp_path / "run"))
    given = {**config("cpu", tmp_path), "offloadd": {"program": PROGRAM}}
    names = {"model": llama(), "given": given}
    exec(compile(code, "the snippet", "exec"), names)
    matrices = block_matrices(names["model"], None)
    assert [group["use_muon"] for group in names["optimizer"].param_groups[1:]] == [False]
    assert {id(param) for param in names["optimizer"].param_groups[0]["params"]} == matrices
    names["run"].close()
    engine, *_ = offloadd.initialize(model=llama(), config={**given, **json.loads(configured)}, run_dir=tmp_path / "configured")
    for batch in loader()[:2]:
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.run.close()

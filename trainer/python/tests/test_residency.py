"""Units that stay in memory when they are released: the bits of those that come each time, fewer of which come, and as many as have room."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import offloadd
from offloadd import _opening, _residency, _whole, _zero
from offloadd._config import settings_of
from offloadd._console import bytes_text
from offloadd._memory import GpuBytes, GpuMemory, HostMemory
from ranks import on_ranks
from test_engine import WRITES, adapted, frozen_block, pair
from test_runs import config, needs_daemon
from toy import Net, Offloaded, SimulatedGpu, let_stay, randomize, same_gradients

HOW = dict(max_new_tokens=5, do_sample=False)
FRACTIONS = (0, 0.5, 1)


@pytest.fixture(autouse=True)
def all_poisoned(poisoned):
    """In every test of this file."""


def of_their_own(make):
    """Models none of whose blocks uses another one's weight, so that each unit comes once in a forward."""

    def made():
        model = make()
        for block in model.blocks:
            block.other = [None]
        return model

    return made


def half_frozen():
    net = Net(10)
    net.blocks[:5].requires_grad_(False)
    return net


MODELS = {"trained": of_their_own(Net), "frozen block": of_their_own(frozen_block), "adapters": of_their_own(adapted)}
# With more blocks than come ahead.
LARGER = of_their_own(half_frozen)


def count_gathers(core):
    """The times that each unit came since the last call."""
    came, core.done = [unit for gradients, unit in core.done if not gradients], []
    return came


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_frozen_units_that_stay_come_once_and_trained_ones_once_a_step(kind, checkpointing, micro_batches):
    for fraction in FRACTIONS:
        torch.manual_seed(0)
        plain = randomize(MODELS[kind]())
        torch.manual_seed(0)
        ours = Offloaded(randomize(MODELS[kind]()), resident=fraction)
        units, staying = ours.engine.gathering.units, [unit for unit in ours.engine.gathering.units if unit.resident]
        assert bool(staying) == bool(fraction) and (len(staying) < len(units) or fraction == 1)
        count_gathers(ours.core)
        for step in range(4):
            plain.zero_grad()
            for _ in range(micro_batches):
                batch = torch.randn(4, 8)
                for one in (plain, ours.model):
                    one(batch, checkpointing=checkpointing).backward()
                assert not ours.live()
            assert not same_gradients(plain, ours.take_gradients())
            came = count_gathers(ours.core)
            for unit in units:
                often = micro_batches * (1 if unit.root else 2)
                assert came.count(unit.index) == (often if unit not in staying else int(unit.trained or step == 0)), (unit, step, fraction)
            residency = ours.engine.residency
            planned = residency.levels.bus_bytes(residency.level, lambda unit: micro_batches * (1 if unit.root else 2))
            assert step == 0 or sum(units[index].bytes for index in came) == planned
        kept = [unit for unit in units if unit.kept]
        assert kept == [unit for unit in staying if not unit.trained], "what is trained is stale after a step"


def test_an_order_with_units_that_stay_is_learned():
    plain, ours = pair(MODELS["trained"])
    ours.gpu = let_stay(ours.engine, 0.5)
    for _ in range(4):
        before = ours.core.announcements
        for _ in range(2):
            ours.model(torch.randn(4, 8)).backward()
        ours.take_gradients()
    # One for each of the two passes, with the units that are there in the second, and none for a deviation.
    assert ours.core.announcements - before == 2 and not ours.engine.gathering.order.deviations


def stays(make=MODELS["trained"], trains=True):
    """A model all of whose units stay, after a step."""
    ours = Offloaded(randomize(make()), trains=trains, resident=1)
    loss = ours.model(torch.randn(4, 8))
    if trains:
        loss.backward()
        ours.take_gradients()
    return ours


def test_a_unit_that_stays_is_released_to_the_script():
    ours = stays(MODELS["adapters"])
    block, core = ours.model.blocks[1], ours.core
    frozen, view = block.linear.base.weight, []
    unit = ours.engine.gathering.unit_of[id(frozen)]
    assert unit.kept and type(frozen).__name__ == "Released"
    count_gathers(core)
    expected = core.params[unit.index][: frozen.numel()]
    assert torch.equal(frozen.view(-1) * 1, expected) and unit.kept and not count_gathers(core)
    with pytest.raises(offloadd.NotSupported, match="blocks.1.linear.base.weight, whose values are in tiles"), torch.no_grad():
        frozen.mul_(2)
    handle = block.linear.base.register_forward_hook(lambda module, *_: view.append(module.weight.data))
    ours.model(torch.randn(4, 8)).backward()
    handle.remove()
    # Memory that a script has kept a view of is not its own any more.
    with pytest.raises(RuntimeError, match="is used after it was released"):
        view[0].mul_(2)
    ours.take_gradients()
    ours.engine.release()
    assert not any(unit.kept or unit.flat.untyped_storage().nbytes() for unit in ours.engine.gathering.units)
    assert torch.equal(frozen.view(-1) * 1, expected)


WRITES_TO_FROZEN = {**WRITES, "by numpy": lambda weight: weight.detach().numpy().fill(0)}


@pytest.mark.parametrize("write", WRITES_TO_FROZEN.values(), ids=WRITES_TO_FROZEN)
def test_a_write_to_a_unit_that_stays_is_named_and_does_not_stay(write):
    ours = stays(MODELS["adapters"])
    layer, batch = ours.model.blocks[1].linear.base, torch.randn(4, 8)
    expected = ours.model(batch)

    def before(module, args):
        with torch.no_grad():
            write(module.weight)

    handle = layer.register_forward_pre_hook(before)
    with pytest.raises(offloadd.NotSupported, match="blocks.1.linear.base.weight was changed in place|assigning .data of"):
        ours.model(batch)
    handle.remove()
    assert torch.equal(ours.model(batch), expected)


@pytest.mark.parametrize("wanted", [slice(None), slice(1, 3)])
@pytest.mark.parametrize("fraction", [0, 1])
def test_weights_that_stay_leave_the_headroom_that_is_asked_for(fraction, wanted):
    ours = Offloaded(randomize(MODELS["trained"]()), trains=False, resident=fraction)
    units, whole = ours.engine.gathering.units, _whole.Whole(ours.engine, None)
    whole._told = True
    size = sum(unit.bytes for unit in units) + 1000
    here = lambda: sum(unit.flat.untyped_storage().nbytes() for unit in units)
    whole._free_bytes = lambda: size - here()
    with torch.no_grad():
        ours.model(torch.randn(4, 8))
    kept, asked = here(), sum(unit.bytes for unit in units[wanted])
    for headroom in (1 << 60, size - asked + 1):
        assert not whole.has_room(units[wanted], headroom) and here() == kept
    assert whole.has_room(units[wanted], 1000) and here() == kept
    # The others go where they are in the way.
    assert whole.has_room(units[wanted], size - asked) and here() == (asked if fraction else 0)
    for unit in units:
        unit.here = True
    assert whole.has_room(units, 1 << 60)


@pytest.fixture
def runs(monkeypatch):
    """Those in which `GatheredParameters` finds parameters."""
    found = []
    monkeypatch.setattr(_zero, "_runs", found)
    return found


def change_unseen(weight):
    """Changes a weight below PyTorch, where no sum of bits is compared any more."""
    weight.detach().numpy()[...] += 1


@pytest.mark.parametrize("where", ["between passes", "in a forward", "nested"])
def test_changes_that_are_lost_do_not_stay_on_the_gpu(runs, where):
    ours = stays(MODELS["adapters"], trains=False)
    gathering, batch = ours.engine.gathering, torch.randn(4, 8)
    runs.append(SimpleNamespace(engine=ours.engine, closed=False))
    weight = ours.model.blocks[1].linear.base.weight
    unit = gathering.unit_of[id(weight)]

    def change(*_):
        with _zero.GatheredParameters([weight]):
            change_unseen(weight)

    with torch.no_grad():
        for _ in range(5):
            expected = ours.model(batch)
        assert unit.kept and unit.watch._sums_left == 0
        if where == "in a forward":
            handle = ours.model.blocks[1].register_forward_hook(change)
            ours.model(batch)
            handle.remove()
        elif where == "nested":
            with _zero.GatheredParameters([weight]):
                change()
        else:
            change()
        count_gathers(ours.core)
        assert torch.equal(ours.model(batch), expected) and count_gathers(ours.core) == [unit.index]
        assert unit.kept


def change_on_rank(rank, count, dir):
    """What a frozen model makes on a rank before and after changes that are lost, by all ranks and by the one that saves."""
    model, batch, found = randomize(MODELS["trained"]()), torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), []
    with torch.no_grad(), offloadd.prepare(model, None, config("cpu", dir), run_dir=dir / "run") as run:
        _zero.remember(run)
        let_stay(run.engine, 1)
        weight = model.blocks[1].linear.weight

        def change(anyway=False):
            with _zero.GatheredParameters([weight]):
                if anyway or rank == 0:
                    change_unseen(weight)

        for act in [lambda: None] * 5 + [change, lambda: change(anyway=True), lambda: run.on_first(lambda: (change(), change()))]:
            act()
            found.append(model(batch))
        assert run.engine.gathering.unit_of[id(weight)].kept
    return found


@needs_daemon
def test_changes_that_are_lost_stay_on_no_rank(tmp_path):
    for found in on_ranks(2, tmp_path / "store", change_on_rank, tmp_path):
        assert all(torch.equal(one, found[0]) for one in found)


# With the real core


class Runs:
    """The same training, with an engine in which a fraction of the units stays."""

    def __init__(self, dir, kind):
        self.dir, self.kind = dir, kind

    def results(self, name, device, fraction):
        torch.manual_seed(0)
        model = randomize(MODELS[self.kind]())
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        (self.dir / name).mkdir()
        with offloadd.prepare(model, optimizer, config(device, self.dir / name), run_dir=self.dir / name / "run") as run:
            if fraction != 0:
                let_stay(run.engine, fraction)
            found = self._train(model, optimizer, run)
            lines = [json.loads(line) for line in (self.dir / name / "run" / "metrics.jsonl").read_text().splitlines()]
            assert [line.get("gpu_resident_bytes", 0) for line in lines] == [0 if fraction is None else run.resident_bytes] + [run.resident_bytes] * 5
            assert self.kind == "frozen block" or fraction == 0 or any(unit.resident for unit in run.engine.gathering.units)
            run.close(keep=True)
        assert not any(unit.kept for unit in run.engine.gathering.units)
        return found + [value.clone() for value in model.state_dict().values()]

    @staticmethod
    def _train(model, optimizer, run):
        generator, found = torch.Generator().manual_seed(3), []
        for step in range(6):
            for _ in range(1 + step % 2):
                x = torch.randn(4, 8, generator=generator)
                loss = model(x, order=[3, 1, 2] if step == 3 else None, checkpointing=step == 4).square()
                loss.backward()
                found.append(loss.detach())
                with torch.no_grad():
                    found.append(model(x))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                found.append(model(x))
            if step == 1:
                trained = {name for name, param in model.named_parameters() if param.requires_grad}
                model.load_state_dict({name: value.clone() / 2 for name, value in model.state_dict().items() if name in trained}, strict=False)
            if step == 2:
                run.release()
                assert not any(unit.kept for unit in run.engine.gathering.units)
            if step == 4:
                with run.gathered(), torch.no_grad():
                    found.append(model(x))
        return found


@needs_daemon
@pytest.mark.parametrize("kind, device", [("trained", "cpu"), ("adapters", "nvme")])
def test_training_has_the_same_bits_whatever_stays(tmp_path, kind, device):
    runs = Runs(tmp_path, kind)
    expected = runs.results("0", device, 0)
    for fraction in (0.5, 1, None):
        found = runs.results(str(fraction), device, fraction)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), fraction


@needs_daemon
def test_a_model_that_nothing_trains_is_brought_once_for_all_tokens(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
    from test_untrained import llama, prompts

    expected, model = llama().generate(prompts(), **HOW), llama()
    with offloadd.prepare(model, None, config("cpu", tmp_path), run_dir=tmp_path / "run") as run:
        let_stay(run.engine, None)
        units = run.engine.gathering.units
        for passes in (2, 0):
            assert torch.equal(model.generate(prompts(), **HOW), expected)
            made = run.generation.last
            # The first pass shows what memory is used, and the second brings what stays.
            assert made.passes == HOW["max_new_tokens"] and made.part * made.passes == pytest.approx(passes)
            # Nothing bounds a pass for which nothing comes.
            assert ("bound" in made.line(run.generation.bound)) == (passes > 0)
        let_stay(run.engine, 0.5)
        assert torch.equal(model.generate(prompts(), **HOW), expected)
        come = sum(unit.bytes for unit in units if not unit.resident)
        assert 0 < come < run.generation.bound.bytes and run.generation.last.part == pytest.approx(come / run.generation.bound.bytes)


@needs_daemon
def test_a_run_ends_where_the_gpu_has_failed(tmp_path, monkeypatch):
    def failing(self, unit):
        raise RuntimeError("CUDA error: device-side assert triggered")

    for _ in range(2):
        model = randomize(MODELS["trained"]())
        run = offloadd.prepare(model, None, config("cpu", tmp_path), run_dir=tmp_path / "run")
        let_stay(run.engine, 1)
        with torch.no_grad():
            model(torch.randn(4, 8))
        assert any(unit.kept for unit in run.engine.gathering.units)
        with monkeypatch.context() as patch:
            patch.setattr(HostMemory, "release", failing)
            run.close(keep=False)


# As many as have room

MARGIN = 1000


@pytest.fixture
def margin(monkeypatch):
    """That of small models."""
    monkeypatch.setattr(_residency, "_MARGIN_BYTES", MARGIN)


class Auto:
    """A model in steps, each of which computes with `takes` bytes, on a GPU with `size` bytes."""

    def __init__(self, size=1 << 40, takes=500, trains=True, make=LARGER):
        self.ours = Offloaded(randomize(make()), trains=trains)
        self.gpu, self.residency, self.takes = let_stay(self.ours.engine, None, size), self.ours.engine.residency, takes
        self.levels = self.residency.levels
        self.seen = []
        self.ours.model.blocks[-1].register_forward_hook(lambda *_: (self.gpu.compute(self.takes), self.seen.append(self.residency.level)) and None)

    def step(self, rows=4):
        with torch.set_grad_enabled(self.ours.engine.gathering.trains):
            loss = self.ours.model(torch.randn(rows, 8))
        if loss.requires_grad:
            loss.backward()
            self.ours.take_gradients()
        return self.residency.level

    def cost(self, level):
        return self.levels.gpu_bytes(level) - self.levels.gpu_bytes(0)


def needed(**how):
    """What a model takes of a GPU in its first step."""
    one = Auto(**how)
    one.step()
    return one.gpu.used_max


@pytest.mark.parametrize("make", [LARGER, MODELS["adapters"]])
def test_the_highest_level_that_has_room_beside_a_step_is_taken_after_it(margin, make):
    how = dict(make=make)
    peak, levels = needed(**how), Auto(**how).levels
    for level in range(levels.highest + 1):
        size = peak + MARGIN + Auto(**how).cost(level)
        one = Auto(size, **how)
        assert one.residency.level == 0 and one.step() >= level and one.cost(one.residency.level) == one.cost(level)
        assert [unit for unit in one.levels.units if unit.resident] == sorted(one.levels.units_at(one.residency.level), key=lambda unit: unit.index)
        if one.cost(level):
            assert Auto(size - 1, **how).step() < level
    # What is in no block takes no memory in addition.
    assert Auto(peak + MARGIN, **how).step() == 1 and Auto(peak + MARGIN - 1, **how).step() == 0


def test_half_of_what_steps_compute_with_is_left_to_larger_ones(margin):
    takes = 100_000
    peak, units = needed(takes=takes), Auto().levels.gpu_bytes(0)
    # The script's own tensor is there before the first pass.
    left = (peak - SimulatedGpu.OWN_BYTES - units) // 2
    assert left > MARGIN
    assert Auto(peak + left, takes).step() == 1 and Auto(peak + left - 1, takes).step() == 0


def test_units_go_where_steps_take_more_and_do_not_come_back(margin):
    peak = needed()
    one = Auto(peak + MARGIN + Auto().cost(4))
    assert one.step() == 4
    expected = one.gpu.size - MARGIN
    # More than half of the margin is left at the highest moment that is expected.
    assert one.step() == 4
    highest = one.gpu.used_max
    one.takes += one.gpu.size - highest - MARGIN // 2
    assert [one.step(), one.step()] == [4, 4] and expected < one.gpu.used_max
    one.takes += 1
    assert one.step() == 4
    fallen = one.step()
    assert 0 < fallen < 4 and one.cost(4) - one.cost(fallen) >= MARGIN - MARGIN // 2
    one.takes = 0
    assert [one.step() for _ in range(3)] == [fallen] * 3


def test_a_peak_after_a_fall_is_seen_though_there_was_a_higher_one(margin):
    peak = needed()
    one = Auto(peak + MARGIN + Auto().cost(4))
    assert one.step() == 4
    one.takes += MARGIN
    one.step()
    before, fallen = one.gpu.used_max, one.step()
    assert 0 < fallen < 4
    one.takes += MARGIN // 4
    one.gpu.forget_peak()
    one.step()
    assert one.gpu.used_max < before
    # Another process takes so much that too little is left beside this peak, though not beside the one that was expected.
    one.gpu.size = one.gpu.used_max + MARGIN // 2 - 1
    assert one.step() < fallen


def test_a_run_that_measures_anew_leaves_others_what_they_have_not_noted_yet(margin):
    one, other = with_room(5, 10_000), Auto()
    other.gpu = other.residency._gpu = one.gpu
    one.gpu.units = one.levels.units + other.levels.units
    other.residency._baseline_bytes = 0
    one.step()
    one.gpu.compute(1 << 20)
    highest = one.gpu.used_max
    one.residency._measure_anew()
    assert other.residency._expected_peak_bytes == highest > one.gpu.used_max


def with_room(level, takes):
    """A model on a GPU on which one level has room."""
    peak = needed(takes=takes)
    units = Auto().levels.gpu_bytes(0)
    return Auto(peak + (peak - units) // 2 + Auto().cost(level), takes)


def test_units_go_before_a_forward_with_larger_inputs_and_come_back_as_far_as_there_is_room(margin):
    one = with_room(5, 10_000)
    assert one.step() == 5 and one.step() == 5
    one.seen.clear()
    assert one.step(rows=3) == 5 and one.seen == [5]
    # A step with ten times as many rows takes little more, as it turns out.
    one.takes += (one.cost(5) - one.cost(4)) // 2
    assert one.step(rows=40) == 4 and one.seen[1] == 0
    assert one.step(rows=40) == 4 and one.seen[2] == 4
    # Or all that is left, and more of the margin.
    one.takes = 14_000
    assert one.step(rows=80) == 0 == one.step(rows=4) and one.seen[3:] == [0, 0]


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    more: object = None


@pytest.mark.parametrize(
    "args, kwargs, numbers",
    [
        ([torch.ones(2, 3)], {"mask": torch.ones(4), "use_cache": True}, 10),
        ([[torch.ones(2), torch.ones(3)], (torch.ones(4), [None, torch.ones(5)])], {}, 14),
        ([{"image": [torch.ones(2)], "text": {"ids": torch.ones(3)}}], {"batch": Batch(torch.ones(4), [torch.ones(5)])}, 14),
        # A cache, and one of older versions of transformers.
        ([SimpleNamespace(keys=torch.ones(9))], {"past_key_values": ((torch.ones(9), torch.ones(9)),), "x": torch.ones(1)}, 1),
        (["text", 3, None, Batch], {}, 0),
    ],
)
def test_numbers_of_inputs_are_found_wherever_they_are(args, kwargs, numbers):
    assert _residency._numbers_in(args, kwargs) == numbers


def test_inputs_without_gradients_say_nothing_of_those_with_them(margin):
    one = with_room(5, 10_000)
    with torch.no_grad():
        one.ours.model(torch.randn(40, 8))
    assert one.step() == 5
    with torch.no_grad():
        one.ours.model(torch.randn(40, 8))
    assert one.step() == 5 and one.seen == [0, 0, 5, 5]
    # Larger than those with gradients before.
    one.step(rows=39)
    assert one.seen[-1] == 0


def test_nothing_stays_where_the_allocator_tells_nothing(margin):
    one = Auto()
    one.gpu.memory = lambda: GpuBytes(0, 0, 1 << 40)
    assert [one.step(), one.step()] == [0, 0]


def test_units_go_where_another_process_takes_memory(margin):
    peak = needed()
    one = Auto(peak + MARGIN + Auto().cost(4))
    assert one.step() == 4
    one.gpu.size -= MARGIN
    assert one.step() < 4


@pytest.mark.parametrize("level, steps", [(4, 0), (4, 3), (9, 0)])
def test_units_go_where_the_script_holds_more_between_passes(margin, level, steps):
    peak = needed()
    one = Auto(peak + MARGIN + Auto().cost(level))
    level = one.step()
    # A small part of the margin, which does not add up while it is held.
    one.gpu.own_bytes += MARGIN // 4
    assert [one.step() for _ in range(steps)] == [level] * steps
    one.gpu.own_bytes += MARGIN
    assert one.step() == one.seen[-1] < level
    one.gpu.forget_peak()
    one.step()
    assert one.gpu.used_max <= one.gpu.size - MARGIN // 2
    # As if nothing stayed.
    one.gpu.own_bytes += one.gpu.size
    assert one.step() == 0


def test_what_a_backward_needs_is_not_held_between_passes(margin):
    peak = needed()
    one = Auto(peak + 2 * MARGIN + Auto().cost(4))

    def step():
        # Two forwards, the first of which leaves something to its backward.
        losses = [one.ours.model(torch.randn(4, 8))]
        one.gpu.own_bytes += MARGIN
        losses.append(one.ours.model(torch.randn(4, 8)))
        sum(losses).backward()
        one.gpu.own_bytes -= MARGIN
        one.ours.take_gradients()
        return one.residency.level

    level = step()
    assert level >= 4 and [step(), step()] == [level] * 2


def test_memory_of_weights_that_a_script_has_gathered_is_left_out_of_account(margin):
    peak = needed()
    one = Auto(peak + MARGIN + Auto().cost(4))
    unit, gathering = one.levels.units[0], one.ours.engine.gathering

    def gathered():
        with gathering.pinned(unit):
            one.gpu.compute(one.gpu.size)
            with torch.no_grad():
                one.ours.model(torch.randn(400, 8))

    gathered()
    assert one.step() == 4
    gathered()
    assert [one.step(), one.step()] == [4, 4]


def test_models_on_one_gpu_choose_in_turn(margin):
    peak = needed()
    policy, reference = Auto(), Auto(trains=False)
    for one in (policy, reference):
        one.gpu.size = 2 * peak + 2 * MARGIN
        one.gpu.units = policy.levels.units + reference.levels.units
    reference.gpu = reference.residency._gpu = policy.gpu
    # A step of the policy is what takes memory: nobody knows it before.
    assert [reference.step(), reference.step(), reference.step()] == [0] * 3
    assert policy.step() > 0
    # What the policy takes with its level is not known yet.
    assert reference.step() == 0
    policy.step()
    # All of what stays counts, embedding and head too: the highest use is in the policy's backward.
    policy.gpu.size = policy.gpu.used_max + MARGIN + reference.levels.bytes(4) - 1
    assert reference.step() == 3
    reference.residency.close(), policy.residency.close()


def test_lines_say_what_stays_and_what_comes(margin, capfd):
    peak = needed(make=MODELS["adapters"])
    for size, what in (
        (1 << 40, "of weights stay on the GPU .offloadd.gpu_resident_fraction., and .* in place of .* come in a step: "),
        (peak, "no weights stay"),
    ):
        one = Auto(size, make=MODELS["adapters"])
        capfd.readouterr()
        one.step(), one.step(), one.step()
        (line,) = [line for line in capfd.readouterr().err.splitlines() if "GPU" in line]
        assert re.search(what, line), line
    units = one.levels.units
    often = lambda unit: 3 * (1 if unit.root else 2)
    assert one.levels.bus_bytes(0, often) == sum(unit.bytes * often(unit) for unit in units)
    assert one.levels.bus_bytes(one.levels.highest, often) == sum(unit.bytes for unit in units if unit.trained)


def test_half_of_the_blocks_that_stay_are_evenly_spaced():
    units = Offloaded(Net(8)).engine.gathering.units
    levels = Offloaded(Net(8)).engine.residency.levels
    numbers = lambda level: [unit.index for unit in levels.units_at(level) if not unit.root]
    assert numbers(5) == [1, 3, 5, 7] and numbers(3) == [3, 7] and len(units) == 9
    assert levels.nearest(0) == 0 and levels.nearest(1) == levels.highest == 9
    bytes_ = [levels.bytes(level) for level in range(10)]
    assert bytes_ == sorted(bytes_) and bytes_[-1] == levels.all_bytes


def test_a_fraction_without_effect_is_told(capfd, monkeypatch):
    engine = Offloaded(Net()).engine
    for keep, gpu, forbids, why in (
        (False, None, True, "the model computes on the processor"),
        (True, engine, True, "all parameters stay with the model"),
        # What a script has kept of a released weight could be written to.
        (False, engine, False, f"torch {torch.__version__} does not tell how to refuse access to memory of released weights (2.11 does)"),
    ):
        monkeypatch.setattr(_opening, "can_forbid", lambda: forbids)
        for own, told in (({"gpu_resident_fraction": 0.5}, f"offloadd: offloadd.gpu_resident_fraction = 0.5 has no effect: {why}\n"), ({}, "")):
            engine.gathering.keep, engine.residency = keep, None
            _opening.keep_units(engine, settings_of({"offloadd": own}), gpu, Path("run"))
            assert engine.residency is None and capfd.readouterr().err == told


def test_a_unit_without_room_names_the_key():
    units = Offloaded(Net()).engine.gathering.units

    class Full:
        stream = staticmethod(lambda: 0)

        def open(self, core):
            return self

        def allocate(self, storage, size):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    ranks = SimpleNamespace(meetings=SimpleNamespace(core=None, watched=lambda it: it))
    memory = GpuMemory(ranks, units, Full())
    with pytest.raises(torch.cuda.OutOfMemoryError, match="^CUDA out of memory$"):
        memory.expect(units[0])
    units[1].kept = True
    with pytest.raises(
        torch.cuda.OutOfMemoryError, match=r"out of memory. [0-9.]+ [KM]iB of weights stay .* no room for blocks.0: set offloadd.gpu_resident_fraction"
    ):
        memory.expect(units[0])


def test_a_full_gpu_is_told_with_what_stays_there(margin, capfd):
    one = Auto()
    index = one.gpu.index
    _residency._say_full(index, 1, 2, 3)
    assert not capfd.readouterr().err
    one.step()
    capfd.readouterr()
    _residency._say_full(index + 1, 1, 2, 3)
    assert not capfd.readouterr().err
    _residency._say_full(index, 1, 2, 3)
    assert (
        f"GPU {index} is full, and {bytes_text(one.residency.bytes)} of weights stay there: set offloadd.gpu_resident_fraction lower" in capfd.readouterr().err
    )


def train_on_rank(rank, count, dir, stay):
    """Levels, losses and weights of a rank, where as many units stay as have room on both ranks."""
    _residency._MARGIN_BYTES = MARGIN
    torch.manual_seed(0)
    model = randomize(LARGER())
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    generator, levels, losses = torch.Generator().manual_seed(rank), [], []
    with offloadd.prepare(model, optimizer, config("cpu", dir), run_dir=dir / "run") as run:
        gpu = let_stay(run.engine, None) if stay else None
        model.blocks[-1].register_forward_hook(lambda *_: gpu.compute(500) if stay else None)
        for step in range(5):
            for _ in range(2):
                losses.append(model(torch.randn(4, 8, generator=generator)).square())
                losses[-1].backward()
                with torch.no_grad():
                    losses.append(model(torch.randn(4, 8, generator=generator)))
            if stay and step == 0:
                # The second rank has less room.
                residency = run.engine.residency
                cost = residency.levels.gpu_bytes(5 - 2 * rank) - residency.levels.gpu_bytes(0)
                gpu.size = gpu.used_max + MARGIN + cost
            optimizer.step()
            optimizer.zero_grad()
            if stay and (rank, step) == (0, 2):
                gpu.size -= 2 * gpu.size
            levels.append(run.engine.residency.level if stay else 0)
        return levels, [loss.item() for loss in losses], {name: value.clone() for name, value in model.state_dict().items()}


@needs_daemon
def test_ranks_agree_on_what_stays_and_have_the_same_bits(tmp_path):
    plain, ours = (on_ranks(2, tmp_path / f"store-{stay}", train_on_rank, tmp_path / str(stay), stay) for stay in (False, True))
    for (_, losses, weights), (levels, our_losses, our_weights) in zip(plain, ours):
        assert levels == [3, 3, 3, 0, 0] and our_losses == losses
        assert all(torch.equal(our_weights[name], value) for name, value in weights.items())

"""Several ranks: the same result as one, whatever ends, and an answer whatever differs."""

import functools
import os
import pathlib
import signal
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import torch
import torch.distributed as dist
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-tools")
transformers.logging.set_verbosity_error()
# Imported once for all ranks.
GPT2, GPT2Config = transformers.GPT2LMHeadModel, transformers.GPT2Config

import offloadd  # noqa: E402
from offloadd import _meetings, _zero  # noqa: E402
from offloadd._board import Board  # noqa: E402
from ranks import on_ranks  # noqa: E402
from test_runs import config, needs_daemon  # noqa: E402

pytestmark = needs_daemon
BATCH, LENGTH = 4, 8


def gpt2():
    # Blocks of several tiles, so that every rank has some.
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 128, "vocab_size": 64, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def adamw(model):
    # With a small eps, AdamW makes whole steps of gradients that are rounding only.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def text(step):
    return torch.randint(0, 64, (8, BATCH, LENGTH), generator=torch.Generator().manual_seed(1))[step]


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def one_step(model, optimizer, batch):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), float(norm)


def train(rank, ranks, path, device, halves=True, dtype=torch.float32, **own):
    """Losses, norms, and the weights at the end, in memory and saved."""
    model = gpt2().to(dtype)
    optimizer = adamw(model)
    with offloadd.prepare(model, optimizer, config(device, path, **own), run_dir=path / "run"):
        steps = [one_step(model, optimizer, text(step).chunk(ranks)[rank] if halves else text(step)) for step in range(4)]
        model.save_pretrained(path / "saved")
        return (*zip(*steps), state(model))


def close(found, expected):
    """Whether all weights together are within 1e-6."""
    apart = sum(float((found[name] - value).double().square().sum()) for name, value in expected.items())
    return (apart / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5 < 1e-6


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


def test_two_ranks_with_half_a_batch_each_are_one_with_the_whole(tmp_path):
    losses, norms, weights = train(0, 1, tmp_path / "one", "none")
    first = None
    for device in ("none", "cpu", "nvme"):
        (tmp_path / device).mkdir()
        told = on_ranks(2, tmp_path / f"store-{device}", functools.partial(train, loss_chunks=3), tmp_path / device, device)
        (found, its_norms, ours), (others, same_norms, theirs) = told
        assert [(a + b) / 2 for a, b in zip(found, others)] == pytest.approx(losses, rel=1e-6), device
        assert its_norms == pytest.approx(norms, rel=1e-5) and its_norms == same_norms, device
        assert close(ours, weights) and equal(ours, theirs), device
        first = first or ours
        assert equal(ours, first), f"{device}: the same bits as with device none"
        assert equal(GPT2.from_pretrained(tmp_path / device / "saved").state_dict(), ours)


def test_ranks_with_equal_batches_have_the_bits_of_one(tmp_path):
    # Halves of equal gradients add up to them without rounding.
    rounded = {"master": "bf16", "moments": "bf16"}
    for dtype, own in ((torch.float32, {"moments": "8bit"}), (torch.bfloat16, {}), (torch.bfloat16, rounded)):
        path = tmp_path / f"{dtype}-{len(own)}"
        losses, _, weights = train(0, 1, path / "one", "none", False, dtype, **own)
        for found, _, ours in on_ranks(2, tmp_path / f"store-{dtype}-{len(own)}", functools.partial(train, **own), path, "cpu", False, dtype):
            assert found == losses and equal(ours, weights), (dtype, own)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def begin(rank, ranks, path):
    """Trains until all ranks are killed within the backward of the fifth step."""
    model = gpt2()
    optimizer = adamw(model)
    offloadd.prepare(model, optimizer, config("nvme", path), run_dir=path / "run")
    model.transformer.h[1].register_full_backward_hook(lambda *_: die() if number == 4 else None)
    for number in range(8):
        one_step(model, optimizer, text(number))


def resume(rank, ranks, path, steps):
    """The step it resumes after, and the weights there; then makes some steps."""
    model = gpt2()
    optimizer = adamw(model)
    with offloadd.prepare(model, optimizer, config("nvme", path), run_dir=path / "run") as run:
        done, found = run.steps_done, state(model)
        for number in range(done, done + steps):
            one_step(model, optimizer, text(number))
        return done, found


def test_a_run_resumes_on_another_number_of_ranks_with_the_same_bits(tmp_path):
    model = gpt2()
    optimizer, kept = adamw(model), {}
    with offloadd.prepare(model, optimizer, config("none", tmp_path), run_dir=tmp_path / "unbroken"):
        for number in range(8):
            kept[number] = state(model)
            one_step(model, optimizer, text(number))
    ended = on_ranks(2, tmp_path / "store", begin, tmp_path)
    assert [str(one) for one in ended] == ["-9", "-9"]
    expected = (3, 4)
    for count, steps in ((2, 1), (1, 1), (3, 0), (4, 1), (1, 0)):
        for done, found in on_ranks(count, tmp_path / f"store-{expected}-{count}", resume, tmp_path, steps):
            assert done in expected and equal(found, kept[done]), f"{count} ranks at step {done}"
        expected = (done + steps,)


def drop(rank, ranks, path, killed):
    """Losses by step, with dropout and an order of the data that are each rank's own."""
    model, losses = gpt2(), {}
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    optimizer = adamw(model)
    torch.manual_seed(10 + rank)
    loader = torch.utils.data.DataLoader(text(0).repeat(4, 1)[rank::ranks], batch_size=2, shuffle=True)
    with offloadd.prepare(model, optimizer, config("nvme", path), run_dir=path / "run") as run:
        for _ in range(2):
            for batch in run.batches(loader):
                losses[run.steps_done + 1], _ = one_step(model, optimizer, batch)
                if killed and run.steps_done == 6:
                    die()
    return losses


def test_each_rank_goes_on_with_its_own_random_numbers_and_data(tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = on_ranks(2, tmp_path / "store", drop, tmp_path / "whole", False)
    assert len(whole[0]) == 8 and whole[0] != whole[1]
    assert [str(one) for one in on_ranks(2, tmp_path / "store-cut", drop, tmp_path / "cut", True)] == ["-9", "-9"]
    for losses, expected in zip(on_ranks(2, tmp_path / "store-resumed", drop, tmp_path / "cut", False), whole):
        assert 2 <= len(losses) <= 3 and losses.items() <= expected.items()


def lose(rank, ranks, path, where):
    """The second rank dies in its third step, or the first one is elsewhere when it does."""
    _meetings._GRACE_S = 1.0
    model = gpt2()
    optimizer = adamw(model)
    with offloadd.prepare(model, optimizer, config("nvme", path), run_dir=path / "run"):
        dies = False
        model.transformer.h[1].register_forward_hook(lambda *_: die() if dies and where == "forward" else None)
        for number in range(8):
            dies = rank == 1 and number == 2
            if dies and where == "elsewhere":
                die()
            if where == "elsewhere" and (rank, number) == (0, 2):
                time.sleep(60)
            one_step(model, optimizer, text(number))
            if dies:
                die()


@pytest.mark.parametrize("where", ["forward", "step", "elsewhere"])
def test_a_dead_rank_ends_the_others_by_name_within_10_s(tmp_path, where, capfd):
    began = time.monotonic()
    first, second = on_ranks(2, tmp_path / "store", lose, tmp_path, where)
    assert time.monotonic() - began < 20
    assert str(second) == "-9"
    if where == "elsewhere":
        assert str(first) == "1" and "rank 0: rank 1 (process" in capfd.readouterr().err
    else:
        assert isinstance(first, offloadd.RankGone) and "rank 1 (process" in str(first), first


def threads(rank, ranks, path, destroys):
    """Threads of process groups before and after a run."""
    names = lambda: sorted(one.read_text() for one in pathlib.Path("/proc/self/task").glob("*/comm") if "gloo" in one.read_text())
    model, before = gpt2(), names()
    optimizer = adamw(model)
    with offloadd.prepare(model, optimizer, config("cpu", path), run_dir=path / "run"):
        one_step(model, optimizer, text(0))
        assert len(names()) > len(before)
        if destroys:
            dist.destroy_process_group()
    return len(before), len(names())


def test_a_run_leaves_no_thread_of_its_groups(tmp_path):
    for before, after in on_ranks(2, tmp_path / "store", threads, tmp_path, False):
        assert before == after
    for nodes in (1, 2):
        # The script ends the process group first. The store of several nodes stays until the run is closed.
        for before, after in on_ranks(2, tmp_path / f"store-{nodes}", threads, tmp_path, True, nodes=nodes):
            assert after == 0


def fail(rank, ranks, path):
    model = gpt2()
    optimizer = adamw(model)
    with offloadd.prepare(model, optimizer, config("cpu", path), run_dir=path / "run"):
        for number in range(3):
            one_step(model, optimizer, text(number))
            if (rank, number) == (0, 1):
                raise KeyError("a mistake")


def test_a_rank_that_fails_tells_the_others_why(tmp_path):
    first, second = on_ranks(2, tmp_path / "store", fail, tmp_path)
    assert isinstance(first, KeyError)
    assert isinstance(second, offloadd.RankGone) and "rank 0 has ended its run: KeyError: 'a mistake'" in str(second), second


def skip(rank, number, model):
    """A batch without a backward."""
    if (rank, number) == (1, 1):
        with torch.no_grad():
            model(input_ids=text(0))


def generate(rank, number, model):
    made = model.generate(text(0)[:, :2], max_new_tokens=3 + rank, min_new_tokens=3 + rank, do_sample=False)
    assert made.shape == (BATCH, 5 + rank)


def read_weight(rank, number, model):
    if rank == 0:
        model.lm_head.weight.sum().item()


def release_memory(rank, number, model):
    if rank == 0:
        model._offloadd_run.release()


def barrier(rank, number, model):
    if (rank, number) == (1, 1):
        dist.barrier()


def slow(rank, number, model):
    if (rank, number) == (1, 1):
        time.sleep(2.5)


def diverge(rank, ranks, path, what, steps=(3, 3)):
    _meetings._STUCK_S, _meetings._NOTE_S = 1.0, 0.1
    model = gpt2()
    optimizer = adamw(model)
    with offloadd.prepare(model, optimizer, config("cpu", path), run_dir=path / "run"):
        for number in range(steps[rank]):
            what(rank, number, model)
            one_step(model, optimizer, text(0))


def test_ranks_that_do_different_things_are_all_told_who_stands_where(tmp_path):
    for what, steps, words in (
        (skip, (3, 3), ('rank 0: "bring (root) (forward)"', 'rank 1: "bring (root) (forward without gradients)"')),
        (slow, (3, 2), ('rank 0: "bring (root) (forward)"', 'rank 1: "end the run"')),
        (release_memory, (3, 3), ('rank 0: "release memory"', 'rank 1: "bring (root) (forward)"')),
        (read_weight, (3, 3), ('rank 0: "bring (root) (outside of forward and backward)"', 'rank 1: "bring (root) (forward)"')),
    ):
        path = tmp_path / what.__name__
        for told in on_ranks(2, tmp_path / f"store-{what.__name__}", diverge, path, what, steps):
            assert isinstance(told, offloadd.OrderDiffers), f"{what}: {told}"
            assert all(word in str(told) for word in words), f"{what}: {told}"


def test_ranks_may_generate_texts_of_different_lengths(tmp_path):
    assert on_ranks(2, tmp_path / "store", diverge, tmp_path, generate) == [None, None]


def test_a_rank_that_waits_elsewhere_is_told_from_one_that_is_slow(tmp_path):
    assert on_ranks(2, tmp_path / "store-slow", diverge, tmp_path, slow) == [None, None]
    first, second = on_ranks(2, tmp_path / "store", diverge, tmp_path, barrier)
    assert isinstance(first, offloadd.OrderDiffers), first
    assert 'rank 0 waits at "commit step 1"' in str(first) and "test_ranks.py" in str(first) and "(barrier)" in str(first), first
    assert isinstance(second, Exception)


class Experts(nn.Module):
    """Experts of which each row takes one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x, chosen):
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            out[chosen == expert] = self.experts[expert](x[chosen == expert])
        return x + out


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(64, 1)

    def forward(self, x, chosen):
        for block in self.blocks:
            x = block(x, chosen)
        loss, rows = x.square().mean(), chosen > 0
        if rows.any():
            # Without such a row a rank has no gradient of what is in no block.
            loss = loss + self.head(x[rows]).square().sum() / len(rows)
        return loss


def route(rank, ranks, path):
    torch.manual_seed(0)
    model, inputs = Routed(), torch.randn(3, 4, 64)
    chosen = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2], [2, 2, 1, 1]])  # nobody takes the fourth
    optimizer = adamw(model)
    with offloadd.prepare(model, optimizer, config("cpu", path), run_dir=path / f"run-{ranks}"):
        for x, expert in zip(inputs, chosen):
            model(x.chunk(ranks)[rank], expert.chunk(ranks)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state(model)


def test_ranks_whose_rows_take_other_experts_are_one_rank(tmp_path):
    expected = route(0, 1, tmp_path)
    for found in on_ranks(2, tmp_path / "store", route, tmp_path):
        assert close(found, expected)


def load_on_the_first(rank, ranks):
    """As transformers loads weights with DeepSpeed's configuration: without an engine, and values on the first rank alone."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    alone = model[0].bias.detach().clone()
    with _zero.GatheredParameters([*model[1].parameters(), model[0].weight], modifier_rank=0):
        if rank == 0:
            model[0].weight.data.normal_()
            model[1].bias.data.normal_()
    assert torch.equal(model[0].bias, alone)
    return state(model)


def test_weights_loaded_on_the_first_rank_are_those_of_all_ranks(tmp_path):
    first, second = on_ranks(2, tmp_path / "store", load_on_the_first)
    same = [name for name in first if torch.equal(first[name], second[name])]
    assert same == ["0.weight", "1.weight", "1.bias"]


def close_after_a_write(rank, ranks, path):
    model = gpt2()
    run = offloadd.prepare(model, adamw(model), config("none", path), run_dir=path / "run")
    one_step(model, run.optimizer, text(0))
    trained = state(model)
    if rank == 1:
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight.mul_(0.5)
    said = ""
    try:
        run.close()
    except offloadd.NotSupported as error:
        said = str(error)
    return said, all(torch.equal(value, trained[name]) for name, value in state(model).items())


def test_a_write_on_one_rank_before_close_is_refused_there_and_all_have_the_committed_weights(tmp_path):
    first, second = on_ranks(2, tmp_path / "store", close_after_a_write, tmp_path)
    assert first == ("", True)
    assert "transformer.h.1.mlp.c_fc.weight was changed" in second[0] and second[1]


def other_dir(rank, ranks, path):
    model = nn.Linear(4, 4)
    offloadd.prepare(model, adamw(model), config("cpu", path), run_dir=path / f"run-{rank}")


def test_what_needs_the_same_settings_and_a_group_says_so(tmp_path, monkeypatch):
    for told in on_ranks(2, tmp_path / "store-dirs", other_dir, tmp_path):
        assert type(told) is offloadd.Error and "rank 1 has another model or other settings than rank 0" in str(told)
    model = nn.Linear(4, 4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(offloadd.Error, match=r"2 processes were started .* call torch.distributed.init_process_group\(\) before"):
        offloadd.prepare(model, adamw(model), config("cpu", tmp_path))


def late_look(rank, ranks, path):
    """The first rank looks for the second before that one comes, and goes on when it has come, failed and ended."""
    number, come, meeting = Board.number, Board.arrive, "compare models and settings"

    def number_of_ended(board, other):
        found = number(board, other)
        if rank == 0 and other == 1 and board.what(0, found + 1) == meeting:
            while not board.ended(1):
                time.sleep(0.01)
            time.sleep(2 * _meetings._LOOK_S)
        return found

    def arrive(board, own, it, what, data):
        while rank == 1 and what == meeting and number(board, 0) < it:
            time.sleep(0.01)
        time.sleep(0.05)
        come(board, own, it, what, data)

    Board.number, Board.arrive = number_of_ended, arrive
    other_dir(rank, ranks, path)


def test_a_rank_that_has_come_and_ended_is_not_taken_for_one_that_never_came(tmp_path):
    for told in on_ranks(2, tmp_path / "store", late_look, tmp_path):
        assert "rank 1 has another model or other settings than rank 0" in str(told)


def trainer(rank, ranks, path, killed=False):
    """Losses, the step it resumed after, and the weights at the end."""
    import offloadd.hf

    data = [{"input_ids": ids, "labels": ids} for ids in text(0).repeat(4, 1).roll(1, 1)]
    model = gpt2()
    args = transformers.TrainingArguments(
        str(path / "out"), per_device_train_batch_size=BATCH // ranks, num_train_epochs=2, learning_rate=1e-2, adam_epsilon=1e-3,
        eval_strategy="steps", eval_steps=2, save_steps=2, logging_steps=1, load_best_model_at_end=True, use_cpu=True, disable_tqdm=True,
        report_to=[], seed=5, max_grad_norm=0.5,
    )  # fmt: skip

    class Kill(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if killed and state.global_step == 5:
                die()

    it = transformers.Trainer(model, args, train_dataset=data, eval_dataset=data[:3], callbacks=[Kill()])
    run = offloadd.hf.attach(it, config("nvme", path))
    resumed = run.steps_done
    it.train(resume_from_checkpoint=True if resumed else None)
    assert os.path.exists(path / "out" / "checkpoint-8" / "model.safetensors")
    assert type(it.model) is GPT2 and it.model_wrapped is model
    return [log["loss"] for log in it.state.log_history if "loss" in log], resumed, state(model)


def test_the_trainer_on_two_ranks_is_one_with_the_whole_batch_and_resumes(tmp_path):
    for name in ("one", "two", "killed"):
        (tmp_path / name).mkdir()
    ((losses, _, weights),) = on_ranks(1, tmp_path / "store-one", trainer, tmp_path / "one")
    (first, _, found), (_, _, others) = on_ranks(2, tmp_path / "store-two", trainer, tmp_path / "two")
    assert len(losses) == 8 and first == pytest.approx(losses, abs=2e-4) and close(found, weights) and equal(found, others)
    ended = on_ranks(2, tmp_path / "store-killed", trainer, tmp_path / "killed", True)
    assert [str(one) for one in ended] == ["-9", "-9"]
    for losses, resumed, resumed_weights in on_ranks(2, tmp_path / "store-resumed", trainer, tmp_path / "killed"):
        assert resumed in (3, 4) and losses[-3:] == first[-3:] and equal(resumed_weights, found)


def accelerated(rank, ranks, path):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = gpt2()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(text(0).repeat(4, 1), batch_size=BATCH // ranks)
    with offloadd.prepare(model, optimizer, config("cpu", path), run_dir=path / f"run-{ranks}", track=[scheduler]):
        # Accelerate would step a scheduler once a rank.
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert type(model) is GPT2
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=batch, labels=batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        accelerator.unwrap_model(model).save_pretrained(
            path / f"saved-{ranks}", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
        )
        return state(model)


def test_accelerate_on_two_ranks_is_one_with_the_whole_batch(tmp_path):
    (expected,) = on_ranks(1, tmp_path / "store-one", accelerated, tmp_path)
    for found in on_ranks(2, tmp_path / "store-two", accelerated, tmp_path):
        assert close(found, expected)
    assert close(GPT2.from_pretrained(tmp_path / "saved-2").state_dict(), expected)


def initialized(rank, ranks, path, saves):
    """Weights at the checkpoint, of frozen blocks too, and after it was loaded."""
    settings = {**config("cpu", path), "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "train_batch_size": 4}
    model = gpt2()
    for param in model.transformer.h[0].parameters():
        param.requires_grad_(False)
    data = list(text(0).repeat(4, 1))
    engine, _, loader, _ = offloadd.initialize(model=model, config=settings, training_data=data, run_dir=path / f"run-{ranks}-{saves}")
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.world_size) == (4, 4 // ranks, ranks)
    assert (engine.global_rank, len(loader)) == (rank, 4)
    found = None
    for number, batch in enumerate(loader):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        if saves and number == 1:
            found = state(model)
            engine.save_checkpoint(path / "saved", client_state={"number": number})
    _, kept = engine.load_checkpoint(path / "saved")
    assert kept == {"number": 1} and engine.global_steps == 2
    engine.save_16bit_model(path, "weights.bin")
    engine.destroy()
    return found, {name: value.clone() for name, value in torch.load(path / "weights.bin").items()}


def test_a_checkpoint_of_two_ranks_is_loaded_by_any_number(tmp_path):
    (saved, loaded), (_, again) = on_ranks(2, tmp_path / "store", initialized, tmp_path, True)
    assert equal(saved, loaded) and equal(saved, again)
    for count in (1, 4):
        for _, loaded in on_ranks(count, tmp_path / f"store-{count}", initialized, tmp_path, False):
            assert equal(saved, loaded), count

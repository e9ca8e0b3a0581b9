"""Several nodes, of which each is a process or two of this machine: the bits of one node, whatever ends, and refusals by name."""

import ctypes
import os
import pathlib
import shutil
import signal
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import torch
from torch import nn

import offloadd  # noqa: E402
from offloadd import _checkpoint, _engine, _meetings, _nodes, _opening, _plan, _transfers  # noqa: E402
from offloadd._checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from cases import ALL_CASES  # noqa: E402
from ranks import on_ranks  # noqa: E402
from test_kills import daemons_of  # noqa: E402
from test_runs import config, needs_daemon  # noqa: E402
from toy import Block, randomize  # noqa: E402

pytestmark = needs_daemon
WIDTH = 512


def model_of():
    """Blocks of several tiles, so that every rank has some, and more of them than come to memory at once."""
    torch.manual_seed(0)
    return randomize(nn.Sequential(nn.Sequential(*(Block(WIDTH) for _ in range(6))), nn.Linear(WIDTH, 1)))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step, rank, ranks):
    return torch.randn(6, 4, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


def drives(path, rank):
    """The directory of a node with one rank, or of the last one."""
    own = path / f"drive-{rank if os.environ['LOCAL_RANK'] == '0' else rank - int(os.environ['LOCAL_RANK'])}"
    own.mkdir(parents=True, exist_ok=True)
    return own


def prepared(path, rank, device="nvme", resume=True, **own):
    model = model_of()
    optimizer = adamw(model)
    return model, optimizer, offloadd.prepare(model, optimizer, config(device, drives(path, rank), **own), run_dir=path / "run", resume=resume)


def one_step(model, optimizer, rank, ranks, number):
    loss = model(batch(number, rank, ranks)).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), float(norm)


def train(rank, ranks, path, device, **own):
    """Losses, norms, and the weights at the end."""
    model, optimizer, run = prepared(path, rank, device, **own)
    with run:
        return [one_step(model, optimizer, rank, ranks, number) for number in range(4)], state(model)


@pytest.mark.parametrize("device, ranks", [("nvme", 3), *([("nvme", 2), ("cpu", 2)] if ALL_CASES else [])])
def test_nodes_have_the_bits_of_one_node_with_as_many_ranks(tmp_path, device, ranks):
    found = {nodes: on_ranks(ranks, tmp_path / f"store-{nodes}", train, tmp_path / str(nodes), device, nodes=nodes) for nodes in (1, 2)}
    for (steps, weights), (expected, kept) in zip(found[2], found[1]):
        assert steps == expected and equal(weights, kept)
    assert (tmp_path / "2/run/nodes/1/layout.json").exists() and not (tmp_path / "2/run/nodes/0").exists()


def with_passes(rank, ranks, path, shard, hook=lambda rank: None):
    """Losses of steps of two passes with an evaluation after each, the weights, how many units were gathered from all ranks by then, and what
    the run said of the copies."""
    told, all_ranks = [], 0
    gather = torch.distributed.all_gather_into_tensor
    _opening.say = told.append

    def counted(whole, part, group=None):
        nonlocal all_ranks
        all_ranks += len(whole) == ranks * len(part)
        return gather(whole, part, group=group)

    _transfers.dist.all_gather_into_tensor = counted
    hook(rank)
    model, optimizer, run = prepared(path, rank, shard=shard)
    with run:
        losses = []
        for number in range(STEPS):
            for part in range(2):
                loss = model(batch(2 * number + part, rank, ranks)).square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(model(batch(100, rank, ranks)).square().mean().item())
        return losses, all_ranks, [line for line in told if "all parameters" in line or "divided over all nodes" in line], state(model)


STEPS, UNITS = 3, 7


@pytest.mark.parametrize("ranks", [3, 2] if ALL_CASES else [3])
def test_copies_of_nodes_change_no_bit_and_each_update_is_gathered_from_all_ranks_once(tmp_path, ranks):
    copies, without = (on_ranks(ranks, tmp_path / f"store-{shard}", with_passes, tmp_path / shard, shard, nodes=2) for shard in ("auto", "all"))
    for (losses, gathered, said, weights), (expected, more, _, kept) in zip(copies, without):
        assert losses == expected and equal(weights, kept)
        # The first step, and the evaluation after each.
        assert gathered == UNITS * (STEPS + 1) and more > 3 * gathered, (gathered, more)
    assert "each node keeps a copy of all parameters in host memory" in copies[0][2][0]
    assert "the parameters are divided over all nodes (offloadd.shard)" in without[0][2][0]


def keep_stale(rank):
    updated = _engine.Engine.updated

    def stale(engine):
        updated(engine)
        for unit in engine.gathering.units:
            unit.fresh = True

    _engine.Engine.updated = stale


def no_room(rank):
    if rank == 1:
        node_copy = _plan._offloadd.node_copy
        _plan._offloadd.node_copy = lambda *known: node_copy(*known[:-1], 0)


def test_stale_copies_give_other_losses_and_no_node_keeps_a_copy_if_one_has_no_room(tmp_path):
    copies, stale, without = (
        on_ranks(2, tmp_path / f"store-{number}", with_passes, tmp_path / str(number), "auto", *hook, nodes=2)[0]
        for number, hook in enumerate(([], [keep_stale], [no_room]))
    )
    assert copies[0][:2] == stale[0][:2] and copies[0] != stale[0]
    assert without[0] == copies[0] and without[1] > 3 * copies[1]
    assert "divided over all nodes (node 1: host memory has no room for a copy of all parameters on each node" in without[2][0]


def unbroken(rank, ranks, path):
    """The weights after each number of steps."""
    model, optimizer, run = prepared(path, rank)
    with run:
        kept = [state(model)]
        for number in range(7):
            one_step(model, optimizer, rank, ranks, number)
            kept.append(state(model))
        return kept


def broken(rank, ranks, path, victim, of, steps):
    """Resumes, makes some steps, and then the victim or the daemon of its node is killed within a backward. Returns the step it
    resumed after, the weights there, the error that ended it and the time from the kill to it."""
    _nodes._SILENT_S = 2.0
    model, optimizer, run = prepared(path, rank)
    done, found, began = run.steps_done, state(model), 0.0

    def kill(*_):
        nonlocal began
        if run.steps_done == done + steps:
            began = time.monotonic()
            if rank == victim:
                for pid in daemons_of(run.run_dir) if of == "daemon" else [os.getpid()]:
                    os.kill(pid, signal.SIGKILL)

    model[0][3].register_full_backward_hook(kill)
    try:
        with run:
            for number in range(done, 7):
                one_step(model, optimizer, rank, ranks, number)
    except offloadd.Error as error:
        return done, found, error, time.monotonic() - began
    return done, found, None, 0.0


def test_killed_ranks_and_daemons_end_all_nodes_by_name_and_repeat_at_most_one_step(tmp_path):
    kept = on_ranks(2, tmp_path / "store", unbroken, tmp_path / "unbroken", nodes=2)[0]
    expected = (0,)
    kills = ((1, "rank"), (0, "rank"), (1, "daemon"), (0, "daemon")) if ALL_CASES else ((1, "rank"), (0, "daemon"))
    kills = (*kills, (None, ""))
    for number, (victim, of) in enumerate(kills):
        told = on_ranks(2, tmp_path / f"store-{number}", broken, tmp_path / "broken", victim, of, 1, nodes=2)
        for rank, one in enumerate(told):
            if (rank, of) == (victim, "rank"):
                assert str(one) == "-9"
                continue
            done, found, error, seconds = one
            assert done in expected and equal(found, kept[done]), (number, rank, done, expected)
            if of == "":
                assert error is None
            elif rank == victim:
                assert isinstance(error, offloadd.DaemonGone), error
            else:
                assert isinstance(error, offloadd.RankGone) and f"rank {victim} " in str(error) and seconds < 10, (number, error, seconds)
        expected = (done, done + 1)


def hold(rank, ranks, path):
    """Two steps, before one of which each rank keeps the interpreter's lock longer than a silent rank is waited for: first the rank that the others
    ask, right after `prepare`. As on a busy machine, the thread that looks after other ranks has not run by then."""
    _nodes._ROUND_S, _nodes._SILENT_S = 0.1, 3.0
    watch = _meetings.Meetings._watch
    _meetings.Meetings._watch = lambda meetings: (time.sleep(1.0), watch(meetings))
    model, optimizer, run = prepared(path, rank, "cpu")
    with run:
        for number in range(2):
            if number == min(rank, 1):
                ctypes.PyDLL(None).usleep(4_500_000)
            one_step(model, optimizer, rank, ranks, number)
        return run.steps_done


def test_a_call_that_holds_the_interpreters_lock_is_no_failure(tmp_path):
    # The first node has two ranks.
    assert on_ranks(3, tmp_path / "store", hold, tmp_path, nodes=(2, 1)) == [2, 2, 2]


def lose(rank, ranks, path):
    _nodes._SILENT_S = 60.0
    model, optimizer, run = prepared(path, rank, "cpu")
    with run:
        for number in range(9):
            if (rank, number) == (2, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            one_step(model, optimizer, rank, ranks, number)


def test_a_rank_is_told_by_those_beside_it(tmp_path):
    *told, killed = on_ranks(3, tmp_path / "store", lose, tmp_path, nodes=2)
    assert str(killed) == "-9"
    for one in told:
        assert isinstance(one, offloadd.RankGone) and "rank 2 (process" in str(one), one


def resumed(rank, ranks, path, resume=True):
    """The step that it resumes after."""
    _, _, run = prepared(path, rank, resume=resume)
    with run:
        return run.steps_done


def test_what_does_not_belong_together_is_refused_by_name(tmp_path):
    on_ranks(2, tmp_path / "store", train, tmp_path, "nvme", nodes=2)
    first, second = tmp_path / "drive-0", tmp_path / "drive-1"
    ((tiles,), (others,)) = first.glob("*.tiles"), second.glob("*.tiles")
    assert others.name == f"{tiles.stem}-node1.tiles"
    starts = iter(range(100))

    def refused(words, ranks=2, nodes=2):
        told = on_ranks(ranks, tmp_path / f"store-{next(starts)}", resumed, tmp_path, nodes=nodes)
        assert all(isinstance(one, offloadd.Error) and any(word in str(one) for word in words) for one in told), told

    others.rename(tmp_path / "kept")
    refused(["node 1 lost generation 5, which node 0 confirmed; node 1 holds none"])
    others.unlink()
    shutil.copy(tiles, others)
    refused(["holds run run-", "rank 1 failed"])
    (tmp_path / "kept").rename(others)
    # The machines come in another order.
    first.rename(tmp_path / "drive"), second.rename(first), (tmp_path / "drive").rename(second)
    refused([f"node 0: {first / others.name} is the part of node 1", f"node 1: {second / tiles.name} is the part of node 0"])
    first.rename(tmp_path / "drive"), second.rename(first), (tmp_path / "drive").rename(second)
    refused(["state is divided over 2 node(s), and this start has 1", "rank 0 failed"], nodes=1)
    refused(["state is divided over 2 node(s), and this start has 3", "failed"], ranks=3, nodes=3)
    assert on_ranks(2, tmp_path / "store-end", resumed, tmp_path, nodes=2) == [4, 4]


def carry(rank, ranks, path, tag, of, steps):
    """Begins anew, loads the checkpoint `of`, makes steps, saves another one and returns the weights."""
    model, optimizer, run = prepared(path, rank, resume=False)
    with run:
        if of is not None:
            load_checkpoint(run.commits, path / "saved", of)
        for number in range(run.steps_done, run.steps_done + steps):
            one_step(model, optimizer, rank, ranks, number)
        found = state(model)
        save_checkpoint(run.commits, path / "saved", tag, {}, True)
        return run.steps_done, found


def test_a_checkpoint_is_resumed_by_any_number_of_nodes(tmp_path):
    def start(nodes, *args):
        (done, found), *others = on_ranks(nodes, tmp_path / f"store-{args[0]}", carry, tmp_path, *args, nodes=nodes)
        assert all(their_done == done and equal(weights, found) for their_done, weights in others)
        return done, found

    at_three = start(2, "a", None, 3)
    at_five = start(2, "b", "a", 2)
    for nodes, tag, of in ((1, "c", "a"), (3, "d", "c")):
        done, found = start(nodes, tag, of, 0)
        assert done == 3 and equal(found, at_three[1]), nodes
    done, found = start(2, "e", "d", 2)
    assert done == 5 and equal(found, at_five[1]), "moments too came through one and three nodes"


def test_a_checkpoints_directory_that_a_node_does_not_see_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_checkpoint, "_SEEN_S", 0.0)
    _checkpoint._check_shared(tmp_path)
    with pytest.raises(offloadd.Error, match=f"this node does not see {tmp_path}/tag.partial as the first node does"):
        _checkpoint._check_shared(tmp_path / "tag.partial/mark")


def diverge(rank, ranks, path, what):
    _meetings._STUCK_S, _meetings._NOTE_S, _nodes._ROUND_S = 1.0, 0.1, 0.1
    model, optimizer, run = prepared(path, rank, "cpu")
    with run:
        for number in range(3):
            if (rank, number) == (1, 1) and what == "reads":
                with torch.no_grad():
                    model(batch(0, 0, 1))
            if (rank, number) == (1, 1) and what == "waits":
                torch.distributed.barrier()
            one_step(model, optimizer, rank, ranks, number)


def test_nodes_whose_order_differs_are_told_who_stands_where(tmp_path):
    for told in on_ranks(2, tmp_path / "store-reads", diverge, tmp_path, "reads", nodes=2):
        assert isinstance(told, offloadd.OrderDiffers) and 'rank 0: "bring ' in str(told) and "(forward without gradients)" in str(told), told
    first, second = on_ranks(2, tmp_path / "store-waits", diverge, tmp_path, "waits", nodes=2)
    assert isinstance(first, offloadd.OrderDiffers), first
    assert 'rank 0 waits at "commit step 1"' in str(first) and "rank 1 has passed" in str(first) and "test_nodes.py" in str(first), first
    assert isinstance(second, Exception)

"""Nodes that share no directory, each of which keeps whole checkpoints (checkpoint.use_node_local_storage): any node may be lost.

A node is a process with a directory for checkpoints of its own.
"""

import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import torch

import offloadd  # noqa: E402
from offloadd import _checkpoint, _each_node, _meetings, _nodes, _transfers  # noqa: E402
from offloadd._checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from ranks import on_ranks  # noqa: E402
from test_nodes import adamw, drives, equal, model_of, one_step, state  # noqa: E402
from test_runs import config, needs_daemon  # noqa: E402

pytestmark = needs_daemon


@pytest.fixture(scope="session")
def mounts():
    """Skips tests whose nodes mount directories where that is not allowed."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("mounting needs root")


def mount(what, where, size=None):
    """Gives this process another directory under the path `where`: `what`, or an empty one with room for `size` bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private, bind = 0x20000, 0x44000, 0x1000
    where.mkdir(parents=True, exist_ok=True)
    given = [(b"none", b"/", None, private, None)]
    if size is None:
        what.mkdir(parents=True, exist_ok=True)
        given.append((os.fsencode(what), os.fsencode(where), None, bind, None))
    else:
        given.append((b"none", os.fsencode(where), b"tmpfs", 0, f"size={size}".encode()))
    assert libc.unshare(new_namespace) == 0, os.strerror(ctypes.get_errno())
    for one in given:
        assert libc.mount(one[0], one[1], one[2], ctypes.c_ulong(one[3]), one[4]) == 0, os.strerror(ctypes.get_errno())


def prepared(path, rank, on=True, device="cpu"):
    model = model_of()
    optimizer = adamw(model)
    settings = {**config(device, drives(path, rank)), "checkpoint": {"use_node_local_storage": on}}
    return model, optimizer, offloadd.prepare(model, optimizer, settings, run_dir=path / "run", resume=False)


def carry(rank, ranks, path, machines, tag, steps, of=None, hook=None):
    """Loads the checkpoint `of`, or the newest one, makes steps, saves another one unless `tag` is None. Returns the tag that was loaded,
    the steps done and the weights."""
    directory = path / f"machine-{machines[rank]}"
    model, optimizer, run = prepared(path, rank)
    if hook is not None:
        hook(rank, directory)
    with run:
        loaded, _ = load_checkpoint(run.commits, directory, of)
        for number in range(run.steps_done, run.steps_done + steps):
            one_step(model, optimizer, rank, ranks, number)
        found = state(model)
        if tag is not None:
            save_checkpoint(run.commits, directory, tag, {}, True)
        return loaded and pathlib.Path(loaded).name, run.steps_done, found


class Machines:
    def __init__(self, path):
        self.path, self._starts = path, iter(range(100))
        path.mkdir(exist_ok=True)

    def dir(self, machine):
        return self.path / f"machine-{machine}"

    def told(self, machines, *args, work=carry, **start):
        ranks = len(machines)
        return on_ranks(ranks, self.path / f"store-{next(self._starts)}", work, self.path, machines, *args, nodes=ranks, **start)

    def start(self, machines, tag, steps, *more):
        """What `carry` returns on all ranks."""
        first, *others = self.told(machines, tag, steps, *more)
        assert not isinstance(first, Exception), first
        for other in others:
            assert other[:2] == first[:2] and equal(other[2], first[2])
        if tag is not None:
            self.same(machines, tag)
        return first

    def same(self, machines, tag):
        """Expects the same files of a checkpoint on all machines, and no others."""
        first, *others = ({file.name: file.read_bytes() for file in (self.dir(machine) / tag).iterdir()} for machine in machines)
        assert first.keys() >= {"checkpoint.json", "state.pt", "tiles.0"} and all(other == first for other in others), first.keys()
        for machine in machines:
            names = {path.name for path in self.dir(machine).iterdir()}
            assert not any(name.startswith(".") or name.endswith((".partial", ".removed", ".part")) for name in names), names


def test_any_node_may_be_lost_with_all_that_it_has(tmp_path):
    machines = Machines(tmp_path)
    machines.start([0, 1], "a", 2)
    shutil.rmtree(machines.dir(1))
    assert machines.start([0, 1], "b", 1)[:2] == ("a", 3)
    shutil.rmtree(machines.dir(0))
    done, found = machines.start([0, 1], None, 1)[1:]
    expected = Machines(tmp_path / "unbroken").start([0, 1], None, 4)[2]
    assert done == 4 and equal(found, expected)


def behind(rank, directory):
    """A machine whose clock is wrong."""
    time.time = lambda: 1000.0


@pytest.mark.parametrize("again", ["b", "a"])
def test_a_node_that_was_away_does_not_count_and_the_number_of_nodes_may_change(tmp_path, again):
    machines = Machines(tmp_path)
    machines.start([0, 1], "a", 1)
    shutil.copytree(machines.dir(1), tmp_path / "unbroken/machine-1")
    # One node goes on; the other one has an older checkpoint, of the same tag too.
    loaded, done, at_two = machines.start([1], again, 1, None, behind)
    assert (loaded, done) == ("a", 2)
    loaded, done, found = machines.start([0, 1, 2], "c" if again == "a" else None, 0)
    assert (loaded, done) == (again, 2) and equal(found, at_two)
    machines.same([0, 1, 2], again)
    # The node that was away can go on alone, with the same moments.
    loaded, done, found = machines.start([0], None, 1)
    assert (loaded, done) == ("c" if again == "a" else "b", 3)
    assert equal(found, Machines(tmp_path / "unbroken").start([1], None, 2)[2])


def test_a_damaged_file_is_named_with_its_node_and_copied_again(tmp_path):
    machines = Machines(tmp_path)
    machines.start([0, 1], "a", 1)
    tiles = machines.dir(1) / "a/tiles.1"
    data = bytearray(tiles.read_bytes())
    data[len(data) // 2] ^= 1
    tiles.write_bytes(data)
    first, second = machines.told([0, 1], None, 0)
    assert isinstance(first, offloadd.RankGone) and f"node 1: the checkpoint {tiles} is damaged" in str(first), first
    assert isinstance(second, offloadd.Damaged) and f"or delete {tiles.parent} on this node" in str(second), second
    # A node that lacks the checkpoint gets no damaged one.
    shutil.rmtree(machines.dir(0) / "a")
    for told in machines.told([0, 1], None, 0):
        assert isinstance(told, offloadd.Error) and "node 1 sent bytes with fingerprint" in str(told) and "node 0" in str(told), told
    assert not (machines.dir(0) / "a").exists() and not (machines.dir(0) / "a.partial").exists()
    # A file that is cut short is not taken for a checkpoint, and comes from the other node.
    machines = Machines(tmp_path / "cut")
    expected = machines.start([0, 1], "a", 1)[2]
    os.truncate(machines.dir(0) / "a/tiles.0", 1000)
    assert equal(machines.start([0, 1], None, 0)[2], expected)
    machines.same([0, 1], "a")


def full(rank, ranks, path, machines, tag, steps):
    """Saves where node 1 has too little room, and makes another step after that."""
    directory = path / f"machine-{machines[rank]}"
    if rank == 1:
        # For its own tiles, and not for the other node's.
        mount(None, directory, size=17 << 20)
    model, optimizer, run = prepared(path, rank, device="nvme")
    with run:
        one_step(model, optimizer, rank, ranks, 0)
        with pytest.raises(offloadd.Error) as failed:
            save_checkpoint(run.commits, directory, tag, {}, True)
        one_step(model, optimizer, rank, ranks, 1)
        return str(failed.value), sorted(path.name for path in directory.iterdir()), run.steps_done, state(model)


def test_a_full_node_is_named_no_node_has_the_checkpoint_and_training_goes_on(tmp_path, mounts):
    told = Machines(tmp_path).told([0, 1], "a", 0, work=full)
    expected = Machines(tmp_path / "unbroken").start([0, 1], None, 2)[2]
    for text, files, done, found in told:
        assert "node 1" in text and "No space left on device" in text, text
        assert files == [] and done == 2 and equal(found, expected)


def small(rank, directory):
    if rank == 1:
        # A checkpoint takes 18.1 MiB, and asks for 1 MiB more.
        mount(None, directory, size=19 << 20)


def test_a_node_with_too_little_room_is_named_before_anything_is_copied(tmp_path, mounts):
    machines = Machines(tmp_path)
    machines.start([0], "a", 1)
    for told in machines.told([0, 1], None, 0, None, small):
        assert isinstance(told, offloadd.Error) and "node 1" in str(told) and "free: free some space" in str(told), told
    assert list(machines.dir(1).iterdir()) == []


def kill_before_naming(rank, directory):
    if rank == 1:
        _checkpoint._name = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def kill_while_copying(rank, directory):
    _nodes._SILENT_S = 2.0
    gather = _transfers.Transfers.gather_nodes

    def gather_nodes(ranks, own):
        # The first one with contents.
        if rank == 1 and len(own) > 1 << 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(ranks, own)

    _transfers.Transfers.gather_nodes = gather_nodes


def test_a_node_that_is_killed_leaves_no_half_of_a_checkpoint(tmp_path):
    machines = Machines(tmp_path)
    machines.start([0, 1], "a", 1)
    began = time.monotonic()
    first, killed = machines.told([0, 1], "b", 1, None, kill_while_copying)
    assert str(killed) == "-9" and isinstance(first, offloadd.RankGone) and "rank 1 " in str(first), first
    assert time.monotonic() - began < 60
    assert sorted(path.name for path in machines.dir(0).iterdir()) == ["a", "latest"] and not (machines.dir(1) / "b").exists()
    shutil.rmtree(machines.dir(1) / "b.partial")
    machines.told([0, 1], "c", 1, None, kill_before_naming)
    assert (machines.dir(0) / "c").exists() and not (machines.dir(1) / "c").exists()
    assert machines.start([0, 1], None, 0)[:2] == ("c", 2)
    machines.same([0, 1], "c")


def slow_network(rank, directory):
    """Each node waits in an operation of torch.distributed for longer than one that would be stuck."""
    _meetings._STUCK_S, _meetings._NOTE_S, _nodes._ROUND_S = 1.0, 0.1, 0.1
    names = {"plain": _transfers.Transfers.gather_nodes, "sleep": time.sleep, "calls": iter(range(1000))}
    text = "def gather_nodes(ranks, own):\n    sleep(4 if next(calls) == 3 else 0)\n    return plain(ranks, own)"
    exec(compile(text, torch.distributed.__file__, "exec"), names)
    _transfers.Transfers.gather_nodes = names["gather_nodes"]


def test_ranks_that_wait_for_a_slow_copy_do_not_take_it_for_a_wrong_order(tmp_path):
    # The second node has two ranks, of which one waits.
    (tmp_path / "machine-1").mkdir()
    told = on_ranks(3, tmp_path / "store", carry, tmp_path, [0, 1, 1], "a", 1, None, slow_network, nodes=2)
    assert [one[:2] for one in told] == [(None, 1)] * 3
    Machines(tmp_path).same([0, 1], "a")


def told_by(rank, ranks, path, machines, tag, steps):
    """The lines that are said while two checkpoints are saved and one is loaded, or the error."""
    said = []
    _each_node.say = _checkpoint.say = said.append
    directory = path / f"machine-{machines[rank]}"
    model, optimizer, run = prepared(path, rank)
    with run:
        for tag in ("a", "b"):
            one_step(model, optimizer, rank, ranks, run.steps_done)
            save_checkpoint(run.commits, directory, tag, {}, True)
        loaded, _ = load_checkpoint(run.commits, directory, None)
        return said, sorted(path.name for path in directory.iterdir()), loaded


def test_nodes_that_see_one_directory_write_each_checkpoint_once_and_say_so_once(tmp_path):
    machines = Machines(tmp_path)
    for said, files, loaded in machines.told([0, 0], None, 0, work=told_by):
        assert said == [f"note: checkpoint.use_node_local_storage: all nodes see the same {machines.dir(0)}, so each checkpoint is written once"]
        assert files == ["a", "b", "latest"] and loaded == str(machines.dir(0) / "b")
    for told in machines.told([1, 1, 2], None, 0, work=told_by):
        assert isinstance(told, offloadd.Error) and "nodes 0, 1 see the same" in str(told), told


def without(rank, ranks, path, machines, tag, steps):
    _checkpoint._SEEN_S = 0.0
    model, optimizer, run = prepared(path, rank, on=False)
    with run:
        one_step(model, optimizer, rank, ranks, 0)
        save_checkpoint(run.commits, path / f"machine-{machines[rank]}", "a", {}, True)


def test_without_the_setting_separate_directories_are_refused_and_it_is_named(tmp_path):
    # The second node has what an earlier save has left.
    (tmp_path / "machine-1/a.partial").mkdir(parents=True)
    for told in Machines(tmp_path).told([0, 1], None, 0, work=without):
        assert isinstance(told, offloadd.Error) and "node 1" in str(told) and "does not see" in str(told), told
        assert "checkpoint.use_node_local_storage = true" in str(told), told

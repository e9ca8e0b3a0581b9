"""Errors during a run: each has a name, and the next step or start continues."""

import os
import pathlib
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import offloadd
from offloadd._order import Order
from test_runs import config, needs_daemon
from toy import Net, randomize


def daemon_of(run_dir):
    """The process number of a run's private daemon."""
    for entry in pathlib.Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and str(run_dir / "offloadd" / "offloadd.toml").encode() in words:
            return int(entry.name)
    raise AssertionError(f"no daemon of {run_dir}")


@contextmanager
def stopped(pid):
    """The process answers nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def interrupted_within_a_second(after_s=0.3):
    """Ctrl-C comes while the block waits."""
    # A shell's background job begins with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(after_s, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        # Where the block has not waited, the test fails; the signal would end all tests.
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < after_s + 1.0


def wide():
    """A model with more tiles than staging slots: every pass waits for the drive."""
    torch.manual_seed(0)
    return randomize(Net(6, width=512))


def inputs(count):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 512, generator=generator) for _ in range(count)]


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@needs_daemon
@pytest.mark.parametrize("schedule", ["immediate", "deferred"])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_ctrl_c_ends_a_wait_within_a_second_and_the_run_goes_on(tmp_path, where, schedule):
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "whole"):
        expected = [step(model, optimizer, x) for x in inputs(5)]
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = config("nvme", tmp_path, optimizer_step=schedule, staging_bytes=40 << 20)
    with offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / "run") as run:
        daemon = daemon_of(tmp_path / "run")
        losses = [step(model, optimizer, x) for x in inputs(2)]
        x = inputs(3)[2]
        if where == "forward":
            with stopped(daemon), interrupted_within_a_second():
                model(x)
        elif where == "backward":
            loss = model(x).square().mean()
            with stopped(daemon), interrupted_within_a_second():
                loss.backward()
            with pytest.raises(offloadd.Error, match="zero_grad"):
                optimizer.step()
            optimizer.zero_grad()
        else:
            loss = model(x).square().mean()
            loss.backward()
            with stopped(daemon), interrupted_within_a_second():
                optimizer.step()
                # The next forward waits for what the step did not wait for.
                optimizer.zero_grad()
                model(x)
            assert run.steps_done == 3
            optimizer.zero_grad()
            losses.append(loss.item())
        losses += [step(model, optimizer, x) for x in inputs(5)[len(losses) :]]
        assert losses == expected
        assert run.steps_done == 5


@needs_daemon
def test_a_daemon_that_died_is_named_and_the_next_start_resumes(tmp_path):
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = config("nvme", tmp_path, staging_bytes=40 << 20)
    run = offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / "run")
    step(model, optimizer, inputs(1)[0])
    os.kill(daemon_of(tmp_path / "run"), signal.SIGKILL)
    with pytest.raises(offloadd.DaemonGone, match="start the script again"):
        for x in inputs(5):
            step(model, optimizer, x)
    with pytest.raises(offloadd.Error):
        run.close()
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with offloadd.prepare(model, optimizer, settings, run_dir=tmp_path / "run") as run:
        assert run.steps_done in (0, 1)
        step(model, optimizer, inputs(1)[0])


class Stopped(nn.Module):
    """Ends the forward as Ctrl-C does where it is asked to."""

    raises = False

    def forward(self, x):
        if self.raises:
            raise KeyboardInterrupt
        return x


def test_ctrl_c_in_the_models_own_code_leaves_a_model_that_goes_on(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), Stopped(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 8)
    with offloadd.prepare(model, optimizer, config("cpu", tmp_path), run_dir=tmp_path / "run") as run:
        for stops in (True, False, True, False):
            model[4].raises = stops
            if stops:
                with pytest.raises(KeyboardInterrupt):
                    model(x)
            else:
                step(model, optimizer, x)
                assert not [unit.name for unit in run.engine.gathering.units if unit.here], "released after the pass"
        assert run.steps_done == 2


def test_an_order_that_never_settles_is_said_once_with_its_cost(capsys):
    order = Order(lambda rest: None)
    for number in range(20):
        order.begin("train")
        for unit in (0, number + 1, 1):
            if order.next((False, unit)):
                order.waited_s += 0.25
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(said) == 1
    assert "6 passes" in said[0] and "cost 1.5 s so far" in said[0] and "resident_fraction" in said[0]


def test_an_order_that_changes_now_and_then_is_not_spoken_of(capsys):
    order = Order(lambda rest: None)
    for number in range(40):
        order.begin("train")
        for unit in (0, 1, 2) if number % 4 else (0, 2):
            order.next((False, unit))
    assert capsys.readouterr().err == ""


def test_units_that_come_between_passes_are_announced_together():
    told = []
    order = Order(lambda rest: told.append(list(rest)))
    units = [(False, 0), (False, 1), (False, 2)]
    order.outside_all(units)
    order.outside((False, 0))
    order.outside((True, 7))
    for unit in units[1:]:
        order.outside(unit)
    assert told == [units, [(True, 7), *units[1:]]]


def test_units_of_one_module_count_once_among_those_that_come_ahead():
    ops = [(gradients, unit) for gradients in (False, True) for unit in range(8)]
    order = Order(lambda rest: None)
    for _ in range(2):
        order.begin("train")
        for op in ops:
            order.next(op)
    order.begin("train")
    order.next(ops[0])
    assert order.gathers(0, 2, range(8)) == [1, 2]
    # As a block whose frozen weights and adapters are two units.
    pairs = [unit // 2 * 2 for unit in range(8)]
    assert order.gathers(0, 2, pairs) == [1, 2, 3, 4, 5]
    assert order.gathers(0, 0, pairs) == []
    for op in ops[1:7]:
        order.next(op)
    assert order.gathers(6, 2, pairs) == [7], "the pass ends"
    assert order.gathers(6, 2, pairs, repeats=True) == [7, 0, 1, 2, 3]

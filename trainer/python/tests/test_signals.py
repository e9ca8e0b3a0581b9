"""Signals where functions of the package begin and end in a step. Errors that this finds: memory that is gone and counts as there, a step that is made and not
counted, or counted and not made, an order of units that the engine does not have."""

import contextlib
import os
import pathlib
import signal
import sys

import pytest
import torch

import offloadd
import offloadd._reentry
from test_muon import same
from test_runs import config
from toy import Blocks

PACKAGE = str(pathlib.Path(offloadd.__file__).parent)
# Places between two signals: a prime, so that loops are met at different places.
STRIDE = 1 if os.environ.get("OFFLOADD_ALL_CASES") else 29
WARM = 3


class Script:
    """A training whose steps depend on their number alone."""

    def __init__(self, kind, path):
        torch.manual_seed(0)
        self.model, self.number, self.run = Blocks(4, 2), 0, None
        given = {"lr": 1e-2, "eps": 1e-3}
        if kind.startswith("offloadd.optim"):
            self.optimizer = offloadd.optim.AdamW(self.model.parameters(), overlap_backward="overlap" in kind, **given)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **given)
        if kind.startswith("prepare"):
            settings = config("cpu", path)
            if kind == "prepare, parameters stay":
                settings["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
            self.run = offloadd.prepare(self.model, self.optimizer, settings, run_dir=path / "run")

    @property
    def steps_done(self):
        return self.optimizer.steps_done if self.run is None else self.run.steps_done

    def weights(self):
        return [value.clone() for value in self.model.state_dict().values()]

    def step(self):
        self.model(torch.randn(2, 4, generator=torch.Generator().manual_seed(self.number))).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    def close(self):
        (self.run or self.optimizer).close()


@contextlib.contextmanager
def signal_at(at, number):
    """Sends the signal `number` where a function of the package begins or ends, counted from 0. Yields the number of such places that were passed. Python looks
    for signals there, and not at each line."""
    count = [0]

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event in ("call", "return"):
            frame.f_trace_lines = False
            count[0] += 1
            if count[0] == at + 1:
                signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def trajectory(kind, path):
    """The weights after each of some steps, and the places of one."""
    script = Script(kind, path)
    found = [script.weights()]
    for _ in range(WARM):
        script.step()
        found.append(script.weights())
    with signal_at(sys.maxsize, signal.SIGUSR1) as count:
        script.step()
    found.append(script.weights())
    while len(found) < WARM + 2 * (count[0] // STRIDE + 2):
        script.step()
        found.append(script.weights())
    script.close()
    return found, count[0]


KINDS = ("prepare", "prepare, parameters stay", "offloadd.optim", "offloadd.optim, overlap_backward")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_ctrl_c_meets_is_made_or_not(tmp_path, kind):
    expected, places = trajectory(kind, tmp_path / "plain")
    script = Script(kind, tmp_path / "run")
    for _ in range(WARM):
        script.step()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for at in range(0, places, STRIDE):
            number = script.number
            with contextlib.suppress(KeyboardInterrupt), signal_at(at, signal.SIGINT):
                script.step()
            script.optimizer.zero_grad()
            script.number = script.steps_done
            assert script.number - number in (0, 1) and same(script.weights(), expected[script.number]), at
            script.step()
            assert script.steps_done == script.number and same(script.weights(), expected[script.number]), at
    finally:
        signal.signal(signal.SIGINT, before)
    script.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_saves_sees_a_steps_weights_or_is_refused(tmp_path, kind):
    expected, places = trajectory(kind, tmp_path / "plain")
    script, saved, came = Script(kind, tmp_path / "run"), [], 0
    for _ in range(WARM):
        script.step()

    def save(*_):
        try:
            script.optimizer.state_dict()
            saved.append(script.weights())
        except offloadd.NotSupported as error:
            assert "set a flag" in str(error)

    before = signal.signal(signal.SIGUSR1, save)
    try:
        for at in range(0, places, STRIDE):
            with signal_at(at, signal.SIGUSR1):
                script.step()
            assert same(script.weights(), expected[script.number]), at
            assert all(any(map(same, [one] * 2, expected[script.number - 1 : script.number + 1])) for one in saved), at
            came += len(saved)
            saved.clear()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came
    script.close()


def test_a_handler_that_makes_a_checkpoint_makes_one_of_a_step_or_is_refused(tmp_path):
    expected, places = trajectory("prepare", tmp_path / "plain")
    script, reader, made = Script("prepare", tmp_path / "run"), Script("prepare", tmp_path / "reader"), []
    for _ in range(WARM):
        script.step()

    def save(*_):
        try:
            script.run.save_checkpoint(tmp_path / "checkpoint")
            made.append(script.steps_done)
        except offloadd.NotSupported as error:
            assert "set a flag" in str(error)

    before = signal.signal(signal.SIGUSR1, save)
    try:
        for at in range(0, places, STRIDE):
            count = len(made)
            with signal_at(at, signal.SIGUSR1):
                script.step()
            assert same(script.weights(), expected[script.number]), at
            if len(made) > count:
                reader.run.load_checkpoint(tmp_path / "checkpoint")
                assert reader.steps_done == made[-1] and same(reader.weights(), expected[made[-1]]), at
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert made
    script.close(), reader.close()


def test_work_that_an_interrupt_has_ended_is_not_under_way(monkeypatch):
    monkeypatch.setattr(offloadd._reentry, "_under_way", (lambda: sys._getframe())())
    assert offloadd._reentry.not_reentered(lambda: 7)() == 7

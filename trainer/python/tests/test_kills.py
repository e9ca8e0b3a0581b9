"""Scripts and daemons that are killed: the next start has the bits of the unbroken run.

Scripts are killed at 8 random instants and daemons at as many; `OFFLOADD_KILLS` is another number, `OFFLOADD_KILLS_SEED` chooses
other instants.
"""

import os
import pathlib
import random
import re
import shutil
import signal
import threading
import time
from concurrent import futures

import pytest

import offloadd
from test_runs import lines_of, needs_daemon, start

INSTANTS = int(os.environ.get("OFFLOADD_KILLS", "8"))
# Runs that are killed beside each other: a script whose daemon is gone waits for another one for a second.
LIVES = 4
SEED = int(os.environ.get("OFFLOADD_KILLS_SEED", "8"))

# The scripts' buffer is too large for a commit's own record.
OWN = {"buffer_elems": 20_000}

# Points in this library's Python half and, with a leading dash, in the engine below it; what is reached only in a new run is first.
FIRST = [("opened", 1), ("initialized", 1)]
POINTS = {
    "immediate": [("handing over", 9), ("-committing", 3), ("stepped", 3), ("state named", 3), ("-updated", 20), ("closing", 1)],
    "deferred": [("sealing", 4), ("noted", 4), ("state written", 4), ("-committed", 3), ("-writing", 40), ("backward", 20), ("closed", 1)],
}


def daemons_of(run_dir):
    """Process numbers of the daemons of a run."""
    wanted = os.fsencode(run_dir / "offloadd" / "offloadd.toml")
    found = []
    for one in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if wanted in one.read_bytes():
                found.append(int(one.parent.name))
        except OSError:
            continue
    return found


class Unbroken:
    """A run that nothing disturbs: its lines, its losses, and how long it takes after its first line."""

    def __init__(self, tmp_path):
        process = start(tmp_path / "whole", tmp_path / "a", **OWN)
        first = process.stdout.readline()
        begins = time.monotonic()
        self.lines = [first.strip(), *lines_of(process)]
        self.seconds = time.monotonic() - begins
        self.losses = {line.split()[1]: line.split()[2] for line in self.lines if line.startswith("step")}
        assert len(self.losses) == 30 and self.lines[:2] == ["begins", "resumed 0"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return Unbroken(tmp_path_factory.mktemp("unbroken"))


class Life:
    """A run that is killed again and again, compared with an unbroken one."""

    def __init__(self, tmp_path, step, unbroken):
        self.dir, self.unbroken = tmp_path, unbroken
        self.own = {"optimizer_step": step, **OWN}
        self.done = 0

    def start(self, what, kill=None, environment=(), delay=None, daemon=False):
        """One start, which may be killed. Returns its lines."""
        own = {**self.own, **({"kill": kill} if kill else {})}
        process = start(self.dir / "run", self.dir / "b", environment, **own)
        if delay is not None:
            assert process.stdout.readline() == "begins\n", process.stderr.read()
            timer = threading.Timer(delay, self.kill, (process, daemon))
            timer.start()
        lines, errors = process.communicate()
        # A killed script may leave a part of a line.
        lines = lines.split("\n")[:-1]
        if delay is not None:
            timer.cancel()
        elif kill or environment:
            assert process.returncode == -signal.SIGKILL, f"{what} was not reached: {lines[-2:]} {errors}"
        if daemon and process.returncode:
            assert re.search(r"^_?offloadd\.\w+: ", errors, re.MULTILINE), errors
        self.check(what, lines)
        return lines

    def kill(self, process, daemon):
        for pid in daemons_of(self.dir / "run") if daemon else [process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def check(self, what, lines):
        for line in lines:
            if line.startswith("resumed"):
                resumed = int(line.split()[1])
                assert self.done - 1 <= resumed <= self.done + 1, f"{what}: resumed at {resumed}, {self.done} were told"
            elif line.startswith("step"):
                _, number, loss = line.split()
                assert self.unbroken.losses[number] == loss, f"{what}: step {number} differs"
                self.done = int(number)
            elif line.startswith("done"):
                assert line == self.unbroken.lines[-1], f"{what}: the weights differ"


def engine_has_points():
    return b"OFFLOADD_KILL_HOLDS" in pathlib.Path(offloadd._offloadd.__file__).read_bytes()


@needs_daemon
@pytest.mark.parametrize("step", POINTS)
def test_a_run_killed_at_each_named_point_has_the_bits_of_the_unbroken_one(tmp_path, step, unbroken):
    if not engine_has_points():
        pytest.skip("the extension is built without the test hooks: trainer/python/test.sh builds it")
    life = Life(tmp_path, step, unbroken)
    for point, number in FIRST + POINTS[step]:
        if point.startswith("-"):
            life.start(point, environment={"OFFLOADD_KILL": f"{point[1:]}@{number}"})
        else:
            life.start(point, kill=(point, number))
    assert life.start("the end")[-1].startswith("done")


@needs_daemon
@pytest.mark.parametrize("daemon", [False, True], ids=["script", "daemon"])
def test_a_run_killed_at_random_instants_has_the_bits_of_the_unbroken_one(tmp_path, daemon, unbroken):
    def live(number):
        rng = random.Random(f"{SEED} {daemon} {number}")
        directory = tmp_path / str(number)
        directory.mkdir()
        life = Life(directory, "deferred" if daemon else "immediate", unbroken)
        for kill in range(number, INSTANTS, LIVES):
            delay = rng.uniform(0, unbroken.seconds / 2)
            lines = life.start(f"kill {kill} of seed {SEED}, after {delay:.3f} s", delay=delay, daemon=daemon)
            if lines and lines[-1].startswith("done"):
                # Killed too late: a new run.
                shutil.rmtree(directory / "run")
                shutil.rmtree(directory / "b")
                life.done = 0
        assert life.start("the end")[-1].startswith("done")

    with futures.ThreadPoolExecutor(LIVES) as pool:
        list(pool.map(live, range(LIVES)))

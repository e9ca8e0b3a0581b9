"""Trains a prepared model with Muon, and is killed where its arguments say: after a step, or within it at one of the calls of the engine."""

import json
import os
import pathlib
import signal
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import offloadd  # noqa: E402
from test_prepared_muon import STEPS, model_of, ours  # noqa: E402
from test_runs import config  # noqa: E402

torch.set_num_threads(1)
directory, given = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
kill_step, kill_call = given.get("kill") or (0, None)
directory.mkdir(exist_ok=True)


def die(*_):
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


model = model_of(torch.bfloat16)
optimizer = ours(model)
run = offloadd.prepare(model, optimizer, config("nvme", directory, **given.get("own", {})), run_dir=directory / "run")
for number in range(run.steps_done + 1, STEPS + 1):
    loss = model(number, (1,) if number % 3 == 2 else ())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    print("step", number, loss.item(), float(norm), flush=True)
    if number == kill_step and kill_call:
        core = run.commits.core
        kills = type("Kills", (), {"__getattr__": lambda _, name: die if name == kill_call else getattr(core, name)})()
        run.commits.core = run.engine.gathering.memory._core = kills
    optimizer.step()
    optimizer.zero_grad()
    if number == kill_step:
        run.drain()
        die()
with torch.no_grad():
    print([param.tolist() for param in model.parameters()])

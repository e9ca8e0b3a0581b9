"""Trains matrices with `offloadd.optim.Muon` in a loop of its own, and is killed where its arguments say: after a step, or within it at one of the
calls of the engine."""

import json
import os
import pathlib
import signal
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import offloadd.optim  # noqa: E402
from offloadd import _param_units  # noqa: E402
from test_muon import batches, made, model_of  # noqa: E402

torch.set_num_threads(1)
_param_units.UNIT_ELEMS = 400
directory, given = sys.argv[1], json.loads(sys.argv[2])
(kill_step, kill_call), options = given.get("kill", (0, None)), given.get("options", {})


def die():
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


model = model_of(torch.bfloat16)
optimizer = made(model, pathlib.Path(directory), options, overlap_backward=given.get("overlap_backward", False))
first = optimizer.resume()
print("resumed", first, flush=True)
for number, x in list(enumerate(batches(), 1))[first:]:
    loss = model(x.bfloat16())
    loss.backward()
    norm = offloadd.optim.clip_grad_norm_(optimizer, 0.1)
    print("step", number, loss.item(), norm.item(), flush=True)
    if number == kill_step and kill_call:
        core = optimizer._run.core
        kills = type("Kills", (), {"__getattr__": lambda _, name: (lambda *args: die()) if name == kill_call else getattr(core, name)})()
        optimizer._run.core = optimizer._run.beside.core = optimizer._run.commits.core = optimizer._run.beside.memory._core = kills
    optimizer.step()
    if number == kill_step:
        die()
    model.zero_grad()
print([param.tolist() for param in model.parameters()])

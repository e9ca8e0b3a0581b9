"""Trains with an optimizer of `offloadd.optim` in a loop of its own, and is killed where its arguments say: after a step, or within it at one of the
calls of the engine. Gradients are clipped, unless it is said whether updates begin `in_backward`."""

import contextlib
import json
import os
import pathlib
import signal
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import offloadd.optim  # noqa: E402
from offloadd import _param_units  # noqa: E402
from test_runs import batches, model_of  # noqa: E402

torch.set_num_threads(1)
_param_units.UNIT_ELEMS = 48
directory, given = sys.argv[1], json.loads(sys.argv[2])
kill_step, kill_call = given.pop("kill", (0, None))
in_backward = given.pop("in_backward", None)


def die():
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


model = model_of(getattr(torch, given.pop("dtype", "float32")))
optimizer = getattr(offloadd.optim, given.pop("rule", "AdamW"))(model.named_parameters(), lr=1e-2, directory=directory, **given)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
first = optimizer.resume(track=[scheduler])
if first:
    scheduler.step()
print("resumed", first, flush=True)
for number, x in list(enumerate(batches(), 1))[first:]:
    noisy = torch.nn.functional.dropout(x, 0.2)
    if in_backward is None:
        loss = model(noisy.to(model.head.weight.dtype)).square()
        loss.backward()
        norm = offloadd.optim.clip_grad_norm_(model.parameters(), 0.5)
        print("step", number, loss.item(), norm.item(), flush=True)
    if number == kill_step and kill_call:
        core = optimizer._run.core
        kills = type("Kills", (), {"__getattr__": lambda _, name: (lambda *args: die()) if name == kill_call else getattr(core, name)})()
        optimizer._run.core = optimizer._run.beside.core = optimizer._run.commits.core = optimizer._run.beside.memory._core = kills
    if in_backward is not None:
        with optimizer.update_in_backward() if in_backward else contextlib.nullcontext():
            loss = model(noisy.to(model.head.weight.dtype)).square()
            loss.backward()
        print("step", number, loss.item(), flush=True)
    optimizer.step()
    if number == kill_step:
        die()
    scheduler.step()
    optimizer.zero_grad()
print([param.tolist() for param in model.parameters()])

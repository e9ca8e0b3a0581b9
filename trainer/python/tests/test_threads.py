"""Backwards whose hooks run in a thread of autograd's, as those of a GPU do: on a CPU they run in the thread that called."""

import _thread
import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import offloadd
from test_runs import config

STEPS = 4


class Blocks(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = x + (block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant))
        return x


@pytest.fixture
def threads(monkeypatch):
    """Lets an outermost backward run in a thread that Python has not begun, while the caller waits; returns those threads."""
    run, found = torch.autograd.graph._engine_run_backward, []

    def _engine_run_backward(*args, **kwargs):
        if torch._C._current_graph_task_id() != -1:
            return run(*args, **kwargs)
        ended, results = _thread.allocate_lock(), []
        ended.acquire()

        def work():
            found.append(threading.get_ident())
            try:
                results.append(run(*args, **kwargs))
            except BaseException as error:
                results.append(error)
            finally:
                ended.release()

        _thread.start_new_thread(work, ())
        ended.acquire()
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    def install():
        for module in (torch.autograd.graph, torch.autograd):
            monkeypatch.setattr(module, "_engine_run_backward", _engine_run_backward)
        return found

    return install


def train(device, reentrant, directory):
    torch.manual_seed(0)
    model = Blocks(reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = offloadd.prepare(model, optimizer, config(device, directory), run_dir=directory / "run")
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step), requires_grad=True)
        loss = model(x).square().mean()
        if step == 1:
            (slope,) = torch.autograd.grad(loss, x, retain_graph=True) if reentrant is not True else (torch.zeros(1),)
            losses.append(float(slope.sum()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    run.close()
    return losses


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_backward_in_a_thread_of_autograds_computes_the_same(device, reentrant, tmp_path, threads):
    (tmp_path / "first").mkdir(), (tmp_path / "second").mkdir()
    expected = train(device, reentrant, tmp_path / "first")
    found = threads()
    assert train(device, reentrant, tmp_path / "second") == expected
    assert len(found) >= STEPS and threading.get_ident() not in found

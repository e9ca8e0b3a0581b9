"""Faults around a run: a typed error or no effect, and nothing that was committed is lost."""

import contextlib
import os
import resource
import signal
import subprocess
import time

import pytest
import torch

import forks
import offloadd
from random_models import Fails
from test_kills import daemons_of
from test_runs import HERE, batches, config, lines_of, model_of, needs_daemon, start, train


@contextlib.contextmanager
def run_of(tmp_path, device="nvme", model=None, name="run", **own):
    model = model or model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, config(device, tmp_path, **own), run_dir=tmp_path / name) as run:
        yield run, model, optimizer


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def unbroken(tmp_path, inputs):
    """Losses and weights of a run that nothing disturbs."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, {}, run_dir=tmp_path / "unbroken"):
        return train(model, optimizer, inputs), weights(model)


def script(tmp_path, text):
    """Starts a script of `text`, which has the directory as its argument."""
    head = f"import os, pathlib, sys\nsys.path.insert(0, {str(HERE)!r})\nimport test_faults, offloadd\nfrom test_runs import batches, train\n"
    (tmp_path / "script.py").write_text(head + text)
    return forks.start(tmp_path / "script.py", tmp_path)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


@pytest.mark.parametrize("step", ["immediate", "deferred"])
def test_failures_in_a_pass_leave_a_state_from_which_the_script_goes_on(tmp_path, step, monkeypatch):
    expected = unbroken(tmp_path, batches(8))
    resize = torch.UntypedStorage.resize_
    left = [0]

    def no_memory(storage, size):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("not enough memory")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", no_memory)
    with run_of(tmp_path, "cpu", optimizer_step=step) as (run, model, optimizer):
        losses = []
        for number, x in enumerate(batches(8)):
            handle = None
            if number == 1:
                handle = model.blocks[3].register_forward_pre_hook(lambda *_: 1 / 0)
            elif number == 2:
                handle = model.blocks[3].register_forward_pre_hook(lambda module, args: (Fails.apply(args[0]),))
            elif number == 3:
                handle = model.blocks[2].linear.weight.register_hook(lambda grad: 1 / 0)
            elif number == 4:
                # In a forward, with units of it in memory.
                left[0] = 8
            elif number == 5:
                # In a backward.
                left[0] = 22
            if handle is not None or left[0] > 0:
                with pytest.raises((ZeroDivisionError, ValueError, RuntimeError)):
                    for _ in range(2):
                        model(x).square().backward()
                assert left[0] <= 0
                if handle is not None:
                    handle.remove()
                optimizer.zero_grad()
            losses += train(model, optimizer, [x])
        assert (losses, same(weights(model), expected[1])) == (expected[0], True)


def test_a_step_after_half_a_backward_is_refused(tmp_path):
    with run_of(tmp_path, "cpu") as (run, model, optimizer):
        train(model, optimizer, batches(1))
        handle = model.blocks[0].register_forward_pre_hook(lambda module, args: (Fails.apply(args[0].requires_grad_()),))
        with pytest.raises(ValueError):
            model(batches(1)[0]).backward()
        handle.remove()
        with pytest.raises(offloadd.Error, match="did not end"):
            optimizer.step()
        assert run.steps_done == 1
        optimizer.zero_grad()
        train(model, optimizer, batches(1))
        assert run.steps_done == 2


@needs_daemon
def test_a_second_process_on_a_run_is_refused_and_the_first_goes_on(tmp_path):
    expected = unbroken(tmp_path, batches(4))
    with run_of(tmp_path) as (run, model, optimizer):
        losses = train(model, optimizer, batches(4)[:2])
        second = script(tmp_path, "with test_faults.run_of(pathlib.Path(sys.argv[1])): print('opened')")
        out, errors = second.communicate()
        assert second.returncode == 1 and "opened" not in out
        assert "offloadd.Error" in errors, errors
        assert "in use" in errors or "another" in errors, errors
        losses += train(model, optimizer, batches(4)[2:])
        assert (losses, same(weights(model), expected[1])) == (expected[0], True)


@needs_daemon
def test_a_daemon_killed_while_the_script_waits_is_a_typed_error_and_the_run_resumes(tmp_path):
    expected = unbroken(tmp_path, batches(6))
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = offloadd.prepare(model, optimizer, config("nvme", tmp_path, optimizer_step="immediate"), run_dir=tmp_path / "run")
    losses = train(model, optimizer, batches(6)[:3])
    (daemon,) = daemons_of(tmp_path / "run")
    os.kill(daemon, signal.SIGSTOP)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {daemon}"])
    begins = time.monotonic()
    with pytest.raises(offloadd.Error):
        train(model, optimizer, batches(6)[3:])
    assert time.monotonic() - begins < 60
    killer.wait()
    with contextlib.suppress(offloadd.Error):
        run.close()
    with run_of(tmp_path, optimizer_step="immediate") as (run, model, optimizer):
        assert 2 <= run.steps_done <= 3
        done = run.steps_done
        assert losses[:done] + train(model, optimizer, batches(6)[done:]) == expected[0]
        assert same(weights(model), expected[1])


@needs_daemon
def test_a_fork_cannot_use_the_run_and_changes_nothing_when_it_ends(tmp_path):
    text = """
with test_faults.run_of(pathlib.Path(sys.argv[1])) as (run, model, optimizer):
    train(model, optimizer, batches(6)[:3])
    child = os.fork()
    if child == 0:
        for use in (lambda: model.head.weight.sum(), lambda: model(batches(1)[0]), run.drain):
            try:
                use()
            except offloadd.Error as error:
                print(error, flush=True)
        # In order, as a worker of a pool that a script makes.
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print("child ended", flush=True)
    train(model, optimizer, batches(6)[3:])
    test_faults.torch.save(test_faults.weights(model), sys.argv[1] + "/weights")
"""
    process = script(tmp_path, text)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert out.count("fork") >= 3 and "child ended" in out, out
    assert same(torch.load(tmp_path / "weights"), unbroken(tmp_path, batches(6))[1])


@needs_daemon
def test_a_full_disk_at_the_start_is_told_and_a_later_start_succeeds(tmp_path):
    """Files may not grow beyond a limit here: the same path as a full drive's."""
    begins = start(tmp_path / "run", tmp_path / "a", limit_bytes=4 << 20)
    out, errors = begins.communicate()
    assert begins.returncode == 1 and "resumed" not in out
    assert "offloadd.Error" in errors and str(tmp_path / "a") in errors, errors
    assert lines_of(start(tmp_path / "run", tmp_path / "a"))[1] == "resumed 0"


@needs_daemon
@pytest.mark.parametrize("step", ["immediate", "deferred"])
def test_a_full_disk_later_is_told_and_the_step_is_committed_when_there_is_room(tmp_path, step):
    def large():
        model = model_of()
        # Too large for a commit's own record.
        model.register_buffer("large", torch.zeros(20_000))
        return model

    model = large()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with run_of(tmp_path, model=model, optimizer_step=step) as (run, model, optimizer):
            losses = train(model, optimizer, batches(6)[:3])
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
            for _ in range(2):
                with pytest.raises(offloadd.Error, match="state-3"):
                    model(batches(6)[3])
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            losses += train(model, optimizer, batches(6)[3:5])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    with run_of(tmp_path, model=large(), optimizer_step=step) as (run, model, optimizer):
        assert run.steps_done == 5
        losses += train(model, optimizer, batches(6)[5:])
        expected = unbroken(tmp_path, batches(6))
        found = weights(model)
        del found["large"]
        assert losses == expected[0] and same(found, expected[1])


@needs_daemon
@pytest.mark.parametrize("damage", ["bytes", "missing"])
def test_a_damaged_state_file_is_a_typed_error(tmp_path, damage):
    model = model_of()
    model.register_buffer("large", torch.zeros(20_000))
    with run_of(tmp_path, model=model) as (run, model, optimizer):
        train(model, optimizer, batches(2))
    file = tmp_path / "run" / "state-2.pt"
    if damage == "bytes":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()
    model = model_of()
    model.register_buffer("large", torch.zeros(20_000))
    with pytest.raises(offloadd.Damaged if damage == "bytes" else offloadd.Error, match="state-2.pt"):
        with run_of(tmp_path, model=model):
            pass

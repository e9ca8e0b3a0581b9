"""`python -m offloadd delete`: all of a run that is not in use, and nothing else."""

import json

import torch

import offloadd
from offloadd.__main__ import main
from test_runs import batches, config, model_of, needs_daemon, train


def run_of(path, device="nvme"):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offloadd.prepare(model, optimizer, config(device, path), run_dir=path / "out" / "offloadd"):
        train(model, optimizer, batches(2))
        yield
    yield


@needs_daemon
def test_a_run_is_deleted_with_its_device_files_when_its_script_has_ended(tmp_path, capsys, monkeypatch):
    run_dir, other = tmp_path / "out" / "offloadd", tmp_path / "offloadd-other-0.tiles"
    other.write_bytes(b"another run's")
    run = run_of(tmp_path)
    next(run)
    assert main(["delete", str(run_dir), "--yes"]) == 1 and "in use: end its script first" in capsys.readouterr().err
    next(run)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(["delete", str(run_dir)]) == 1
    assert f"{run_dir}\n" in (out := capsys.readouterr().out) and "nothing was deleted" in out and len(list(tmp_path.glob("*.tiles"))) == 2
    (run_dir / "mine.txt").write_text("")
    assert main(["delete", str(run_dir), "--yes"]) == 1 and "what is not the run's: mine.txt" in capsys.readouterr().err
    (run_dir / "mine.txt").unlink()
    assert main(["delete", str(tmp_path / "out"), "--yes"]) == 1 and f"name {run_dir}" in capsys.readouterr().err
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(["delete", str(run_dir)]) == 0
    assert not run_dir.exists() and list(tmp_path.glob("*.tiles")) == [other]


def test_a_run_in_host_memory_is_a_directory(tmp_path):
    run = run_of(tmp_path, "cpu")
    assert [next(run), next(run)] == [None, None] and main(["delete", str(tmp_path / "out" / "offloadd"), "--yes"]) == 0
    assert list((tmp_path / "out").iterdir()) == []


def test_a_job_at_a_daemon_is_deleted_there(tmp_path, capsys):
    run = run_of(tmp_path, "cpu")
    next(run), next(run)
    run_dir, told = tmp_path / "out" / "offloadd", tmp_path / "told"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@" >> {told}\n[ ! -e {tmp_path}/open ] || {{ echo "a session has it open" >&2; exit 1; }}\n')
    program.chmod(0o755)
    store = {**json.loads((run_dir / "store.json").read_text()), "socket": "/run/x.sock", "program": str(program)}
    (run_dir / "store.json").write_text(json.dumps(store))
    (tmp_path / "open").touch()
    assert main(["delete", str(run_dir), "--yes"]) == 1 and "cannot be deleted: a session has it open" in capsys.readouterr().err
    (tmp_path / "open").unlink()
    assert main(["delete", str(run_dir), "--yes"]) == 0 and not run_dir.exists()
    assert told.read_text().splitlines() == 2 * [f"job delete {store['job']} --force --socket /run/x.sock"]

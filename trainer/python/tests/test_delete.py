"""`python -m offloadd delete`: all of a run that is not in use, and nothing else."""

import json
import shutil

import pytest
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
    # `trainer runs` reads it.
    assert [link.readlink() for link in tmp_path.glob("*.run")] == [run_dir]
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(["delete", str(run_dir)]) == 1
    assert f"{run_dir}\n" in (out := capsys.readouterr().out) and "nothing was deleted" in out and len(list(tmp_path.glob("*.tiles"))) == 2
    (run_dir / "mine.txt").write_text("")
    assert main(["delete", str(run_dir), "--yes"]) == 1 and "move or delete mine.txt first" in capsys.readouterr().err
    (run_dir / "mine.txt").unlink()
    assert main(["delete", str(tmp_path / "out"), "--yes"]) == 1 and f"name {run_dir}" in capsys.readouterr().err
    # Moved, it would begin anew and leave its tiles behind.
    (tmp_path / "out").rename(tmp_path / "moved")
    with pytest.raises(offloadd.Error, match=f"begun as {run_dir}"):
        model = model_of()
        offloadd.prepare(model, torch.optim.AdamW(model.parameters()), config("nvme", tmp_path), run_dir=tmp_path / "moved" / "offloadd")
    (tmp_path / "moved").rename(tmp_path / "out")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(["delete", str(run_dir)]) == 0
    assert not run_dir.exists() and list(tmp_path.glob("*.tiles")) == [other] and not list(tmp_path.glob("*.run"))


def test_what_is_not_of_this_run_stays(tmp_path, capsys):
    run_dir, files = tmp_path / "out" / "offloadd", [tmp_path / "offloadd-offloadd-1.tiles", tmp_path / "mine.tiles"]
    run = run_of(tmp_path, "cpu")
    next(run), next(run)
    for file in files:
        file.touch()
    told = json.loads((run_dir / "store.json").read_text())

    def refused(where, words, **more):
        (where / "store.json").write_text(json.dumps({**told, **more}))
        assert main(["delete", str(where), "--yes"]) == 1 and words in capsys.readouterr().err
        assert all(file.exists() for file in files) and (where / "layout.json").exists()

    refused(run_dir, "store.json is damaged", job="offloadd-1", device_files=[str(files[1])])
    refused(run_dir, "store.json is damaged", job=None, device_files=7)
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    refused(copy, f"{copy} is a copy of {run_dir}", job="offloadd-1", device_files=[str(files[0])])
    for name in ("state-best.pt", "rank-list.txt", "offloadd/store.json"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).touch()
        refused(run_dir, f"move or delete {name}")
        (run_dir / name).unlink()
    # Under another name of its directory it is the same run.
    (run_dir / "store.json").write_text(json.dumps(told))
    (tmp_path / "link").symlink_to(run_dir)
    assert main(["delete", str(tmp_path / "link"), "--yes"]) == 0
    assert not run_dir.exists() and not (tmp_path / "link").is_symlink() and copy.exists()


def test_the_part_of_another_node_is_deleted_where_its_tiles_are(tmp_path, capsys):
    run = run_of(tmp_path, "cpu")
    next(run), next(run)
    run_dir, tiles = tmp_path / "out" / "offloadd", tmp_path / "offloadd-offloadd-1-node1.tiles"
    part = run_dir / "nodes" / "1"
    part.mkdir(parents=True)
    told = json.loads((run_dir / "store.json").read_text())
    (part / "store.json").write_text(json.dumps({**told, "run_dir": str(part), "job": "offloadd-1-node1", "device_files": [str(tiles)]}))
    assert main(["delete", str(run_dir), "--yes"]) == 1 and "nodes/1 (another node's part, to be deleted on that node)" in capsys.readouterr().err
    tiles.touch()
    assert main(["delete", str(run_dir), "--yes"]) == 0 and f"{part} and its tiles" in capsys.readouterr().out
    assert not run_dir.exists() and not tiles.exists()


def test_a_deletion_that_fails_half_way_is_repeated(tmp_path, capsys, monkeypatch):
    run = run_of(tmp_path, "cpu")
    next(run), next(run)
    run_dir = tmp_path / "out" / "offloadd"
    (run_dir / "tensorboard").mkdir()

    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fail)
        assert main(["delete", str(run_dir), "--yes"]) == 1
    assert capsys.readouterr().err.endswith(f"offloadd: {run_dir / 'tensorboard'}: Permission denied\n")
    assert main(["delete", str(run_dir), "--yes"]) == 0 and not run_dir.exists()


def test_a_run_in_host_memory_is_a_directory(tmp_path):
    run = run_of(tmp_path, "cpu")
    assert [next(run), next(run)] == [None, None] and main(["delete", str(tmp_path / "out" / "offloadd"), "--yes"]) == 0
    assert list((tmp_path / "out").iterdir()) == []


def test_a_job_at_a_daemon_is_deleted_there(tmp_path, capsys):
    run = run_of(tmp_path, "cpu")
    next(run), next(run)
    run_dir, told = tmp_path / "out" / "offloadd", tmp_path / "told"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@" >> {told}\ncat {tmp_path}/refusal >&2\nexit 1\n')
    program.chmod(0o755)
    store = {**json.loads((run_dir / "store.json").read_text()), "socket": "/run/x.sock", "program": str(program)}
    (run_dir / "store.json").write_text(json.dumps(store))
    (tmp_path / "refusal").write_text("a session has it open")
    assert main(["delete", str(run_dir), "--yes"]) == 1 and "cannot be deleted: a session has it open" in capsys.readouterr().err
    # Deleted by another command, or never made.
    (tmp_path / "refusal").write_text(f"uid 0 has no job {store['job']} in this store")
    assert main(["delete", str(run_dir), "--yes"]) == 0 and not run_dir.exists()
    assert told.read_text().splitlines() == 2 * [f"job delete {store['job']} --force --socket /run/x.sock"]

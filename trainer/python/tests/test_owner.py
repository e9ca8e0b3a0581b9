"""trainer/bench/owner.sh: parts that end each for itself, are not repeated, and leave one file without a name of the machine in it."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "trainer/bench"))

import owner  # noqa: E402
import owner_archive  # noqa: E402
import results  # noqa: E402
import watch  # noqa: E402

NO_GPU = {"version": "2.11", "build": "CPU", "gpus": [], "no_gpu": "torch finds no GPU"}


def content(path):
    with tarfile.open(path) as archive:
        return {one.name.partition("/")[2]: (one, archive.extractfile(one).read().decode()) for one in archive}


def test_a_drive_is_measured_and_the_file_names_nothing_of_the_machine(tmp_path):
    home = tmp_path / "ada-lovelace"
    drive, out = home / "drive", home / "out"
    drive.mkdir(parents=True)
    command = [ROOT / "trainer/bench/owner.sh", "--tiny", "--yes", "--bin", ROOT / "target/debug", "--directory", "drive", "--out", "out"]
    env = {**os.environ, "PYTHON": sys.executable, "USER": "ada-lovelace"}
    done = subprocess.run(
        [*map(str, command), "doctor", "scale", "nvme1"], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, cwd=home, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nvme1        at most 15 min" in done.stdout, done.stdout
    assert list(drive.iterdir()) == []
    found = content(out / "offloadd-owner.tar.gz")
    assert {"README.txt", "summary.json", "row.md", "doctor.log", "scale/scale.json", "table/results.json", "table/nvme1/run.toml"} <= set(found)
    for name, (about, text) in found.items():
        assert (about.uid, about.uname, about.mtime) == (0, "", 0), name
        assert "lovelace" not in text and str(ROOT) not in text and str(pathlib.Path(sys.prefix)) not in text, name
    summary = json.loads(found["summary.json"][1])
    assert {name: summary["parts"][name]["status"] for name in ("doctor", "scale", "nvme1")} == dict.fromkeys(("doctor", "scale", "nvme1"), "done")
    rates, figures = (found["row.md"][1].split(" | ")[column] for column in (2, 4))
    assert rates.count(";") == 2 and "+" in rates and figures.endswith("%"), found["row.md"][1]


@pytest.fixture
def args(tmp_path):
    return argparse.Namespace(out=tmp_path / "out", directory=None, bin=tmp_path, tiny=True, yes=True, parts=[])


def test_a_part_that_fails_or_takes_too_long_does_not_end_the_others(args, capsys):
    parts = [
        owner.Part("fails", "", 60, ["sh", "-c", "echo why; exit 3"]),
        owner.Part("waits", "", 1, ["sh", "-c", "sleep 300 & sleep 300"]),
        owner.Part("absent", "", 60, ["/no/such/program"]),
        owner.Part("works", "", 60, ["sh", "-c", "echo well"]),
    ]
    assert owner.measure(args, parts) == 1
    ended = {name: one["status"] for name, one in json.loads((args.out / "parts.json").read_text()).items()}
    assert ended == {"fails": "failed, status 3", "waits": "timed out", "absent": "failed to start", "works": "done"}
    logs = {name: text for name, (_, text) in content(args.out / "offloadd-owner.tar.gz").items()}
    assert logs["fails.log"] == "why\n" and "No such file" in logs["absent.log"]
    parts[0].command = ["true"]
    capsys.readouterr()
    assert owner.measure(args, parts[:1] + parts[3:]) == 0
    said = capsys.readouterr().out
    assert "== fails" in said and "== works" not in said
    # With another command, for example on another drive, it is not done.
    parts[3].command = ["true", "again"]
    owner.measure(args, parts[3:])
    assert "== works" in capsys.readouterr().out


def test_nothing_starts_before_a_yes(args, monkeypatch):
    args.yes, parts = False, [owner.Part("works", "", 60, ["true"])]
    for stdin, answer, code in (("not a terminal", None, 2), ("a terminal", "n", 2), ("a terminal", "", 2), ("a terminal", "y", 0)):
        monkeypatch.setattr(sys, "stdin", argparse.Namespace(isatty=lambda: stdin == "a terminal"))
        monkeypatch.setattr("builtins.input", lambda _: answer)
        assert owner.measure(args, parts) == code, (stdin, answer)
        assert (args.out / "parts.json").exists() == (code == 0), (stdin, answer)


def test_what_a_machine_has_no_means_for_is_left_out_by_name(args, tmp_path, monkeypatch):
    parts = {part.name: part for part in owner.parts_of(args)}
    assert set(parts) == {line.split()[0] for line in owner.__doc__.split("\n\n")[2].splitlines()}
    assert owner.why_not(parts["scale"], args, NO_GPU) == "no --directory"
    args.directory = tmp_path
    assert [name for name, part in parts.items() if owner.why_not(part, args, NO_GPU)] == []
    args.tiny = False
    assert {name for name, part in parts.items() if owner.why_not(part, args, NO_GPU) == "torch finds no GPU"} == set(parts) - {"doctor", "scale"}
    with_gpu, free_bytes = {**NO_GPU, "gpus": ["a GPU"]}, {"scale": 6 << 30, "nvme1": 47 << 30}
    for free, lacking in ((0, ["scale", "nvme1"]), (free_bytes["scale"], ["nvme1"]), (free_bytes["nvme1"], [])):
        monkeypatch.setattr(owner.shutil, "disk_usage", lambda _, free=free: argparse.Namespace(free=free))
        monkeypatch.setattr(owner, "memory_bytes", lambda _: 64 << 30)
        assert [name for name, part in parts.items() if owner.why_not(part, args, with_gpu)] == lacking, free
    monkeypatch.setattr(owner, "memory_bytes", lambda _: 16 << 30)
    assert [name for name, part in parts.items() if owner.why_not(part, args, with_gpu)] == ["host", "client-host"]


def test_before_the_start_and_on_the_page_stands_how_long_it_takes_and_what_it_writes(args, tmp_path):
    args.tiny, args.directory = False, tmp_path
    parts = owner.parts_of(args)
    said = "\n".join(owner.announcement(args, NO_GPU, parts, parts, {}))
    for words in ("writes 52 s as fast as the drive can: 168 GB at 3.2 GB/s", "writes 148 GB", "Altogether at most 56 min"):
        assert words in said, said
    page = (ROOT / "docs/benchmarks.md").read_text().split("## Measuring your own machine")[1]
    space_bytes = owner.parameters(owner.rows.MODELS["1.3b"]) * owner.SPACE_BYTES_PER_PARAM
    for words in ("at most 56 minutes", "148 GB", "52 seconds", "168 GB at 3.2 GB/s", f"{space_bytes / 1e9:.0f} GB of free space"):
        assert words in page, words


@pytest.mark.parametrize(
    "text, expected",
    [
        ("/mnt/big drive/run/a.tiles: no space", "DRIVE/run/a.tiles: no space"),
        ("/srv/clone/trainer/x.py", "REPO/trainer/x.py"),
        ("/srv/clone2/x and /home/ada/.bashrc", "PATH and PATH"),
        ("unix:/run/user/1000/x.sock", "unix:PATH"),
        ("ext4 on /dev/nvme0n1p2, /dev/mapper/ada--vg-root", "ext4 on /dev/nvme0n1p2, PATH"),
        ("/sys/kernel/mm/x /proc/self/status", "/sys/kernel/mm/x /proc/self/status"),
        ("6.2 GB/s, https://example.org/a", "6.2 GB/s, https://example.org/a"),
        ("Ada@box.example.org: adapter, host_bytes", "USER@HOST: adapter, host_bytes"),
        ("tcp://box:29500 10.1.2.3 127.0.0.1 fe80:0:0:1234 12:30:59", "tcp://HOST:29500 ADDRESS 127.0.0.1 ADDRESS 12:30:59"),
        ("GPU-1a2b3c4d-0000-1111-2222-1234567890ab", "ID"),
    ],
)
def test_names_paths_addresses_and_identifiers_are_replaced(text, expected):
    paths = {"/mnt/big drive": "DRIVE", "/srv/clone": "REPO"}
    assert owner_archive.scrubbed(text, paths, {"ada": "USER", "box.example.org": "HOST", "box": "HOST"}) == expected


def test_the_row_has_the_columns_of_the_page():
    page = (ROOT / "docs/benchmarks.md").read_text().split("## On owners' machines")[1].split("\n## ")[0]
    head = next(line for line in page.splitlines() if line.startswith("|"))
    assert head == f"| {' | '.join(owner.COLUMNS)} |"
    rate = lambda *numbers: {way: {"bytes_per_s": number * 1e9} for way, number in zip(("read", "write"), numbers) if number}
    loads = [{"load": load, "daemon": rate(*ours), "fio": rate(*fio)} for load, ours, fio in (("read", (6, 0), (6.25, 0)), ("both", (5, 2), (5, 2)))]
    rows = [{"row": "nvme1", "step_s": 5.0, "tflops": 26.0, "bound_s": 4.9}, {"row": "host", "step_s": 0.5, "tflops": 270.0}]
    summary = {
        "machine": {"hardware": "1 x AMD GPU"},
        "torch": {"version": "2.11"},
        "date": "today",
        "commit": "abc",
        "tiny": False,
        "parts": {"check": {"status": "done"}},
        "rows": rows,
        "scale": {"devices": [{"under": "ext4 on nvme0n1"}], "rows": loads},
    }
    cells = owner.row_of(summary)
    assert len(cells) == len(owner.COLUMNS)
    assert cells[1:] == ["ext4 on nvme0n1", "6.00; 5.00 + 2.00", "96%; 100%", "5.000, 26.0, 98%", "", "0.500, 270.0", "", "passed", "today, abc"]


def test_an_amd_gpu_is_seen_by_its_driver(tmp_path, monkeypatch):
    for card, used in (("card0", None), ("card1", 3 << 30), ("card2", 1 << 30)):
        (tmp_path / card / "device").mkdir(parents=True)
        if used:
            (tmp_path / card / "device/mem_info_vram_used").write_text(f"{used}\n")
    monkeypatch.setattr(watch, "DRM", tmp_path)
    monkeypatch.setattr(results, "AMD_DRIVER", tmp_path)
    # Of a machine with an NVIDIA GPU beside them too.
    for nvidia, names, used in (([], ["AMD Instinct"], 4 << 30), (["NVIDIA H200"], ["NVIDIA H200"], 6 << 30)):

        def run(command, **_):
            said = ["AMD Instinct"] if command[0] == sys.executable else nvidia if "name" in command[1] else ["2048"] * len(nvidia)
            return subprocess.CompletedProcess(command, 0, "\n".join(said))

        monkeypatch.setattr(subprocess, "run", run)
        results.gpus.cache_clear()
        assert (results.gpus(), watch.gpu_bytes()) == (names, used)
    results.gpus.cache_clear()

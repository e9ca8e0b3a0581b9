#!/usr/bin/env python3
"""Checks and measures offloadd on a machine of your own, and leaves one file to send back.

    trainer/bench/owner.sh --directory /mnt/nvme0      a directory on the drive to measure

doctor       what `offloadd doctor` says, and the versions of programs, torch and driver
check        trainer/bench/package/gpu_check.py: the Python package on your GPU, compared with plain PyTorch
scale        `bench-io scale`: the drive through the daemon, compared with fio where it is installed
resident     a row of trainer/bench/table.py: all state in GPU memory
host         the same, all state in host memory
client-host  the same by the Python package
nvme1        all state on the drive

Without PART, all that this machine has the means for. Says before it starts how long it takes at most and what it writes. The same command
continues after a stop: it leaves out the parts that are done. A part that fails, or whose time is over, does not end the others.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import time

import owner_archive
import results
import rows
import watch

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAMS = ("offloadd", "trainer", "trainer-with-torch", "bench-io")
EXTENSION = ROOT / "trainer/python/python/offloadd/_offloadd.abi3.so"

# Of `bench-io scale`: in a round, the daemon, fio and one thread write, then daemon and fio write again while they read. A half second of each
# is not measured.
SCALE_SIZE, SCALE_RUNTIME_S, SCALE_ROUNDS = "1g", 3, 3
SCALE_WRITES_S = SCALE_ROUNDS * 5 * (SCALE_RUNTIME_S + 0.5)
# Five times the size of one drive's bytes, as the help of `bench-io scale` says.
SCALE_SPACE_BYTES = 5 << 30

STEPS = 8
# A step writes the state once, 12 bytes for each parameter; before the first one it is written whole, 14 bytes.
STEP_BYTES, FIRST_BYTES = 12, 14
# The last commit and the step in progress, each up to 14 bytes for each parameter, and a fifth more.
SPACE_BYTES_PER_PARAM = 34
# State and gradients, and what the programs and torch take besides: parts that keep them in host memory.
HOST_BYTES_PER_PARAM = 20
IN_HOST_MEMORY = ("host", "client-host")

# Of a good drive of today; only for the estimate of what `bench-io scale` writes.
WRITE_RATE = rows.DRIVE_RATES[1]

# Columns of the table "On owners' machines" of docs/benchmarks.md, of which the file to send back has a row.
COLUMNS = (
    "machine",
    "drive",
    "GB/s: read; written; both",
    "of fio",
    "`nvme1`: step (s), TFLOPS, of the bound",
    "`resident`: step (s), TFLOPS",
    "`host`: step (s), TFLOPS",
    "`client-host`: step (s), TFLOPS",
    "GPU check",
    "date, commit",
)


@dataclasses.dataclass
class Part:
    name: str
    says: str
    limit_s: int
    command: list
    gpu: bool = False
    drive: bool = False
    writes: str = ""


def parts_of(args):
    """The parts with their commands, limits of time, and what they need."""
    tiny, python, out = args.tiny, sys.executable, args.out
    table = [python, HERE / "table.py", "--bin", args.bin, "--out", out / "table", "--model", "tiny" if tiny else "1.3b", "--steps", 4 if tiny else STEPS]
    check = [python, ROOT / "trainer/bench/package/gpu_check.py", "--bin", args.bin, "--out", out / "check", *(["--cpu", "scaler"] if tiny else [])]
    scale = [args.bin / "bench-io", "scale", "--directory", args.directory, "--out", out / "scale"]
    sizes = ["--size", "32m", "--runtime", 1, "--rounds", 1, "--fio", "none"]
    scale += sizes if tiny else ["--size", SCALE_SIZE, "--runtime", SCALE_RUNTIME_S, "--rounds", SCALE_ROUNDS]
    params = parameters(rows.MODELS["1.3b"])
    train_bytes = params * (STEPS * STEP_BYTES + FIRST_BYTES)
    row = lambda name, limit_s, **more: Part(name, rows_say(name), limit_s, [*table, "--timeout", limit_s - 60, name], gpu=True, **more)
    nvme1 = row("nvme1", 900, drive=True, writes=f"{train_bytes / 1e9:.0f} GB")
    nvme1.command += ["--directory", args.directory]
    return [
        Part("doctor", "what stops or slows down a daemon here", 60, [args.bin / "offloadd", "doctor", *([args.directory] if args.directory else [])]),
        Part("check", "the Python package compared with plain PyTorch", 1200, check, gpu=True),
        Part(
            "scale",
            "the drive through the daemon and with fio",
            300,
            scale,
            drive=True,
            writes=f"{SCALE_WRITES_S:.0f} s as fast as the drive can: {SCALE_WRITES_S * WRITE_RATE / 1e9:.0f} GB at {WRITE_RATE / 1e9:g} GB/s",
        ),
        row("resident", 300),
        row("host", 300),
        row("client-host", 300),
        nvme1,
    ]


def rows_say(name):
    return {**rows.ROWS, **rows.PEERS}[name]["says"]


def parameters(model):
    """Of a Llama without grouped heads whose embedding and head are two matrices."""
    hidden, layers = model["hidden"], model["layers"]
    return 2 * model["vocab"] * hidden + layers * (4 * hidden**2 + 3 * hidden * model["ff"] + 2 * hidden) + hidden


def main():
    parser = argparse.ArgumentParser(prog="owner.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="those above (default: all that this machine has the means for)")
    parser.add_argument("--directory", type=pathlib.Path, help="an existing directory on the drive to measure")
    parser.add_argument("--out", type=pathlib.Path, help="where results and the file to send back go [default: target/owner]")
    parser.add_argument("--bin", type=pathlib.Path, help="where the programs are [default: target/release]")
    parser.add_argument("--yes", action="store_true", help="start without a question")
    parser.add_argument("--tiny", action="store_true", help="try the script itself, in minutes, on any machine: a tiny model on the processor, 32 MiB")
    parser.add_argument("--called-in", type=pathlib.Path, default=pathlib.Path.cwd(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, default in (("directory", None), ("out", ROOT / "target/owner"), ("bin", ROOT / "target/release")):
        given = getattr(args, name)
        setattr(args, name, (args.called_in / given).resolve() if given else default)
    if args.directory and not args.directory.is_dir():
        parser.error(f"--directory {args.directory}: no such directory")
    if args.directory and not os.access(args.directory, os.W_OK):
        parser.error(f"--directory {args.directory}: not writable by this user")
    parts = parts_of(args)
    if unknown := set(args.parts) - {part.name for part in parts}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; --help has them")
    missing = [str(path) for path in (*(args.bin / name for name in PROGRAMS), EXTENSION) if not path.exists()]
    if missing:
        sys.exit(
            f"owner.sh: missing: {', '.join(missing)}\nBuild them with: LIBTORCH_USE_PYTORCH=1 make build python    (torch in the first `python3` of PATH)"
        )
    # Stopping is an exception, so that what was started is ended.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda *_: sys.exit("owner.sh: stopped; the same command continues"))
    sys.exit(measure(args, parts))


def measure(args, parts):
    """Runs the parts that are not done, and packs the file. Returns the exit status."""
    args.out.mkdir(parents=True, exist_ok=True)
    torch = about_torch()
    record = Record(args, {"commit": commit(), "torch": f"{torch['version']} ({torch['build']})"})
    left_out = {part.name: why for part in parts if (why := why_not(part, args, torch))}
    wanted = [part for part in parts if not args.parts or part.name in args.parts]
    todo = [part for part in wanted if part.name not in left_out and not record.is_done(part)]
    print("\n".join(announcement(args, torch, wanted, todo, left_out)), flush=True)
    if todo and not confirmed(args):
        return 2
    for part in todo:
        run(part, args, record)
    summary = summary_of(args, torch, record, left_out)
    packed = owner_archive.pack(args.out, summary, row_of(summary), secrets(args))
    print(f"\n{packed.path}\n  {packed.size_bytes / 1e3:.0f} kB: {', '.join(packed.names)}")
    print("Look into it, then attach it to an issue. Host and user names, paths, addresses and identifiers in it were replaced.")
    failed = [name for name, one in record.parts.items() if one["status"] != "done" and name in {part.name for part in wanted}]
    if failed:
        print(f"Without a result: {', '.join(failed)}; the file has their logs. The same command tries them again.")
    return 1 if failed else 0


def why_not(part, args, torch):
    """Why this machine has no means for the part; None if it has."""
    if part.drive and not args.directory:
        return "no --directory"
    if part.gpu and not args.tiny and not torch["gpus"]:
        return torch["no_gpu"]
    space_bytes = SCALE_SPACE_BYTES if part.name == "scale" else parameters(rows.MODELS["1.3b"]) * SPACE_BYTES_PER_PARAM
    if part.drive and not args.tiny and shutil.disk_usage(args.directory).free < space_bytes:
        return f"less than {space_bytes / 1e9:.0f} GB free in {args.directory}"
    wanted_bytes = parameters(rows.MODELS["1.3b"]) * HOST_BYTES_PER_PARAM
    if part.name in IN_HOST_MEMORY and not args.tiny and memory_bytes("MemAvailable") < wanted_bytes:
        return f"less than {wanted_bytes / 1e9:.0f} GB of host memory available"
    return None


def announcement(args, torch, wanted, todo, left_out):
    """What will be done: a line for each part, then the sums."""
    lines = [f"torch {torch['version']} ({torch['build']}); GPUs: {', '.join(torch['gpus']) or torch['no_gpu']}", ""]
    for part in wanted:
        state = f"at most {part.limit_s / 60:.0f} min" if part in todo else f"left out: {left_out[part.name]}" if part.name in left_out else "done before"
        writes = f"; writes {part.writes}" if part.writes and part in todo and not args.tiny else ""
        lines.append(f"  {part.name:12} {state}: {part.says}{writes}")
    lines += ["", f"Altogether at most {sum(part.limit_s for part in todo) / 60:.0f} min. Results: {args.out}"]
    if any(part.drive for part in todo):
        lines.append(f"The writes wear the drive of {args.directory}; its data stays as it is, and the files that are made there are deleted again.")
    if shutil.which("fio") is None:
        lines.append("fio is not installed: without it the drive's figures have nothing to be compared with.")
    return lines


def confirmed(args):
    if args.yes:
        return True
    if not sys.stdin.isatty():
        print("owner.sh: nothing was started: this is no terminal, and --yes is not given")
        return False
    return input("Start? [y/N] ").strip().lower() in ("y", "yes")


class Record:
    """parts.json: how each part ended, so that a later call leaves out those that are done with the same `measured`: commit and torch."""

    def __init__(self, args, measured):
        self.path, self.args, self.measured = args.out / "parts.json", args, measured
        self.parts = json.loads(self.path.read_text()) if self.path.exists() else {}

    def is_done(self, part):
        one = self.parts.get(part.name, {})
        return one.get("status") == "done" and one.get("command") == words(part.command) and one.get("measured") == self.measured

    def add(self, part, **found):
        self.parts[part.name] = {"command": words(part.command), "measured": self.measured, **found}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.parts, indent=1) + "\n")
        new.replace(self.path)


def words(command):
    return [str(word) for word in command]


def run(part, args, record):
    """Runs one part with all it starts, for as long as it may take. Its failure is its result."""
    print(f"== {part.name}", flush=True)
    log, began, written = args.out / f"{part.name}.log", time.monotonic(), written_bytes(args.directory)
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    try:
        watched = watch.run(part.command, log=log, timeout_s=part.limit_s, env=env)
        status = "timed out" if watched.timed_out else "done" if succeeded(part, watched.status) else f"failed, status {watched.status}"
    except OSError as error:
        log.write_text(f"{error}\n")
        status = "failed to start"
    found = {"status": status, "seconds": round(time.monotonic() - began, 1)}
    if part.drive and written is not None:
        # What others wrote to the drive meanwhile counts too.
        found["written_bytes"] = written_bytes(args.directory) - written
    record.add(part, **found)
    print(f"  {status} after {found['seconds']:.0f} s", flush=True)


def succeeded(part, status):
    # `offloadd doctor` says with 1 that it has found a problem.
    return status == 0 or (part.name == "doctor" and status == 1)


def written_bytes(directory):
    """Written to the directory's block device since the machine started; None without one device of its own, as in btrfs."""
    if directory is None:
        return None
    device = os.stat(directory).st_dev
    stat = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    try:
        return int(stat.read_text().split()[6]) * 512
    except OSError:
        return None


def commit():
    return said("git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=8")


def memory_bytes(what):
    """A line of /proc/meminfo."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def about_torch():
    """Torch's version and build, and the GPUs that it finds; why there is none."""
    import torch

    hip, cuda = getattr(torch.version, "hip", None), torch.version.cuda
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    no_gpu = "torch finds no GPU"
    if not gpus and results.AMD_DRIVER.exists() and not hip:
        no_gpu = "this torch is not ROCm's, which an AMD GPU needs"
    elif not gpus and pathlib.Path("/dev/nvidia0").exists() and not cuda:
        no_gpu = "this torch has no CUDA, which an NVIDIA GPU needs"
    return {"version": torch.__version__, "build": f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU", "gpus": gpus, "no_gpu": no_gpu}


def said(*command):
    """What a program prints; "missing" without it."""
    try:
        done = subprocess.run(words(command), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "missing"
    return (done.stdout + done.stderr).strip()


def summary_of(args, torch, record, left_out):
    """Everything of the run that is not a log."""
    driver = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    versions = {name: said(args.bin / name, "--version") for name in ("offloadd", "trainer", "bench-io")}
    versions |= {"python": platform.python_version(), "transformers": importlib.metadata.version("transformers")}
    amd = pathlib.Path("/sys/module/amdgpu/version")
    versions |= {"nvidia": said(*driver), "amdgpu": amd.read_text().strip() if amd.exists() else "missing", "fio": said("fio", "--version")}
    read = lambda path: json.loads(path.read_text()) if path.exists() else None
    ended = {name: {key: value for key, value in one.items() if key not in ("command", "measured")} for name, one in record.parts.items()}
    return {
        "machine": {"hardware": results.hardware(), "memory_bytes": memory_bytes("MemTotal"), "kernel": platform.release()},
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "tiny": args.tiny,
        "torch": torch,
        "versions": versions,
        "parts": {**{name: {"status": f"left out: {why}"} for name, why in left_out.items()}, **ended},
        "rows": [{key: value for key, value in row.items() if key != "steps"} for row in read(args.out / "table/results.json") or []],
        "scale": read(args.out / "scale/scale.json"),
    }


def row_of(summary):
    """The row of docs/benchmarks.md."""
    rate = lambda way: f"{way['bytes_per_s'] / 1e9:.2f}"
    loads = {row["load"]: row for row in (summary["scale"] or {}).get("rows", ())}
    ways = lambda row, who: [way for key in ("read", "write") if row.get(who) and (way := row[who].get(key))]
    ours = "; ".join(" + ".join(map(rate, ways(row, "daemon"))) for row in loads.values())
    total = lambda row, who: sum(way["bytes_per_s"] for way in ways(row, who))
    of_fio = "; ".join(f"{total(row, 'daemon') / total(row, 'fio'):.0%}" for row in loads.values() if total(row, "fio"))
    newest = {row["row"]: row for row in summary["rows"] if "step_s" in row}
    figures = lambda name: f"{newest[name]['step_s']:.3f}, {newest[name]['tflops']:.1f}" if name in newest else ""
    drive = ", ".join(device["under"] for device in (summary["scale"] or {}).get("devices", ()))
    bound = f", {newest['nvme1']['bound_s'] / newest['nvme1']['step_s']:.0%}" if newest.get("nvme1", {}).get("bound_s") else ""
    check = summary["parts"].get("check", {}).get("status", "")
    cells = [f"{summary['machine']['hardware']}, torch {summary['torch']['version']}", drive, ours, of_fio, figures("nvme1") + bound]
    cells += [figures(name) for name in ("resident", "host", "client-host")]
    return [*cells, "passed" if check == "done" else check, f"{summary['date']}, {summary['commit']}{' (tiny: not figures)' if summary['tiny'] else ''}"]


def secrets(args):
    """Paths of this machine, each with the word that stands for it in what is sent."""
    paths = {args.directory: "DRIVE", args.out: "OUT", args.bin: "BIN", ROOT: "REPO", pathlib.Path(sys.prefix): "PYTHON", pathlib.Path.home(): "HOME"}
    return {str(path): word for path, word in paths.items() if path and path != pathlib.Path("/")}


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Runs rows of the table of step times on a machine with GPUs, peers beside them, and adds them to results.json and RESULTS.md.

    trainer/bench/table.py resident nvme4 nvme4@2 pytorch        rows; of nvme4@2, two processes
    trainer/bench/table.py --list                                all rows
    trainer/bench/table.py --peers host                          all configurations of all its peers first
    trainer/bench/table.py --model tiny nvme1 pytorch            tries the script itself, on any machine

A row's drives are made for it and taken away after it (`bench-io testdrives`; needs root), and measured reading and writing at once while they are
there (mixed.py; fio where there is one). The bound is `trainer plan`'s with these rates and the row's own time of computing. A ratio is
to the fastest of a row's peers in the same call. A peer that is not installed, or that fails, is a row that says so. Everything started
is ended, also when this is stopped.

The binaries need libtorch's libraries: --libtorch names the directory of an installed torch, otherwise `import torch` is asked.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import mixed
import planned
import smaller_gpu
import testdrives
import results
import energy
import rows
import watch

HERE = pathlib.Path(__file__).resolve().parent

# Fresh weights, two generations of extents and full read-ahead: the first steps are not like the others.
WARM_STEPS = 3

# Of the drives, beside the tiles: an eighth more than an equal part, records, the file system's own blocks.
DRIVE_SLACK = 1.2
DRIVE_SLACK_BYTES = 256 << 20


class RowFailed(Exception):
    """Why there is no figure."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--list", action="store_true", help="the rows")
    parser.add_argument("--peers", action="store_true", help="before the rows, all peers that they are compared with")
    parser.add_argument("--bin", type=pathlib.Path, default=HERE.parents[1] / "target/release", help="where trainer, offloadd and bench-io are")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/table"), help="where results and logs go")
    parser.add_argument("--libtorch", type=pathlib.Path, help="the directory of an installed torch")
    parser.add_argument("--fio", help='the program, when it is not in PATH; or "none"')
    parser.add_argument("--model", default="1.3b", choices=sorted(rows.MODELS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches a step, of rows and peers (default: the row's)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one row's training")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of a smaller GPU: another process holds the rest of each (24GiB)")
    parser.add_argument("--drive-rates", nargs=2, metavar=("READ", "WRITE"), help="of one drive, such as 6.2GB/s 3.2GB/s")
    parser.add_argument("--directory", action="append", default=[], help="a directory on a real drive instead of rate-limited ones; may come several times")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="laid over every run file")
    parser.add_argument("--trace", action="store_true", help="also a timeline of each row (trainer train --trace)")
    parser.add_argument("--warm-memory", default="0", metavar="SIZE", help="touch so much memory first, on machines that get theirs lazily (96GiB)")
    parser.add_argument("--commit", help="of the binaries; otherwise git is asked")
    args = parser.parse_args()
    if args.list:
        for name, says in [*((n, r["says"]) for n, r in {**rows.ROWS, **rows.PEERS}.items()), (rows.CURVE, "losses beside plain_pytorch.py's")]:
            print(f"{name:26} {says}")
        return
    known = {*rows.ROWS, *rows.PEERS, rows.CURVE}
    for name in args.rows:
        if rows.split(name)[0] not in known:
            parser.error(f"{name}: no such row; --list has them")
    if args.peers:
        peers = (peer for name in args.rows for peer in rows.PEERS_OF.get(rows.split(name)[0], ()))
        args.rows = list(dict.fromkeys([*peers, *args.rows]))
    if args.steps <= WARM_STEPS:
        parser.error(f"--steps {args.steps}: more than the {WARM_STEPS} that warm up")
    if args.model != "tiny" and not results.gpus():
        sys.exit("table.py: no GPU here; `--model tiny` tries the script")
    # Stopping is an exception, so that what was made is taken away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("table.py: stopped"))
    args.out, testdrives.program = args.out.resolve(), args.bin.resolve() / "bench-io"
    args.out.mkdir(parents=True, exist_ok=True)
    warm_memory(testdrives.number(args.warm_memory))
    table = Table(args)
    with smaller_gpu.left_with(args.gpu_memory and testdrives.number(args.gpu_memory)):
        failed = [name for name in args.rows if not table.row(name)]
    print((args.out / "RESULTS.md").read_text())
    sys.exit(f"table.py: no figure for {', '.join(failed)}" if failed else 0)


class Table:
    """One call of this script: its rows are one run."""

    def __init__(self, args):
        self.args = args
        self.about = {
            "run": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
            "hardware": results.hardware(),
            "date": datetime.date.today().isoformat(),
            "commit": args.commit or git_commit(),
            "model": args.model,
            **({"accumulate": args.accumulate} if args.accumulate > 1 else {}),
            **({"gpu_memory": args.gpu_memory} if args.gpu_memory else {}),
        }
        self.env = {**os.environ, "LD_LIBRARY_PATH": library_path(args.libtorch)}
        self.data = rows.text_to_train(args.out)

    def row(self, name):
        """Measures one row and keeps it, also its failure. Whether there is a figure."""
        print(f"== {name}", flush=True)
        base, ranks = rows.split(name)
        try:
            if base == rows.CURVE:
                found = self.losses()
            elif base in rows.PEERS:
                found = self.peer(name, base, ranks)
            else:
                found = self.train(name, base, ranks)
        except (RowFailed, testdrives.DriveError) as error:
            found = {"note": str(error)}
        says = {**rows.ROWS, **rows.PEERS}.get(base, {}).get("says", "losses beside plain PyTorch's")
        found = {"row": name, "says": says, **self.about, **found}
        results.add(self.args.out, found)
        print({key: value for key, value in found.items() if key != "steps"}, flush=True)
        return "step_s" in found or "losses" in found

    def train(self, name, base, ranks):
        row = rows.ROWS[base]
        if self.args.accumulate > 1:
            row = {**row, "accumulate": self.args.accumulate}
        model = rows.MODELS[row.get("model", self.args.model) if self.args.model != "tiny" else "tiny"]
        directory = self.args.out / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        on_drives = rows.NVME in (row["param"], row["optimizer"])

        def write(nvme_paths):
            text = rows.run_file(row, model, data=str(self.data), directory=str(directory / "run"), nvme_paths=nvme_paths, steps=self.args.steps, ranks=ranks)
            (directory / "run.toml").write_text(text)

        if not on_drives:
            write([])
            return self.trained(directory, ranks, None)
        if self.args.directory or row.get("own_drives"):
            if not self.args.directory:
                raise RowFailed("name directories on real drives with --directory")
            with tempfile.TemporaryDirectory(dir=self.args.directory[0], prefix="table-") as one:
                others = [tempfile.TemporaryDirectory(dir=other, prefix="table-") for other in self.args.directory[1:]]
                write([one, *(other.name for other in others)])
                return {**self.trained(directory, ranks, None), "note": f"on {', '.join(self.args.directory)}, as fast as they are"}
        count = row["drives"]
        # The plan needs no directory that exists.
        write([f"/drive{index}" for index in range(count)])
        plan = self.plan(directory, ranks)
        size_bytes = int(plan["device_bytes"] / count * DRIVE_SLACK) + 2 * plan["chosen"]["state_tile_bytes"] + DRIVE_SLACK_BYTES
        rates = [testdrives.number(text) for text in self.args.drive_rates] if self.args.drive_rates else rows.DRIVE_RATES
        directories = testdrives.create(count, size_bytes, *rates, loop_devices=rows.LOOP_DEVICES_PER_DRIVE)
        try:
            write(directories)
            block_bytes = max(1 << 20, min(plan["chosen"]["state_tile_bytes"] // 4096 * 4096, 8 << 20))
            drives = mixed.measure(testdrives.read_state(), sorted({1 << 20, block_bytes}), 3.0, self.args.fio)
            (directory / "drives.json").write_text(json.dumps(drives, indent=1))
            return self.trained(directory, ranks, drives)
        finally:
            testdrives.destroy()

    def plan(self, directory, ranks, *more):
        """`trainer plan --json` of the row's run file."""
        command = [self.args.bin / "trainer", "plan", directory / "run.toml", "--json", *(["--ranks", ranks] if ranks > 1 else []), *self.sets(), *more]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=self.env, timeout=60)
        try:
            plan = json.loads(done.stdout)
        except json.JSONDecodeError:
            raise RowFailed(f"trainer plan: {done.stderr.strip()[-400:]}") from None
        if "step" not in plan:
            raise RowFailed(f"the plan refuses: {plan.get('problems')}")
        return plan

    def sets(self):
        return [word for one in self.args.set for word in ("--set", one)]

    def trained(self, directory, ranks, drives):
        """Trains the row's run file and makes its figures."""
        trainer, run = self.args.bin / "trainer", directory / "run.toml"
        words = ["launch", "--nproc", ranks, "--", run] if ranks > 1 else ["train", run]
        command = [trainer, *words, *self.sets(), "--fresh"]
        if self.args.trace:
            command += ["--trace", directory / "trace.json"]
        metrics = directory / "run" / "metrics.jsonl"
        watched = watch.run(
            testdrives.enter(command) if drives else command, log=directory / "log", timeout_s=self.args.timeout, env=self.env, first_line=metrics
        )
        steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        if watched.status != 0 and len(steps) <= WARM_STEPS:
            raise RowFailed(why_it_failed(watched))
        steady = steps[WARM_STEPS:]
        middle = lambda key: statistics.median(step.get(key, 0) for step in steady)
        step_s, compute_s = middle("step_s"), middle("forward_s") + middle("backward_s")
        joules = energy.middle_joules(steady)
        plan = self.plan(directory, ranks)
        per_step = 6 * plan["parameters"] * plan["tokens_per_step"]
        found = {
            "step_s": step_s,
            "tokens_per_s": plan["tokens_per_step"] / step_s,
            "tflops": per_step / step_s / 1e12,
            **({"joules_per_token": joules / plan["tokens_per_step"]} if joules else {}),
            "ranks": ranks,
            "read_bytes": middle("device_read_bytes"),
            "written_bytes": middle("device_written_bytes"),
            "start_s": (watched.first_line_at or 0) - steps[0]["step_s"],
            "host_bytes": watched.host_bytes,
            "gpu_bytes": watched.gpu_bytes,
            **{key: middle(key) for key in ("forward_s", "backward_s", "waited_s", "update_s", "bound_s")},
            "bound_by_trainer_s": middle("bound_s"),
            "chosen": plan["chosen"],
            "steps": steps,
        }
        if watched.timed_out or watched.status != 0:
            found["note"] = "it did not end by itself; the steps it made count"
        if drives:
            rates = ["--read", f"{drives['read'] / 1e9:.4f}GB/s", "--write", f"{drives['write'] / 1e9:.4f}GB/s"]
            if compute_s > 0:
                rates += ["--tflops", f"{plan['bound']['operations'] / ranks / compute_s / 1e12:.4f}"]
            bound = self.plan(directory, ranks, *rates)["bound"]
            found |= {"bound_s": bound["s"], "bound": bound, "drives": drives}
            off = [way for way in ("read", "write") if abs(drives[f"{way}_alone"] / drives[f"limit_{way}"] - 1) > 0.05]
            if off:
                found["note"] = f"drives alone do not reach their limits ({', '.join(off)}): see drives.json"
        return found

    def peer(self, name, base, ranks):
        peer, out = rows.PEERS[base], self.args.out / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for module in peer["needs"]:
            if subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode != 0:
                raise RowFailed(f"{module} is not installed here")
        if ranks > 1 and not peer.get("ranks"):
            raise RowFailed(f"{peer['program']} runs in one process only")
        model = rows.MODELS[self.args.model]
        shape = [word for key in ("hidden", "layers", "heads", "ff", "vocab", "seq", "micro") for word in (f"--{key}", model[key])]
        many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
        command = [sys.executable, *many, HERE / peer["program"], *peer["words"], *shape, "--steps", self.args.steps, "--out", out]
        if self.args.accumulate > 1:
            command += ["--accumulate", self.args.accumulate]
        count, ours = peer.get("drives"), peer.get("ours", False)
        if ours:
            command += ["--program", self.args.bin / "offloadd"]
        if not count:
            return self.peer_ran(command, out, ranks, None)
        size_bytes = planned.drive_bytes(self.client_bytes(peer, shape) if ours else deepspeed_bytes(model), count)
        directories = testdrives.create(count, size_bytes, *rows.DRIVE_RATES, raid0=not ours, loop_devices=rows.LOOP_DEVICES_PER_DRIVE)
        try:
            return self.peer_ran([*command, *(word for one in directories for word in ("--directory", one))], out, ranks, directories)
        finally:
            testdrives.destroy()

    def client_bytes(self, peer, shape):
        """What a row of the Python package takes on drives."""
        command = [sys.executable, HERE / peer["program"], *peer["words"], *shape, "--out", self.args.out, "--plan"]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RowFailed(f"no plan: {done.stderr.strip()[-400:]}")
        return json.loads(done.stdout.splitlines()[-1])["device_bytes"]

    def peer_ran(self, command, out, ranks, directories):
        command = testdrives.enter(command) if directories else command
        # torchrun would give each process one thread.
        env = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count() // ranks)}
        watched = watch.run(command, log=out / "log", timeout_s=self.args.timeout, env=env, first_line=out / "metrics.jsonl")
        last = next((line for line in reversed(watched.said.splitlines()) if line.startswith("{")), None)
        if watched.status != 0 or last is None:
            raise RowFailed(why_it_failed(watched))
        found, model = json.loads(last), rows.MODELS[self.args.model]
        tokens = model["seq"] * model["micro"] * self.args.accumulate * ranks
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        # The first process has a GPU of its own, and the others as much work.
        joules = energy.middle_joules(steps[WARM_STEPS:])
        return {
            **found,
            "ranks": ranks,
            "tokens_per_s": tokens / found["step_s"],
            "tflops": 6 * found["params"] * tokens / found["step_s"] / 1e12,
            **({"joules_per_token": joules * ranks / tokens} if joules else {}),
            "start_s": (watched.first_line_at or 0) - steps[0]["step_s"],
            "host_bytes": watched.host_bytes,
            "gpu_bytes": watched.gpu_bytes,
        }

    def losses(self):
        """The same weights, data and settings in both programs; bf16 rounds differently in each, so curves are near and not equal."""
        directory = self.args.out / rows.CURVE
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        model = rows.MODELS[self.args.model]
        steps, lr, seed = max(self.args.steps, 40), 1e-4, 1
        text = rows.run_file(rows.ROWS["resident"], model, data=str(self.data), directory=str(directory / "run"), nvme_paths=[], steps=steps, seed=seed, lr=lr)
        (directory / "run.toml").write_text(text)
        ours = watch.run(
            [self.args.bin / "trainer", "train", directory / "run.toml", *self.sets(), "--fresh"],
            log=directory / "log",
            timeout_s=self.args.timeout,
            env=self.env,
        )
        shape = [word for key in ("hidden", "layers", "heads", "ff", "vocab", "seq", "micro") for word in (f"--{key}", model[key])]
        theirs = watch.run(
            [
                sys.executable,
                HERE / "plain_pytorch.py",
                *shape,
                "--steps",
                steps,
                "--lr",
                lr,
                "--seed",
                seed,
                "--data",
                self.data,
                "--out",
                directory / "pytorch",
            ],
            log=directory / "pytorch.log",
            timeout_s=self.args.timeout,
        )
        for what, watched in (("trainer", ours), ("plain_pytorch.py", theirs)):
            if watched.status != 0:
                raise RowFailed(f"{what}: {' '.join(watched.said.split()[-60:])}")
        curves = [
            [json.loads(line)["loss"] for line in path.read_text().splitlines()]
            for path in (directory / "run/metrics.jsonl", directory / "pytorch/metrics.jsonl")
        ]
        apart = [abs(a - b) / b for a, b in zip(*curves, strict=True)]
        return {
            "losses": curves,
            "note": f"{steps} steps, loss {curves[0][0]:.4f} to {curves[0][-1]:.4f}; apart by {max(apart):.2e} at most, "
            f"{statistics.mean(apart):.2e} in the mean, {apart[0]:.2e} at the first step",
        }


def deepspeed_bytes(model):
    """What DeepSpeed takes on drives: fp32 gradients beside 16 bytes of state and parameters, and some more. Nothing of ours knows it."""
    params = 12 * model["hidden"] ** 2 * model["layers"] * 2 + 2 * model["vocab"] * model["hidden"]
    return params * 24


def why_it_failed(watched):
    """The last error it named, which what it says while it ends may follow; otherwise its last words."""
    errors = [line.strip() for line in watched.said.splitlines() if re.search(r"\w*(Error|Exception)\b.*:", line)]
    words = errors[-1] if errors else " ".join(watched.said.split()[-60:])
    return f"{'its time was over' if watched.timed_out else f'status {watched.status}'}: {words}"


def warm_memory(size_bytes):
    """Touches memory in processes of its own and gives it back: a machine that grows has it then."""
    if size_bytes == 0:
        return
    since, parts = time.monotonic(), min(8, os.cpu_count() or 1)
    script = "import sys; n = int(sys.argv[1]); b = bytearray(n); b[::4096] = b'x' * len(range(0, n, 4096))"
    for child in [subprocess.Popen([sys.executable, "-c", script, str(size_bytes // parts)]) for _ in range(parts)]:
        child.wait()
    print(f"touched {size_bytes / 2**30:.0f} GiB in {time.monotonic() - since:.1f} s", flush=True)


def library_path(libtorch):
    """Where the binaries find libtorch and what it needs."""
    if libtorch is None:
        asked = subprocess.run([sys.executable, "-c", "import torch; print(torch.__path__[0])"], capture_output=True, text=True)
        fetched = HERE.parents[1] / ".libtorch/torch"
        libtorch = pathlib.Path(asked.stdout.strip()) if asked.returncode == 0 else fetched
    if not (libtorch / "lib").is_dir():
        sys.exit(f"table.py: no libtorch at {libtorch}: name an installed torch's directory with --libtorch")
    nvidia = sorted(str(lib) for lib in libtorch.parent.glob("nvidia/*/lib"))
    return ":".join([str(libtorch / "lib"), *nvidia, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def git_commit():
    done = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measures places of the state and groups of micro-batches on a GPU: seconds, TFLOPS and GPU memory of a step with more and more tokens.

    trainer/bench/groups.py --places resident host host-gpu --fractions 0.5 0.9 --tokens 16k

Each row trains a few steps of the model with --micro sequences a micro-batch; a group is the plan's choice ("plan"), all micro-batches
together ("all"), or a number. --fractions are fractions of the parameters whose tiles are in GPU memory, a row of host-gpu each. Losses
of rows with as many tokens must be the same in bits: the script says so, and ends with status 1 if they are not. The programs may be built elsewhere:
--bin needs trainer, trainer-with-torch and offloadd in one directory, and torch comes from this Python or from --libtorch. A row takes half a minute
to start; results go to OUT/groups.json.
"""

import argparse
import itertools
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys

import rows
import smaller_gpu
import testdrives
import watch
from table import library_path

HERE = pathlib.Path(__file__).resolve().parent

# Steps of a row by micro-batches: the first ones are slower, and a step of 64 micro-batches takes long.
STEPS = {1: 8, 4: 6, 16: 4, 64: 3}
WARM_STEPS = {1: 3, 4: 2, 16: 1, 64: 1}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=HERE.parents[1] / "target/release", help="where trainer and offloadd are")
    parser.add_argument("--libtorch", type=pathlib.Path, help="the directory of an installed torch")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/groups"))
    parser.add_argument("--model", default="1.3b", choices=sorted(rows.MODELS))
    parser.add_argument("--places", nargs="+", default=["resident", "host"], choices=["resident", "host", "host-gpu"])
    parser.add_argument("--tokens", nargs="+", default=["16k", "64k", "256k", "1m"], choices=["16k", "64k", "256k", "1m"])
    parser.add_argument("--groups", nargs="+", default=["plan", "all"], help="plan, all, or numbers of micro-batches")
    parser.add_argument("--fractions", nargs="+", default=["auto"], help="of the parameters in GPU memory, for host-gpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="laid over every run file")
    parser.add_argument("--steps", type=int, help="of each row; by default fewer the more tokens a step has")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of a smaller GPU: another process holds the rest (24GiB)")
    parser.add_argument("--repeat", type=int, default=1, help="times that each row is trained: do losses repeat in bits? (%(default)s)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one row")
    args = parser.parse_args()
    # Stopping is an exception, so that what was started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("groups.py: stopped"))
    args.out.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "LD_LIBRARY_PATH": library_path(args.libtorch)}
    data = rows.text_to_train(args.out)
    head = f"{'place':13} {'tokens':>7} {'group':>9} {'groups':>6} {'kept':>12} {'inputs':>6} {'on GPU':>6} {'step s':>8} {'planned':>8} {'TFLOPS':>7} {'GPU GiB':>8} {'planned':>8}"
    print(head, flush=True)
    with smaller_gpu.left_with(args.gpu_memory and testdrives.number(args.gpu_memory)):
        found, differ = measured(args, env, data)
    (args.out / "groups.json").write_text(json.dumps(found, indent=1))
    sys.exit(1 if differ or any("failed" in row for row in found) else 0)


def measured(args, env, data):
    """All rows, printed as they are known, and whether losses differ."""
    found, differ = [], False
    places = [(place, fraction) for place in args.places for fraction in (args.fractions if place == "host-gpu" else [None])]
    for tokens in args.tokens:
        micro_batches = {"16k": 1, "64k": 4, "256k": 16, "1m": 64}[tokens]
        # One micro-batch has no groups.
        groups = args.groups[:1] if micro_batches == 1 else args.groups
        losses = {}
        for (place, fraction), group, _ in itertools.product(places, groups, range(args.repeat)):
            row = measure(args, env, data, place, fraction, micro_batches, group)
            row |= {"place": place, "fraction": fraction, "tokens": tokens, "asked": group}
            found.append(row)
            print(line(row), flush=True)
            if "losses" in row:
                losses.setdefault(tuple(row["losses"]), []).append((place, fraction, group))
        # A row that was ended early has fewer.
        longest = max(losses, key=len, default=())
        if any(some != longest[: len(some)] for some in losses):
            differ = True
            print(f"DIFFER    losses of {tokens}: {losses}", flush=True)
    return found, differ


def measure(args, env, data, place, fraction, micro_batches, group):
    """Trains one row."""
    directory = args.out / f"{place}-{fraction}-{micro_batches}-{group}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    steps = args.steps or STEPS[micro_batches]
    row = {**rows.ROWS[place], "accumulate": micro_batches}
    text = rows.run_file(row, rows.MODELS[args.model], data=str(data), directory=str((directory / "run").resolve()), nvme_paths=[], steps=steps)
    sets = [word for one in args.set for word in ("--set", one)]
    if fraction:
        sets += ["--set", f"offload.gpu_resident_fraction={fraction}"]
    if group != "plan":
        sets += ["--set", f"train.micro_batch_group={micro_batches if group == 'all' else group}"]
    try:
        plan, watched, lines = train(args.bin, env, directory, text, sets, steps, args.timeout)
    except RowFailed as why:
        return {"failed": str(why)}
    if len(lines) < min(steps, WARM_STEPS[micro_batches] + 1):
        return {"failed": f"status {watched.status}: {' '.join(watched.said.split()[-60:])}"}
    # A row of few steps is there for its losses.
    warm_steps = min(WARM_STEPS[micro_batches], len(lines) - 1)
    step_s = statistics.median(step["step_s"] for step in lines[warm_steps:])
    return {
        "chosen": plan["chosen"],
        "micro_batches": micro_batches,
        "step_s": step_s,
        "planned_s": plan["bound"]["s"],
        # Six operations for each parameter and token, without attention.
        "tflops": 6 * plan["parameters"] * plan["tokens_per_step"] / step_s / 1e12,
        "tflops_with_attention": plan["bound"]["operations"] / step_s / 1e12,
        "gpu_bytes": watched.gpu_bytes,
        "planned_gpu_bytes": (plan["gpu"] or {}).get("process_bytes", 0),
        "host_bytes": watched.host_bytes,
        "planned_host_bytes": plan["host"]["node_bytes"],
        "start_s": watched.first_line_at,
        "steps_s": [step["step_s"] for step in lines],
        "losses": [step["loss"] for step in lines],
        "norms": [step.get("grad_norm") for step in lines],
        "warnings": [text for text in watched.said.splitlines() if "warning" in text.lower()],
        "why": [choice for choice in plan["choices"] if choice["key"] == "train.micro_batch_group"],
    }


class RowFailed(Exception):
    """Why a row was not trained."""


def train(programs, env, directory, text, sets, steps, timeout_s, enter=None):
    """Trains the run file `text` in `directory` until it has done `steps` steps, as the command that `enter` makes of it. Returns
    `trainer plan`'s answer, what was watched, and the lines of metrics.jsonl."""
    run, metrics = directory / "run.toml", directory / "run" / "metrics.jsonl"
    run.write_text(text)
    plan = planned(programs, env, run, sets)
    if not plan["fits"]:
        raise RowFailed(f"the plan refuses: {plan['problems']}")
    metrics.unlink(missing_ok=True)
    # The checkpoint at the end takes longer than the steps.
    command = [programs / "trainer", "train", run, *sets, "--fresh"]
    command = enter(command) if enter else command
    watched = watch.run(command, log=directory / "log", timeout_s=timeout_s, env=env, first_line=metrics, enough=(metrics, steps))
    lines = [json.loads(text) for text in metrics.read_text().splitlines()] if metrics.exists() else []
    # A checkpoint that was begun is large.
    for made in (directory / "run").glob("*"):
        if made.is_dir():
            shutil.rmtree(made, ignore_errors=True)
    return plan, watched, lines


def planned(programs, env, run, words):
    """What `trainer plan` says of a run file."""
    asked = subprocess.run([str(programs / "trainer"), "plan", str(run), "--json", *words], capture_output=True, text=True, env=env, timeout=120)
    try:
        return json.loads(asked.stdout)
    except json.JSONDecodeError:
        raise RowFailed(f"trainer plan: {asked.stderr.strip()[-400:]}") from None


def line(row):
    """A row of the table."""
    lead = f"{row['place'] + ' ' + (row['fraction'] or ''):13} {row['tokens']:>7} {row['asked']:>9} "
    if "failed" in row:
        return lead + row["failed"]
    chosen = row["chosen"]
    size = chosen["micro_batch_group"]
    more = chosen["blocks_keeping_more"]
    kept = chosen["activation_checkpointing"] + (f"+{more}" if more else "")
    return (
        f"{lead}{-(-row['micro_batches'] // size):6} {kept:>12} {chosen['activations']:>6} {chosen['gpu_resident_fraction']:6.2f} {row['step_s']:8.3f} "
        f"{row['planned_s']:8.3f} {row['tflops']:7.1f} {row['gpu_bytes'] / 2**30:8.1f} {row['planned_gpu_bytes'] / 2**30:8.1f}"
    )


if __name__ == "__main__":
    main()

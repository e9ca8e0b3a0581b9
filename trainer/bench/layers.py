#!/usr/bin/env python3
"""Computes a step of a model that does not fit from steps of its first layers at full width, beside the plan's step of the whole.

    trainer/bench/layers.py --model 70b --layers 2 4 --directory /mnt/nvme0

The state is on drives (--directory, one for each; --testdrives N makes N of them in memory, rate-limited, as root) or, without them, in host memory.
A line through the measured steps gives the time of a layer and of the rest; the whole is the rest and as many layers as the model has. The
result is computed, not measured. Nothing of the state stays in host or GPU memory, so that every layer costs the same. Results go to OUT/layers.json.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics

import groups
import rows
import testdrives
from table import library_path

# Steps that do not count: memory is touched and files grow.
WARM_STEPS = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=groups.HERE.parents[1] / "target/release", help="where trainer, offloadd and bench-io are")
    parser.add_argument("--libtorch", type=pathlib.Path, help="the directory of an installed torch")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/layers"))
    parser.add_argument("--model", default="70b", choices=sorted(rows.MODELS))
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4], help="numbers of layers to measure, at least two (%(default)s)")
    parser.add_argument("--directory", action="append", default=[], help="on a drive; once for each")
    parser.add_argument("--testdrives", type=int, default=0, metavar="N", help="rate-limited drives in memory to make (root)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="laid over every run file")
    parser.add_argument("--steps", type=int, default=5, help=f"of each number of layers, of which the first {WARM_STEPS} do not count (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one number of layers")
    args = parser.parse_args()
    if len(set(args.layers)) < 2 or args.steps <= WARM_STEPS:
        parser.error(f"two numbers of layers and more than {WARM_STEPS} steps are needed")
    args.out.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "LD_LIBRARY_PATH": library_path(args.libtorch)}
    testdrives.program = args.bin.resolve() / "bench-io"
    found = [measure(args, env, count) for count in sorted(set(args.layers))]
    failed = [row for row in found if "failed" in row]
    whole = None if failed else computed(args, env, found)
    (args.out / "layers.json").write_text(json.dumps({"measured": found, "computed": whole}, indent=1))
    raise SystemExit(bool(failed))


def row_of(args):
    on_drives = bool(args.directory or args.testdrives)
    where = rows.NVME if on_drives else rows.CPU
    staging = {"staging": str(1_400_000_000 * max(1, args.testdrives or len(args.directory))), "commit": 1}
    return {"param": where, "optimizer": where, "accumulate": args.accumulate, **(staging if on_drives else {})}


def text_of(args, layers, directory, drives):
    model = {**rows.MODELS[args.model], "layers": layers}
    return rows.run_file(
        row_of(args),
        model,
        data=str(rows.text_to_train(args.out)),
        directory=str((directory / "run").resolve()),
        nvme_paths=drives,
        steps=args.steps,
    )


def measure(args, env, layers):
    """Trains a few steps with so many layers."""
    directory = args.out / f"{args.model}-{layers}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    sets = [word for one in args.set for word in ("--set", one)]
    row = {"layers": layers}
    try:
        plan = planned(args, env, layers, directory, sets)
        with drives_of(args, plan) as (drives, enter):
            text = text_of(args, layers, directory, drives)
            _, watched, lines = groups.train(args.bin, env, directory, text, sets, args.steps, args.timeout, enter)
            if len(lines) <= WARM_STEPS:
                raise groups.RowFailed(f"status {watched.status}: {' '.join(watched.said.split()[-60:])}")
    except (groups.RowFailed, testdrives.DriveError) as why:
        print(f"{layers} layers: {why}", flush=True)
        return {**row, "failed": str(why)}
    row |= {
        "step_s": statistics.median(step["step_s"] for step in lines[WARM_STEPS:]),
        "planned_s": plan["bound"]["s"],
        "parameters": plan["parameters"],
        "tokens_per_step": plan["tokens_per_step"],
        "gpu_bytes": watched.gpu_bytes,
        "host_bytes": watched.host_bytes,
    }
    print(f"{layers} layers: {row['step_s']:.3f} s a step, {row['planned_s']:.3f} s planned, {row['parameters'] / 1e9:.2f} G parameters", flush=True)
    return row


def planned(args, env, layers, directory, sets):
    """The plan with as many drives as there are, also where a test drive is two directories. It needs no directory that exists."""
    run = directory / "plan.toml"
    count = args.testdrives or len(args.directory)
    run.write_text(text_of(args, layers, directory, [f"/nonexistent/{number}" for number in range(count)]))
    return groups.planned(args.bin, env, run, sets)


@contextlib.contextmanager
def drives_of(args, plan):
    """Directories for the tiles, and what makes a command one under the drives' limits."""
    if not args.testdrives:
        yield args.directory, None
        return
    size_bytes = int(plan["device_bytes"] / args.testdrives * 1.1) + (1 << 30)
    drives = testdrives.create(args.testdrives, size_bytes, *rows.DRIVE_RATES, loop_devices=rows.LOOP_DEVICES_PER_DRIVE)
    try:
        yield drives, testdrives.enter
    finally:
        testdrives.destroy()


def computed(args, env, found):
    """The step of all layers, by the line through the first and the last measured one, and by the plan."""
    first, last = found[0], found[-1]
    layer_s = (last["step_s"] - first["step_s"]) / (last["layers"] - first["layers"])
    layers = rows.MODELS[args.model]["layers"]
    step_s = first["step_s"] + layer_s * (layers - first["layers"])
    directory = args.out / f"{args.model}-{layers}"
    directory.mkdir(exist_ok=True)
    plan = planned(args, env, layers, directory, [word for one in args.set for word in ("--set", one)])
    tflops = 6 * plan["parameters"] * plan["tokens_per_step"] / step_s / 1e12
    print(
        f"{layers} layers, computed: {step_s:.2f} s a step ({layer_s:.4f} s a layer), {plan['bound']['s']:.2f} s planned; {plan['parameters'] / 1e9:.1f} G parameters, "
        f"{plan['tokens_per_step'] / step_s:.0f} tokens/s, {tflops:.1f} TFLOPS; drives {plan['device_bytes'] / 1e9:.0f} GB",
        flush=True,
    )
    return {"layers": layers, "layer_s": layer_s, "step_s": step_s, "planned_s": plan["bound"]["s"], "parameters": plan["parameters"], "tflops": tflops}


if __name__ == "__main__":
    main()

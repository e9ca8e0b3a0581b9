#!/usr/bin/env python3
"""Trains a run file as it is and again with other settings, and prints the mean losses of both side by side.

    trainer/bench/losses.py RUN.toml --steps 1000 --set 'optimizer.master="bf16"' --set 'optimizer.moments="bf16"'

Each training begins anew in a directory of its own below --out, where metrics.jsonl has every step. Both see the same tokens in the same order.
"""

import argparse
import json
import pathlib
import subprocess

HERE = pathlib.Path(__file__).resolve().parent

# Lines of the table.
PARTS = 10


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--trainer", type=pathlib.Path, default=HERE.parents[1] / "target/release/trainer")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/losses"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="laid over the second training only")
    args = parser.parse_args()
    first, second = (train(args, name, sets) for name, sets in (("as-it-is", []), ("changed", args.set)))
    print(f"{'steps':>13} {'as it is':>9} {'changed':>9} {'apart':>8}")
    part = max(1, args.steps // PARTS)
    for start in range(0, args.steps, part):
        one, other = (sum(losses[start : start + part]) / len(losses[start : start + part]) for losses in (first, second))
        print(f"{start + 1:>6}-{min(start + part, args.steps):<6} {one:9.4f} {other:9.4f} {other / one - 1:+8.2%}")


def train(args, name, sets):
    """The losses of all steps of one training."""
    run_dir = (args.out / name).resolve()
    own = [f"train.steps={args.steps}", f'train.run_dir="{run_dir}"', *sets]
    subprocess.run([args.trainer, "train", args.run, "--fresh", *[word for one in own for word in ("--set", one)]], check=True)
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Trains a run file as it is and again with other settings, and prints the mean losses of both side by side.

    trainer/bench/losses.py RUN.toml --steps 1000 --set 'optimizer.master="bf16"' --set 'optimizer.moments="bf16"'
    trainer/bench/losses.py RUN.toml --out DIRECTORY --drawn OUT.svg      draws the curves of an earlier call

Each training begins anew in a directory of its own below --out, where metrics.jsonl has every step. Both see the same tokens in the same order.
"""

import argparse
import json
import math
import pathlib
import subprocess

HERE = pathlib.Path(__file__).resolve().parent

# Directories of the two trainings.
NAMES = ("as-it-is", "changed")

# Lines of the table.
PARTS = 10
# Points of a curve, each the mean of as many steps.
POINTS = 100
LEFT, WIDTH, HEIGHT, MARGIN = 60, 560, 260, 40
COLOURS = ("#7f7f7f", "#1b6ca8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--trainer", type=pathlib.Path, default=HERE.parents[1] / "target/release/trainer")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/losses"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="laid over the second training only")
    parser.add_argument("--drawn", type=pathlib.Path, metavar="OUT.svg", help="trains nothing; draws the curves in --out")
    parser.add_argument("--names", nargs=2, default=NAMES, metavar="NAME", help="of the curves")
    args = parser.parse_args()
    if args.drawn:
        args.drawn.write_text(picture([losses_of(args.out / name) for name in NAMES], args.names))
        return
    first, second = (train(args, name, sets) for name, sets in zip(NAMES, ([], args.set)))
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
    return losses_of(run_dir)


def losses_of(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def picture(curves, names):
    """An SVG of the losses by step, each point the mean of some steps."""
    each = max(1, len(curves[0]) // POINTS)
    means = [[sum(part) / each for part in zip(*[iter(curve)] * each)] for curve in curves]
    high = math.ceil(max(max(mean) for mean in means))
    x = lambda point: LEFT + WIDTH * (point + 0.5) / len(means[0])
    y = lambda loss: MARGIN + HEIGHT * (1 - loss / high)
    words = lambda at_x, at_y, text, more="": f'<text x="{at_x:g}" y="{at_y:g}"{more}>{text}</text>'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + MARGIN}" height="{HEIGHT + 2 * MARGIN}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for loss in range(high + 1):
        lines.append(f'<path d="M{LEFT} {y(loss):g}H{LEFT + WIDTH}" stroke="#dddddd"/>')
        lines.append(words(LEFT - 8, y(loss) + 4, loss, ' text-anchor="end"'))
    for mean, colour, name in zip(means, COLOURS, names):
        path = " ".join(f"{x(point):.1f},{y(loss):.1f}" for point, loss in enumerate(mean))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        row = MARGIN + 16 * (names.index(name) + 1)
        lines.append(words(LEFT + WIDTH - 120, row, name, f' fill="{colour}"'))
    lines.append(words(LEFT + WIDTH, HEIGHT + MARGIN + 20, f"{len(curves[0])} steps", ' text-anchor="end"'))
    lines.append(words(LEFT, MARGIN - 12, "loss"))
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()

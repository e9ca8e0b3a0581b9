#!/usr/bin/env python3
"""Draws TFLOPS by where the state is and by tokens a step, beside the peers, from results.json and MEASUREMENTS.md.

    trainer/bench/picture.py     `make docs` calls it; a test keeps the pictures current

throughput.svg: a bar is the median of a row's runs on one H200, a line its range. tokens.svg: the first table of "Many tokens a step", a line for each of
its columns.
"""

import argparse
import json
import math
import pathlib
import statistics

import readme

HERE = pathlib.Path(__file__).resolve().parent
PICTURES = HERE.parents[1] / "docs/pictures"
OURS, PYTORCH, DEEPSPEED = "#1b6ca8", "#7f7f7f", "#d95f02"

# Title, and [(place, [(row, label, colour)])]: of a peer the fastest configuration that was measured there.
PANELS = [
    (
        "Model state in memory",
        [
            (
                "GPU memory",
                [
                    ("resident", "offloadd", OURS),
                    ("pytorch-compiled-kept", "PyTorch, compiled", PYTORCH),
                    ("deepspeed-gpu", "DeepSpeed, recomputing", DEEPSPEED),
                ],
            ),
            (
                "host memory",
                [
                    ("host", "offloadd", OURS),
                    ("deepspeed-cpu-zero2-compiled", "DeepSpeed ZeRO-2, compiled, recomputing", DEEPSPEED),
                    ("fsdp-cpu-kept", "PyTorch FSDP2", PYTORCH),
                ],
            ),
        ],
    ),
    (
        "Model state on drives of 6.2 GB/s read, 3.2 GB/s write",
        [
            ("one drive", [("nvme1", "offloadd", OURS), ("deepspeed-nvme1", "DeepSpeed", DEEPSPEED)]),
            ("four drives", [("nvme4", "offloadd", OURS), ("deepspeed-nvme4", "DeepSpeed", DEEPSPEED)]),
            ("four drives, half in host memory", [("nvme4-half", "offloadd", OURS)]),
        ],
    ),
]
LEFT, WIDTH, BAR = 250, 430, 18


def values(rows, name):
    """TFLOPS of the row's runs on one GPU."""
    return [row["tflops"] for row in rows if row["row"] == name and "tflops" in row and row["hardware"].startswith("1 x NVIDIA H200")]


def text(x, y, words, more=""):
    return f'<text x="{x:g}" y="{y:g}"{more}>{words}</text>'


def svg(width, height, lines):
    """The file of a picture with these elements."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif" font-size="13" fill="#222">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *lines, "</svg>"]) + "\n"


def picture(rows):
    y, lines = 30, [text(16, 30, "Training throughput, TFLOPS (higher is better)", ' font-size="17" font-weight="bold"')]
    y += 20
    lines.append(text(16, y, "Llama, 1.345 G parameters, bf16, 16 k tokens per step, one H200. Bar: median of the runs; line: range.", ' fill="#555"'))
    for title, places in PANELS:
        most = max(max(values(rows, row)) for _, bars in places for row, _, _ in bars)
        y += 34
        lines.append(text(16, y, title, ' font-size="14" font-weight="bold"'))
        for place, bars in places:
            y += 12
            lines.append(text(16, y + BAR - 5, place))
            for row, label, colour in bars:
                found = values(rows, row)
                median, scale = statistics.median(found), WIDTH / most
                lines.append(f'<rect x="{LEFT}" y="{y}" width="{median * scale:.1f}" height="{BAR - 4}" fill="{colour}"/>')
                if len(found) > 1:
                    middle = y + (BAR - 4) / 2
                    lines.append(f'<path d="M{LEFT + min(found) * scale:.1f} {middle:g}H{LEFT + max(found) * scale:.1f}" stroke="#222"/>')
                end = LEFT + max(found) * scale + 6
                lines.append(text(round(end, 1), y + BAR - 7, f'<tspan font-weight="bold">{median:.{0 if median >= 100 else 1}f}</tspan> {label}'))
                y += BAR
    y += 18
    return svg(860, y, lines)


def curves(measurements):
    """Of each column of the table: its title, and (thousands of tokens a step, TFLOPS) of each cell that was measured."""
    every_row = list(readme.tables(readme.section(measurements, "Many tokens a step")))
    head = every_row[0][0]
    first_table = [row for of, row in every_row if of == head]
    tokens = [int(row[0].split(" k")[0].replace(",", "")) for row in first_table]
    for column, title in enumerate(head[1:], 1):
        cells = [row[column] for row in first_table]
        yield title, [(count, float(cell.split(", ")[1])) for count, cell in zip(tokens, cells) if ", " in cell]


def tokens_picture(measurements):
    left, top, width, height, most = 60, 74, 470, 300, 600
    found = list(curves(measurements))
    counts = sorted({count for _, points in found for count, _ in points})
    x = lambda count: left + width * math.log2(count / counts[0]) / math.log2(counts[-1] / counts[0])
    y = lambda tflops: top + height * (1 - tflops / most)
    lines = [text(16, 30, "TFLOPS by tokens a step", ' font-size="17" font-weight="bold"')]
    lines.append(text(16, 50, "Llama, 1.345 G parameters, bf16, one H200, micro-batches of 16 k tokens.", ' fill="#555"'))
    for tflops in range(0, most + 1, 100):
        lines.append(f'<path d="M{left} {y(tflops):g}H{left + width}" stroke="#ddd"/>')
        lines.append(text(left - 8, y(tflops) + 4, tflops, ' text-anchor="end"'))
    for count in counts:
        lines.append(text(round(x(count), 1), top + height + 20, f"{count:,} k", ' text-anchor="middle"'))
    # Names stand beside the last points, from the top, and not on each other.
    below = 0
    for title, points in sorted(found, key=lambda curve: -curve[1][-1][1]):
        colour = colour_of(title)
        dash = "" if colour == OURS else ' stroke-dasharray="5 3"'
        path = " ".join(f"{x(count):.1f},{y(tflops):.1f}" for count, tflops in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        lines += [f'<circle cx="{x(count):.1f}" cy="{y(tflops):.1f}" r="3" fill="{colour}"/>' for count, tflops in points]
        below = max(below + 17, y(points[-1][1]) + 4)
        lines.append(text(left + width + 12, round(below, 1), title if colour != OURS else f"offloadd, {title}", f' fill="{colour}"'))
    return svg(left + width + 290, top + height + 34, lines)


def colour_of(title):
    return next((colour for name, colour in (("PyTorch", PYTORCH), ("FSDP2", PYTORCH), ("DeepSpeed", DEEPSPEED)) if name in title), OURS)


def current():
    """The pictures by their names."""
    measurements = (HERE / "MEASUREMENTS.md").read_text()
    return {"throughput.svg": picture(json.loads((HERE / "results.json").read_text())), "tokens.svg": tokens_picture(measurements)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path, default=PICTURES, metavar="DIRECTORY", help="another directory than the page's")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, drawn in current().items():
        (args.out / name).write_text(drawn)

#!/usr/bin/env python3
"""Draws docs/pictures/throughput.svg from results.json: TFLOPS by where the state is, beside the peers.

    trainer/bench/picture.py     `make docs` calls it; a test keeps the picture current

A bar is the median of a row's runs on one H200, a line its range.
"""

import argparse
import json
import pathlib
import statistics

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parents[1] / "docs/pictures/throughput.svg"
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
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {y}" width="860" height="{y}" font-family="sans-serif" font-size="13" fill="#222">'
    return "\n".join([head, f'<rect width="860" height="{y}" fill="#fff"/>', *lines, "</svg>"]) + "\n"


def current():
    return picture(json.loads((HERE / "results.json").read_text()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path, default=OUT, metavar="OUT.svg", help="another file than the page's")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(current())

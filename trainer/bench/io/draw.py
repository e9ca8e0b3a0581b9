#!/usr/bin/env python3
"""Draws a report of `bench-io scale` or `bench-io training` as a chart over the number of drives (SVG).

    bench-io scale --directory /mnt/nvme0 --out results && trainer/bench/io/draw.py results/scale.json     writes results/scale.svg
    trainer/bench/io/draw.py training.json OUT.svg
    trainer/bench/io/draw.py --stored          draws the results in trainer/bench/io again; `make docs` calls it

Above a chart stand the machine and how it was measured.
"""

import argparse
import html
import json
import math
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
# Drawn from the file beside them, which has no other source.
STORED = ("fast", "scale", "training")

PANEL_WIDTH, PANEL_HEIGHT = 300, 220
# Beside and below a panel: the axis' numbers and its title.
MARGIN = 64
# Height of the title and the panels' names; description lines come between them.
HEAD, LINE_HEIGHT = 46, 18
# Average width of a letter.
LETTER_WIDTH = 6.2
LEGEND_WIDTH, LEGEND_HEIGHT, WIDTH_MIN = 180, 30, 760
# Most intervals between the numbers of the vertical axis.
TICKS_MAX = 6

OURS, PEER, LIMIT, SLOW = "#1b6ca8", "#d95f02", "#999", "#7a7a7a"
CIRCLE, SQUARE = "m-4,0 a4,4 0 1,0 8,0 a4,4 0 1,0 -8,0", "m-3.5,-3.5 h7 v7 h-7 z"
TRIANGLE, DIAMOND = "m0,-4.5 l4.5,8 h-9 z", "m0,-5 l5,5 l-5,5 l-5,-5 z"
# A series' name, colour, dashes and the mark of its points, wherever it stands in a chart.
SCALE = [
    ("limit set", LIMIT, "2 3", CIRCLE),
    ("fio", PEER, "7 4", SQUARE),
    ("through offloadd", OURS, "", TRIANGLE),
    ("one thread", SLOW, "1 4", DIAMOND),
]
TRAINING = [
    ("ours, predicted", OURS, "7 4", CIRCLE),
    ("ours, measured", OURS, "", TRIANGLE),
    ("DeepSpeed, predicted", PEER, "7 4", SQUARE),
    ("DeepSpeed, measured", PEER, "", DIAMOND),
]


def svg(title, unit, about, panels):
    """A chart of `unit` over drives for each panel, (name, [(series, [(drives, value)])]), below a title and the lines `about` it."""
    panels = [(name, [(series, points) for series, points in lines if points]) for name, lines in panels]
    widest = max(map(len, about), default=0) * LETTER_WIDTH + 2 * MARGIN
    width = max(len(panels) * (PANEL_WIDTH + MARGIN) + MARGIN, WIDTH_MIN, math.ceil(widest))
    head = HEAD + LINE_HEIGHT * len(about)
    height = head + PANEL_HEIGHT + MARGIN + LEGEND_HEIGHT
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" fill="#222">']
    out += [f'<rect width="{width}" height="{height}" fill="#fff"/>', _text(MARGIN, 24, title, ' font-size="15"')]
    out += [_text(MARGIN, 42 + LINE_HEIGHT * index, line) for index, line in enumerate(about)]
    for index, (name, lines) in enumerate(panels):
        out += _panel(name, unit, lines, MARGIN + index * (PANEL_WIDTH + MARGIN), head)
    for index, ((name, colour, dashes, mark), _) in enumerate(panels[0][1]):
        x, y = MARGIN + index * LEGEND_WIDTH, height - 18
        line = f'<line x1="{x}" y1="{y}" x2="{x + 28}" y2="{y}" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        out.append(line + _mark(x + 14, y, colour, mark) + _text(x + 34, y + 4, name))
    return "\n".join([*out, "</svg>"]) + "\n"


def _panel(name, unit, lines, left, head):
    points = [point for _, points in lines for point in points]
    drives_max = max((drives for drives, _ in points), default=1)
    highest = max((value for _, value in points), default=0) or 1e-3
    step = tick_step(highest)
    ticks = math.ceil(highest / step)
    bottom, middle = head + PANEL_HEIGHT, head + PANEL_HEIGHT / 2

    def at(drives, value):
        return left + PANEL_WIDTH * drives / drives_max, head + PANEL_HEIGHT * (1 - value / (ticks * step))

    out = [_text(left + 8, head - 4, name, ' font-size="13"')]
    out.append(f'<path d="M{left} {head} V{bottom} H{left + PANEL_WIDTH}" fill="none" stroke="#222"/>')
    out.append(_text(left + PANEL_WIDTH / 2, bottom + 36, "drives", ' text-anchor="middle"'))
    out.append(f'<text transform="translate({left - 42},{middle:g}) rotate(-90)" text-anchor="middle">{html.escape(unit)}</text>')
    for tick in range(ticks + 1):
        _, y = at(0, tick * step)
        decimals = max(0, -math.floor(math.log10(step)))
        out.append(f'<path d="M{left} {y:.1f} h{PANEL_WIDTH}" stroke="#eee"/>')
        out.append(_text(left - 6, y + 4, f"{tick * step:.{decimals}f}", ' text-anchor="end"'))
    for drives in range(1, int(drives_max) + 1):
        out.append(_text(at(drives, 0)[0], bottom + 18, str(drives), ' text-anchor="middle"'))
    for (_, colour, dashes, mark), points in lines:
        places = [at(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        out += [_mark(x, y, colour, mark) for x, y in places]
    return out


def tick_step(top):
    """Distance of the numbers on an axis up to `top`: 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(top / TICKS_MAX))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power, 20 * power) if top / step <= TICKS_MAX)


def _text(x, y, words, more=""):
    return f'<text x="{x:.6g}" y="{y:.6g}"{more}>{html.escape(words)}</text>'


def _mark(x, y, colour, mark):
    return f'<path d="M{x:.1f},{y:.1f} {mark}" fill="{colour}"/>'


def scale(report):
    """The chart of a report of `bench-io scale`: of the block size that was measured last, GB/s over drives for each load."""
    bs = report["rows"][-1]["bs"]
    rows = [row for row in report["rows"] if row["bs"] == bs and not row["unlimited"]]

    def both(way):
        return way and sum(way[direction]["bytes_per_s"] for direction in ("read", "write") if way.get(direction))

    def limit(row):
        limits = row["limit_bytes_per_s"]
        return limits and sum(rate for rate, load in zip(limits, ("read", "write")) if row["load"] in (load, "both"))

    values = (limit, lambda row: both(row["fio"]), lambda row: both(row["daemon"]), lambda row: row["one_thread_bytes_per_s"])
    about = [machine(report["machine"])]
    if "description" in report:
        about += report["description"]
    elif limits := report.get("limit"):
        about.append("limit set: {:.2f} GB/s read and {:.2f} GB/s written per drive".format(limits["read_bps"] / 1e9, limits["write_bps"] / 1e9))
    panels = []
    for load in ("read", "write", "both"):
        of_load = [row for row in rows if row["load"] == load]
        lines = [(series, [(row["drives"], value(row) / 1e9) for row in of_load if value(row)]) for series, value in zip(SCALE, values)]
        panels.append((load, lines))
    return svg(f"Throughput over drives, operations of {bs / (1 << 20):g} MiB", "GB/s", about, panels)


def training(report, measured=()):
    """The chart of a report of `bench-io training`: TFLOPS over drives. `measured` has DeepSpeed's by the number of drives."""
    rows, ours = report["rows"], report["rows"][0]["ours"]

    def tflops(step):
        return step and 6 * ours["parameters"] * ours["tokens"] / step["step_s"] / 1e12

    kinds = [[(row["drives"], tflops(row[kind])) for row in rows if row.get(kind)] for kind in ("ours", "measured", "deepspeed")]
    about = [machine(report["machine"])]
    about += report.get("description") or [f"{ours['parameters'] / 1e6:.0f} M parameters, {ours['tokens']:g} tokens per step"]
    about.append(f"rates: {report['rates']}")
    if measured:
        about.append("DeepSpeed, measured: on drives of the same rates, median of the runs in trainer/bench/results.json")
    return svg("Training throughput over drives", "TFLOPS", about, [("training", [*zip(TRAINING, [*kinds, sorted(measured)])])])


def machine(about):
    """A line about the machine of a report."""
    parts = [about["processor"], f"{about['cores']} cores", f"{about['memory_bytes'] >> 30} GiB", about["kernel"]]
    return ", ".join([*parts, f"huge pages {about['huge_pages'] or 'none'}", about["date"]])


def draw(report, measured=()):
    """The chart of either report."""
    if not isinstance(report, dict) or not report.get("rows"):
        raise ValueError("no report of `bench-io scale` or `bench-io training`, or one without rows")
    return training(report, measured) if "rates" in report else scale(report)


def stored():
    """The pictures of trainer/bench/io, by file."""
    runs = json.loads((HERE.parent / "results.json").read_text())
    tflops = {drives: [run["tflops"] for run in runs if run["row"] == f"deepspeed-nvme{drives}" and run["model"] == "1.3b"] for drives in (1, 4)}
    measured = [(drives, statistics.median(found)) for drives, found in tflops.items()]
    found = {}
    for name in STORED:
        report = json.loads((HERE / f"{name}.json").read_text())
        found[HERE / f"{name}.svg"] = draw(report, measured if name == "training" else ())
    return found


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("report", nargs="?", type=pathlib.Path, metavar="REPORT.json")
    what.add_argument("--stored", action="store_true", help="draw the stored results again")
    parser.add_argument("out", nargs="?", type=pathlib.Path, metavar="OUT.svg", help="(default: beside the report)")
    args = parser.parse_args(words)
    if args.stored:
        for path, picture in stored().items():
            path.write_text(picture)
        return 0
    out = args.out or args.report.with_suffix(".svg")
    try:
        out.write_text(draw(json.loads(args.report.read_text())))
    except (OSError, ValueError, KeyError) as error:
        print(f"draw.py: {args.report}: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

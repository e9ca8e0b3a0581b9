#!/usr/bin/env python3
"""Checks that each figure of README's table "How fast" was measured. Prints each that was not.

    trainer/bench/readme.py        `make check` calls it

A figure's source is a row of results.json, or a row of a table in trainer/bench/MEASUREMENTS.md. A figure that is added or changed by hand needs its source
in SOURCES, and the source has to say the same number, rounded alike.
"""

import argparse
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# The figures of README are of this GPU and of one process.
GPU = "NVIDIA H200"

# Beginning of a row of README's table: for each column after the first, the sources of its figures in their order. A source is the name of a
# row in results.json, or a heading of trainer/bench/MEASUREMENTS.md with the beginning of a row below it.
SOURCES = {
    "GPU memory": [
        ["resident", "resident"],
        ["pytorch-compiled-kept", "pytorch-compiled-kept", "pytorch-compiled"],
        ["deepspeed-gpu"],
    ],
    "[products in fp8]": [[("Products in 8 bits", "6.74 G, 13 of 32")], [], []],
    "host memory, no state on the GPU": [
        [("A part of the state in GPU memory", "host memory (`offload.gpu_resident_fraction = 0`)"), "host"],
        ["fsdp-cpu-kept"],
        ["deepspeed-cpu-zero2-compiled", "deepspeed-cpu-kept"],
    ],
    "host memory, 262 k": [
        [("Many tokens a step", "262 k, commit a6f92d09")],
        [("Many tokens a step", "262 k |")],
        [("Many tokens a step", "262 k, peers"), ("Many tokens a step", "262 k |")],
    ],
    "6.74 billion parameters, the H200": [[("Smaller GPUs", "6.74 G, 80 GiB; commit 2f351821"), ("Smaller GPUs", "6.74 G, 24 GiB; commit 2f351821")], [], []],
    "13.0; 32.8": [[("13.0 billion parameters on one GPU", "2026-11-30, 764a607a"), ("32.8 billion parameters on one GPU", "64 k")], [], []],
    "one drive": [["nvme1"], [], ["deepspeed-nvme1"]],
    "four drives": [["nvme4", "nvme4"], [], ["deepspeed-nvme4"]],
}


def figures(text):
    """Numbers of a cell, as they are written; not those in names (ZeRO-2, FSDP2)."""
    return re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.]*\w)", text)


def section(page, heading):
    """The text below a heading, up to the next one; None without it."""
    parts = re.split(rf"^#+ {re.escape(heading)}$", page, flags=re.MULTILINE)
    return re.split(r"^#+ ", parts[1], flags=re.MULTILINE)[0] if len(parts) == 2 else None


def tables(text):
    """Yields each row of the tables in a text as its cells, with the cells of its table's head."""
    head = None
    for line in text.splitlines():
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells(line)
        elif not line.startswith("|--") and not line.startswith("| --"):
            yield head, cells(line)


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def starts_with(row, beginning):
    return " | ".join(row).startswith(beginning)


def measured(source, results, benchmarks):
    """What a source says: a function from the number of digits to the figures with so many. Raises a KeyError without such a source."""
    if isinstance(source, str):
        values = [row["tflops"] for row in results if row["row"] == source and GPU in row["hardware"] and "tflops" in row]
        if not values:
            raise KeyError(f"results.json has no row `{source}` of a {GPU}")
        return lambda digits: [f"{value:.{digits}f}" for value in values]
    heading, beginning = source
    found = [(head, row) for head, row in tables(section(benchmarks, heading) or "") if starts_with(row, beginning)]
    if len(found) != 1:
        raise KeyError(f'trainer/bench/MEASUREMENTS.md has {len(found)} rows "{beginning}" below "{heading}"')
    (head, row), *_ = found
    # A title of the first column may say it for all.
    said = [figure for title, cell in zip(head, row) if "TFLOPS" in title + head[0] for figure in figures(cell)]
    return lambda digits: said


def faults(readme, results, benchmarks, sources):
    """Returns a line for each figure of README's table without a source that says it."""
    found, seen = [], set()
    for head, row in tables(section(readme, "How fast") or ""):
        name = next((one for one in sources if starts_with(row, one)), None)
        if name is None or name in seen:
            found.append(f'README.md, "{row[0]}": no row of SOURCES in trainer/bench/readme.py')
            continue
        seen.add(name)
        for title, cell, expected in zip(head[1:], row[1:], sources[name], strict=True):
            place, written = f'README.md, "{row[0]}", {title}', figures(cell)
            if len(written) != len(expected):
                found.append(f"{place}: {len(written)} figures, and {len(expected)} sources in trainer/bench/readme.py")
                continue
            for figure, source in zip(written, expected):
                try:
                    said = measured(source, results, benchmarks)(len(figure.partition(".")[2]))
                except KeyError as error:
                    found.append(f"{place}: {error.args[0]}")
                    continue
                if figure not in said:
                    where = f"results.json, row `{source}`," if isinstance(source, str) else f'trainer/bench/MEASUREMENTS.md, "{source[0]}", row "{source[1]}",'
                    found.append(f"{place}: {figure}, but {where} says {', '.join(dict.fromkeys(said))}")
    return found + [f'trainer/bench/readme.py: README\'s table has no row "{name}"' for name in sources if name not in seen]


def stored():
    """README, results.json and trainer/bench/MEASUREMENTS.md of this directory."""
    results = json.loads((HERE / "results.json").read_text())
    return (ROOT / "README.md").read_text(), results, (HERE / "MEASUREMENTS.md").read_text()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    wrong = faults(*stored(), SOURCES)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)

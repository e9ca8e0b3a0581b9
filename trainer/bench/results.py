"""results.json, one object a row, and RESULTS.md, the table made of it."""

import functools
import json
import pathlib
import subprocess
import sys

import rows

# Of the kernel, with any AMD GPU that computes.
AMD_DRIVER = pathlib.Path("/dev/kfd")

COLUMNS = [
    "row",
    "hardware",
    "date",
    "step s",
    "tokens/s",
    "TFLOPS",
    "read + written GB",
    "bound s",
    "of the bound",
    "peer TFLOPS",
    "ratio",
    "start s",
    "host GiB",
    "GPU GiB",
    "J/token",
    "commit",
]


def add(out, row):
    """Adds a row and makes the table again."""
    path = out / "results.json"
    found = json.loads(path.read_text()) if path.exists() else []
    found.append(row)
    path.write_text(json.dumps(found, indent=1) + "\n")
    (out / "RESULTS.md").write_text(table(found))


def table(found):
    intro = "Every row that `trainer/bench/table.py` measured; [benchmarks](../../docs/benchmarks.md#training) has the main ones, the model and the machine."
    lines = ["# Training table", "", intro, "", f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    lines += [f"| {' | '.join(cells(row, found))} |" for row in found]
    lines += [
        "",
        "TFLOPS: 6 x parameters x tokens / time. The bound is `trainer plan`'s, with the rates that the drives gave reading and writing at once in",
        "the same run, and the row's own time of computing. of the bound: bound / step. ratio: TFLOPS / the peer's of the same run. start: until the first step.",
        "host: PSS of trainer and daemon. J/token: of the GPUs, by their counters, medians of steps. Blank: not measured, or not kept. Devices and what a row trains:",
        "",
    ]
    shown = {row["row"]: row.get("says", "") for row in found}
    lines += [f"- {name}: {says}" for name, says in shown.items()]
    notes = [f"- {row['row']}: {row['note']}" for row in found if row.get("note")]
    return "\n".join(lines + (["", "Notes:", "", *notes] if notes else [])) + "\n"


def cells(row, found):
    if "step_s" not in row:
        blank = [""] * (len(COLUMNS) - 5)
        return [row["row"], row.get("hardware", ""), row.get("date", ""), row.get("note", "failed").splitlines()[0][:120], *blank, row.get("commit", "")]
    name, ranks = rows.split(row["row"])
    peer = peer_of(name, ranks, row, found)
    number = lambda key, digits, scale=1.0: f"{row[key] / scale:.{digits}f}" if row.get(key) else ""
    return [
        row["row"] + (f", {row['gpu_memory']} of GPU memory" if row.get("gpu_memory") else ""),
        row["hardware"],
        row["date"],
        number("step_s", 3),
        number("tokens_per_s", 0),
        number("tflops", 1),
        f"{row['read_bytes'] / 1e9:.1f} + {row['written_bytes'] / 1e9:.1f}" if "read_bytes" in row else "",
        number("bound_s", 3),
        f"{row['bound_s'] / row['step_s']:.0%}" if row.get("bound_s") else "",
        f"{peer['tflops']:.1f}" if peer else "",
        f"{row['tflops'] / peer['tflops']:.2f}" if peer else "",
        number("start_s", 1),
        number("host_bytes", 1, 2**30),
        number("gpu_bytes", 1, 2**30),
        number("joules_per_token", 4),
        row["commit"],
    ]


def peer_of(name, ranks, row, found):
    """The fastest of the row's peers in the same run; of one process, multiplied, when the peer ran with one."""
    wanted = rows.PEERS_OF.get(name, ())
    same = [one["tflops"] for one in found if one["row"] in wanted and one.get("run") == row.get("run") and "tflops" in one]
    return {"tflops": max(same) * ranks} if same else None


def hardware():
    """This machine in a few words."""
    cpu = next((line.split(":")[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    cores = sum(line.startswith("processor") for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines())
    names = gpus()
    many = f"{len(names)} x {names[0]}, " if names else ""
    return f"{many}{cores} cores ({cpu})"


@functools.cache
def gpus():
    """Names of the GPUs: nvidia-smi's, else torch's where AMD's driver is."""
    names = lines_said_by("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if names or not AMD_DRIVER.exists():
        return names
    return lines_said_by(sys.executable, "-c", "import torch\nfor index in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(index))")


def lines_said_by(*command):
    """What a program prints; nothing without it, or when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []

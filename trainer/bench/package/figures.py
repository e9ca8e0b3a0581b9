"""What the scripts of rows share: drives, the time of steps, the rates of the bus, and lines that are printed when they are known."""

import json
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import planned  # noqa: E402
import rows  # noqa: E402
import testdrives  # noqa: E402
import watch  # noqa: E402

# Steps that learn the order of units and fill buffers, before those that count.
WARM_STEPS = 3

# Bytes of a copy that measures the bus.
_COPY_BYTES = 1 << 30


def add_drives(parser):
    """The options that say where a row on drives has its tiles."""
    parser.add_argument("--nvme-path", action="append", default=[], metavar="DIRECTORY", help="on a drive; once for each")
    parser.add_argument("--testdrives", type=int, default=0, metavar="N", help="rate-limited drives in memory to make for this call (root)")


def offload_param(place, args):
    """The tables `offload_param` and `offloadd` of a row in this place: host memory, or drives below the daemon that was built here or is in PATH."""
    if place != "nvme":
        return {"device": "cpu"}, {}
    built = pathlib.Path(__file__).resolve().parents[3] / "target/release/offloadd"
    return {"device": "nvme", "nvme_path": args.nvme_path}, {"program": str(built)} if built.exists() else {}


def on_test_drives(args, device_bytes):
    """With --testdrives, runs this script again on so many drives, and ends as it does. They hold what `device_bytes` returns together, and are gone
    afterwards."""
    if not args.testdrives or args.nvme_path:
        return
    # Stopping is an exception, so that the drives are taken away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{sys.argv[0]}: stopped"))
    size_bytes = planned.drive_bytes(device_bytes(), args.testdrives)
    began = time.perf_counter()
    drives = testdrives.create(args.testdrives, size_bytes, *rows.DRIVE_RATES, loop_devices=rows.LOOP_DEVICES_PER_DRIVE)
    try:
        show(drives=args.testdrives, drive_bytes=size_bytes, drives_made_s=time.perf_counter() - began)
        words = [word for drive in drives for word in ("--nvme-path", drive)]
        # A session of its own: what it started ends with it, and the drives are free.
        child = subprocess.Popen(testdrives.enter([sys.executable, *sys.argv, *words]), start_new_session=True)
        try:
            sys.exit(child.wait())
        finally:
            watch.end(child)
    finally:
        testdrives.destroy()


def show(**row):
    """Prints a row at once, so that a call that is cut off keeps it."""
    print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}), flush=True)


def wait(device):
    """Returns when the device has computed everything."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def forget_peak(device):
    """Lets the peak of GPU memory begin anew, without what nobody uses."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device):
    """The peak of GPU memory since then; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else None


def timed(step, steps, device):
    """Calls `step` and returns the median seconds of each part that its results name, after steps that warm up, and all of its losses.
    `step` returns a loss and a list of times at which its parts ended."""
    parts, losses = [], []
    for number in range(WARM_STEPS + steps):
        wait(device)
        began = time.perf_counter()
        loss, ends = step()
        wait(device)
        ends = [began, *ends, time.perf_counter()]
        losses.append(float(loss))
        if number >= WARM_STEPS:
            parts.append([after - before for before, after in zip(ends, ends[1:])])
    return [statistics.median(part) for part in zip(*parts)], losses


def bus_rates(device):
    """Bytes a second to and from the GPU, each from pinned memory and alone; None on a CPU."""
    if not device.startswith("cuda"):
        return None, None
    host, there = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True), torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    rates = []
    for to, source in ((there, host), (host, there)):
        took = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
        rates.append(_COPY_BYTES / min(took))
    return rates

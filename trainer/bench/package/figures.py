"""What the scripts of rows share: the time of steps, the rates of the bus, and lines that are printed when they are known."""

import json
import statistics
import time

import torch

# Steps that learn the order of units and fill buffers, before those that count.
WARM_STEPS = 3

# Bytes of a copy that measures the bus.
_COPY_BYTES = 1 << 30


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

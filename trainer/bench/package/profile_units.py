#!/usr/bin/env python3
"""Shows where the Python package's time goes for each unit of a model: hooks, order, memory, and calls into Rust.

    trainer/bench/package/profile_units.py --step-s 0.6 --of-units 26

The model has many units of nine small parameters, as a Llama's block has, so that nothing but this time is seen. First a step as it is,
beside the same model in plain PyTorch; then the same with a clock around every part, which makes it longer: use the parts as shares.
--step-s and --of-units say what the time is of a real step (0.6 s and 26 units: the table's 1.3 G model on an H200).
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "python/python"))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import offloadd  # noqa: E402
from offloadd import _commits, _engine, _gathering, _gradients, _memory, _opening, _order, _reports, _steps, _tile_gradients  # noqa: E402

PARTS = {
    "forward: hooks": (_engine.Engine, ("_before_forward", "_after_forward", "_hook_made", "_begin_pass")),
    "backward: hooks": (_engine.Engine, ("_before_backward", "_before_gradient", "_start_backward", "_settle", "_backward_ended")),
    "backward: gradients": (_gradients.Gradients, ("collect", "take_all", "hand_over")),
    "backward: end": (_gradients.Gradients, ("left", "end_backward", "put_away", "looked_at", "_collect_sums", "show")),
    "gather and release": (_gathering.Gathering, ("gather", "release", "take_away", "_expect", "_open", "guard", "_note_written", "refuse_writes")),
    "order": (_order.Order, ("begin", "next", "gathers", "outside", "_learn", "forget_rest")),
    "memory": (_memory.HostMemory, ("expect", "ready", "release", "gradient_buffer", "hand_over", "square_sums")),
    "memory, GPU": (_memory.GpuMemory, ("expect", "ready", "release", "gradient_buffer", "hand_over", "square_sums")),
    "handles of gradients": (_tile_gradients.GradientInTile, ("__new__", "__torch_dispatch__")),
    "step": (_steps.Steps, ("make", "_groups", "_of_params", "_scales")),
    "step: engine": (_engine.Engine, ("updated", "forget_gradients")),
    "commit": (_commits.Commits, ("seal", "note_step", "_complete")),
    "reports": (_reports.Reports, ("step",)),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(7))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, x):
        a, b = (norm(x) for norm in self.norms)
        return x + sum(part(a) for part in self.parts[:4]) + sum(part(b) for part in self.parts[4:])


class Model(nn.Module):
    def __init__(self, units, width):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(units))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Clock:
    """Seconds and calls of each part, without the parts it calls."""

    def __init__(self):
        self.seconds, self.calls, self._within = {}, {}, []

    def around(self, name, call):
        def timed(*args, **kwargs):
            began = time.perf_counter()
            self._within.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                inner, took = self._within.pop(), time.perf_counter() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + took - inner
                self.calls[name] = self.calls.get(name, 0) + 1
                if self._within:
                    self._within[-1] += took

        return timed

    def wrap(self):
        for name, (owner, methods) in PARTS.items():
            for method in methods:
                found = owner.__dict__.get(method)
                if isinstance(found, (staticmethod, classmethod)):
                    setattr(owner, method, type(found)(self.around(name, found.__func__)))
                elif found is not None:
                    setattr(owner, method, self.around(name, found))

    def forget(self):
        self.seconds.clear(), self.calls.clear()


class Timed:
    """An object of the extension with a clock around every call."""

    def __init__(self, it, clock):
        self._it, self._clock = it, clock

    def __getattr__(self, name):
        found = getattr(self._it, name)
        if callable(found):
            found = self._clock.around(f"Rust: {name}", found)
            self.__dict__[name] = found
        return found


def steps(model, optimizer, x, count, wait):
    """Medians of the seconds of forward, backward and the rest of a step."""
    found = []
    for _ in range(count):
        times = [time.perf_counter()]
        loss = model(x)
        wait()
        times.append(time.perf_counter())
        loss.backward()
        wait()
        times.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wait()
        times.append(time.perf_counter())
        found.append([after - before for before, after in zip(times, times[1:])])
    return [statistics.median(part) for part in zip(*found[len(found) // 4 :])]


def measured(args, clock):
    """A prepared model's steps, with a clock around each part if one is given."""
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    torch.manual_seed(0)
    model = Model(args.units, args.width).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(1, args.width, device=args.device)
    plain = steps(model, optimizer, x, args.steps, wait)
    model = Model(args.units, args.width).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    settings = {"gradient_accumulation_steps": 1, "zero_optimization": {"offload_param": {"device": "cpu"}}, "offloadd": {"units": ["Block"]}}
    with tempfile.TemporaryDirectory() as directory, offloadd.prepare(model, optimizer, settings, run_dir=directory + "/run"):
        steps(model, optimizer, x, 3, wait)
        if clock is not None:
            clock.forget()
        return plain, steps(model, optimizer, x, args.steps, wait)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--step-s", type=float, default=0.6, help="of a real step")
    parser.add_argument("--of-units", type=int, default=26, help="its units")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plain, ours = measured(args, None)
    print(f"{args.units} units of 9 parameters, {args.device}, torch {torch.__version__}; microseconds per unit\n")
    print(f"| | forward | backward | clip, update, zero_grad |\n|{' --- |' * 4}")
    micro = lambda seconds: f"{seconds / args.units * 1e6:.0f}"
    for name, found in (("plain PyTorch", plain), ("offloadd", ours), ("more", [b - a for a, b in zip(plain, ours)])):
        print(f"| {name} | {' | '.join(map(micro, found))} |")
    more = (sum(ours) - sum(plain)) / args.units
    print(f"\n{args.of_units} units: {more * args.of_units * 1e3:.2f} ms, {more * args.of_units / args.step_s:.2%} of a step of {args.step_s} s\n")

    clock = Clock()
    clock.wrap()
    opened, mover = _opening.open_tiles, _memory.GpuDevice.open
    watched = lambda *args: (lambda core, blob: (Timed(core, clock), blob))(*opened(*args))
    # The mover is opened with the extension's own object.
    _opening.open_tiles = watched
    _memory.GpuDevice.open = lambda gpu, core: Timed(mover(gpu, getattr(core, "_it", core)), clock)
    measured(args, clock)
    steps_done = args.steps
    print(f"| part, with a clock around each | calls per unit and step | microseconds per unit and step |\n|{' --- |' * 3}")
    for name, seconds in sorted(clock.seconds.items(), key=lambda one: -one[1]):
        print(f"| {name} | {clock.calls[name] / args.units / steps_done:.2f} | {micro(seconds / steps_done)} |")


if __name__ == "__main__":
    main()

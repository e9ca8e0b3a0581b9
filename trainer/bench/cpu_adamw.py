#!/usr/bin/env python3
"""Measures AdamW on processors: this project's kernel, torch.optim.AdamW as loop, foreach and fused, and DeepSpeed's CPUAdam, if it is installed.

    trainer/bench/cpu_adamw.py --million 256 --threads 1 2

torch's and DeepSpeed's have fp32 weights, gradients and moments and move 28 bytes a parameter; the kernel also has the trainer's formats. Needs
`cargo build --release -p kernels --example adamw_speed`. DeepSpeed compiles its own with this machine's compiler: `pip install deepspeed ninja`.
A row is the best of some passes over parameters that together exceed every cache.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import time

import torch

HERE = pathlib.Path(__file__).resolve().parent
PASSES = 5
# Elements of a parameter: one matrix of a block of a model of 7 G parameters.
PARAM_ELEMS = 16 << 20
NAME_COLUMNS = 46
DEEPSPEED = "DeepSpeed, DeepSpeedCPUAdam"
KINDS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
# What the kernel calls its formats, what they are, and bytes that a parameter moves.
FORMATS = {
    "Fp32, Fp32": ("fp32", 28),
    "SplitBf16, Fp32": ("bf16, fp32 master", 26),
    "SplitBf16, Bf16": ("bf16, fp32 master, bf16 moments", 18),
    "Bf16, Bf16": ("bf16, no master, bf16 moments", 14),
}
OURS = re.compile(r"AdamW (\w+, \w+) +\w+ +(\d+) +([\d.]+)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=int, default=256, help="parameters, in millions")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count()}))
    parser.add_argument("--kernel", type=pathlib.Path, default=HERE.parents[1] / "target/release/examples/adamw_speed")
    args = parser.parse_args()
    if not args.kernel.exists():
        sys.exit(f"{args.kernel} is missing: cargo build --release -p kernels --example adamw_speed")
    ours = subprocess.run([args.kernel, str(args.million), "AdamW"], capture_output=True, text=True, check=True)
    rates = {(kind, int(threads)): float(rate) for kind, threads, rate in OURS.findall(ours.stdout)}
    print(f"{'AdamW':{NAME_COLUMNS}} {'threads':>7} {'G parameters/s':>14} {'GB/s':>6}")
    adam, why_not = cpu_adam()
    for threads in args.threads:
        for kind, (name, bytes_each) in FORMATS.items():
            if (kind, threads) in rates:
                show(f"this project, {name}", threads, rates[kind, threads], bytes_each)
        torch.set_num_threads(threads)
        for name, words in KINDS.items():
            show(f"torch.optim.AdamW, {name}", threads, rate_of(lambda params, words=words: torch.optim.AdamW(params, **words), args.million), 28)
        if adam:
            show(DEEPSPEED, threads, rate_of(adam, args.million), 28)
        else:
            print(f"{DEEPSPEED:{NAME_COLUMNS}} {threads:7} {why_not}")


def cpu_adam():
    """DeepSpeed's optimizer, which compiles itself for this processor, or why there is none."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])
    except ImportError as error:
        return None, f"not installed: {error}"
    except Exception as error:
        return None, f"does not compile: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return DeepSpeedCPUAdam, ""


def rate_of(make, million):
    """G parameters a second of the best pass."""
    params = [torch.nn.Parameter(torch.randn(PARAM_ELEMS)) for _ in range(max(1, million * 1_000_000 // PARAM_ELEMS))]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer, best = make(params), float("inf")
    for _ in range(1 + PASSES):
        began = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - began)
    return len(params) * PARAM_ELEMS / best / 1e9


def show(name, threads, rate, bytes_each):
    print(f"{name:{NAME_COLUMNS}} {threads:7} {rate:14.2f} {rate * bytes_each:6.1f}", flush=True)


if __name__ == "__main__":
    main()

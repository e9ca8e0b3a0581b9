#!/usr/bin/env python3
"""Measures the same training in a page of plain PyTorch, to compare with: step time, memory, and the loss curve.

Llama as one writes it down: RMSNorm, rotary positions, scaled_dot_product_attention, SwiGLU; each block checkpointed; loss in fp32
over bf16 logits. It keeps what an exact trainer keeps: bf16 weights to compute with, an fp32 master and fp32 moments, updated by the
fused AdamW (16 bytes a parameter with bf16 gradients, 4 more while the step's gradients are fp32). `--master none` keeps only bf16
weights and bf16 moments: less to move, other results. `--compile` lets torch.compile fuse each block and the loss (Triton, a minute).
`--keep` keeps what blocks compute instead of checkpointing them.

With `--data FILE` it reads the trainer's tokens (bytes) in the trainer's order and starts from the trainer's weights (the counter of
trainer/run/src/model/init.rs), so that its losses can be laid beside metrics.jsonl; without, tokens are random.

    trainer/bench/plain_pytorch.py --steps 8 --out DIR                    step time: DIR/metrics.jsonl and a last line of JSON
    plain_pytorch.py --data text --seed 1 --steps 100 --out DIR
"""

import argparse
import json
import math
import os
import pathlib
import time

import energy
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

MASK = (1 << 64) - 1
GAMMA, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(value):
    """The int64 of the same bits."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def splitmix64(z):
    """Of a Python number."""
    z = (z + GAMMA) & MASK
    z = ((z ^ z >> 30) * MIX1) & MASK
    z = ((z ^ z >> 27) * MIX2) & MASK
    return z ^ z >> 31


def splitmix64_tensor(z):
    """Of each element; int64 arithmetic wraps, and a shift right must be told not to copy the sign."""
    right = lambda z, bits: (z >> bits) & ((1 << (64 - bits)) - 1)
    z = z + signed(GAMMA)
    z = (z ^ right(z, 30)) * signed(MIX1)
    z = (z ^ right(z, 27)) * signed(MIX2)
    return z ^ right(z, 31)


def fresh(unit, offset, shape, seed, std, device):
    """The trainer's first weights of a matrix that lies at `offset` of its unit."""
    out = torch.empty(math.prod(shape), dtype=torch.float32, device=device)
    key = splitmix64((splitmix64(seed) + unit) & MASK)
    for start in range(0, out.numel(), 1 << 24):
        count = min(1 << 24, out.numel() - start)
        counter = torch.arange(count, device=device) * 2 + signed(key + 2 * (offset + start))
        u1 = ((splitmix64_tensor(counter) >> 11 & (1 << 53) - 1) + 1).double() * 2.0**-53
        u2 = (splitmix64_tensor(counter + 1) >> 11 & (1 << 53) - 1).double() * 2.0**-53
        out[start : start + count] = (std * (-2 * u1.log()).sqrt() * (2 * math.pi * u2).cos()).float()
    return out.view(shape)


def units(a):
    """Each unit's parameters as the trainer lays them out: (name, shape)."""
    h, ff = a.hidden, a.ff
    block = [
        ("norm1", (h,)),
        ("q", (h, h)),
        ("k", (h, h)),
        ("v", (h, h)),
        ("o", (h, h)),
        ("norm2", (h,)),
        ("gate", (ff, h)),
        ("up", (ff, h)),
        ("down", (h, ff)),
    ]
    return [[("embed", (a.vocab, h))]] + [block] * a.layers + [[("norm", (h,)), ("head", (a.vocab, h))]]


def make_masters(a, device):
    """fp32 weights by unit; each parameter starts at a multiple of 64 elements of its unit."""
    masters = []
    for unit, members in enumerate(units(a)):
        offset, made = 0, {}
        for name, shape in members:
            made[name] = torch.ones(shape, device=device) if len(shape) == 1 else fresh(unit, offset, shape, a.seed, a.init, device)
            offset += (math.prod(shape) + 63) // 64 * 64
        masters.append(made)
    return masters


def norm(x, weight, eps):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def block(x, p, cos, sin, a):
    batch, seq, _ = x.shape
    heads = lambda y: y.view(batch, seq, a.heads, -1).transpose(1, 2)
    y = norm(x, p["norm1"], a.eps)
    q, k, v = (heads(F.linear(y, p[name])) for name in "qkv")
    y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
    x = x + F.linear(y.transpose(1, 2).reshape(batch, seq, -1), p["o"])
    y = norm(x, p["norm2"], a.eps)
    return x + F.linear(F.silu(F.linear(y, p["gate"])) * F.linear(y, p["up"]), p["down"])


def head(x, p, targets, a):
    logits = F.linear(norm(x, p["norm"], a.eps), p["head"])
    return F.cross_entropy(logits.float().view(-1, a.vocab), targets.reshape(-1))


def loss_of(weights, inputs, targets, cos, sin, a):
    of_block, of_head = (torch.compile(block), torch.compile(head)) if a.compile else (block, head)
    x = F.embedding(inputs, weights[0]["embed"])
    for p in weights[1:-1]:
        x = of_block(x, p, cos, sin, a) if a.keep else checkpoint(of_block, x, p, cos, sin, a, use_reentrant=False)
    return of_head(x, weights[-1], targets, a)


def permuted(seed, epoch, count, index):
    """Where `index` of 0..count comes in an epoch: trainer/run/src/data/order.rs."""
    half = (max(2, (count - 1).bit_length()) + 1) // 2
    mask = (1 << half) - 1
    key = seed * GAMMA + epoch * 0xD1B54A32D192ED03
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ (splitmix64((key + turn * 0x8CB92BA72F3D8DD7 + right) & MASK) & mask)
        index = left << half | right
        if index < count:
            return index


def batches(a, device):
    """Inputs and targets of one micro-batch after the other."""
    if a.data is None:
        while True:
            rows = torch.randint(0, a.vocab, (a.micro, a.seq + 1), device=device)
            yield rows[:, :-1], rows[:, 1:]
    text = torch.frombuffer(bytearray(pathlib.Path(a.data).read_bytes()), dtype=torch.uint8)
    windows, sample = (len(text) - 1) // a.seq, 0
    while True:
        starts = [permuted(a.seed, i // windows, windows, i % windows) * a.seq for i in range(sample, sample + a.micro)]
        sample += a.micro
        rows = torch.stack([text[start : start + a.seq + 1] for start in starts]).long().to(device)
        yield rows[:, :-1], rows[:, 1:]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "hidden": 2048,
        "layers": 24,
        "heads": 16,
        "ff": 5504,
        "vocab": 32000,
        "seq": 2048,
        "micro": 8,
        "accumulate": 1,
        "steps": 8,
        "seed": 1,
        "lr": 1e-4,
        "clip": 1.0,
        "eps": 1e-6,
        "init": 0.02,
        "theta": 10000.0,
    }.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--data")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--master", choices=["fp32", "none"], default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    return parser.parse_args()


def main():
    a = arguments()
    began = time.time()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    dtype = torch.bfloat16 if a.dtype == "bf16" else torch.float32

    masters = make_masters(a, device)
    weights = [{name: p.to(dtype, copy=True).requires_grad_(True) for name, p in unit.items()} for unit in masters]
    pairs = [(unit[name], made[name]) for unit, made in zip(masters, weights) for name in made]
    if a.master == "none":
        pairs = [(weight, weight) for _, weight in pairs]
    del masters
    groups = [{"params": [m for m, _ in pairs if m.dim() > 1], "weight_decay": 0.1}, {"params": [m for m, _ in pairs if m.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    count = sum(m.numel() for m, _ in pairs)
    # The angles in fp32, as Hugging Face's models have them.
    dim = a.hidden // a.heads
    angle = torch.arange(a.seq, device=device)[:, None] * (1.0 / a.theta ** (torch.arange(0, dim, 2, device=device).float() / dim))[None, :]
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))

    a.out.mkdir(parents=True, exist_ok=True)
    lines, source, times = open(a.out / "metrics.jsonl", "w"), batches(a, device), []
    meter = energy.of_this_process(device)
    for step in range(1, a.steps + 1):
        wait()
        start, loss = time.perf_counter(), 0.0
        for _ in range(a.accumulate):
            part = loss_of(weights, *next(source), cos, sin, a) / a.accumulate
            part.backward()
            loss = loss + part.detach()
        if a.master == "fp32":
            for master, weight in pairs:
                master.grad, weight.grad = weight.grad.float(), None
        total = torch.nn.utils.clip_grad_norm_([m for m, _ in pairs], a.clip)
        optimizer.step()
        if a.master == "fp32":
            with torch.no_grad():
                torch._foreach_copy_([w for _, w in pairs], [m for m, _ in pairs])
        optimizer.zero_grad(set_to_none=True)
        wait()
        times.append(time.perf_counter() - start)
        line = {"step": step, "loss": float(loss), "grad_norm": float(total), "step_s": times[-1], "gpu_energy_j": meter.joules_since_last()}
        if step == 1:
            line["started_s"] = time.time() - began
        lines.write(json.dumps(line) + "\n")
        lines.flush()
    steady = sorted(times[2:] or times)
    print(
        json.dumps(
            {
                "params": count,
                "step_s": steady[len(steady) // 2],
                "torch": torch.__version__,
                "master": a.master,
                "gpu": torch.cuda.get_device_name() if on_gpu else None,
                "gpu_peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
                "host_bytes": int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            }
        )
    )


if __name__ == "__main__":
    main()

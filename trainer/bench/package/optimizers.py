#!/usr/bin/env python3
"""Measures seconds a step of a model whose parameters are on the GPU and whose optimizer's state is elsewhere: offloadd.optim.AdamW, and what others have.

    trainer/bench/package/optimizers.py --directory /mnt/nvme0
    trainer/bench/package/optimizers.py --device cpu --tiny          tries the script itself

The table's Llama of 1.345 G parameters with random weights, bf16, 16 k tokens a step, blocks checkpointed, gradients clipped to a norm of 1 but in the
rows that say otherwise.

torch          fp32 masters and moments on the GPU, torch.optim.AdamW, fused
host           offloadd.optim.AdamW, masters and moments in host memory
overlap        the same with overlap_backward=True
begun          the same with update_in_backward(), not clipped
drive          as host, in files in --directory (a temporary directory)
drive-overlap  as overlap, there, with overlap_commit=True
drive-begun    as begun, there
torchao        CPUOffloadOptimizer: bf16 weights and moments, no masters, gradients that leave before they are clipped: less to do, other results
fsdp2          CPUOffloadPolicy, one rank: fp32 parameters in host memory too (trainer/bench/fsdp_peer.py)
zero2          DeepSpeed ZeRO-2, its optimizer in host memory (trainer/bench/deepspeed_peer.py)

A row is a process and a line of JSON, printed when it ends. bound_s, of rows of ours: forward and backward of the row itself (without updates in
it), then bus_s, memory_s or drive_s, the longest one: gradients and parameters on the bus, both at once, each at the rate of a copy from or to pinned
memory; what an update reads and writes of host memory, at the rate of a copy there; what it writes to drives, and reads of them beyond what staging
holds, which is read while the model computes. With overlap_commit what staging holds is written in the next step. Clipped updates wait for the norm of
all gradients, so they follow backward; those that begin in backward take place beside it, after forward. Never less than the run's own bound,
all bytes at the rates of the drives. of_the_bound: bound_s / step_s.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
PEERS = HERE.parent
sys.path[:0] = [str(PEERS), str(HERE.parents[1] / "python/python")]

import planned  # noqa: E402
import rows  # noqa: E402

# Those of ours, and whether their updates begin in backward.
OURS = {"host": False, "overlap": False, "begun": True, "drive": False, "drive-overlap": False, "drive-begun": True}
ROWS = ("torch", *OURS, "torchao", "fsdp2", "zero2")
# Program and arguments of rows that are measured elsewhere, and the module that each needs.
ELSEWHERE = {"fsdp2": ("fsdp_peer.py", ["cpu"], "torch"), "zero2": ("deepspeed_peer.py", ["cpu-opt", "--stage", "2"], "deepspeed")}
OPTIMIZER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=6, help="that are timed")
    parser.add_argument("--directory", action="append", default=[], help="on a drive, for the rows drive; one for each drive")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one row")
    parser.add_argument("--program", help="the program offloadd, for the rows drive")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of some million parameters")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        return measure(args)
    for row in args.rows:
        why = missing(row, args)
        if why:
            print(f"skipped: {row}: {why}", flush=True)
        else:
            run(row, args)
    return 0


def missing(row, args):
    """Why a row cannot run here; None where it can."""
    needs = {"torchao": "torchao", **{name: module for name, (_, _, module) in ELSEWHERE.items()}}.get(row)
    if needs and importlib.util.find_spec(needs) is None:
        return f"no module {needs}"
    return f"{row} needs a GPU" if needs and not args.device.startswith("cuda") else None


def run(row, args):
    """One row in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        if row in ELSEWHERE:
            program, words, _ = ELSEWHERE[row]
            model = rows.MODELS["tiny" if args.tiny else "1.3b"]
            sizes = [word for key in ("hidden", "layers", "heads", "ff", "vocab", "seq", "micro") for word in (f"--{key}", str(model[key]))]
            # It leaves the first step out.
            command = [sys.executable, str(PEERS / program), *words, "--out", out, "--steps", str(args.steps + 1), *sizes]
        else:
            command = [sys.executable, __file__, "--row", row, *sys.argv[1:]]
        began = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
            why, printed = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"], done.stdout.splitlines()
        except subprocess.TimeoutExpired as error:
            why, printed = [f"longer than {args.timeout} s"], (error.stdout or b"").decode().splitlines()
        lines = [json.loads(line) for line in printed if line.startswith("{")]
        found = next((line for line in lines if "step_s" in line), {"error": why[0]})
        if row in ELSEWHERE and "step_s" in found:
            found |= derived(found["params"], found["step_s"], args)
    print(json.dumps({"row": row, **found, "row_took_s": round(time.monotonic() - began, 1)}), flush=True)


def derived(params, step_s, args):
    model = rows.MODELS["tiny" if args.tiny else "1.3b"]
    tokens = model["seq"] * model["micro"]
    return {"tokens": tokens, "tflops": round(6 * params * tokens / step_s / 1e12, 2)}


def measure(args):
    """A row of this process."""
    import torch
    from figures import bus_rates, forget_peak, peak_gib, show, timed, wait

    model, vocabulary, shape = model_of(args)
    params = sum(param.numel() for param in model.parameters())
    with tempfile.TemporaryDirectory() as temporary:
        optimizer, clip = optimizer_of(args, model, temporary)

        def step():
            tokens = torch.randint(vocabulary, shape, device=args.device)
            with optimizer.update_in_backward() if OURS.get(args.row) else contextlib.nullcontext():
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
            wait(args.device)
            backward_ended = time.perf_counter()
            if not OURS.get(args.row):
                clip(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), [backward_ended]

        def alone():
            tokens = torch.randint(vocabulary, shape, device=args.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            wait(args.device)
            forward_ended = time.perf_counter()
            loss.backward()
            model.zero_grad()
            return loss.detach(), [forward_ended]

        rates = bus_rates(args.device)
        # Updates that begin in backward may slow it down.
        alone_s, _ = timed(alone, 3, args.device) if OURS.get(args.row) else (None, [])
        forget_peak(args.device)
        (compute_s, update_s), losses = timed(step, args.steps, args.device)
        row = {"params": params, "step_s": compute_s + update_s, "compute_s": compute_s, "update_s": update_s}
        row |= derived(params, row["step_s"], args)
        if args.row in OURS:
            row |= bound_of(args, optimizer, params, alone_s or (compute_s, 0.0), rates)
            row["of_the_bound"] = row["bound_s"] / row["step_s"]
            optimizer.close()
        show(**row, gpu_gib=peak_gib(args.device), first_loss=losses[0], last_loss=losses[-1], torch=torch.__version__)
    return 0


def model_of(args):
    """The model on its device, its vocabulary, and the shape of a batch."""
    import torch
    import transformers

    sizes = rows.MODELS["tiny" if args.tiny else "1.3b"]
    config = transformers.LlamaConfig(
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["ff"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads"],
        vocab_size=sizes["vocab"],
        max_position_embeddings=sizes["seq"],
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model.gradient_checkpointing_enable()
    return model, sizes["vocab"], (sizes["micro"], sizes["seq"])


def optimizer_of(args, model, temporary):
    """The row's optimizer, and its function that clips."""
    import torch

    clip = torch.nn.utils.clip_grad_norm_
    if args.row == "torch":
        return WithMasters(model), clip
    if args.row == "torchao":
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **OPTIMIZER), clip
    import offloadd

    directory = (args.directory or [temporary]) if args.row.startswith("drive") else None
    options = {"program": args.program} if args.program else None
    where = [pathlib.Path(one) / "offloadd-optimizers" for one in directory] if directory else None
    given = {
        **OPTIMIZER,
        "directory": where,
        "options": options,
        "overlap_backward": args.row.endswith("overlap"),
        "overlap_commit": args.row == "drive-overlap",
    }
    return offloadd.optim.AdamW(model.named_parameters(), **given), offloadd.optim.clip_grad_norm_


class WithMasters:
    """torch.optim.AdamW on fp32 masters of a model's parameters."""

    def __init__(self, model):
        import torch

        self.params = [param for param in model.parameters() if param.requires_grad]
        self.masters = [param.detach().float() for param in self.params]
        self.inner = torch.optim.AdamW(self.masters, fused=True, **OPTIMIZER)

    def step(self):
        import torch

        for param, master in zip(self.params, self.masters):
            master.grad, param.grad = param.grad.float(), None
        self.inner.step()
        self.inner.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)

    def zero_grad(self):
        """Gradients are gone with the step."""


def host_rate():
    """Bytes a second that a copy in host memory reads and writes together, on all cores."""
    import torch

    source = torch.zeros(1 << 28, dtype=torch.float32)
    to, took = torch.zeros_like(source), []
    for _ in range(5):
        began = time.perf_counter()
        to.copy_(source)
        took.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(took)


def bound_of(args, optimizer, params, alone_s, rates):
    """The least seconds of a step of ours; `alone_s`: of what an update follows, and of what it may take place beside."""
    to_gpu, from_gpu = rates
    bus_s = max(2 * params / to_gpu, 2 * params / from_gpu) if to_gpu else 0.0
    memory_s = planned.update_bytes(optimizer._run.plan) / host_rate()
    run = optimizer._run
    last = json.loads((run.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    found = {"bus_s": bus_s, "memory_s": memory_s, "host_gib": last["host_bytes"] / 2**30, "read_bytes": last["device_read_bytes"]}
    if args.row.startswith("drive"):
        drive_s = drive_time(drive_figures(run), last["device_read_bytes"], last["device_written_bytes"], args.row == "drive-overlap")
        found |= {"written_bytes": last["device_written_bytes"], "drive_s": drive_s, "drive_bound_s": last["bound_s"]}
    found["bound_s"] = step_bound(alone_s, [bus_s, memory_s, found.get("drive_s", 0.0)], found.get("drive_bound_s", 0.0))
    return found


def drive_figures(run):
    """Figures of the run's plan, with the rates of drives that the run measured when it began."""
    from offloadd import _offloadd

    return json.loads(_offloadd.plan(run.plan.engine_plan))


def drive_time(figures, read_bytes, written_bytes, overlaps_commit):
    """Seconds in which drives read and write what cannot overlap with forward and backward: an update is read ahead into staging, and what it writes
    stays there when the commit overlaps with the next step."""
    staged = figures["staging_bytes"]
    written_bytes -= staged if overlaps_commit else 0
    return max(0.0, (read_bytes - staged) / figures["read_bytes_per_s"], written_bytes / figures["write_bytes_per_s"])


def step_bound(alone_s, update_s, all_s):
    """The least seconds of a step whose update takes the longest of `update_s`: after the first of `alone_s` and beside the second. `all_s` is that of
    all bytes of a step on drives, wherever in it they move."""
    before, beside = alone_s
    return max(all_s, before + max(beside, *update_s))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())

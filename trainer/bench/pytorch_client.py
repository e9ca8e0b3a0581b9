#!/usr/bin/env python3
"""Measures the Python package on the table's model: transformers' Llama in a plain loop, taken over by `offloadd.prepare`.

    trainer/bench/pytorch_client.py nvme --out target/client --directory /mnt/nvme0

Needs the built extension (`make python`) and transformers beside torch. Below torchrun each process has a GPU and the work of one.
"""

import argparse
import json
import os
import pathlib
import sys
import time

import energy
import planned

HERE = pathlib.Path(__file__).resolve().parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["none", "cpu", "nvme"])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--directory", action="append", default=[], help="on a drive; one for each drive")
    parser.add_argument("--keep", action="store_true", help="keep what blocks compute instead of checkpointing activations")
    parser.add_argument("--compile", action="store_true", help="compile each block with torch.compile")
    parser.add_argument("--staging", type=int, default=0, help="bytes of host memory that tiles pass through")
    parser.add_argument("--program", help="the program offloadd")
    parser.add_argument("--plan", action="store_true", help="only print what the mode nvme takes on drives")
    for name, value in {"hidden": 2048, "layers": 24, "heads": 16, "ff": 5504, "vocab": 32000, "seq": 2048, "micro": 8, "accumulate": 1, "steps": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def made(a, device):
    """The model of a row."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=a.hidden,
        intermediate_size=a.ff,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.heads,
        vocab_size=a.vocab,
        max_position_embeddings=a.seq,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.train()
    if not a.keep:
        model.gradient_checkpointing_enable()
    if a.compile:
        for layer in model.model.layers:
            layer.compile()
    return model


def main():
    a = arguments()
    began = time.time()
    sys.path.insert(0, str(HERE.parent / "python/python"))
    import offloadd
    import torch

    if a.plan:
        model = made(a, "meta")
        return print(json.dumps({"device_bytes": planned.device_bytes(model, torch.optim.AdamW(model.parameters()))}))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    model = made(a, device)
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    settings = {
        "train_micro_batch_size_per_gpu": a.micro,
        # One backward pass a step, as the native trainer's and DeepSpeed's rows: gradients keep the parameters' type.
        "gradient_accumulation_steps": a.accumulate,
        "zero_optimization": {"offload_param": {"device": a.mode, "nvme_path": a.directory}},
        "offloadd": {
            # As the native trainer's rows: nothing stays on the GPU between its uses.
            "gpu_resident_fraction": 0,
            **({"staging_bytes": a.staging // ranks} if a.staging else {}),
            **({"program": a.program} if a.program else {}),
        },
    }
    a.out.mkdir(parents=True, exist_ok=True)
    times, python = [], []
    with offloadd.prepare(model, optimizer, settings, run_dir=a.out / "run") as run, open(a.out / "metrics.jsonl" if rank == 0 else os.devnull, "w") as lines:
        if rank == 0:
            print(run.describe(), flush=True)
        torch.manual_seed(rank)
        meter = energy.of_this_process(device)
        for step in range(1, a.steps + 1):
            wait()
            start = time.perf_counter()
            forward_s = 0.0
            for _ in range(a.accumulate):
                forward_began = time.perf_counter()
                tokens = torch.randint(0, a.vocab, (a.micro, a.seq), device=device)
                loss = model(input_ids=tokens, labels=tokens).loss
                forward_s += time.perf_counter() - forward_began
                (loss / a.accumulate).backward()
            backward_s = time.perf_counter() - start - forward_s
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            wait()
            times.append(time.perf_counter() - start)
            # Of the host's calls: forward's ends before the GPU has computed, backward's after.
            python.append((forward_s, backward_s))
            line = {"step": step, "loss": loss.item(), "grad_norm": float(norm), "step_s": times[-1], "forward_s": forward_s, "backward_s": backward_s}
            line["gpu_energy_j"] = meter.joules_since_last()
            lines.write(json.dumps(line | ({"started_s": time.time() - began} if step == 1 else {})) + "\n")
            lines.flush()
    steady = sorted(range(min(2, len(times) - 1), len(times)), key=times.__getitem__)
    middle = steady[len(steady) // 2]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    if rank == 0:
        print(
            json.dumps(
                {
                    "params": count,
                    "step_s": times[middle],
                    "forward_s": python[middle][0],
                    "backward_s": python[middle][1],
                    "torch": torch.__version__,
                    "gpu_peak_bytes": peak,
                }
            )
        )
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

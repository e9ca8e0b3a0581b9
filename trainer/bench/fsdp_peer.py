#!/usr/bin/env python3
"""Measures PyTorch's FSDP2 on the table's model, to compare with: random weights and tokens, fp32 parameters and moments, bf16 arithmetic.

    trainer/bench/fsdp_peer.py cpu --out target/peer

MODE: gpu; cpu (parameters, gradients and optimizer in host memory).

Needs transformers beside torch.
"""

import argparse
import json
import os
import pathlib
import time

import energy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["gpu", "cpu"])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--keep", action="store_true", help="keep what blocks compute instead of checkpointing activations")
    parser.add_argument("--prefetch", type=int, default=0, help="blocks to gather ahead, beside what FSDP does by itself")
    for name, value in {"hidden": 2048, "layers": 24, "heads": 16, "ff": 5504, "vocab": 32000, "seq": 2048, "micro": 8, "accumulate": 1, "steps": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    # Without torchrun one process, as it would describe it, with all processors for the optimizer.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29514"}
    for name, value in {"OMP_NUM_THREADS": str(os.cpu_count()), **alone}.items():
        os.environ.setdefault(name, value)
    began = time.time()
    import torch
    import torch.distributed
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
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
    model = LlamaForCausalLM(config).float()
    if not a.keep:
        model.gradient_checkpointing_enable()
    count = sum(p.numel() for p in model.parameters())
    policy = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy() if a.mode == "cpu" else OffloadPolicy(),
    }
    blocks = list(model.model.layers)
    for block in blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    for index, block in enumerate(blocks) if a.prefetch else ():
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + a.prefetch])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - a.prefetch) : index][::-1])
    if a.mode == "gpu":
        model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    model.train()

    a.out.mkdir(parents=True, exist_ok=True)
    times = []
    first = torch.distributed.get_rank() == 0
    with open(a.out / "metrics.jsonl" if first else os.devnull, "w") as lines:
        meter = energy.of_this_process("cuda")
        for step in range(1, a.steps + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(a.accumulate):
                tokens = torch.randint(0, a.vocab, (a.micro, a.seq), device="cuda")
                loss = model(input_ids=tokens, labels=tokens).loss
                (loss / a.accumulate).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            line = {"step": step, "loss": loss.item(), "step_s": times[-1], "gpu_energy_j": meter.joules_since_last()} | (
                {"started_s": time.time() - began} if step == 1 else {}
            )
            lines.write(json.dumps(line) + "\n")
            lines.flush()
    steady = sorted(times[1:])
    if first:
        print(json.dumps({"params": count, "step_s": steady[len(steady) // 2], "torch": torch.__version__}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

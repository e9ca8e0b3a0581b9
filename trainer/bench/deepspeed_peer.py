#!/usr/bin/env python3
"""Measures DeepSpeed's ZeRO on the table's model, to compare with: random weights and tokens, the settings with which it was seen to run.

    trainer/bench/deepspeed_peer.py nvme --out target/peer --directory /mnt/nvme0

MODE: gpu; cpu-opt (optimizer in host memory), cpu (parameters too); nvme-opt (optimizer on the drive), nvme (parameters too).
Needs deepspeed and transformers beside torch. Its extensions are compiled at the first use: a minute, libaio's headers, nvcc.
"""

import argparse
import json
import os
import pathlib
import time

import energy


def settings(mode, directory, hidden, micro, accumulate, stage=3, buckets="auto", super_offload=False):
    """A configuration of the published kind, with buffers as large as this model needs."""
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": hidden * hidden}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": hidden * hidden * 9 // 10,
            "stage3_param_persistence_threshold": 10 * hidden,
            "sub_group_size": 100_000_000 if mode.startswith("nvme") else 1_000_000_000,
        }
    if buckets == "large":
        # The numbers of its documentation's examples, whatever the model.
        zero |= {
            "reduce_bucket_size": 500_000_000,
            "stage3_prefetch_bucket_size": 500_000_000,
            "stage3_param_persistence_threshold": 1_000_000,
            "stage3_max_live_parameters": 3_000_000_000,
            "stage3_max_reuse_distance": 3_000_000_000,
        }
    if mode.startswith("cpu"):
        more = {"super_offload": True, "ratio": 0.9, "cpuadam_cores_perc": 0.9} if super_offload else {}
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, **more}
    if mode == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if mode.startswith("nvme"):
        # Five buffers, its documented number, end in an assertion with pipelining; sixteen were enough.
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": directory,
            "pin_memory": True,
            "buffer_count": 16,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    if mode == "nvme":
        zero["offload_param"] = {"device": "nvme", "nvme_path": directory, "pin_memory": True, "buffer_count": 60, "buffer_size": 70_000_000, "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "aio": {"block_size": 8 << 20, "queue_depth": 16, "intra_op_parallelism": 4, "single_submit": False, "overlap_events": True},
        "steps_per_print": 1_000_000,
    }


def disk_bytes():
    """Read and written by this process."""
    counters = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["gpu", "cpu-opt", "cpu", "nvme-opt", "nvme"])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--directory", help="on the drive")
    parser.add_argument("--stage", type=int, default=3, choices=[2, 3], help="of ZeRO (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep what blocks compute instead of checkpointing activations")
    parser.add_argument("--buckets", default="auto", choices=["auto", "large"], help="by the model's width, or the documentation's")
    parser.add_argument("--super", action="store_true", help="SuperOffload")
    parser.add_argument("--compile", action="store_true", help="compile each block with torch.compile")
    for name, value in {"hidden": 2048, "layers": 24, "heads": 16, "ff": 5504, "vocab": 32000, "seq": 2048, "micro": 8, "accumulate": 1, "steps": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def main():
    a = arguments()
    # Without a launcher one process, as it would describe it, with all processors for its optimizer.
    for name, value in {
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29512",
    }.items():
        os.environ.setdefault(name, value)
    began = time.time()
    # Its extensions are compiled for the GPU at hand; it cannot read names of architectures such as 9.0a.
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    import deepspeed
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
    chosen = settings(a.mode, a.directory, a.hidden, a.micro, a.accumulate, a.stage, a.buckets, a.super)
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=chosen, dtype=torch.bfloat16, enabled=a.stage == 3):
        model = LlamaForCausalLM(config)
    if not a.keep:
        model.gradient_checkpointing_enable()
    if a.compile:
        for layer in model.model.layers:
            layer.compile()
    count = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=chosen)
    engine.train()

    a.out.mkdir(parents=True, exist_ok=True)
    times, moved = [], []
    first = torch.distributed.get_rank() == 0
    with open(a.out / "metrics.jsonl" if first else os.devnull, "w") as lines:
        meter = energy.of_this_process(engine.device)
        for step in range(1, a.steps + 1):
            before, start = disk_bytes(), time.perf_counter()
            for _ in range(a.accumulate):
                tokens = torch.randint(0, a.vocab, (a.micro, a.seq), device=engine.device)
                loss = engine(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)
                engine.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            moved.append([after - old for after, old in zip(disk_bytes(), before)])
            line = {"step": step, "loss": loss.item(), "step_s": times[-1], "gpu_energy_j": meter.joules_since_last()} | (
                {"started_s": time.time() - began} if step == 1 else {}
            )
            lines.write(json.dumps(line) + "\n")
            lines.flush()
    steady = sorted(range(1, len(times)), key=times.__getitem__)
    middle = steady[len(steady) // 2]
    if first:
        print(
            json.dumps(
                {
                    "params": count,
                    "step_s": times[middle],
                    "read_bytes": moved[middle][0],
                    "written_bytes": moved[middle][1],
                    "torch": torch.__version__,
                    "deepspeed": deepspeed.__version__,
                }
            )
        )


if __name__ == "__main__":
    main()

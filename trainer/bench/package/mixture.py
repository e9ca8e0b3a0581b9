#!/usr/bin/env python3
"""Measures seconds a step, and bytes, of a mixture of experts: plain PyTorch with everything on the GPU, then the state in host memory or on drives.

    trainer/bench/package/mixture.py --train lora plain host whole
    trainer/bench/package/mixture.py nvme --nvme-path /mnt/nvme0 --nvme-path /mnt/nvme1     or, as root: --testdrives 2

The model is N of the 48 layers of Qwen3-30B-A3B in bf16 with random weights, 0.62 G parameters each. `host` and `nvme` bring the experts of a
layer in groups, `whole` brings all of them at once, from host memory. The bound is that of bringing the bytes that were brought from host memory,
at the rate measured in the run; on drives the run's own. All places must have the same first loss, or the script ends with status 1.
"""

import argparse
import json
import math
import pathlib
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "python/python"))

import figures  # noqa: E402
import planned  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import offloadd  # noqa: E402
from offloadd._generation import measured_bound  # noqa: E402

# Qwen3-30B-A3B's.
SHAPE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960, "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", metavar="PLACE", default=["plain", "host"], help="plain, host, whole, nvme (default: plain host)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--train", choices=["all", "lora"], default="all", help="lora: adapters of the attention, all else frozen")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048, help="tokens of each sequence (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps that are measured, after two others (%(default)s)")
    parser.add_argument("--checkpointing", action="store_true", help="compute each block's forward again in its backward")
    parser.add_argument("--resident", type=float, metavar="FRACTION", help="of the weights that stay on the GPU; by default what has room")
    parser.add_argument("--unit-bytes-max", type=int, help="the package's default without it")
    parser.add_argument("--device", default="cuda")
    figures.add_drives(parser)
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters in each layer, to try the script")
    args = parser.parse_args()
    figures.on_test_drives(args, lambda: device_bytes_of(args))
    losses = [measured(place, args) for place in args.places]
    if any(not math.isclose(loss, losses[0], rel_tol=1e-3) for loss in losses):
        raise SystemExit(f"the first losses differ: {losses}")


def config_of(args):
    return transformers.Qwen3MoeConfig(**SHAPE | (TINY if args.tiny else {}) | {"num_hidden_layers": args.layers})


def device_bytes_of(args):
    with torch.device("meta"):
        model = adapted(transformers.AutoModelForCausalLM.from_config(config_of(args), dtype=torch.bfloat16), args)
    own = {"unit_bytes_max": args.unit_bytes_max} if args.unit_bytes_max else {}
    return planned.device_bytes(model, optimizer_of(model), own)


def adapted(model, args):
    """The model, with what --train says beside it."""
    if args.train == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    return model


def optimizer_of(model):
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-5, foreach=False)


def built(args):
    """The same model and batch for each place, where the model was asked for."""
    torch.manual_seed(0)
    config = config_of(args)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ids = torch.randint(config.vocab_size, (args.batch, args.length))
    model = adapted(model, args)
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model, {"input_ids": ids, "labels": ids}


def measured(place, args):
    """Trains in one place, prints its line and returns the first loss."""
    model, batch = built(args)
    params = sum(param.numel() for param in model.parameters())
    optimizer = optimizer_of(model)
    row = {"place": place, "train": args.train, "layers": args.layers, "g_params": params / 1e9, "tokens": args.batch * args.length}
    if place == "plain":
        found = steps(model, optimizer, batch, args)
    else:
        model.to("cpu")
        if args.device == "cuda":
            torch.cuda.empty_cache()
        found = offloaded(place, model, optimizer, batch, args)
    loss = found.pop("loss")
    row |= found
    print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}), flush=True)
    return loss


def offloaded(place, model, optimizer, batch, args):
    where, own = figures.offload_param(place, args)
    own |= {"compute_device": "cuda:0" if args.device == "cuda" else None, "unit_bytes_max": args.unit_bytes_max, "gpu_resident_fraction": args.resident}
    if place == "whole":
        own["unit_bytes_max"] = 1 << 50
    config = {"zero_optimization": {"offload_param": where}, "offloadd": {key: value for key, value in own.items() if value is not None}}
    with tempfile.TemporaryDirectory(dir=args.nvme_path[0] if place == "nvme" else None) as directory:
        began = time.perf_counter()
        run = offloadd.prepare(model, optimizer, config, run_dir=pathlib.Path(directory) / "run")
        row = {"start_s": time.perf_counter() - began, "units": len(run.engine.gathering.units)}
        row["largest_unit_gib"] = max(unit.bytes for unit in run.engine.gathering.units) / 2**30
        moved = counted(run.engine.gathering.memory)
        row |= steps(model, optimizer, batch, args, moved)
        if place != "nvme":
            rate = measured_bound(run.engine, run.plan).bytes_per_s
            row |= {"gb_per_s": rate / 1e9, "bound_s": row["brought_gib"] * 2**30 / rate}
            row["of_the_bound"] = row["bound_s"] / row["s"]
        run.close(keep=False)
        row |= noted(run.run_dir, args.steps)
    return row


def noted(run_dir, count):
    """What the run has noted of its last steps: bytes of drives, and its own bound, which counts forward, backward and drives."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()[-count:]]
    mean = lambda key: sum(row[key] for row in rows) / len(rows)
    gib = {f"device_{what}_gib": mean(f"device_{what}_bytes") / 2**30 for what in ("read", "written")}
    return {**gib, "engine_bound_s": mean("bound_s"), "waited_s": mean("waited_s")}


def counted(memory):
    """The bytes of parameters that are brought, and of gradients that leave, from now on."""
    moved, expect, hand_over = [0, 0], memory.expect, memory.hand_over

    def count_expect(unit):
        moved[0] += unit.bytes
        expect(unit)

    def count_hand_over(unit):
        moved[1] += unit.gradient_bytes
        hand_over(unit)

    memory.expect, memory.hand_over = count_expect, count_hand_over
    return moved


def steps(model, optimizer, batch, args, moved=None):
    """Seconds of a step, its bytes, and the GPU's memory."""
    first = None
    for number in range(2 + args.steps):
        if number == 2:
            if args.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began, before = time.perf_counter(), list(moved or ())
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first = loss.item() if first is None else first
    if args.device == "cuda":
        torch.cuda.synchronize()
    row = {"loss": first, "s": (time.perf_counter() - began) / args.steps}
    if moved:
        row |= {name: (now - then) / args.steps / 2**30 for name, now, then in zip(("brought_gib", "gradients_gib"), moved, before)}
    if args.device == "cuda":
        row["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


if __name__ == "__main__":
    main()

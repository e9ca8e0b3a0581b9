#!/usr/bin/env python3
"""Compares GPU memory of prepared models of several families: what `python -m offloadd plan --seq-len` says, and PyTorch's own peak.

    trainer/bench/package/gpu_memory.py llama qwen3
    trainer/bench/package/gpu_memory.py --device cpu --tiny            tries the script itself

Random weights in bf16, some layers of true widths, state in host memory. Each family trains all parameters with gradient checkpointing and without it,
and generates text with nothing trained. Lines of JSON; the script ends with status 1 where a plan is more than 10 % away.
"""

import argparse
import contextlib
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "python/python"))

import torch  # noqa: E402
import transformers  # noqa: E402
from adapters import config as config_of  # noqa: E402
from figures import forget_peak, peak_gib, show  # noqa: E402

import offloadd  # noqa: E402
from offloadd._gpu_plan import computed, gpu_plan  # noqa: E402
from offloadd._units import units_of  # noqa: E402

WIDE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 12, "vocab_size": 64000}
NARROW = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 300}
FAMILIES = {"llama": "Llama", "qwen3": "Qwen3", "gpt2": "GPT2", "gemma2": "Gemma2", "mistral": "Mistral"}
TOLERANCE = 0.1
STEPS = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=list(FAMILIES), help=f"{', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument(
        "--resident", type=float, default=0.0, metavar="F", help="fraction of the weights that stays on the GPU (offloadd.gpu_resident_fraction)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of some hundred parameters")
    args = parser.parse_args()
    away = []
    for family in args.families:
        for kind in ("all, checkpointed", "all", "none"):
            planned, found = planned_gib(family, kind, args), measured_gib(family, kind, args)
            ratio = planned / found if found else None
            show(family=family, trains=kind, planned_gib=planned, measured_gib=found, planned_of_measured=ratio)
            if ratio is not None and abs(ratio - 1) > TOLERANCE:
                away.append(f"{family} ({kind})")
    return f"gpu_memory.py: more than {TOLERANCE:.0%} away: {', '.join(away)}" if away else 0


def model_of(family, args, device):
    sizes = NARROW if args.tiny else WIDE
    if family == "gpt2":
        keys = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "vocab_size": "vocab_size"}
        sizes = {key: sizes[value] for key, value in keys.items()} | {"n_positions": max(1024, args.seq_len)}
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def planned_gib(family, kind, args):
    model, trains = model_of(family, args, "meta"), kind != "none"
    units, modules = units_of(model, None, trains=trains)
    of_step = computed(model, units, (args.batch, args.seq_len), trains)
    traced = of_step.checkpointed if kind == "all, checkpointed" else of_step.kept
    return gpu_plan(of_step, units, modules, trains, args.resident, None).total_bytes(traced) / 2**30


def measured_gib(family, kind, args):
    """The peak of a few steps, or of a pass over the whole length."""
    model, trains = model_of(family, args, args.device), kind != "none"
    if kind == "all, checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if trains else None
    with (
        tempfile.TemporaryDirectory() as directory,
        offloadd.prepare(model.train(trains), optimizer, config_of(args, args.resident), run_dir=directory + "/run"),
    ):
        forget_peak(args.device)
        with contextlib.nullcontext() if trains else torch.inference_mode():
            for _ in range(STEPS):
                ids = torch.randint(model.config.vocab_size, (args.batch, args.seq_len), device=args.device)
                if not trains:
                    model(input_ids=ids, use_cache=True, logits_to_keep=1)
                    continue
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return peak_gib(args.device)


if __name__ == "__main__":
    sys.exit(main())

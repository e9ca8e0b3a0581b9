#!/usr/bin/env python3
"""Measures tokens a second of a model that nothing trains: plain PyTorch with all weights on the GPU, then weights in host memory or on drives.

    trainer/bench/package/generation.py plain host
    trainer/bench/package/generation.py nvme --nvme-path /mnt/nvme0 --nvme-path /mnt/nvme1

The model is a Llama of 8 G parameters in bf16 with random weights, or fewer layers of it. The bound is that of bringing all weights once a
pass, at the bandwidth measured in the run; all places must generate the same tokens, or the script ends with status 1.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "python/python"))

import torch  # noqa: E402
import transformers  # noqa: E402

import offloadd  # noqa: E402

# Llama-3-8B's.
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", metavar="PLACE", default=["plain", "host"], help="plain, host, nvme (default: plain host)")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nvme-path", action="append", default=[], help="a directory on a drive")
    parser.add_argument("--tiny", action="store_true", help="a model of a few hundred parameters, to try the script")
    args = parser.parse_args()
    shape = SHAPE | {"num_hidden_layers": args.layers}
    if args.tiny:
        shape |= TINY
    torch.manual_seed(0)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape), dtype=torch.bfloat16).eval()
        prompts = torch.randint(shape["vocab_size"], (args.batch, args.prompt))
    params = sum(param.numel() for param in model.parameters())
    print(
        f"{params / 1e9:.2f} G parameters, batch {args.batch}, {args.prompt} + {args.new_tokens} tokens, {torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}"
    )
    answers = {}
    if "plain" in args.places:
        answers["plain"], seconds = generated(model, prompts, args)
        report("plain", seconds, args)
    for place in args.places:
        if place == "plain":
            continue
        model.to("cpu")
        if args.device == "cuda":
            torch.cuda.empty_cache()
        answers[place] = offloaded(place, model, prompts, args)
    if any(not torch.equal(answer, next(iter(answers.values()))) for answer in answers.values()):
        raise SystemExit("the places generated different tokens")


def offloaded(place, model, prompts, args):
    """The tokens of one place, whose line is printed."""
    where = {"device": "nvme", "nvme_path": args.nvme_path} if place == "nvme" else {"device": "cpu"}
    config = {"zero_optimization": {"offload_param": where}, "offloadd": {"compute_device": "cuda:0" if args.device == "cuda" else None}}
    with tempfile.TemporaryDirectory(dir=args.nvme_path[0] if place == "nvme" else None) as directory:
        began = time.perf_counter()
        run = offloadd.prepare(model, None, config, run_dir=pathlib.Path(directory) / "run")
        started = time.perf_counter() - began
        run.generation.tells = False
        answer, seconds = generated(model, prompts, args)
        report(place, seconds, args, run.generation.bound, run.generation.last.passes, started)
        run.close()
    return answer


def generated(model, prompts, args):
    """The tokens of the second of two calls, and its seconds."""
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        # The first one makes handles and learns the order.
        model.generate(prompts, max_new_tokens=2, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(prompts))
        began = time.perf_counter()
        made = model.generate(
            prompts, min_new_tokens=args.new_tokens, max_new_tokens=args.new_tokens, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(prompts)
        )
        if args.device == "cuda":
            torch.cuda.synchronize()
        return made.cpu(), time.perf_counter() - began


def report(place, seconds, args, bound=None, passes=0, started=None):
    """One line for people, one for programs."""
    tokens = args.batch * args.new_tokens
    row = {"place": place, "tokens_per_s": tokens / seconds, "s": seconds}
    if args.device == "cuda":
        row["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if bound:
        row |= {"bound_tokens_per_s": tokens / (passes * bound.s), "of_the_bound": passes * bound.s / seconds, "gb_per_s": bound.bytes_per_s / 1e9}
        row |= {"bound_by": bound.by, "start_s": started}
    print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}), flush=True)


if __name__ == "__main__":
    main()

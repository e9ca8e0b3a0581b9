#!/usr/bin/env python3
"""Measures tokens a second of a model that nothing trains: plain PyTorch with all weights on the GPU, then weights in host memory or on drives.

    trainer/bench/package/generation.py plain host
    trainer/bench/package/generation.py nvme --nvme-path /mnt/nvme0 --nvme-path /mnt/nvme1     or, as root: --testdrives 2
    trainer/bench/package/generation.py --model 70b --same-blocks --resident 0 plain host

The model is a Llama of 8, 32 or 70 G parameters in bf16 with random weights, or fewer layers of it. With --same-blocks all blocks have the same
weights: a model has the memory of one, until its tiles are filled. --resident is a fraction of the weights that stays on the GPU, by default
what has room. The bound is that of bringing the others once a pass, at the bandwidth measured in the run; all places must generate the same
tokens, or the script ends with status 1.
"""

import argparse
import json
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

SHARED = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False}

# Llama-3-8B's, one of Qwen3-32B's sizes, and Llama-3-70B's.
SHAPES = {
    "8b": {**SHARED, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "32b": {**SHARED, "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "head_dim": 128},
    "70b": {**SHARED, "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
}

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", metavar="PLACE", default=["plain", "host"], help="plain, host, nvme (default: plain host)")
    parser.add_argument("--model", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="all of the model's without it")
    parser.add_argument("--same-blocks", action="store_true", help="give all blocks the same weights")
    parser.add_argument("--resident", type=float, metavar="FRACTION", help="of the weights that stay on the GPU")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    figures.add_drives(parser)
    parser.add_argument("--tiny", action="store_true", help="a model of a few hundred parameters, to try the script")
    args = parser.parse_args()
    shape = SHAPES[args.model] | (TINY if args.tiny else {})
    if args.layers:
        shape |= {"num_hidden_layers": args.layers}
    figures.on_test_drives(args, lambda: planned.device_bytes(on_meta(shape)))
    torch.manual_seed(0)
    with torch.device(args.device):
        prompts = torch.randint(shape["vocab_size"], (args.batch, args.prompt))
    model = built(shape, args)
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
        with tempfile.TemporaryDirectory() as directory:
            if args.same_blocks:
                map_blocks(model, pathlib.Path(directory))
            model.to("cpu")
            if args.device == "cuda":
                torch.cuda.empty_cache()
            answers[place] = offloaded(place, model, prompts, args)
    if any(not torch.equal(answer, next(iter(answers.values()))) for answer in answers.values()):
        raise SystemExit("the places generated different tokens")


def on_meta(shape):
    """A model of a shape that takes no memory."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape), dtype=torch.bfloat16)


def built(shape, args):
    """The model on its device."""
    make = lambda **other: transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape | other), dtype=torch.bfloat16).eval()
    with torch.device(args.device):
        if not args.same_blocks:
            return make()
        model = make(num_hidden_layers=1)
    with torch.device("meta"):
        blocks = make().model.layers
    model.config.num_hidden_layers = len(blocks)
    for block in blocks:
        give(block, dict(model.model.layers[0].named_parameters()))
    model.model.layers = blocks
    return model


def map_blocks(model, directory):
    """Gives all blocks the weights of the first one by mappings of one file: each has addresses of its own, and all have the same memory."""
    values = {name: value.detach().cpu() for name, value in model.model.layers[0].named_parameters()}
    for name, value in values.items():
        (directory / name).write_bytes(value.reshape(-1).view(torch.uint8).numpy())
    for block in model.model.layers:
        mapped = {name: torch.from_file(str(directory / name), False, value.numel(), dtype=value.dtype) for name, value in values.items()}
        give(block, {name: value.view_as(values[name]) for name, value in mapped.items()})


def give(block, values):
    """Replaces all parameters of a block."""
    for name, value in values.items():
        module, _, own = name.rpartition(".")
        setattr(block.get_submodule(module), own, torch.nn.Parameter(value.detach()))


def offloaded(place, model, prompts, args):
    """The tokens of one place, whose line is printed."""
    where, own = figures.offload_param(place, args)
    own |= {"compute_device": "cuda:0" if args.device == "cuda" else None, "gpu_resident_fraction": args.resident}
    config = {"zero_optimization": {"offload_param": where}, "offloadd": {key: value for key, value in own.items() if value is not None}}
    with tempfile.TemporaryDirectory(dir=args.nvme_path[0] if place == "nvme" else None) as directory:
        began = time.perf_counter()
        run = offloadd.prepare(model, None, config, run_dir=pathlib.Path(directory) / "run")
        started = time.perf_counter() - began
        run.generation.tells = False
        answer, seconds = generated(model, prompts, args)
        last = run.generation.last
        report(place, seconds, args, run.generation.bound, last.passes * last.part, started)
        # The next place begins with the model in host memory.
        run.close(keep=place != args.places[-1])
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
    # Where all weights have room on the GPU, none come.
    if bound and passes:
        row |= {"bound_tokens_per_s": tokens / (passes * bound.s), "of_the_bound": passes * bound.s / seconds, "gb_per_s": bound.bytes_per_s / 1e9}
        row |= {"bound_by": bound.by, "start_s": started}
    print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}), flush=True)


if __name__ == "__main__":
    main()

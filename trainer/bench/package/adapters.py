#!/usr/bin/env python3
"""Measures seconds a step of adapters on a frozen base: plain PEFT with the base on the GPU, then prepared, with the base in host memory or on drives.

    trainer/bench/package/adapters.py lora qlora --resident 0 auto
    trainer/bench/package/adapters.py qlora --model 70b --places plain nvme --testdrives 4 --resident 0
    trainer/bench/package/adapters.py --device cpu --tiny          tries the script itself

The base is a Llama of 8, 32 or 70 G parameters with random weights, in bf16 (lora) or in bitsandbytes' NF4 (qlora), made a layer at a time. Rank 16
on all linear layers of the blocks; adapters of one type and blocks checkpointed alike in all rows of a base. Lines of JSON:

resident       offloadd.gpu_resident_fraction of a prepared row, and resident_bytes: weights that stay on the GPU
tflops         4 x parameters x tokens, forward and the gradients of inputs; what checkpointing computes again is not counted
bus_bytes      weights that came to the GPU in a step
bus_s          their least seconds, at the rate of a copy from pinned memory
drive_s        on --testdrives, their least seconds to read those weights, at the rate that limits them
bound_s        the longest of the plain row's step, bus_s and drive_s; of_the_bound: bound_s / step_s

The place `deepspeed` is ZeRO-3 with the base in host memory and the adapters' state on the GPU; it changes the model, so it comes last.
--gathered adds three steps of writing, loss and update for each base, with all weights on the GPU while it writes, and with weights that come
for each token. The script ends with status 1 where a prepared model's first loss is not the plain one's.
"""

import argparse
import contextlib
import math
import os
import pathlib
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "python/python")]

import peft  # noqa: E402
import planned  # noqa: E402
import rows  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from figures import add_drives, bus_rates, forget_peak, offload_param, on_test_drives, peak_gib, show, timed, wait  # noqa: E402
from generation import SHAPES, TINY  # noqa: E402
from torch import nn  # noqa: E402

import offloadd  # noqa: E402
from offloadd import _sketch  # noqa: E402

# Of the first losses of a pair, which are computed by the same kernels.
TOLERANCE = 1e-3
RANK = 16
PLACES = ["plain", "host", "nvme", "deepspeed"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bases", nargs="*", metavar="BASE", default=["lora", "qlora"], help="lora, qlora (both)")
    parser.add_argument("--model", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="all of the model's without it")
    parser.add_argument("--places", nargs="+", default=["plain", "host"], choices=PLACES, help="plain, host, nvme, deepspeed (plain host)")
    add_drives(parser)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 16384], help="of a step")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    parser.add_argument("--adapters", default="bfloat16", choices=["bfloat16", "float32"], help="type of the adapters")
    parser.add_argument(
        "--resident", nargs="*", default=["auto"], metavar="F", help="fractions of the weights that stay on the GPU, or auto: prepared rows of each"
    )
    parser.add_argument("--gathered", action="store_true", help="write and learn, too")
    parser.add_argument("--batch", type=int, default=64, help="texts that --gathered writes")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few hundred parameters")
    args = parser.parse_args()
    if set(args.bases) - {"lora", "qlora"}:
        parser.error(f"bases are lora and qlora, not {' '.join(args.bases)}")
    if "deepspeed" in args.places[:-1]:
        parser.error("deepspeed changes the model: name it as the last place")
    on_test_drives(args, lambda: max(planned.device_bytes(*sketched(base, args)) for base in args.bases))
    to_gpu, _ = bus_rates(args.device)
    show(gpu=torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU", torch=torch.__version__, to_gpu_gb_per_s=to_gpu and to_gpu / 1e9)
    differ = [base for base in args.bases if not Pair(base, args, to_gpu).rows()]
    return f"adapters.py: the prepared model's first loss is not plain PEFT's: {', '.join(differ)}" if differ else 0


class Pair:
    """The rows of one base: the same model, plain and then prepared."""

    def __init__(self, base, args, to_gpu):
        self.base, self.args, self.to_gpu = base, args, to_gpu
        began = time.perf_counter()
        self.model = model_of(base, args)
        wait(args.device)
        sizes = lambda trained: sum(param.numel() for param in self.model.parameters() if param.requires_grad == trained)
        # Two numbers lie in each byte of a layer in NF4, which counts bytes.
        self.params = sum(module.in_features * module.out_features for module in self.model.modules() if isinstance(module, nn.Linear))
        show(base=base, made_s=time.perf_counter() - began, matmul_params=self.params, adapters=sizes(True), adapter_type=args.adapters, rank=RANK)
        self.first = [param.detach().clone() for param in self.trained()]
        self.losses, self.step_s = {}, {}

    def trained(self):
        return [param for param in self.model.parameters() if param.requires_grad]

    def fresh(self):
        """An optimizer of the adapters, which are as they were at first."""
        with torch.no_grad():
            for param, value in zip(self.trained(), self.first):
                param.copy_(value)
        return torch.optim.AdamW(self.trained(), lr=1e-4)

    def rows(self):
        """Measures and prints all rows. Returns whether the losses are equal."""
        if "plain" in self.args.places:
            for tokens in self.args.tokens:
                self.row("plain", self.fresh(), tokens)
        for place in self.args.places:
            for resident in self.args.resident if place in ("host", "nvme") else ():
                self.prepared(place, resident)
        if "deepspeed" in self.args.places:
            self.deepspeed()
        return all(math.isclose(losses[0], loss, rel_tol=TOLERANCE) for losses in self.losses.values() for loss in losses)

    def prepared(self, place, resident):
        """Measures and prints the rows of a prepared model, of which so much stays on the GPU."""
        optimizer = self.fresh()
        with tempfile.TemporaryDirectory(dir=self.args.nvme_path[0] if place == "nvme" else None) as directory:
            began = time.perf_counter()
            run = offloadd.prepare(self.model, optimizer, config(self.args, place, resident), run_dir=pathlib.Path(directory) / "run")
            show(base=self.base, place=place, resident=resident, start_s=time.perf_counter() - began, plan=str(run.plan).splitlines())
            for tokens in self.args.tokens:
                self.row(place, optimizer, tokens, run)
            for whole in (True, False) if self.args.gathered else ():
                self.write_and_learn(run, optimizer, whole)
            run.close(keep=True)

    def deepspeed(self):
        """Measures and prints the rows of DeepSpeed's ZeRO-3 with the base in host memory and the adapters' state on the GPU."""
        import deepspeed
        from deepspeed_peer import settings

        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}.items():
            os.environ.setdefault(name, value)
        optimizer = self.fresh()
        chosen = settings("cpu", None, self.model.config.hidden_size, 1, 1)
        del chosen["optimizer"], chosen["zero_optimization"]["offload_optimizer"], chosen["gradient_clipping"]
        began = time.perf_counter()
        engine, optimizer, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=chosen | {"zero_allow_untested_optimizer": True})
        show(base=self.base, place="deepspeed", version=deepspeed.__version__, start_s=time.perf_counter() - began)
        for tokens in self.args.tokens:
            self.row("deepspeed", optimizer, tokens, engine=engine)

    def row(self, place, optimizer, tokens, run=None, engine=None):
        """Measures and prints one row, of a run or of DeepSpeed's engine."""
        args, vocabulary = self.args, self.model.config.vocab_size
        sequences = max(1, tokens // args.seq_len)
        torch.manual_seed(1)
        moved = Moved(run)

        def step():
            batch = torch.randint(vocabulary, (sequences, args.seq_len), device=args.device)
            loss = (engine or self.model)(input_ids=batch, labels=batch).loss
            if engine:
                engine.backward(loss)
                engine.step()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            moved.end_step()
            return loss.detach(), []

        forget_peak(args.device)
        self.model.train()
        about = {"base": self.base, "place": place, "tokens": sequences * args.seq_len}
        try:
            with moved:
                (step_s,), losses = timed(step, args.steps, args.device)
        except torch.cuda.OutOfMemoryError as error:
            optimizer.zero_grad()
            return show(**about, error=str(error).splitlines()[0])
        tflops = 4 * self.params * about["tokens"] / step_s / 1e12
        row = {**about, "step_s": step_s, "tokens_per_s": about["tokens"] / step_s, "tflops": tflops, "gpu_gib": peak_gib(args.device)}
        if place == "plain":
            self.step_s[tokens] = step_s
        if tokens in self.step_s:
            row["beside_plain"] = step_s / self.step_s[tokens]
        if run:
            row |= {"resident": resident_of(run), "resident_bytes": run.resident_bytes, "bus_bytes": moved.of_step}
            if self.to_gpu and tokens in self.step_s:
                row["bus_s"] = moved.of_step / self.to_gpu
                row["drive_s"] = moved.of_step / (rows.DRIVE_RATES[0] * args.testdrives) if place == "nvme" else 0
                row["bound_s"] = max(row["bus_s"], row["drive_s"], self.step_s[tokens])
                row["of_the_bound"] = row["bound_s"] / step_s
        show(**row, first_loss=losses[0], last_loss=losses[-1])
        # A second row of a prepared model has other adapters.
        if place == "plain" or tokens == args.tokens[0]:
            self.losses.setdefault(tokens, []).append(losses[0])

    def write_and_learn(self, run, optimizer, whole):
        """Three steps of a policy gradient: texts, a reward of each, loss, update."""
        args, vocabulary = self.args, self.model.config.vocab_size
        how = {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens, "do_sample": True, "top_k": 0, "pad_token_id": 0, "use_cache": True}
        parts = []
        forget_peak(args.device)
        for _ in range(3):
            prompts = torch.randint(vocabulary, (args.batch, args.prompt), device=args.device)
            wait(args.device)
            times = [time.perf_counter()]
            self.model.eval()
            with torch.no_grad(), run.gathered() if whole else contextlib.nullcontext(False) as fitted:
                texts = self.model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **how)
                wait(args.device)
                times.append(time.perf_counter())
            self.model.train()
            written = texts[:, args.prompt :]
            rewards = written.float().mean(1)
            log_probs = self.model(texts).logits[:, args.prompt - 1 : -1].float().log_softmax(-1).gather(-1, written[..., None])
            (-((rewards - rewards.mean())[:, None] * log_probs[..., 0]).mean() / vocabulary).backward()
            optimizer.step()
            optimizer.zero_grad()
            wait(args.device)
            times.append(time.perf_counter())
            parts.append([after - before for before, after in zip(times, times[1:])])
        write_s, learn_s = map(min, zip(*parts))
        tokens = args.batch * args.new_tokens
        about = {
            "base": self.base,
            "resident": resident_of(run),
            "writes": "gathered" if whole else "streamed",
            "all_weights_fit": bool(fitted),
            "write_s": write_s,
            "learn_s": learn_s,
        }
        show(**about, written_tokens_per_s=tokens / write_s, gpu_gib=peak_gib(args.device))


class Moved:
    """Bytes of units that came to the memory of a run's model, in its last step."""

    def __init__(self, run):
        self._memory = run and run.engine.gathering.memory
        self._bytes = self.of_step = 0

    def __enter__(self):
        if self._memory:
            expect = self._memory.expect

            def counted(unit):
                self._bytes += unit.bytes
                expect(unit)

            self._memory.expect = counted

    def __exit__(self, *_):
        if self._memory:
            del self._memory.expect

    def end_step(self):
        self.of_step, self._bytes = self._bytes, 0


def config(args, place, resident):
    device, own = offload_param(place, args)
    own |= {"compute_device": args.device if ":" in args.device or args.device == "cpu" else f"{args.device}:0"}
    own["gpu_resident_fraction"] = resident if resident == "auto" else float(resident)
    return {"gradient_accumulation_steps": 1, "zero_optimization": {"offload_param": device}, "offloadd": own}


def resident_of(run):
    fraction = run.settings.gpu_resident_fraction
    return "auto" if fraction is None else fraction


def on_meta(args):
    """The model without memory, and its configuration."""
    shape = SHAPES[args.model] | (TINY if args.tiny else {}) | ({"num_hidden_layers": args.layers} if args.layers else {})
    config = transformers.LlamaConfig(**shape, use_cache=False, dtype=torch.bfloat16)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), config


def sketched(base, args):
    """A model without memory that takes the bytes of `model_of`, and an optimizer of its adapters."""
    model, _ = on_meta(args)
    with torch.device("meta"):
        _sketch.quantize(model, "nf4" if base == "qlora" else None)
        _sketch.adapt(model, RANK)
    trained = [param for param in model.parameters() if param.requires_grad]
    for param in trained:
        param.data = param.data.to(getattr(torch, args.adapters))
    return model, torch.optim.AdamW(trained)


def model_of(base, args):
    """A Llama with adapters where it computes; never more of its bf16 weights in memory than its blocks keep."""
    model, config = on_meta(args)
    torch.manual_seed(0)
    # Its buffers are computed and not random.
    with torch.device(args.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and base == "qlora" and child is not model.lm_head:
                setattr(module, name, in_nf4(child, args.device))
            else:
                fill(child, args.device)
    adapters = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model.requires_grad_(False), adapters, autocast_adapter_dtype=False)
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(args.device, getattr(torch, args.adapters))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def fill(module, device):
    """Gives the module's own parameters memory and random values, and norms ones."""
    for name, param in list(module.named_parameters(recurse=False)):
        value = torch.ones_like(param, device=device) if param.dim() == 1 else torch.empty_like(param, device=device).normal_(0, 0.02)
        setattr(module, name, nn.Parameter(value, requires_grad=False))


def in_nf4(linear, device):
    """A layer of bitsandbytes' with random weights of this one's shape."""
    from bitsandbytes import nn as quantized

    made = quantized.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4", device="meta"
    )
    weight = torch.empty(linear.weight.shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    made.weight = quantized.Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=made).to(device)
    return made


if __name__ == "__main__":
    sys.exit(main())

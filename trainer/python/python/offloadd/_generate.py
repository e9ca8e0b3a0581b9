"""`python -m offloadd generate`: answers to the prompts of a file, a batch at a time.

x.jsonl ──▶ batches ──▶ y.jsonl.part: the settings, then whole batches ──▶ y.jsonl, when all are there
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, Iterator

import torch

from ._console import say
from ._errors import Error
from ._generation import GenerationStats
from ._served import ServedModel, add_arguments, check_is_model

# Least seconds between two lines of progress.
_LINE_S = 10.0

HELP = "answer the prompts of a file with a model whose weights are in host memory or on drives"
EXAMPLES = """\
examples:
  python -m offloadd generate Qwen3-8B --prompts x.jsonl --out y.jsonl
  python -m offloadd generate my-model --prompts x.jsonl --out y.jsonl --temperature 0.7 --seed 3 --batch 64
  python -m offloadd generate Llama-70B --prompts x.jsonl --out y.jsonl --nvme /mnt/nvme0 --nvme /mnt/nvme1 --batch 256

Each line of x.jsonl is {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}; messages go through the model's chat template.
Each line of y.jsonl is that of x.jsonl with "completion". Interrupted, the same command goes on after the last batch that was written.
All weights are read once for each token of a batch: the larger --batch, the more tokens per second, until the GPU's memory is full.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("generate", help=HELP, description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--prompts", type=Path, required=True, metavar="X.jsonl", help="the prompts")
    parser.add_argument("--out", type=Path, required=True, metavar="Y.jsonl", help="the file of the answers, which appears when it is whole")
    parser.add_argument("--batch", type=int, default=16, help="prompts that are answered together (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 takes the likeliest token (%(default)s)")


def generate(given: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    check_is_model(given.model)
    rows = _rows(given.prompts)
    if given.out.exists():
        raise Error(f"{given.out} exists: remove it, or name another --out")
    if given.batch < 1:
        raise Error(f"--batch {given.batch}: at least one prompt")
    names = ("max_new_tokens", "temperature", "top_p", "seed", "batch", "dtype")
    settings = {"model": os.path.abspath(given.model) if os.path.isdir(given.model) else given.model, **{name: getattr(given, name) for name in names}}
    part = Path(f"{given.out}.part")
    done = _begin(part, settings, rows)
    if done:
        say(f"{part} has {done} answers: goes on after them")
    with ServedModel(given) as served, open(part, "a", encoding="utf-8") as file:
        _check(served, rows, given.prompts)
        began, told, made = time.monotonic(), 0.0, GenerationStats()
        for start in range(done, len(rows), given.batch):
            batch = rows[start : start + given.batch]
            # A batch has random numbers of its own, whatever came before it in this process.
            torch.manual_seed(given.seed * 1_000_003 + start)
            answers = list(_answers(served, batch, given))
            file.write("".join(json.dumps({**row, "completion": text}, ensure_ascii=False) + "\n" for row, text in zip(batch, answers)))
            file.flush()
            made += served.run.generation.last
            left, so_far = len(rows) - start - len(batch), start + len(batch)
            if time.monotonic() - told >= _LINE_S or not left:
                told = time.monotonic()
                seconds = (told - began) / (so_far - done) * left
                rest = f"; about {_duration(seconds)} left" if left else ""
                say(f"{so_far} of {len(rows)} prompts; {made.line(served.run.generation.bound)}{rest}")
    with open(part, encoding="utf-8") as file, open(f"{given.out}.new", "w", encoding="utf-8") as whole:
        next(file)
        whole.writelines(file)
        whole.flush()
        os.fsync(whole.fileno())
    os.replace(f"{given.out}.new", given.out)
    part.unlink()
    return 0


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    # Not splitlines: a text may have separators of Unicode that end no line of JSON.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise Error(f"{path}: line {number} is not valid JSON: {error}") from None
        if not isinstance(row, dict) or not ("messages" in row or "prompt" in row):
            raise Error(f'{path}: line {number} has neither "prompt" nor "messages": write {{"prompt": "text"}}')
        rows.append(row)
    if not rows:
        raise Error(f"{path} has no prompts")
    return rows


def _begin(part: Path, settings: dict[str, Any], rows: list[dict[str, Any]]) -> int:
    """Leaves `part` with whole batches of answers to `rows`. Returns how many answers it has."""
    lines = part.read_bytes().splitlines(keepends=True) if part.exists() else []
    if lines and lines[0].endswith(b"\n"):
        before = json.loads(lines[0])
        if before != settings:
            changed = ", ".join(f"{name} was {value!r} and is {settings.get(name)!r}" for name, value in before.items() if settings.get(name) != value)
            raise Error(f"{part} was begun with other settings ({changed}): take those, remove the file, or name another --out")
        whole = [line for line in lines[1:] if line.endswith(b"\n")]
        kept = len(whole) if len(whole) == len(rows) else len(whole) // settings["batch"] * settings["batch"]
        answered = [{name: value for name, value in json.loads(line).items() if name != "completion"} for line in whole[:kept]]
        if [{name: value for name, value in row.items() if name != "completion"} for row in rows[:kept]] != answered:
            raise Error(f"{part} has answers to other prompts: remove it, or name another --out")
        lines = lines[: kept + 1]
    else:
        lines = [(json.dumps(settings) + "\n").encode()]
    part.write_bytes(b"".join(lines))
    return len(lines) - 1


def _check(served: ServedModel, rows: list[dict[str, Any]], path: Path) -> None:
    if served.tokenizer.chat_template is None and any(_messages(row) for row in rows):
        raise Error(f'{path} has messages, and the model\'s tokenizer has no chat template: write {{"prompt": "text"}}')


def _messages(row: dict[str, Any]) -> Any:
    """The messages of a row; None where it has text."""
    given = row["messages"] if "messages" in row else row["prompt"]
    return given if isinstance(given, list) else None


def _answers(served: ServedModel, rows: list[dict[str, Any]], given: argparse.Namespace) -> Iterator[str]:
    tokenizer = served.tokenizer
    texts, special = [], []
    for row in rows:
        messages = _messages(row)
        texts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) if messages else row["prompt"])
        # A template writes them itself.
        special.append(messages is None)
    ids = [tokenizer(text, add_special_tokens=add)["input_ids"] for text, add in zip(texts, special)]
    for row, of_row in zip(rows, ids):
        if not of_row:
            raise Error(f"the prompt {json.dumps(row, ensure_ascii=False)} has no tokens: give each prompt some text")
    inputs = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    for row in served.generate(inputs, given):
        yield tokenizer.decode(row, skip_special_tokens=True)


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} h" if hours >= 1 else f"{minutes:.0f} min" if minutes >= 1 else f"{seconds:.0f} s"

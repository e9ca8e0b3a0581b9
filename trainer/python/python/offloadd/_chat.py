"""`python -m offloadd chat`: a conversation with a model whose weights are in host memory or on drives."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Optional

import torch

from ._console import say
from ._served import ServedModel, add_arguments

HELP = "talk with a model whose weights are in host memory or on drives"
EXAMPLES = """\
examples:
  python -m offloadd chat my-model
  python -m offloadd chat out/checkpoint-500 --temperature 0 --system 'You answer in one sentence.'
  python -m offloadd chat Llama-70B --nvme /mnt/nvme0 --max-new-tokens 60

An empty line or Ctrl-D ends the conversation, /new begins another one, Ctrl-C ends an answer. A run of `trainer` is written as a model first:
`trainer export runs/qwen --out my-model`; a script writes its own with trainer.save_model or model.save_pretrained.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("chat", help=HELP, description=HELP, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampling; 0 takes the likeliest token (%(default)s)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")


def chat(given: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    from transformers import TextStreamer

    torch.manual_seed(given.seed)
    with ServedModel(given) as served:
        tokenizer = served.tokenizer
        talks = tokenizer.chat_template is not None
        if not talks:
            say("the model has no chat template: it continues each of your lines, and forgets it then")
        begin = [{"role": "system", "content": given.system}] if given.system else []
        messages = list(begin)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        while line := _asked():
            if line == "/new":
                messages = list(begin)
                continue
            if talks:
                messages.append({"role": "user", "content": line})
                inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
            else:
                inputs = tokenizer(line, return_tensors="pt")
            try:
                answer = served.generate(inputs, given, streamer=streamer)[0]
            except KeyboardInterrupt:
                say("the answer was interrupted; it is forgotten with its question")
                del messages[len(messages) - talks :]
                continue
            say(served.run.generation.last.line(served.run.generation.bound))
            messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    return 0


def _asked() -> Optional[str]:
    """The next line of the person; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None

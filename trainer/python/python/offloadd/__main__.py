"""`python -m offloadd`: `plan` says what a run takes, without a script, `generate` and `chat` try a model, and `delete` deletes a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

import torch
from torch import nn

from . import _chat, _generate
from ._config import settings_of
from ._errors import Error
from ._experts import Experts
from ._packed import stand_in
from ._plan import Plan
from ._run_dir import delete
from ._units import blocks_of, units_of

# Bits of a number by their name.
_BITS = {"nf4": 4, "int8": 8}

# Blocks of a model of which only the number of parameters is known.
_BLOCKS = 24


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command and returns its exit status: 1 for a run that does not fit or cannot start, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m offloadd")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="print what a run takes: memory, device files, bytes and seconds of a step")
    plan.add_argument("config", help="DeepSpeed's JSON")
    model = plan.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="name or directory of a Hugging Face model; its weights are not loaded")
    model.add_argument("--params", type=float, help="number of parameters, such as 7e9")
    plan.add_argument("--trainable", type=float, metavar="N", help="the model is frozen, and N parameters are trained beside it, such as those of LoRA")
    plan.add_argument("--quantize", choices=_BITS, help="the layers of --model are quantized and frozen, as bitsandbytes does it")
    plan.add_argument("--units", type=int, default=_BLOCKS, help=f"blocks of a model given by --params ({_BLOCKS})")
    plan.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="type of the parameters")
    plan.add_argument("--run-dir", type=Path, help="the run's directory; figures it measured are used")
    _generate.add_parser(commands)
    _chat.add_parser(commands)
    remove = commands.add_parser("delete", help="delete a run that is not in use: its directory, with its device files or its job at a daemon")
    remove.add_argument("run_dir", type=Path, help="the run's directory, which each start prints")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    given = parser.parse_args(arguments)
    try:
        if given.command == "delete":
            return delete(given.run_dir.absolute(), given.yes)
        if given.command == "generate":
            return _generate.generate(given)
        if given.command == "chat":
            return _chat.chat(given)
        plan = _plan(given)
        print(plan)
        if plan.warnings:
            raise Error(f"the run does not fit: {plan.warnings[0]}")
    except Error as error:
        print(f"offloadd: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("offloadd: interrupted; the same command goes on with what is left" if given.command == "generate" else "offloadd: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"offloadd: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _plan(given: argparse.Namespace) -> Plan:
    settings = settings_of(given.config, schedules=False)
    with torch.device("meta"):
        model = _by_name(given.model) if given.model else _by_size(int(given.params), given.units)
        quantized = _quantize(model, given.quantize)
        if given.trainable is not None:
            _freeze(model, int(given.trainable), settings.units or None)
    model.to(getattr(torch, given.dtype or settings.precision or "float32"))
    trains = given.trainable is not None or not quantized
    experts = Experts(model, settings.units or None, None if settings.parameters_stay else settings.unit_bytes_max)
    units, _ = units_of(model, settings.units or None, fp32_gradients=settings.fp32_gradients, trains=trains, apart=experts.apart)
    plan = Plan(settings, (given.run_dir or settings.run_dir or settings.default_dir).absolute(), units)
    if plan.problems:
        print(plan)
    plan.check()
    return plan


def _quantize(model: nn.Module, wanted: Optional[str]) -> bool:
    """Lets the weights of linear layers take the bytes of quantized ones, where they are `wanted`, or the model's configuration says so. Returns
    whether they are."""
    kept = getattr(getattr(model, "config", None), "quantization_config", None) or {}
    kept = kept if isinstance(kept, dict) else kept.to_dict()
    if kept and wanted is None:
        wanted = "nf4" if kept.get("load_in_4bit") else "int8" if kept.get("load_in_8bit") else None
        if wanted is None:
            raise Error(
                f"--model is quantized by {kept.get('quant_method', 'another library')}: plan it with offloadd.prepare(model, None, config, plan_only=True)"
            )
    if wanted is None:
        return False
    # As transformers leaves them.
    out = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    skipped = kept.get("llm_int8_skip_modules") or []
    linear = [one for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not out and name.rpartition(".")[2] not in skipped]
    if not linear:
        raise Error(f"--quantize {wanted}: the model has no linear layers; give --model")
    for one in linear:
        one.weight = stand_in(one.weight.shape, _BITS[wanted])
    return True


def _freeze(model: nn.Module, trainable: int, wanted: Optional[Sequence]) -> None:
    """Freezes the model, and gives its blocks `trainable` parameters together."""
    model.requires_grad_(False)
    blocks = [module for _, module in blocks_of(model, wanted)] or [model]
    if trainable < len(blocks):
        raise Error(f"--trainable {trainable}: each of the model's {len(blocks)} blocks trains a parameter at least")
    for block in blocks:
        block.register_parameter("trained_beside", nn.Parameter(torch.empty(trainable // len(blocks))))


def _by_name(name: str) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise Error("--model needs transformers: install it, or give --params") from None
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise Error(f"--model {name}: {error}") from None
    architecture = (config.architectures or [None])[0]
    model_class = getattr(transformers, architecture or "", None)
    return model_class(config) if model_class else transformers.AutoModel.from_config(config)


def _by_size(params: int, units: int) -> nn.Module:
    if params < units or units < 1:
        raise Error(f"--params {params} --units {units}: each unit needs a parameter: give more parameters or fewer units, at least one")
    blocks = nn.ModuleList()
    for _ in range(max(units, 3)):
        block = nn.Module()
        block.weight = nn.Parameter(torch.empty(params // max(units, 3)))
        blocks.append(block)
    model = nn.Module()
    model.blocks = blocks
    return model


if __name__ == "__main__":
    sys.exit(main())

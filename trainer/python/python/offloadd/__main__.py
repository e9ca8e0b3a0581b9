"""`python -m offloadd`: `plan` says what a run takes, without a script, `generate` and `chat` try a model, and `delete` deletes a run."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Optional, Sequence

import torch
from torch import nn

from . import _chat, _generate, _offloadd
from ._config import Settings, settings_of
from ._errors import Error
from ._experts import Experts
from ._gpu_plan import computed, gpu_plan, gpu_plan_in_place
from ._memory import GpuDevice
from ._nodes import guess
from ._plan import NO_INPUTS, Machine, Plan
from ._run_dir import delete
from ._served import check_is_model, positive
from ._sketch import BITS, adapt, by_name, by_size, cast, freeze, quantize
from ._muon import block_matrices
from ._supported_optimizers import with_optim, with_rule
from ._units import alignment_of, units_of

# Blocks of a model of which only the number of parameters is known.
_BLOCKS = 24


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command and returns its exit status: 1 for a run that does not fit or cannot start, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m offloadd")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="print what a run takes: memory, device files, bytes and seconds of a step")
    plan.add_argument(
        "config", metavar="CONFIG|MODEL", help="DeepSpeed's JSON; or the directory or name of a Hugging Face model, planned with its state in host memory"
    )
    plan.add_argument("--nvme", type=Path, action="append", metavar="DIR", help="directory on a drive for the state, with MODEL")
    plan.add_argument("--model", help="name or directory of a Hugging Face model; its weights are not loaded")
    plan.add_argument("--params", type=_count, metavar="N", help="number of parameters, such as 7e9 or 7B")
    plan.add_argument("--train", choices=["none", "lora", "all"], help="what is trained (all; lora with --lora; none with --quantize)")
    beside = plan.add_mutually_exclusive_group()
    beside.add_argument("--lora", type=int, metavar="RANK", help="the model is frozen, and adapters of this rank beside its linear layers are trained")
    beside.add_argument("--trainable", type=_count, metavar="N", help="the model is frozen, and N parameters are trained beside it")
    plan.add_argument("--quantize", choices=BITS, help="the layers of the model are quantized and frozen, as bitsandbytes does it")
    plan.add_argument("--seq-len", type=positive, metavar="TOKENS", help="plan GPU memory, too, for sequences of this length")
    plan.add_argument("--batch", type=positive, help="sequences that a GPU computes together (1)")
    plan.add_argument("--ranks", type=positive, metavar="N", help="processes of one machine that train together, each with a GPU of its own (1)")
    plan.add_argument("--gpu-memory", metavar="SIZE", help="memory of a GPU, such as 24GiB, which a step is to fit into (what this machine's has free)")
    plan.add_argument("--host-memory", metavar="SIZE", help="host memory that the run is to fit into, such as 128GiB (what this machine has available)")
    plan.add_argument(
        "--drives", metavar="NxREAD:WRITE", help="number of drives with the rates of each, such as 2x6.2GB/s:3.2GB/s (what the run measured, or assumed ones)"
    )
    plan.add_argument("--read", metavar="RATE", help="read rate of all drives together, such as 6.2GB/s, in place of --drives")
    plan.add_argument("--write", metavar="RATE", help="write rate of all drives together, such as 3.2GB/s")
    plan.add_argument(
        "--activations", choices=["gpu", "cpu", "nvme"], help="where inputs of checkpointed blocks wait for their backward (offloadd.activations)"
    )
    plan.add_argument("--mlp-chunks", type=positive, metavar="N", help="chunks of tokens in which MLPs are computed (offloadd.mlp_chunks)")
    plan.add_argument("--loss-chunks", type=positive, metavar="N", help="chunks of tokens in which the head and the loss are computed (offloadd.loss_chunks)")
    plan.add_argument("--optim", metavar="NAME", help="the optimizer that a Trainer's argument optim names, such as adamw_8bit (adamw_torch)")
    plan.add_argument("--units", type=int, help=f"blocks of a model given by --params ({_BLOCKS})")
    plan.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="type of the parameters (that of bf16 or fp16 in CONFIG; that of MODEL)")
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


def _count(text: str) -> int:
    """A number of an option, with an exponent or a unit."""
    try:
        return _offloadd.parse_count(text)
    except Error as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _plan(given: argparse.Namespace) -> Plan:
    # A model is planned with its state in host memory, or on the drives of --nvme.
    by_name_alone, ranks = _is_model(given.config), given.ranks or 1
    if by_name_alone:
        check_is_model(given.config)
        given.model, place = given.model or given.config, {"device": "cpu"}
        if given.activations == "nvme" and not given.nvme:
            raise Error("--activations nvme: this plan has no state on drives: give --nvme DIR")
        if given.nvme:
            place = {"device": "nvme", "nvme_path": list(map(str, given.nvme))}
        settings = settings_of({"zero_optimization": {"offload_param": place}}, schedules=False, ranks=ranks)
    elif given.nvme:
        raise Error(f"--nvme belongs to a plan without a configuration: {given.config} has zero_optimization.offload_param.nvme_path")
    else:
        settings = settings_of(given.config, schedules=False, ranks=ranks)
    if given.optim is not None and settings.optimizer:
        raise Error(f'--optim {given.optim}: {given.config} has optimizer.type = "{settings.optimizer["type"]}", which a Trainer takes; leave one out')
    rule, activations = (settings.optimizer or {}).get("type", settings.rule), given.activations or settings.activations
    settings = with_rule(dataclasses.replace(settings, activations=activations), rule)
    settings = settings if given.optim is None else with_optim(settings, given.optim)
    if (given.model is None) == (given.params is None):
        raise Error("a plan is that of a model: give its directory, --model or --params, and one of them only")
    if given.units is not None and given.model:
        raise Error(f"--units {given.units} says how many blocks a model given by --params has: leave it out")
    with torch.device("meta"):
        model = by_name(given.model) if given.model else by_size(given.params, _BLOCKS if given.units is None else given.units)
        trains = _sketch(model, given, settings.units or None)
    dtype = given.dtype or settings.precision or (by_name_alone and getattr(model.config, "dtype", None)) or "float32"
    cast(model, dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))
    _check_gpu_options(given)
    # Before layers are cut, whose code needs values then.
    before, shape = units_of(model, settings.units or None, trains=trains)[0], (given.batch or 1, given.seq_len)
    chunks = given.mlp_chunks or settings.mlp_chunks, given.loss_chunks or settings.loss_chunks
    of_step = None if given.seq_len is None else computed(model, before, shape, trains, activations, *chunks)
    align, muon = alignment_of(settings.moments), block_matrices(model, settings.units or None) if settings.rule == "Muon" and trains else set()
    experts = Experts(model, settings.units or None, None if settings.parameters_stay else settings.unit_bytes_max, with_block=ranks > 1)
    units, modules = units_of(
        model, settings.units or None, fp32_gradients=settings.fp32_gradients, trains=trains, apart=experts.apart, align_elems=align, muon=muon
    )
    # Frozen parameters that stay with the model are in no tile.
    in_tiles = (
        units_of(model, settings.units or None, False, settings.fp32_gradients, trains, experts.apart, align, muon)[0] if settings.parameters_stay else units
    )
    on_gpu = None
    if of_step is not None and settings.parameters_stay:
        on_gpu = gpu_plan_in_place(of_step, units, trains, _gpu_bytes(given), ranks)
    elif of_step is not None:
        on_gpu = gpu_plan(of_step, units, modules, trains, settings.gpu_resident_fraction, _gpu_bytes(given), ranks)
    on_bus = 0 if on_gpu is None else on_gpu.up_bytes
    directory = (given.run_dir or settings.run_dir or settings.default_dir).absolute()
    inputs = NO_INPUTS if of_step is None else of_step.inputs(settings.micro_batches or 1)
    plan = Plan(settings, directory, in_tiles, guess(0, ranks), bus_bytes=on_bus, on_gpu=of_step is not None, inputs=inputs, machine=_machine(given, settings))
    if by_name_alone:
        plan.to_drives = "give --nvme DIR"
    if on_gpu is not None:
        plan.more, plan.more_warnings = on_gpu.lines(), [on_gpu.warning] if on_gpu.warning else []
    if plan.problems:
        print(plan)
    plan.check()
    return plan


def _is_model(name: str) -> bool:
    """Whether CONFIG is a model's directory, or a name such as Qwen/Qwen3-8B, and no file."""
    path = Path(name)
    return path.is_dir() or not path.exists() and path.suffix != ".json" and not name.startswith((".", "/", "~")) and name.count("/") <= 1


def _check_gpu_options(given: argparse.Namespace) -> None:
    """Refuses what says nothing without a plan of GPU memory."""
    if given.seq_len is not None:
        if not given.model:
            raise Error("--seq-len: GPU memory is planned for a model by its directory or name, not for --params")
        return
    for name in ("gpu_memory", "batch", "activations", "mlp_chunks", "loss_chunks"):
        if (value := getattr(given, name)) is not None:
            name = f"--{name.replace('_', '-')}"
            raise Error(f"{name} {value}: GPU memory is planned for sequences of a length: give --seq-len too")


def _machine(given: argparse.Namespace, settings: Settings) -> Machine:
    """The machine that is planned for, as far as it is given."""
    for name in ("drives", "read", "write"):
        if (value := getattr(given, name)) is not None and settings.device != "nvme":
            raise Error(f"--{name} {value}: this plan has no state on drives: {'give --nvme DIR' if given.nvme is None else 'leave it out'}")
    if given.drives is not None and (given.read is not None or given.write is not None):
        raise Error(f"--drives {given.drives}: has the rates of drives, as --read and --write have: leave one of them out")
    read, write = (None, None) if given.drives is None else _offloadd.parse_drives(given.drives)
    return Machine(
        None if given.host_memory is None else _offloadd.parse_memory(given.host_memory),
        read if given.read is None else _offloadd.parse_rate(given.read),
        write if given.write is None else _offloadd.parse_rate(given.write),
    )


def _gpu_bytes(given: argparse.Namespace) -> Optional[int]:
    """Memory of the GPU that is planned for: this machine's, unless it is given; None where there is none."""
    if given.gpu_memory is not None:
        return _offloadd.parse_memory(given.gpu_memory)
    return GpuDevice(torch.device("cuda")).memory().free_bytes if torch.cuda.is_available() else None


def _sketch(model: nn.Module, given: argparse.Namespace, wanted: Optional[Sequence]) -> bool:
    """Gives the model the layers and the trained parameters of the plan. Returns whether anything is trained."""
    quantized = quantize(model, given.quantize)
    beside = given.lora is not None or given.trainable is not None
    train = given.train or ("lora" if beside else "none" if quantized else "all")
    if train == "all" and (quantized or beside):
        raise Error(f"--train all: {'quantized layers cannot be' if quantized else '--lora and --trainable say that the model is not'} trained; leave one out")
    if train == "none" and beside:
        raise Error("--train none: --lora and --trainable say what is trained; leave one out")
    if train == "lora" and not beside:
        raise Error("--train lora: give the rank of the adapters, as in --lora 16")
    if given.lora is not None:
        adapt(model, given.lora)
    elif given.trainable is not None:
        freeze(model, given.trainable, wanted)
    return train != "none"


if __name__ == "__main__":
    sys.exit(main())

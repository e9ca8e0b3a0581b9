"""The needs of a run before it starts: host memory, device files, bytes a step, and the bound of a step's time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from . import _offloadd
from ._config import Settings
from ._console import bytes_text
from ._errors import Error, NoSpace, NotSupported
from ._memory import GpuDevice
from ._nodes import Topology
from ._program import BIN
from ._units import Unit


class PlannedInputs(NamedTuple):
    """Inputs of checkpointed blocks that wait elsewhere."""

    # Host memory of those that wait there.
    host_bytes: int = 0
    # Space on drives of those that wait there, and what a step writes and reads of them.
    area_bytes: int = 0
    moved_bytes: int = 0


NO_INPUTS = PlannedInputs()


class Machine(NamedTuple):
    """What a machine has that is planned for; None: what this one has, or what the run measured."""

    host_memory_bytes: Optional[int] = None
    # Rates of all drives together.
    read_bytes_per_s: Optional[float] = None
    write_bytes_per_s: Optional[float] = None


THIS_MACHINE = Machine()


class Plan:
    """A run's figures; `str` writes them for people."""

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        units: list[Unit],
        topology: Topology = Topology(),
        gpu: Optional[GpuDevice] = None,
        tile_elems: Optional[int] = None,
        bus_bytes: int = 0,
        on_gpu: bool = False,
        inputs: "PlannedInputs" = NO_INPUTS,
        machine: Machine = THIS_MACHINE,
    ) -> None:
        self.settings, self.base_dir, self.gpu = settings, run_dir, gpu
        # The directory of this node's part of the run, and the name of its job.
        self.run_dir, self.job = part_of(run_dir, topology.node)
        self.types = sorted({_type(unit.dtype) for unit in units})
        self.units = len(units)
        self.trains = any(unit.trained for unit in units)
        self.params = sum(unit.numel for unit in units)
        self.engine_plan = json.dumps(
            engine_plan(settings, run_dir, units, topology, gpu.index if gpu is not None else None, tile_elems, bus_bytes, on_gpu, inputs, machine)
        )
        self.figures: dict[str, Any] = json.loads(_offloadd.plan(self.engine_plan, json.dumps(machine._asdict())))
        self.host_available_bytes: Optional[int] = self.figures["host_available_bytes"]
        # Inputs of checkpointed blocks, where they are planned.
        self.inputs = inputs
        self.host_bytes = self.figures["host_bytes"] + inputs.host_bytes
        self._bus_bytes = bus_bytes
        # Lines for people about what else is planned, and reasons why it may fail.
        self.more: list[str] = []
        self.more_warnings: list[str] = []
        # What puts the state on drives where no configuration does.
        self.to_drives = ""
        # Each of them takes what is planned.
        self.local_ranks = len(topology.local)
        # This rank's part of a copy of all parameters that the ranks of each of several nodes keep, and why they keep none. None where
        # there is nothing to keep.
        self.copy_bytes, self.why_no_copy = 0, None
        if topology.nodes > 1 and not settings.parameters_stay:
            self.copy_bytes, self.why_no_copy = self._copy(units, topology)
            self.host_bytes += self.copy_bytes

    def _copy(self, units: list[Unit], topology: Topology) -> tuple[int, str]:
        if self.settings.shard == "all":
            return 0, "offloadd.shard"
        # On all ranks.
        elems = [shard_elems * topology.count for shard_elems in self.figures["shard_elems"]]
        parts = [(unit.name or "what is in no block", count * unit.dtype.itemsize) for unit, count in zip(units, elems)]
        return _offloadd.node_copy(parts, len(topology.local), self.gpu is not None, self.host_bytes, self.host_available_bytes)

    def network(self, why_no_copy: str) -> str:
        """Where the nodes have the parameters, for people."""
        if why_no_copy:
            return f"the parameters are divided over all nodes ({why_no_copy})"
        return f"each node keeps a copy of all parameters in host memory, {bytes_text(self.copy_bytes)} for each rank"

    @property
    def problems(self) -> list[str]:
        """Why the run cannot start; empty where it can."""
        f = self.figures
        more = f"; offloadd.activations_bytes of each process takes {bytes_text(f['input_bytes'])}" if f["input_bytes"] else ""
        return [f["problem"] + more] if f["problem"] else []

    @property
    def warnings(self) -> list[str]:
        """Reasons why the run may fail later."""
        found, host, available = [], self.local_ranks * self.host_bytes, self.host_available_bytes
        area, needed = self.figures["input_bytes"], self.inputs.area_bytes
        if area < needed:
            found.append(f"offloadd.activations_bytes = {area}: inputs of blocks need {needed} bytes on drives: set it to that")
        if self.figures["in_memory"]:
            found.append(
                f"nvme_path: {self.figures['in_memory']} keeps its files in memory: a power cut or a restart of the machine loses the run. Name a directory on "
                "a drive, or save checkpoints elsewhere"
            )
        if available is not None and host > available:
            place = "offload_optimizer" if self.settings.parameters_stay and self.settings.device != "none" else "offload_param"
            lower = "offloadd.resident_fraction or offloadd.staging_bytes" if self.settings.resident_fraction else "offloadd.staging_bytes"
            to_drives = self.to_drives or f'set zero_optimization.{place}.device = "nvme" with an nvme_path'
            advice = f"set {lower} lower" if self.settings.device == "nvme" else to_drives
            what = "tiles and inputs of blocks" if self.inputs.host_bytes else "tiles"
            found.append(f"{what} take {bytes_text(host)} of host memory, {bytes_text(available)} are available: {advice}")
        return [*found, *self.more_warnings]

    @property
    def bound_s(self) -> float:
        """Least seconds of a step. Without an earlier run's metrics.jsonl, forward and backward are not counted."""
        return self.figures["bound_s"]

    @property
    def read_s(self) -> Optional[float]:
        """Least seconds in which drives read what a pass of forward needs of the tiles of this machine's ranks; None without drives."""
        f = self.figures
        return self.local_ranks * f["forward_read_bytes"] / f["read_bytes_per_s"] if f["device_bytes"] else None

    def check(self) -> None:
        """Raises `NoSpace` where the drives have too little space."""
        for problem in self.problems:
            raise NoSpace(problem)

    def __str__(self) -> str:
        f = self.figures
        of_ranks = f" for {self.local_ranks} ranks, {bytes_text(self.host_bytes)} each" if self.local_ranks > 1 else ""
        in_memory = self.inputs.host_bytes + f["input_slot_bytes"]
        lines = [
            f"model     {self.params / 1e6:.2f} M parameters ({', '.join(self.types)}) in {self.units} units, {f['tiles']} tiles of {f['tile_elems']} elements",
            f"host      {bytes_text(self.local_ranks * self.host_bytes)}{of_ranks}: resident tiles {bytes_text(f['resident_bytes'])}, staging "
            f"{bytes_text(f['staging_bytes'])}, gradients {bytes_text(f['grad_bytes'])}"
            + (f", part of the node's copy of the parameters {bytes_text(self.copy_bytes)}" if self.copy_bytes else "")
            + (f", inputs of blocks {bytes_text(in_memory)}" if in_memory else ""),
        ]
        if self.host_available_bytes is not None:
            lines[-1] += f"; {bytes_text(self.host_available_bytes)} available"
        if self.why_no_copy is not None:
            lines.append(f"network   {self.network(self.why_no_copy)}")
        lines += self.more
        if f["device_bytes"]:
            where = ", ".join(map(str, self.settings.nvme)) or f"the store behind {self.settings.socket}"
            copies = "two copies of each tile that changes" if self.trains else "one copy of each tile"
            more = f", and {bytes_text(f['input_bytes'])} for inputs of blocks of each process" if f["input_bytes"] else ""
            files = f", a file of {bytes_text(f['file_bytes'])} in each" if len(self.settings.nvme) > 1 else ""
            lines.append(f"devices   {bytes_text(f['device_bytes'])} in {where}{files}: {copies}{more}")
            if self.inputs.area_bytes:
                lines.append(f'inputs    set "activations": "nvme" and "activations_bytes": {self.inputs.area_bytes} in offloadd, for micro-batches like this')
        else:
            lines.append("devices   nothing")
        lines += self._of_a_step() if self.trains else self._of_a_pass()
        lines += [f"warning   {warning}" for warning in self.warnings]
        lines += [f"refused   {problem}" for problem in self.problems]
        return "\n".join(lines)

    def _of_a_step(self) -> list[str]:
        f, lines, rates = self.figures, [], ""
        if f["device_bytes"]:
            reads = [f"{part} {bytes_text(f[part + '_read_bytes'])}" for part in ("forward", "backward", "update")]
            total = sum(f[part + "_read_bytes"] for part in ("forward", "backward", "update"))
            who = "each rank " * (self.local_ranks > 1)
            written = f["written_bytes"] + self.inputs.moved_bytes
            if self.inputs.moved_bytes:
                reads.append(f"inputs of blocks {bytes_text(self.inputs.moved_bytes)}")
            of = f" (inputs of blocks {bytes_text(self.inputs.moved_bytes)})" if self.inputs.moved_bytes else ""
            of = ", and inputs of blocks, which --seq-len plans" if f["input_bytes"] and not of else of
            lines.append(f"a step    {who}reads {bytes_text(total + self.inputs.moved_bytes)} ({', '.join(reads)}), writes {bytes_text(written)}{of}")
            of_reads = f" ({f['read_source']})" * (f["read_source"] != f["write_source"])
            rates = f"; reads at {f['read_bytes_per_s'] / 1e9:.2f} GB/s{of_reads}, writes at {f['write_bytes_per_s'] / 1e9:.2f} GB/s ({f['write_source']})"
        counted = "" if f["compute_s"] is not None else "; without the time of forward and backward, which the first step measures"
        lines.append(f"bound     {f['bound_s']:.3g} s a step, limited by {f['wall']}{rates}{counted}")
        if f["last_step_s"] is not None:
            lines.append(f"expected  {max(f['last_step_s'], f['bound_s']):.3g} s a step, as the last one in metrics.jsonl")
        return lines

    def _of_a_pass(self) -> list[str]:
        f = self.figures
        if self.read_s is None:
            if not self._bus_bytes:
                return []
            return [f"bound     {self._bus_bytes / f['bus_bytes_per_s']:.3g} s a pass, limited by bus at {f['bus_bytes_per_s'] / 1e9:.0f} GB/s (assumed)"]
        return [
            f"a pass    reads {bytes_text(f['forward_read_bytes'])}: for the next token of each sequence of a batch",
            f"bound     {self.read_s:.3g} s a pass, limited by device reads at {f['read_bytes_per_s'] / 1e9:.2f} GB/s ({f['read_source']})",
        ]


def engine_plan(
    settings: Settings,
    run_dir: Path,
    units: list[Unit],
    topology: Topology,
    gpu: Optional[int],
    tile_elems: Optional[int] = None,
    bus_bytes: int = 0,
    on_gpu: bool = False,
    inputs: "PlannedInputs" = NO_INPUTS,
    machine: Machine = THIS_MACHINE,
) -> dict[str, Any]:
    """The description of a run for the extension. `gpu` is the index of the GPU that the model computes on; `tile_elems` has the elements of a tile,
    where units depend on them; `bus_bytes` has those of weights and matrices that come to a GPU in a step, where they are planned. `on_gpu`: the model will
    compute on a GPU that is not at hand."""
    part, job = part_of(run_dir, topology.node)
    described = [
        {
            "elems": unit.elems,
            "dtype": _type(unit.dtype),
            "elem_bytes": unit.dtype.itemsize,
            "gradient_dtype": _type(unit.gradient_dtype),
            "trained": unit.trained,
            "muon": unit.muon,
            "params": unit.plan_params,
        }
        for unit in units
    ]
    available = machine.host_memory_bytes if machine.host_memory_bytes is not None else _offloadd.host_available_bytes()
    facts = {
        "units": described,
        "ranks": topology.count,
        "local_ranks": len(topology.local),
        "cores": os.cpu_count() or 2,
        "gpu": gpu,
        "on_gpu": on_gpu,
        "on_drives": settings.device == "nvme",
        # What is available says nothing of a quota.
        "available_bytes": None if settings.socket else available,
        "resident_fraction": settings.resident_fraction,
        "gradients": settings.gradients,
        "staging_bytes": settings.staging_bytes,
        "optimizer_device": settings.optimizer_device,
        "update_threads": settings.update_threads,
    }
    return {
        "units": described,
        "nvme": [str(path) for path in settings.nvme],
        "socket": str(settings.socket) if settings.socket else None,
        "program": program_of(settings),
        "run_dir": str(part),
        "job": job,
        # Deferred updates let the engine read ahead across the end of a pass, also where there are none.
        "deferred": settings.optimizer_step == "deferred" or not any(unit.trained for unit in units),
        "resident_fraction": settings.resident_fraction,
        "moments": settings.moments,
        "master": _master(settings, units),
        "optimizer": settings.rule,
        "commit_every": settings.commit_every,
        "activations_bytes": _activations_bytes(settings, inputs) if any(unit.trained for unit in units) else 0,
        "moved_bytes": inputs.moved_bytes,
        **json.loads(_offloadd.choices(json.dumps(facts))),
        "compute_gpu": gpu,
        "rank": topology.rank,
        "ranks": topology.count,
        "first_ranks": topology.first_ranks,
        "run": job_of(run_dir),
        "tile_elems": tile_elems,
        "bus_bytes": bus_bytes,
    }


def _activations_bytes(settings: Settings, inputs: PlannedInputs) -> int:
    """Bytes on drives for inputs of blocks, of each process; 0 where they do not wait there."""
    if settings.activations != "nvme":
        return 0
    if settings.device != "nvme":
        place = "offload_optimizer" if settings.parameters_stay and settings.device != "none" else "offload_param"
        raise Error(f'offloadd.activations = "nvme": no state is on drives: set zero_optimization.{place}.device = "nvme", or offloadd.activations = "cpu"')
    if not (settings.activations_bytes or inputs.area_bytes):
        raise Error(
            'offloadd.activations = "nvme": set offloadd.activations_bytes, the space on drives for the inputs of blocks of one micro-batch: '
            "python -m offloadd plan --seq-len TOKENS --batch SEQUENCES --activations nvme computes it"
        )
    return settings.activations_bytes or inputs.area_bytes


def _master(settings: Settings, units: list[Unit]) -> str:
    """How masters are stored. Refuses bf16 where no trained parameter is its own master then, and for float16."""
    types = {unit.dtype for unit in units if unit.trained}
    if settings.master == "bf16" and types and (torch.float16 in types or torch.bfloat16 not in types):
        raise NotSupported(
            f'offloadd.master = "bf16" is for trained parameters in bfloat16 (beside others in float32), and these are in '
            f"{' and '.join(sorted(map(_type, types)))}: leave it out, or convert the model with model.to(torch.bfloat16)"
        )
    return settings.master


# What may differ between nodes, and what may differ between the ranks of a node.
_OF_NODE = ("nvme", "socket", "run_dir", "job", "gradients_fraction")
_OF_RANK = ("rank", "staging_bytes", "update_threads", "update_gpu", "compute_gpu", "program")


def described(plan: str) -> tuple[str, str]:
    """What must be the same on all ranks of an engine's plan, and what must be on those of a node."""
    values = json.loads(plan)
    of_node = {key: values[key] for key in _OF_NODE}
    same = {key: value for key, value in values.items() if key not in _OF_NODE + _OF_RANK}
    return json.dumps([same, bool(values["nvme"] or values["socket"])]), json.dumps(of_node)


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def part_of(run_dir: Path, node: int) -> tuple[Path, str]:
    """The directory of a node's part of a run, and the name of its job in a store."""
    return _offloadd.node_part(run_dir, job_of(run_dir), node)


def job_of(run_dir: Path) -> str:
    """The job's name in a store: the directory's, told apart by its path."""
    name = "".join(letter if letter.isascii() and letter.isalnum() or letter in "-_" else "-" for letter in run_dir.name)[:40]
    return f"{name}-{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:8]}"


def program_of(settings: Settings) -> Optional[str]:
    """The program offloadd: the configuration's, the wheel's, or the one in the PATH."""
    if settings.program:
        return str(settings.program)
    beside = BIN / "offloadd"
    return str(beside) if beside.exists() else shutil.which("offloadd")

"""Settings: DeepSpeed's JSON, with this library's own keys under "offloadd"."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional, Union

from ._errors import Error, NotSupported

# DeepSpeed's keys that change nothing here: batch sizes are the script's, and how bytes move is this library's business.
_WITHOUT_EFFECT = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print", "wall_clock_breakdown",
    "dump_state", "optimizer", "scheduler", "bf16", "fp16", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio",
    "communication_data_type", "gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "zero_optimization", "offloadd",
    "checkpoint", "activation_checkpointing", "flops_profiler", "tensorboard", "csv_monitor", "wandb", "data_types", "memory_breakdown",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What `prepare` was asked for."""

    # "none", "cpu" or "nvme": where parameters and optimizer state live beside the computation.
    device: str = "none"
    nvme: tuple[Path, ...] = ()
    gradient_clipping: float = 0.0
    # The offloadd section:
    units: tuple[str, ...] = ()
    optimizer_step: str = "deferred"
    resident_fraction: float = 0.0
    commit_every: int = 1
    staging_bytes: int = 0
    # Whether gradients of 16-bit parameters lie in tiles as fp32, so that sums of several passes are not rounded.
    fp32_gradients: bool = True
    update_threads: int = field(default_factory=lambda: max(1, min(4, (os.cpu_count() or 2) // 2)))
    socket: Optional[Path] = None
    program: Optional[Path] = None


_OWN = {"units", "optimizer_step", "resident_fraction", "commit_every", "staging_bytes", "update_threads", "socket", "program"}


def settings_of(config: Union[str, os.PathLike, Mapping[str, Any]]) -> Settings:
    """Reads a file or a dict. Unknown keys are refused with the one that was probably meant."""
    if not isinstance(config, Mapping):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise Error(f"{os.fspath(config)}: {error}") from None
    _known("", config, _WITHOUT_EFFECT)
    zero = config.get("zero_optimization") or {}
    param = zero.get("offload_param") or {}
    optimizer = zero.get("offload_optimizer") or {}
    own = dict(config.get("offloadd") or {})
    _known("offloadd.", own, _OWN)

    devices = {part.get("device", "none") for part in (param, optimizer) if part}
    devices.discard("none")
    device = "nvme" if "nvme" in devices else "cpu" if "cpu" in devices else "none"
    if devices - {"cpu", "nvme"}:
        raise Error(f"zero_optimization: offload device {sorted(devices)}: one of none, cpu, nvme")
    paths = param.get("nvme_path") or optimizer.get("nvme_path") or ()
    paths = [paths] if isinstance(paths, str) else list(paths)
    socket = own.pop("socket", None)
    if device == "nvme" and not paths and not socket:
        raise Error("zero_optimization.offload_param.nvme_path: name a directory on an NVMe drive, or several in a list")
    for path in paths if device == "nvme" else ():
        if not Path(path).is_dir():
            raise Error(f"zero_optimization.offload_param.nvme_path: {path} is no directory: make it, or name another one")
    fp32_gradients = _fp32_gradients(config)
    clipping = config.get("gradient_clipping", 0.0)
    settings = Settings(
        device=device,
        nvme=tuple(Path(path).absolute() for path in paths) if device == "nvme" and not socket else (),
        gradient_clipping=0.0 if clipping == "auto" else float(clipping),
        fp32_gradients=fp32_gradients,
        socket=Path(socket) if socket else None,
        program=Path(own.pop("program")) if "program" in own else None,
        units=tuple(own.pop("units", ())),
        **own,
    )
    if settings.optimizer_step not in ("immediate", "deferred"):
        raise Error(f"offloadd.optimizer_step = {settings.optimizer_step!r}: one of immediate, deferred")
    if not 0.0 <= settings.resident_fraction <= 1.0:
        raise Error(f"offloadd.resident_fraction = {settings.resident_fraction}: from 0 to 1")
    if zero.get("zero_hpz_partition_size", 1) not in (0, 1) or zero.get("zero_quantized_weights"):
        raise NotSupported("zero_optimization: ZeRO++ is not supported; remove zero_hpz_partition_size and zero_quantized_weights")
    return settings


def _fp32_gradients(config: Mapping[str, Any]) -> bool:
    """What `data_types.grad_accum_dtype` says; without it, fp32 unless a step is known to have one backward pass."""
    wanted = (config.get("data_types") or {}).get("grad_accum_dtype")
    if wanted not in (None, "fp32", "bf16", "fp16"):
        raise Error(f"data_types.grad_accum_dtype = {wanted!r}: one of fp32, bf16, fp16")
    return wanted == "fp32" or wanted is None and config.get("gradient_accumulation_steps") != 1


def _known(prefix: str, found: Mapping[str, Any], known: set[str]) -> None:
    for key in found:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            raise Error(f"unknown key `{prefix}{key}`" + (f"; did you mean `{prefix}{close[0]}`?" if close else ""))

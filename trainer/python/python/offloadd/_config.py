"""Settings: DeepSpeed's JSON, with this library's own keys under "offloadd"."""

from __future__ import annotations

import difflib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Union

from ._errors import Error, NotSupported

Config = Union[str, os.PathLike, Mapping[str, Any]]

# DeepSpeed's keys that are read. The tables `optimizer.params` and `scheduler.params` are checked where they are used.
_READ = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print",
    "wall_clock_breakdown", "data_types.grad_accum_dtype", "bf16.enabled", "fp16.enabled", "fp16.loss_scale",
    "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale",
    "optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params", "zero_optimization.stage",
    "zero_optimization.offload_param.device", "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.nvme_path",
    "tensorboard.enabled", "tensorboard.output_path", "tensorboard.job_name",
    "csv_monitor.enabled", "csv_monitor.output_path", "csv_monitor.job_name", "checkpoint.use_node_local_storage", "offloadd",
}  # fmt: skip

# DeepSpeed's keys without effect at the top level: how bytes move and when is this library's business. In the tables above,
# every key that is not read has none.
_WITHOUT_EFFECT = {
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio", "dump_state", "memory_breakdown", "log_level",
    "flops_profiler", "comms_logger", "timers", "activation_checkpointing", "communication_data_type",
    "prescale_gradients", "gradient_predivide_factor", "dataloader_drop_last", "disable_python_gc",
}  # fmt: skip

_DATA_PARALLEL = "leave it out: all ranks compute the whole model, each on its part of a batch"
_LOSSY = "leave it out: it changes weights or gradients"
_IN_ORDER = "leave it out: the data comes in the order of the script's loader"
_NO_NETWORK = "offloadd does not use the network: set enabled = false, and upload metrics.jsonl of the run directory, or the files of tensorboard"

# DeepSpeed's keys that ask for something unsupported, with what to do; they are accepted when they are off.
_REFUSED = {
    "torch_autocast": "use bf16.enabled = true",
    "amp": "use bf16.enabled = true",
    "bf16.bf16_master_weights_and_grads": "leave it out: the master is fp32",
    "bf16.bf16_optimizer_states": 'leave it out, or set offloadd.moments = "bf16", which rounds moments stochastically',
    "fp16.fp16_master_weights_and_grads": "leave it out: the master is fp32",
    "sparse_gradients": "leave it out: gradients of the embedding are dense",
    "wandb": _NO_NETWORK,
    "comet": _NO_NETWORK,
    "nebula": "leave it out: commits take the place of DeepSpeed's checkpoints",
    "data_efficiency": _IN_ORDER,
    "curriculum_learning": _IN_ORDER,
    "progressive_layer_drop": "leave it out: the model's forward says what is computed",
    "eigenvalue": "leave it out: nothing here uses it",
    "quantize_training": _LOSSY,
    "weight_quantization": _LOSSY,
    "compression_training": _LOSSY,
    "zero_optimization.zero_quantized_weights": _LOSSY,
    "zero_optimization.zero_quantized_nontrainable_weights": _LOSSY,
    "zero_optimization.zero_quantized_gradients": _LOSSY,
    "zero_optimization.zeropp_loco_param": _LOSSY,
    "zero_optimization.cpu_offload": 'write "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'write "offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_params": 'write "offload_param": {"device": "cpu"}',
    "zero_optimization.zenflow": "leave it out: updates overlap computing without changing the result (offloadd.optimizer_step)",
    "sparse_attention": "leave it out: attention is the model's own",
    "autotuning": "leave it out: python -m offloadd plan says what fits and how fast it can be",
    "hybrid_engine": "leave it out: only training is done here",
    "elasticity": "leave it out: a run resumes with any number of ranks, and train_batch_size stays the same",
    "disable_allgather": _DATA_PARALLEL,
    "tensor_parallel": _DATA_PARALLEL,
    "expert_parallel": _DATA_PARALLEL,
    "pipeline": _DATA_PARALLEL,
    "zero_optimization.zero_hpz_partition_size": _DATA_PARALLEL,
    "zero_optimization.mics_shard_size": _DATA_PARALLEL,
}

# Values of refused keys that switch them off, beside false, null, 0 and `enabled` false.
_OFF = {"zero_optimization.zero_hpz_partition_size": 1, "zero_optimization.mics_shard_size": -1}

_PATH = ((str, os.PathLike), "a path")

# Keys under "offloadd", with the types of their values and the words for what they may be.
_OWN = {
    "units": ((list, tuple), "a list of classes or patterns of module names"),
    "optimizer_step": (str, "one of immediate, deferred"),
    "optimizer_device": (str, "one of auto, cpu, gpu, shared"),
    "resident_fraction": ((int, float), "a number from 0 to 1"),
    "gradients": (str, "one of auto, cpu, nvme"),
    "shard": (str, "one of auto, all"),
    "moments": (str, "one of fp32, bf16"),
    "commit_every": (int, "a whole number of steps, at least 1"),
    "staging_bytes": (int, "a whole number of bytes"),
    "update_threads": (int, "a whole number, at least 1"),
    "run_dir": _PATH,
    "socket": _PATH,
    "program": _PATH,
    "compute_device": (str, "a device of torch, such as cuda:0"),
}

# Least likeness, from 0 to 1, of a misspelled key to the one that was meant. DeepSpeed's own keys are less alike.
_MISSPELLED = 0.85

# DeepSpeed's name for a job without one.
_JOB_NAME = "DeepSpeedJobName"


@dataclass(frozen=True)
class Settings:
    """The settings of a configuration."""

    # "none", "cpu" or "nvme": where parameters and optimizer state live beside the computation.
    device: str = "none"
    nvme: tuple[Path, ...] = ()
    gradient_clipping: float = 0.0
    # Samples of a step, where the configuration says so.
    train_batch_size: Optional[int] = None
    steps_per_print: Optional[int] = None
    wall_clock_breakdown: bool = False
    # "bfloat16" or "float16" where the configuration switches one on.
    precision: Optional[str] = None
    run_dir: Optional[Path] = None
    # Whether every node keeps whole checkpoints, if nodes share no directory.
    use_node_local_storage: bool = False
    # The whole configuration, for what only `initialize` reads.
    json: Mapping[str, Any] = field(default_factory=dict)
    # DeepSpeed's keys in it that have no effect here.
    without_effect: tuple[str, ...] = ()
    # The offloadd section:
    units: tuple[str, ...] = ()
    optimizer_step: str = "deferred"
    resident_fraction: float = 0.0
    # "cpu" or "nvme": where gradients lie until the update. None: in host memory if it has room.
    gradients: Optional[str] = None
    # "auto" or "all": whether the ranks of each of several nodes keep a copy of all parameters, as far as there is room.
    shard: str = "auto"
    # "fp32" or "bf16": how the optimizer's moments are stored.
    moments: str = "fp32"
    commit_every: int = 1
    staging_bytes: int = 0
    # Whether gradients of 16-bit parameters lie in tiles as fp32, so that sums of several passes are not rounded.
    fp32_gradients: bool = True
    # "cpu", "gpu" or "shared"; by where the model computes and the state lies if None.
    optimizer_device: Optional[str] = None
    # By the number of cores if None.
    update_threads: Optional[int] = None
    socket: Optional[Path] = None
    program: Optional[Path] = None
    # Where the model computes, if not where it is.
    compute_device: Optional[str] = None

    def monitor_dir(self, name: str, run_dir: Path) -> Optional[str]:
        """Directory of a monitor's files, if it is enabled."""
        monitor = self.json.get(name) or {}
        if not monitor.get("enabled"):
            return None
        job = monitor.get("job_name") or _JOB_NAME
        if Path(job).name != job:
            raise Error(f"{name}.job_name = {job!r}: must be the name of a directory, without a path: {name}.output_path names the directory above it")
        return str(Path(monitor.get("output_path") or run_dir / name) / job)


def read(config: Config) -> Mapping[str, Any]:
    """The content of a configuration: a dict, or a file's. Raises `Error` if the file cannot be read or is not a JSON object."""
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise Error(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Error(f"{path} is not JSON: {error}") from None
    if not isinstance(content, Mapping):
        raise Error(f"{path}: expected a JSON object, such as {{\"train_batch_size\": 8}}")
    return content


def settings_of(config: Config) -> Settings:
    """Reads a file or a dict. Raises `Error` for unknown keys, with the one that was probably meant, and `NotSupported` for
    something unsupported."""
    default_dir = Path("offloadd-run").absolute()
    if not isinstance(config, Mapping):
        default_dir = Path(config).absolute().with_name(f"offloadd-{Path(config).stem}")
        config = read(config)
    without_effect = _check(config)
    zero = config.get("zero_optimization") or {}
    param = zero.get("offload_param") or {}
    optimizer = zero.get("offload_optimizer") or {}
    own = own_keys(config)

    devices = {part.get("device", "none") for part in (param, optimizer) if part}
    devices.discard("none")
    device = "nvme" if "nvme" in devices else "cpu" if "cpu" in devices else "none"
    if devices - {"cpu", "nvme"}:
        unknown = sorted(map(str, devices - {"cpu", "nvme"}))[0]
        raise Error(f'zero_optimization: a "device" is "{unknown}": offload_param.device and offload_optimizer.device must be one of none, cpu, nvme')
    paths = param.get("nvme_path") or optimizer.get("nvme_path") or ()
    paths = [paths] if isinstance(paths, str) else list(paths)
    socket = own.pop("socket", None)
    if device == "nvme" and not paths and not socket:
        raise Error('zero_optimization: a device is "nvme" and nvme_path is missing: name a directory on an NVMe drive, or several in a list')
    for path in paths if device == "nvme" else ():
        if not Path(path).is_dir():
            raise Error(f"zero_optimization.offload_param.nvme_path: {path} is not a directory: make it, or name another one")
    batch = batch_of(config)
    settings = Settings(
        device=device,
        nvme=tuple(Path(path).absolute() for path in paths) if device == "nvme" and not socket else (),
        gradient_clipping=_number(config, "gradient_clipping", 0.0),
        train_batch_size=batch and batch[0] * batch[1] * processes(),
        steps_per_print=_number(config, "steps_per_print", None),
        wall_clock_breakdown=bool(config.get("wall_clock_breakdown", False)),
        precision=_precision(config),
        use_node_local_storage=_use_node_local_storage(config),
        run_dir=Path(own.pop("run_dir", default_dir)).absolute(),
        json=config,
        without_effect=tuple(without_effect),
        fp32_gradients=_fp32_gradients(config),
        socket=Path(socket) if socket else None,
        program=Path(own.pop("program")) if "program" in own else None,
        units=tuple(own.pop("units", ())),
        **own,
    )
    in_range = {
        "optimizer_step": settings.optimizer_step in ("immediate", "deferred"),
        "optimizer_device": settings.optimizer_device in (None, "cpu", "gpu", "shared"),
        "gradients": settings.gradients in (None, "cpu", "nvme"),
        "shard": settings.shard in ("auto", "all"),
        "moments": settings.moments in ("fp32", "bf16"),
        "resident_fraction": 0.0 <= settings.resident_fraction <= 1.0,
        "commit_every": settings.commit_every >= 1,
        "staging_bytes": settings.staging_bytes >= 0,
        "update_threads": settings.update_threads is None or settings.update_threads >= 1,
    }
    if settings.program and not settings.program.is_file():
        raise Error(f"offloadd.program: {settings.program} is not a file: name the program offloadd, or leave the key out")
    for key, good in in_range.items():
        if not good:
            raise Error(f"offloadd.{key} = {getattr(settings, key)!r}: must be {_OWN[key][1]}")
    return settings


def own_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys under "offloadd" that have a value."""
    section = config.get("offloadd") or {}
    if not isinstance(section, Mapping):
        raise Error(f"offloadd = {section!r}: expected an object of keys")
    _known("offloadd.", section, _OWN)
    own = {key: value for key in section if (value := _given(section, key, None)) is not None}
    for key, value in own.items():
        types, words = _OWN[key]
        if not isinstance(value, types) or isinstance(value, bool):
            raise Error(f"offloadd.{key} = {value!r}: must be {words}")
    return own


def _fp32_gradients(config: Mapping[str, Any]) -> bool:
    """Returns `data_types.grad_accum_dtype`; without it, fp32 unless a step is known to have one backward pass."""
    wanted = (config.get("data_types") or {}).get("grad_accum_dtype")
    if wanted not in (None, "fp32", "bf16", "fp16"):
        raise Error(f"data_types.grad_accum_dtype = {wanted!r}: must be one of fp32, bf16, fp16")
    return wanted == "fp32" or wanted is None and config.get("gradient_accumulation_steps") != 1


def processes() -> int:
    """Processes that train together, as torch.distributed or the one who starts them says."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def batch_of(config: Mapping[str, Any]) -> Optional[tuple[int, int]]:
    """Samples of a rank's micro-batch and micro-batches of a step, by DeepSpeed's arithmetic; None where no size is given."""
    ranks = processes()
    train = _given(config, "train_batch_size", None)
    micro = _given(config, "train_micro_batch_size_per_gpu", None)
    steps = _given(config, "gradient_accumulation_steps", None)
    for key, number in (
        ("train_batch_size", train),
        ("train_micro_batch_size_per_gpu", micro),
        ("gradient_accumulation_steps", steps),
    ):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise Error(f"{key} = {number!r}: must be a whole number, at least 1")
    if train is None:
        return None if micro is None else (micro, steps or 1)
    if train % ranks:
        raise Error(f"train_batch_size: {train} is not a multiple of the number of ranks, {ranks}")
    train //= ranks
    all_ranks, times = (" * ranks", f" * {ranks}") if ranks > 1 else ("", "")
    if micro is None and steps is None:
        return train, 1
    if micro is not None and steps is not None:
        if train != micro * steps:
            raise Error(
                f"train_batch_size: {train * ranks} contradicts train_micro_batch_size_per_gpu * gradient_accumulation_steps{all_ranks} = "
                f"{micro} * {steps}{times} = {micro * steps * ranks}"
            )
        return micro, steps
    known, name = (micro, "train_micro_batch_size_per_gpu") if micro else (steps, "gradient_accumulation_steps")
    if train % known:
        raise Error(f"train_batch_size: {train * ranks} is not a multiple of {name}{all_ranks} = {known}{times}")
    return (micro, train // micro) if micro else (train // steps, steps)


def _given(section: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key; "auto" and null count as left out."""
    value = section.get(key)
    return default if value is None or value == "auto" else value


def _number(section: Mapping[str, Any], key: str, default: Any) -> Any:
    value = _given(section, key, default)
    if value is not default and (not isinstance(value, (int, float)) or isinstance(value, bool)):
        raise Error(f"{key} = {value!r}: must be a number")
    return value


def _precision(config: Mapping[str, Any]) -> Optional[str]:
    on = [name for name in ("bf16", "fp16") if (config.get(name) or {}).get("enabled") is True]
    if len(on) == 2:
        raise Error("bf16.enabled and fp16.enabled: only one of them can be true")
    return {"bf16": "bfloat16", "fp16": "float16"}[on[0]] if on else None


def _use_node_local_storage(config: Mapping[str, Any]) -> bool:
    value = _given(config.get("checkpoint") or {}, "use_node_local_storage", False)
    if not isinstance(value, bool):
        raise Error(f"checkpoint.use_node_local_storage = {value!r}: must be true or false")
    return value


def _check(found: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Refuses what is unknown or not supported; returns the keys without effect."""
    without_effect = []
    for key, value in found.items():
        path = prefix + key
        if path in _REFUSED:
            off = not value or value == _OFF.get(path) or isinstance(value, Mapping) and value.get("enabled") is False
            if not off:
                raise NotSupported(f"{path} is not supported: {_REFUSED[path]}")
        elif any(one.startswith(path + ".") for one in _READ):
            if not isinstance(value or {}, Mapping):
                raise Error(f"{path} = {value!r}: expected an object of keys")
            without_effect += _check(value or {}, path + ".")
        elif path not in _READ:
            if not prefix:
                _known("", [key], {one.split(".")[0] for one in _READ | _WITHOUT_EFFECT})
            # A key of a table that is not one of those read is another of DeepSpeed's, unless it is nearly one of them.
            inner = {one[len(prefix):].split(".")[0] for one in _READ if prefix and one.startswith(prefix)}
            if difflib.get_close_matches(key, inner, 1, _MISSPELLED):
                _known(prefix, [key], inner)
            without_effect.append(path)
    return without_effect


def _known(prefix: str, found: Iterable[str], known: set[str]) -> None:
    for key in found:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean `{prefix}{close[0]}`?" if close else "leave it out; docs/pytorch.md lists the keys"
            raise Error(f"unknown key `{prefix}{key}`; {hint}")

"""Settings: DeepSpeed's JSON, with this library's own keys under "offloadd". The extension checks them, as it does for the native trainer."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional, Union

from . import _offloadd
from ._errors import Error, NotSupported

Config = Union[str, os.PathLike, Mapping[str, Any], "Settings"]

# What messages call a configuration that is no file.
_DICT = "the configuration"

# Directory of a run that no configuration and no file names.
_RUN_DIR = "offloadd-run"


@dataclass(frozen=True)
class Settings:
    """The checked settings of a configuration; `settings_of` makes them."""

    # "none", "cpu" or "nvme": where the optimizer state lives, and the parameters with it unless they stay where the model has them.
    device: str
    parameters_stay: bool
    nvme: tuple[Path, ...]
    # 0 for none.
    gradient_clipping: float
    # Samples of a step and of a rank's micro-batch, where the configuration says so, and micro-batches.
    train_batch_size: Optional[int]
    micro_batch: Optional[int]
    micro_batches: Optional[int]
    steps_per_print: Optional[int]
    wall_clock_breakdown: bool
    # Whether the loader that `initialize` makes leaves a smaller last batch out.
    dataloader_drop_last: bool
    # "bfloat16" or "float16" where the configuration switches one on.
    precision: Optional[str]
    # What happens to a step whose gradients are not finite, for the extension's `LossScale`.
    overflow: Any
    # Whether every node keeps whole checkpoints, if nodes share no directory.
    use_node_local_storage: bool
    # `output_path` and `job_name` of each monitor that is enabled.
    tensorboard: Optional[Mapping[str, Any]]
    csv_monitor: Optional[Mapping[str, Any]]
    # Whether gradients of 16-bit parameters lie in tiles as fp32, so that sums of several passes are not rounded.
    fp32_gradients: bool
    # type, lr, betas, eps and weight_decay, where the configuration has an optimizer.
    optimizer: Optional[Mapping[str, Any]]
    scheduler: Optional[Mapping[str, Any]]
    # The key offloadd.run_dir.
    run_dir: Optional[Path]
    units: tuple
    optimizer_step: str
    resident_fraction: float
    # "cpu" or "nvme": where gradients lie until the update. None: in host memory if it has room.
    gradients: Optional[str]
    # "gpu", "cpu" or "nvme": where inputs of checkpointed blocks wait for their backward; on a processor they stay unless they go to drives.
    activations: str
    # Space on the drives for them, of each process; 0 where the configuration has none.
    activations_bytes: int
    matmuls: str
    # Chunks of tokens in which the MLP of a block is computed.
    mlp_chunks: int
    loss_chunks: int
    # The fraction of the parameters' bytes that stays on the GPU. None: as much as has room.
    gpu_resident_fraction: Optional[float]
    # "auto" or "all": whether the ranks of each of several nodes keep a copy of all parameters, as far as there is room.
    shard: str
    # "fp32", "bf16" or "8bit": how the optimizer's moments are stored.
    moments: str
    # "fp32" or "bf16": how the masters of bfloat16 parameters are stored.
    master: str
    # Ranks that have parts of one sequence.
    sequence_parallel_size: int
    # Bytes of a unit above which the experts of a layer are divided.
    unit_bytes_max: int
    commit_every: int
    staging_bytes: int
    # "cpu", "gpu" or "shared"; by where the model computes and the state lies if None.
    optimizer_device: Optional[str]
    # By the number of cores if None.
    update_threads: Optional[int]
    socket: Optional[Path]
    program: Optional[Path]
    # Where the model computes, if not where it is.
    compute_device: Optional[str]
    # DeepSpeed's keys that have no effect here, and other lines for the person who wrote the configuration.
    without_effect: tuple[str, ...]
    said: tuple[str, ...]
    # The run's directory where nothing names one.
    default_dir: Path
    # The whole configuration.
    json: Mapping[str, Any] = field(default_factory=dict)
    # "AdamW", "Lion" or "Muon": whose rule updates tiles. The script's optimizer says it.
    rule: str = "AdamW"

    def monitor_dir(self, name: str, run_dir: Path) -> Optional[str]:
        """Directory of a monitor's files, if it is enabled."""
        monitor = getattr(self, name)
        return monitor and str(Path(monitor["output_path"] or run_dir / name) / monitor["job_name"])


def read(config: Config) -> Mapping[str, Any]:
    """The content of a configuration: a dict, or a file's. Raises `Error` if the file cannot be read or is not a JSON object."""
    if isinstance(config, Settings):
        return config.json
    return config if isinstance(config, Mapping) else json.loads(_offloadd.read_json(Path(config)))


def settings_of(
    config: Config, gradient_clipping: float = 0.0, schedules: bool = True, sequence_ranks: Optional[int] = None, ranks: Optional[int] = None
) -> Settings:
    """Reads a file or a dict. `gradient_clipping` counts where it has none. Raises `Error` with all that is wrong in it, or `NotSupported` if it asks
    for something unsupported.

    Without `schedules`, the learning rate is the script's: a schedule whose end the Trainer fills in ("auto") is not read. `sequence_ranks` is
    sequence_parallel_size where the configuration has none, and `ranks` train together where they are not those of this process.
    """
    if isinstance(config, Settings):
        return config
    default_dir, name = Path(_RUN_DIR).absolute(), _DICT
    if not isinstance(config, Mapping):
        path = Path(config).absolute()
        default_dir, name = path.with_name(f"offloadd-{path.stem}"), path.name
    config = read(config)
    _check_text(config)
    unread = () if schedules or not _end_is_filled_in(config) else ("scheduler",)
    checked = {key: value for key, value in config.items() if key not in unread}
    if sequence_ranks is not None:
        given = checked.get("sequence_parallel_size")
        if given not in (None, "auto", sequence_ranks):
            raise Error(f"sequence_parallel_size = {given!r}, and the script has sequences on {sequence_ranks} ranks")
        checked["sequence_parallel_size"] = sequence_ranks
    text, wrong = _offloadd.check_settings(json.dumps(checked, default=_plain), name, ranks or processes())
    if wrong:
        raise (NotSupported if "not supported" in wrong else Error)(wrong if name is _DICT else f"{name}: {wrong}")
    values = json.loads(text)
    for key in ("run_dir", "socket", "program"):
        values[key] = None if values[key] is None else Path(values[key])
    if values["gradient_clipping"] is None:
        values["gradient_clipping"] = gradient_clipping
    units = (config.get("offloadd") or {}).get("units")
    # Classes pass through no JSON.
    values["units"] = tuple(units) if values["units"] else ()
    for key in ("without_effect", "said"):
        values[key] = tuple(values[key])
    values["nvme"] = tuple(map(Path, values["nvme"]))
    return Settings(**values, default_dir=default_dir, json=config)


def _end_is_filled_in(config: Mapping[str, Any]) -> bool:
    """Whether the configuration leaves the end of its schedule to the Trainer, which knows the number of steps."""
    scheduler = config.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    return isinstance(params, Mapping) and params.get("total_num_steps") == "auto"


def _check_text(value: Any, key: str = "") -> None:
    """Refuses what is no text, such as the name of a directory in another encoding: JSON cannot have it."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            _check_text(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for one in value:
            _check_text(one, key)
    elif isinstance(value, (str, os.PathLike)):
        try:
            os.fsdecode(value).encode()
        except UnicodeEncodeError:
            raise Error(f"{key} {os.fsdecode(value)!r} is not UTF-8: name another {key.rpartition('.')[2]}") from None


def _plain(value: Any) -> Any:
    """A value of a dict as JSON has it."""
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    for convert in ("item", "tolist"):
        # Numbers of numpy and torch.
        if hasattr(value, convert):
            return getattr(value, convert)()
    return str(value)


def processes() -> int:
    """Processes that train together, as torch.distributed or the one who starts them says."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))

"""`deepspeed.zero`: where parameters are built, and how a script reads and changes them after `initialize`."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Union

import torch
import torch.distributed as dist
from torch import nn

from ._config import Config, settings_of
from ._deepspeed_ranks import answering, init_distributed
from ._errors import Error, NotSupported
from ._read_only import only_read
from ._run import Run, prepare
from ._units import Unit

# Smaller parameters are built in host memory: a mapping each costs more than they hold.
_MAPPED_BYTES_MIN = 1 << 20

# Runs whose parameters `GatheredParameters` finds.
_runs: "weakref.WeakSet[Run]" = weakref.WeakSet()


def remember(run: Run) -> None:
    """Lets `GatheredParameters` find the parameters of `run`."""
    _runs.add(run)


def unused_dir(directory: Path) -> Path:
    """The directory, or one beside it with a number, in which no open run of this process lies."""
    taken = {part for run in list(_runs) if not run.closed for part in (run.run_dir, *run.run_dir.parents)}
    names = itertools.chain([directory], (directory.with_name(f"{directory.name}-{number}") for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def run_of(param: torch.Tensor) -> Optional[Run]:
    """The run that has a parameter; None where none has."""
    return next((run for run in list(_runs) if not run.closed and id(param) in run.engine.gathering.unit_of), None)


class Init:
    """Builds the parameters of modules within it in the type that the configuration says, and in a temporary file on nvme_path
    where it offloads to NVMe: a model may be larger than the host's memory. `initialize` takes them from there."""

    def __init__(
        self,
        module: Optional[nn.Module] = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: Optional[str] = None,
        pin_memory: bool = False,
        config_dict_or_path: Optional[Config] = None,
        config: Optional[Config] = None,
        enabled: bool = True,
        dtype: Optional[torch.dtype] = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        for name, value in (("data_parallel_group", data_parallel_group), ("mpu", mpu), *others.items()):
            if value is not None:
                raise NotSupported(f"zero.Init: {name} is not supported: leave it out")
        given = config_dict_or_path if config_dict_or_path is not None else config
        settings = settings_of(given) if given is not None else None
        self._dtype = dtype or (getattr(torch, settings.precision) if settings and settings.precision else None)
        self._dir = settings.nvme[0] if settings and settings.nvme else None
        self._enabled = enabled
        self._before: list[Any] = []

    def __enter__(self) -> "Init":
        answering()
        if not self._enabled:
            return self
        # As DeepSpeed's does: transformers asks for the rank when it loads weights.
        init_distributed()
        plain = nn.Module.register_parameter

        def register_parameter(module: nn.Module, name: str, param: Optional[nn.Parameter]) -> None:
            if type(param) is nn.Parameter and not param.is_meta and not hasattr(param, "_offloadd_built"):
                param.data = self._place(param.data)
                param._offloadd_built = True
            plain(module, name, param)

        self._before.append(plain)
        nn.Module.register_parameter = register_parameter
        return self

    def __exit__(self, *_: Any) -> None:
        if self._enabled:
            nn.Module.register_parameter = self._before.pop()

    def _place(self, value: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and value.is_floating_point() else value.dtype
        bytes_ = value.numel() * dtype.itemsize
        if self._dir is None or bytes_ < _MAPPED_BYTES_MIN:
            return value.to(dtype)
        placed = _mapped(self._dir, bytes_, dtype).view(value.shape)
        return placed.copy_(value)


def _mapped(directory: Path, bytes_: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a file without a name, whose space is freed with the tensor."""
    handle, path = tempfile.mkstemp(prefix="offloadd-building-", dir=directory)
    try:
        # Without it, a full drive would end the process with SIGBUS when a page is written.
        os.posix_fallocate(handle, 0, bytes_)
        storage = torch.UntypedStorage.from_file(path, True, bytes_)
    except OSError as error:
        raise Error(f"{directory}: no room to build a parameter of {bytes_} bytes: {error.strerror}; free some space, or name another nvme_path") from None
    finally:
        os.close(handle)
        os.unlink(path)
    return torch.empty(0, dtype=dtype).set_(storage)


@contextlib.contextmanager
def GatheredParameters(
    params: Union[nn.Parameter, Iterable[nn.Parameter]],
    modifier_rank: Optional[int] = None,
    fwd_module: Optional[nn.Module] = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Keeps the values of parameters in memory, through forwards of the model too. With `modifier_rank=0`, the first rank's changes are
    committed at its end, those of a model that is not trained written anew; without it a change is an error at its end. Values that are only read,
    and do not fit into memory together, come where they are used. Parameters that no engine has are in memory anyway; with `modifier_rank=0`, all
    ranks have the first one's at its end."""
    if modifier_rank not in (None, 0):
        raise NotSupported(f"GatheredParameters: modifier_rank={modifier_rank}: only changes of rank 0 can be kept; pass modifier_rank=0")
    wanted = [params] if isinstance(params, torch.Tensor) else list(params)
    # Other weights of models that are not trained.
    others: list[tuple[Run, dict[int, torch.Tensor]]] = []
    with contextlib.ExitStack() as stack:
        found = [(run, run.engine.gathering.units_with(wanted)) for run in list(_runs) if enabled and not run.closed]
        if modifier_rank is None:
            found = [(run, units) for run, units in found if _has_room(run, units)]
        for run, units in found:
            for unit in units:
                stack.enter_context(run.engine.gathering.pinned(unit))
            # Before the units are released, after an exception of the script too.
            stack.callback(_let_none_stay, run, units)
        uses = {unit: _uses(unit) for _, units in found for unit in units}
        with contextlib.ExitStack() as reads:
            for run, units in found if modifier_rank is None else ():
                reads.enter_context(
                    only_read(run.engine.gathering, units, "pass modifier_rank=0 to GatheredParameters, which keeps what the first rank writes")
                )
            yield
        for unit, before in uses.items():
            if _uses(unit) > before:
                # The script has kept a view, such as `param.data`, of memory that is about to be released: it may keep that memory.
                unit.move(unit.flat.clone(), copy=False)
        if modifier_rank is not None:
            for run, units in found:
                if run.trains:
                    run.rewriting.keep_changes(units)
                elif changes := run.rewriting.changes(units):
                    others.append((run, {key: value.to("cpu") for key, value in changes.items()}))
            _share([param for param in wanted if not any(id(param) in run.engine.gathering.unit_of for run, _ in found)])

    for run, changes in others:
        _begin_with(run, changes)


def _begin_with(run: Run, changes: Mapping[int, torch.Tensor]) -> None:
    """Writes a model anew that is not trained, with other values of the parameters whose ids are given: its tiles are written once, and their
    place takes those of a new run."""
    model = run.model
    run.close(keep=True)
    with torch.no_grad():
        for param in model.parameters():
            if id(param) in changes:
                param.copy_(changes[id(param)])
    remember(prepare(model, None, run.settings, run_dir=run.plan.base_dir, resume=False))


def _has_room(run: Run, units: list[Unit]) -> bool:
    """Whether units that are to be read fit into memory at a time. One does; and where one rank leads, the others bring what it reads."""
    return len(units) < 2 or run.engine.gathering.leads or run.whole.has_room(units)


def _let_none_stay(run: Run, units: list[Unit]) -> None:
    """Lets units that are released next give their memory back, resident ones too: changes that nobody has noticed are lost with it. Where one rank
    leads, `Gathering` does it at the end, on all ranks."""
    for unit in units:
        unit.written = unit.written or not run.engine.gathering.leads


def _uses(unit: Unit) -> int:
    """Tensors that lie in a unit's memory."""
    if unit.watch is not None:
        unit.watch.drop_unheld()
    return torch._C._storage_Use_Count(unit.flat.untyped_storage()._cdata)


def _share(params: list[nn.Parameter]) -> None:
    """Gives parameters the first rank's values: transformers loads weights there alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # A group of NCCL alone has no tensors of the processor.
    through = "cuda" if dist.get_backend() == "nccl" else None
    for param in params:
        if param.is_meta:
            continue
        value = param.detach().contiguous().to(through or param.device)
        dist.broadcast(value, src=0)
        if value.data_ptr() != param.data_ptr():
            param.data.copy_(value)

"""`deepspeed.comm`: torch's process group under DeepSpeed's names."""

from __future__ import annotations

import datetime
import os
from typing import Any, Optional

import torch

from . import _finder
from ._console import say

_answering = False


def answering() -> None:
    """Says once, on the first rank, who answers."""
    global _answering
    if not _answering:
        say(f"answers to `import deepspeed` in this process (interface {_finder.VERSION}); DeepSpeed is not used")
    _answering = True


def is_initialized() -> bool:
    return torch.distributed.is_initialized()


def init_distributed(
    dist_backend: Optional[str] = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: Optional[datetime.timedelta] = None,
    init_method: Optional[str] = None,
    dist_init_required: Optional[bool] = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Opens torch's process group unless it is open: over the ranks that a launcher started, or of this process alone."""
    if torch.distributed.is_initialized():
        return
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if rank >= 0 and world_size > 0:
        given.update(rank=rank, world_size=world_size)
    if init_method is not None:
        given["init_method"] = init_method
    elif "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        given.update(store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.distributed.init_process_group(backend, **given)


def get_rank(group: Any = None) -> int:
    return torch.distributed.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return torch.distributed.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    return torch.distributed.barrier(group, async_op, device_ids) if is_initialized() else None


def destroy_process_group(group: Any = None) -> None:
    if is_initialized():
        torch.distributed.destroy_process_group(group)

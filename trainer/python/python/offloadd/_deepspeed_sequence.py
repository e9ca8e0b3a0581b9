"""Names of DeepSpeed for sequences on several ranks (Ulysses, ALST): the attention, the loader, the groups of ranks, and computing in tiles."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Callable, Iterable, Optional, Union

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from ._errors import Error, NotSupported
from ._sequence_attention import take_for_divided
from ._sequence_groups import current, group_of
from ._sequence_loader import Loader

# The module that is passed as `mpu`.
MPU = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


class UlyssesSPAttentionHF:
    """Registers attention of sequences whose parts lie on several ranks. The functions of transformers' models take its place when a model is
    passed to `initialize`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotSupported("UlyssesSPAttentionHF(...): call UlyssesSPAttentionHF.register_with_transformers")

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Union[nn.Module, str, None],
        core_attn_implementation: Optional[str],
        sequence_parallel_size: int,
        micro_batch_size: Optional[int] = None,
        seq_length: Optional[int] = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: Optional[int] = None,
    ) -> Any:
        """Makes the groups of ranks, and returns the module that is passed to `initialize` as `mpu`; None for one rank. The models that are
        initialized from then on are checked and divided there. `core_attn_implementation` is the model's own where it is None."""
        if sequence_parallel_size == 1:
            return None
        length = seq_length if seq_length is not None else max_length
        if not seq_length_is_variable and length is None:
            raise Error("register_with_transformers: seq_length_is_variable=False without seq_length: name the length, or leave it out")
        if length is not None and length % sequence_parallel_size:
            raise Error(f"register_with_transformers: seq_length = {length} cannot be divided among {sequence_parallel_size} ranks")
        initialize_sequence_parallel(sequence_parallel_size)
        take_for_divided(core_attn_implementation, not disable_in_eval)
        return importlib.import_module(MPU)


class UlyssesSPDataLoaderAdapter(Loader):
    """A loader that divides its batches, which have labels, among the ranks of a sequence. Batches come in host memory."""

    _needs_labels = True

    def __init__(self, dl: Iterable, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        group = current()
        if group is None or (sp_rank, sp_world_size) != (group.rank, group.size):
            raise NotSupported(
                "UlyssesSPDataLoaderAdapter: pass the group of UlyssesSPAttentionHF.register_with_transformers, this rank's place in it and its size"
            )
        super().__init__(dl, group)


# Groups of ranks


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Makes the groups, each of neighbouring ranks."""
    group_of(sequence_parallel_size)


def get_sequence_parallel_group() -> Any:
    """The ranks with parts of the same sequence."""
    return _made().group


def get_sequence_parallel_world_size() -> int:
    return _made().size


def get_sequence_parallel_rank() -> int:
    return _made().rank


def get_sequence_data_parallel_group() -> Any:
    """All ranks: they divide parameters and state."""
    return _made().world


def _made() -> Any:
    group = current()
    if group is None:
        raise Error("sequence parallel group is not initialized: call UlyssesSPAttentionHF.register_with_transformers first")
    return group


def ranks() -> Optional[int]:
    """Ranks of a sequence, if the script has made their groups."""
    group = current()
    return None if group is None else group.size


def without_gradient(all_reduce: Callable) -> Callable:
    """An all_reduce in place, which has the gradient of this rank's share: refuses a loss of parts of a sequence."""

    @functools.wraps(all_reduce)
    def call(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = current()
        if made is not None and group is made.group and tensor.requires_grad:
            raise NotSupported(
                "deepspeed.comm.all_reduce of a loss among the ranks of a sequence: its gradient is that of this rank's share alone: "
                "use torch.distributed.nn.functional.all_gather or offloadd.sequence_parallel.mean; for a number, tensor.detach()"
            )
        return all_reduce(tensor, op, group, *args, **kwargs)

    return call


# Computing in tiles


def sequence_tiled_compute(
    fn: Callable,
    seqlen: int,
    shards: int,
    kwargs_to_shard: dict[str, Any],
    kwargs_to_pass: dict[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: Optional[str] = "mean",
) -> torch.Tensor:
    """Computes `fn` on one tile of the tokens after the other, and again in backward, so that the activations of one tile are in memory. Results
    are put together along `output_unshard_dimension`, a new one for 0, and averaged or added up (`output_reduction`)."""
    if output_reduction not in (None, "mean", "sum"):
        raise Error(f"sequence_tiled_compute: output_reduction = {output_reduction!r}: expected None, 'mean' or 'sum'")
    step = -(-seqlen // shards)

    def tile(first: int) -> torch.Tensor:
        parts = {name: value[:, first : first + step] for name, value in kwargs_to_shard.items()}
        return torch.utils.checkpoint.checkpoint(fn, **parts, **kwargs_to_pass, use_reentrant=False)

    tiles = [tile(first) for first in range(0, seqlen, step)]
    whole = torch.stack(tiles) if output_unshard_dimension == 0 else torch.cat(tiles, dim=output_unshard_dimension)
    return whole if output_reduction is None else getattr(whole, output_reduction)()


class TiledMLP:
    """Computes a feed-forward layer on one tile of the tokens after the other, and again in backward."""

    @staticmethod
    def apply(fn: Callable, layer: nn.Module, x: torch.Tensor, shards: int, compute_params: Any = None) -> torch.Tensor:
        """`fn(layer, x)`, in `shards` tiles along the second dimension from the right."""
        tiles = x.chunk(shards, dim=-2)
        return torch.cat([torch.utils.checkpoint.checkpoint(fn, layer, tile, use_reentrant=False) for tile in tiles], dim=-2)


# The names of each module.
ATTENTION = {one.__name__: one for one in (UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter, TiledMLP, sequence_tiled_compute)}
STATE = {
    "initialize_sequence_parallel": initialize_sequence_parallel,
    "get_sequence_parallel_group": get_sequence_parallel_group,
    "get_sequence_parallel_world_size": get_sequence_parallel_world_size,
    "get_sequence_parallel_rank": get_sequence_parallel_rank,
    "get_sequence_data_parallel_group": get_sequence_data_parallel_group,
    "get_sequence_data_parallel_world_size": dist.get_world_size,
    "get_sequence_data_parallel_rank": dist.get_rank,
    # As in DeepSpeed, where only sequences divide a model.
    "get_model_parallel_group": get_sequence_parallel_group,
    "get_model_parallel_world_size": get_sequence_parallel_world_size,
    "get_model_parallel_rank": get_sequence_parallel_rank,
}
GROUPS = {
    "_get_sequence_parallel_group": get_sequence_parallel_group,
    "_get_sequence_parallel_world_size": lambda: 1 if current() is None else get_sequence_parallel_world_size(),
    "_get_sequence_parallel_rank": lambda: 0 if current() is None else get_sequence_parallel_rank(),
}

"""Batches in parts, one for each rank of a sequence."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, Mapping, Optional

import torch

from ._errors import Error
from ._sequence_attention import check_divided
from ._sequence_groups import IGNORED, SequenceGroup, the_group


class Loader:
    """Divides the batches of a loader among the ranks of a sequence: this rank's part of a batch, one after the other for each rank whose
    loader has one. Each rank's loader is as in a run without sequences on several ranks.

    A batch is a mapping with `input_ids`. All of its tensors are [batch, tokens, ...]; what is no tensor is passed on. `labels`, shifted by one
    token, are called `shift_labels`. `position_ids` count from 0 in each row where the loader has none.
    """

    # Whether batches without labels are refused.
    _needs_labels = False

    def __init__(self, loader: Iterable, group: Optional[SequenceGroup] = None) -> None:
        self.loader, self._group = loader, group or the_group()
        self._iterator: Optional[Iterator] = None
        # Parts that the next pass leaves out.
        self._skip = 0

    def skipping(self, parts: int, skip_batches: Callable[[Iterable, int], Iterable]) -> "Loader":
        """The same without the first `parts`; `skip_batches` leaves out some of the loader's batches."""
        batches, rest = divmod(parts, self._group.size)
        found = Loader(skip_batches(self.loader, batches), self._group)
        found._skip = rest
        return found

    def __len__(self) -> int:
        return len(self.loader) * self._group.size  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        # Such as batch_size, dataset and set_epoch.
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        check_divided("sequence_parallel.Loader", passes=False)
        iterator = iter(self.loader)
        while True:
            batch = next(iterator, None)
            described = _described(batch, self._group.size, self._needs_labels)
            of_ranks = self._group.gather_objects(described)
            _check(of_ranks)
            if batch is None:
                return
            # All parts before the first is used: the ranks may use them at different speeds.
            parts = [self._part(batch, of_rank, source) for source, of_rank in enumerate(of_ranks)]
            skip, self._skip = self._skip, 0
            yield from parts[skip:]

    def __next__(self) -> dict[str, Any]:
        """The next part, over and over: at the end of the data it raises `StopIteration` and begins anew."""
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = None
            raise

    def _part(self, batch: Mapping[str, Any], described: Mapping[str, Any], source: int) -> dict[str, Any]:
        """This rank's part of the batch of rank `source` of the sequence."""
        size, own = self._group.size, source == self._group.rank
        tensors = _shifted(batch) if own else {}
        found: dict[str, Any] = dict(described["others"])
        for name, (shape, dtype) in described["tensors"].items():
            like = torch.empty((shape[0], shape[1] // size, *shape[2:]), dtype=getattr(torch, dtype))
            parts = [part.contiguous() for part in tensors[name].cpu().chunk(size, dim=1)] if own else None
            found[name] = self._group.scatter(parts, like, source)
        return found


def _described(batch: Optional[Any], size: int, needs_labels: bool) -> dict[str, Any]:
    """What the ranks of a sequence tell each other of a batch: shapes and types of its tensors, what is no tensor, or what is wrong with it."""
    if batch is None:
        return {"ends": True}
    if not hasattr(batch, "keys") or not isinstance(batch["input_ids"] if "input_ids" in batch.keys() else None, torch.Tensor):
        return {"wrong": "a batch is no mapping with input_ids: sequences on several ranks need names"}
    tensors = {name: (tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in _shifted(batch).items()}
    if needs_labels and "shift_labels" not in tensors:
        return {"wrong": "a batch has no labels: losses of the tokens are added up over the parts of a sequence, others are not those of the whole"}
    rows, tokens = batch["input_ids"].shape[:2]
    for name, (shape, _) in tensors.items():
        if shape[:2] != (rows, tokens):
            return {"wrong": f"{name} has the shape {list(shape)} and input_ids {[rows, tokens]}: all tensors of a batch must have its rows and tokens"}
    if tokens % size:
        return {"wrong": f"a batch has sequences of {tokens} tokens, which {size} ranks cannot divide: pad to a multiple (pad_to_multiple_of={size})"}
    return {"tensors": tensors, "others": {name: batch[name] for name in batch.keys() if not isinstance(batch[name], torch.Tensor)}}


def _check(of_ranks: list[dict[str, Any]]) -> None:
    """Refuses a batch that one of the ranks cannot divide, on all of them."""
    for rank, described in enumerate(of_ranks):
        if "wrong" in described:
            raise Error(f"rank {rank} of the sequence: {described['wrong']}")
    ended = [rank for rank, described in enumerate(of_ranks) if "ends" in described]
    if ended and len(ended) < len(of_ranks):
        raise Error(f"the data of rank {ended[0]} of the sequence has ended before the others': all ranks need as many batches (drop_last=True)")


def _shifted(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a batch that are divided: labels by the token that has them as its next one, and positions where there were none."""
    tensors = {name: batch[name] for name in batch.keys() if isinstance(batch[name], torch.Tensor)}
    labels, ids = tensors.pop("labels", None), tensors["input_ids"]
    if labels is not None and "shift_labels" not in tensors:
        tensors["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    if "position_ids" not in tensors:
        tensors["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    return tensors

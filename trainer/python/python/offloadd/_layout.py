"""Names, shapes and kinds of the parameters in a run's units, which a later start must have too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from ._config import Settings
from ._errors import LayoutChanged
from ._run_dir import FROZEN, LAYOUT, check_moments, write_private
from ._units import Unit


class Layout:
    """That of one model."""

    def __init__(self, model: nn.Module, units: list[Unit]) -> None:
        # All names of a parameter, by its id.
        self.names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(param), []).append(name)
        # The number of a parameter among all of the units.
        self.index_of = {id(param): index for index, param in enumerate(param for unit in units for param in unit.params)}
        self.trains = any(unit.trained for unit in units)
        self._units = units
        # As ranks compare it.
        self.units = [
            [[self.names[id(param)][0], list(param.shape), _kind_of(unit, order)] for param, order in zip(unit.params, unit.memory_orders)] for unit in units
        ]

    def check_dir(self, run_dir: Path, settings: Settings, resume: bool) -> None:
        """Refuses a directory with the run of another model. Without drives nothing is left of an earlier run that this one begins anew."""
        if (run_dir / LAYOUT).exists() and (resume or settings.device == "nvme"):
            self.check(json.loads((run_dir / LAYOUT).read_text()), run_dir)
            if settings.device == "nvme":
                check_moments(run_dir, settings)

    def write(self, run_dir: Path) -> None:
        write_private(run_dir / LAYOUT, json.dumps(self.stored()))

    def stored(self) -> list:
        """Names, shapes and kinds by unit, as a later start compares them: what belongs to quantized parameters is not in tiles, so it must be
        the same then."""
        marks = [[packed.fingerprint() for packed in unit.packed] for unit in self._units]
        return [
            [[name, shape, kind + (f", quantized ({mark})" if mark else "")] for (name, shape, kind), mark in zip(unit, of_unit)]
            for unit, of_unit in zip(self.units, marks)
        ]

    def check(self, kept: list, where: Any) -> None:
        """Refuses the units `kept` of another model: parameters of other names, shapes or types, others that are frozen, or other groups
        of them."""
        before = [(name, tuple(shape), kind) for unit in kept for name, shape, kind in unit]
        now = [(name, tuple(shape), kind) for unit in self.stored() for name, shape, kind in unit]
        kinds = {(name, shape): kind for name, shape, kind in now}
        for name, shape, old_kind in before:
            kind = kinds.get((name, shape), old_kind)
            if kind != old_kind:
                if not self.trains and not old_kind.startswith(FROZEN):
                    raise LayoutChanged(
                        f"{where}: a run that trains {name} lies there, and the model is to be used without training: name another run_dir; for the run's weights "
                        "prepare the model with its optimizer, and write them with model.save_pretrained or run.save_weights"
                    )
                raise LayoutChanged(
                    f"{where}: it was begun with {name} {old_kind}, and the model has it {kind}; freeze the parameters that were frozen then, in the same "
                    "types and memory formats and quantized from the same weights, or name another run_dir (for Hugging Face's Trainer another output_dir)"
                )
        as_begun = (
            "use the model, offloadd.units and offloadd.unit_bytes_max it was begun with (experts in groups; a value above a layer's size for none), or name "
            "another run_dir (for Hugging Face's Trainer another output_dir)"
        )
        for (old_name, old_shape, _), (name, shape, _) in zip(before, now):
            if (old_name, old_shape) != (name, shape):
                raise LayoutChanged(f"{where}: it was begun with {old_name} {old_shape} where the model has {name} {shape}; {as_begun}")
        if len(before) != len(now) or [len(unit) for unit in kept] != [len(unit) for unit in self.units]:
            raise LayoutChanged(
                f"{where}: it was begun with {len(before)} parameters in {len(kept)} units, and the model has {len(now)} in "
                f"{len(self.units)}, or divides them otherwise; {as_begun}"
            )


def _kind_of(unit: Unit, order: str) -> str:
    kind = ("trained in " if unit.trained else FROZEN) + str(unit.dtype).removeprefix("torch.") + " by Muon" * unit.muon + f" {order}" * bool(order)
    return f"{kind}, {unit.division}" if unit.division else kind

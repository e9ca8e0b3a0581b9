"""Reports of a run's steps: metrics.jsonl, the monitors, lines on stderr."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Optional

import torch

from ._config import Settings
from ._console import say
from ._progress import Progress
from ._ranks import Ranks


class Reports:
    """Those of one run, which the first rank writes."""

    def __init__(self, settings: Settings, run_dir: Path, ranks: Ranks, core: Any, optimizer: torch.optim.Optimizer) -> None:
        self._settings, self._run_dir, self._ranks, self._core, self._optimizer = settings, run_dir, ranks, core, optimizer
        self._progress = Progress(settings.steps_per_print)
        # The loss of the step, where somebody knows it, and what it was multiplied with.
        self.loss: float = math.nan
        self.loss_scale: Optional[float] = None
        # Before clipping.
        self.grad_norm: Optional[float] = None

    def open(self, steps_done: int) -> None:
        """Continues the reports after a step."""
        settings = self._settings
        self.loss, self.loss_scale, self.grad_norm = math.nan, None, None
        self._progress = Progress(settings.steps_per_print)
        if self._ranks.first:
            older = self._core.open_reports(
                steps_done,
                self._samples(steps_done),
                settings.monitor_dir("tensorboard", self._run_dir),
                settings.monitor_dir("csv_monitor", self._run_dir),
                settings.wall_clock_breakdown,
            )
            if older:
                say(older)

    def _samples(self, steps_done: int) -> int:
        return steps_done * (self._settings.train_batch_size or 1)

    def step(self, steps_done: int, norm: float, gpu_resident_bytes: int = 0) -> None:
        """Reports the step that ended, in which so many bytes of weights stayed on the GPU."""
        self.grad_norm = norm
        lr = float(self._optimizer.param_groups[0]["lr"])
        facts = self._core.report(steps_done, self._samples(steps_done), self.loss, norm, lr, self.loss_scale, False, gpu_resident_bytes)
        self.loss = math.nan
        self._progress.step(steps_done, facts)

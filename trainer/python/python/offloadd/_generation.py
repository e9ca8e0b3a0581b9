"""`generate` of a model that nothing trains: what it reached, beside what the weights' bytes allow."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass
from typing import Any, Optional

import torch

from . import _offloadd
from ._console import bytes_text, say
from ._engine import Engine
from ._plan import Plan

# Least seconds between two lines about what was generated.
_LINE_S = 60.0


@dataclass(frozen=True)
class Bound:
    """The least seconds of a forward pass: that of bringing all weights once."""

    bytes: int
    bytes_per_s: float
    # Who limits it.
    by: str

    @property
    def s(self) -> float:
        return self.bytes / self.bytes_per_s


@dataclass(frozen=True)
class GenerationStats:
    """What calls of `generate` made, with the passes of the model that took."""

    rows: int = 0
    tokens: int = 0
    passes: int = 0
    s: float = 0.0
    # The part of the weights that a pass read: less than all where tokens choose experts, and where weights stay on a GPU.
    part: float = 1.0

    def __add__(self, other: "GenerationStats") -> "GenerationStats":
        passes = self.passes + other.passes
        part = (self.part * self.passes + other.part * other.passes) / passes if passes else 1.0
        return GenerationStats(self.rows + other.rows, self.tokens + other.tokens, passes, self.s + other.s, part)

    def line(self, bound: Optional[Bound]) -> str:
        """What was reached, for people. A bound of the passes is one of the tokens, too."""
        text = f"{self.tokens} tokens of {self.rows} sequence(s) in {self.s:.3g} s: {self.tokens / self.s:.3g} tokens/s"
        if bound is None or not self.passes * self.part:
            return text
        return (
            f"{text}; bound {self.tokens / (self.passes * self.part * bound.s):.3g} tokens/s: {self.passes} passes over "
            f"{bytes_text(int(self.part * bound.bytes))} of weights at "
            f"{bound.bytes_per_s / 1e9:.3g} GB/s from {bound.by}"
        )


class Meter:
    """Measures each call of a model's `generate`, and says what it reached."""

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self._engine, self._plan = engine, plan
        self._said_s, self.tells = -_LINE_S, True
        self._bound: Optional[Bound] = None
        # What the last call made.
        self.last = GenerationStats()
        model = engine.model
        if hasattr(model, "generate"):
            model.generate = self._measured(model.generate)

    def _measured(self, plain: Any) -> Any:
        """A `generate` that is measured."""

        @functools.wraps(plain)
        def generate(*args: Any, **kwargs: Any) -> Any:
            engine = self._engine
            passes, brought, began = engine.passes, engine.gathering.brought_bytes, time.perf_counter()
            result = plain(*args, **kwargs)
            took = time.perf_counter() - began
            passes, brought = engine.passes - passes, engine.gathering.brought_bytes - brought
            made = getattr(result, "sequences", result)
            if not isinstance(made, torch.Tensor):
                return result
            given = next((one for one in (kwargs.get("input_ids"), kwargs.get("inputs"), *args[:1]) if isinstance(one, torch.Tensor)), None)
            prompt = 0 if given is None else given.shape[-1]
            length = made.shape[-1] - (1 if getattr(getattr(engine.model, "config", None), "is_encoder_decoder", False) else prompt)
            self.last = GenerationStats(len(made), len(made) * length, passes, took, self._part(passes, brought))
            # On all ranks at once.
            bound = self.bound if brought else None
            if self.tells and time.monotonic() - self._said_s >= _LINE_S:
                self._said_s = time.monotonic()
                say(f"generated {self.last.line(bound)}")
            return result

        return generate

    def _part(self, passes: int, brought_bytes: int) -> float:
        """The part of all weights that each of some passes read, which brought so many bytes."""
        return brought_bytes / passes / sum(unit.bytes for unit in self._engine.gathering.units) if passes else 1.0

    @property
    def bound(self) -> Bound:
        """Measured when it is first asked for, by all ranks."""
        if self._bound is None:
            self._bound = measured_bound(self._engine, self._plan)
        return self._bound


def measured_bound(engine: Engine, plan: Plan) -> Bound:
    """That of the drives, whose rate was measured when they were opened, or of the way from host memory to where the model computes, measured
    with the largest unit. All ranks must call it."""
    gathering = engine.gathering
    if plan.settings.device == "nvme":
        figures = json.loads(_offloadd.plan(plan.engine_plan))
        ranks = gathering.ranks
        # Each rank has tiles of its own, and each node drives of its own.
        if bytes_ := ranks.total("find the bound of a pass", int(figures["forward_read_bytes"])) // ranks.topology.nodes:
            return Bound(bytes_, figures["read_bytes_per_s"], "drives")
    largest, took = max(gathering.units, key=lambda unit: unit.bytes), []
    for _ in range(2):
        if largest.kept:
            gathering.take_away(largest)
        began = time.perf_counter()
        with gathering.gathered(largest):
            if largest.flat.is_cuda:
                torch.cuda.synchronize(largest.flat.device)
            took.append(time.perf_counter() - began)
    return Bound(sum(unit.bytes for unit in gathering.units), largest.bytes / min(took), "host memory")

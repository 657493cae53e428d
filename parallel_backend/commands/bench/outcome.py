"""The findings of a benchmark: one row per strategy, and what it was measured on, as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median

from ...strategy import ParallelStrategy


@dataclass(frozen=True)
class StrategyRow:
    """One strategy. `step_seconds`: all warm steps of all rounds; `memory_bytes`: predicted, of the fullest device.

    `difference`: largest from the first strategy's latent, relative to its largest value; `sent_bytes`: by all ranks in
    one step; `problem`: why it did not run, or empty.
    """

    strategy: ParallelStrategy
    engine: str = ""
    step_seconds: tuple[float, ...] = ()
    memory_bytes: float | None = None
    sent_bytes: float = 0.0
    difference: float | None = None
    problem: str = ""

    @property
    def exact(self) -> bool:
        """Whether it must give one device's latent; PipeFusion's stale keys and values give a close one."""
        return self.strategy.exact

    @property
    def name(self) -> str:
        return self.strategy.describe() + ("" if self.exact else " ≈")

    @property
    def step_s(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None


@dataclass(frozen=True)
class BenchResult:
    """The rows and what they were measured on. `model`, `request`: in words and numbers, without names or paths.

    `interleaved`: all strategies took turns in each round; else each was measured after the other, because their
    weights do not fit side by side. `links`: seconds and bytes per second that the ranks measured, in words.
    """

    rows: tuple[StrategyRow, ...]
    model: str
    request: str
    hardware: tuple[str, ...]
    software: tuple[str, ...]
    rounds: int
    interleaved: bool
    links: tuple[str, ...] = ()

    @property
    def one(self) -> StrategyRow | None:
        """The row of one device, if it ran."""
        return next((r for r in self.rows if r.strategy.world_size == 1 and r.step_seconds), None)

    def speedup(self, row: StrategyRow) -> float | None:
        """Times as fast as one device."""
        one = self.one.step_s if self.one else None
        return None if one is None or row.step_s is None else one / row.step_s

    @property
    def best(self) -> StrategyRow | None:
        """The fastest that is exact, or that ran at all."""
        return min(
            (r for r in self.rows if r.step_seconds), key=lambda r: (not r.exact, r.step_s), default=None
        )

    def as_dict(self) -> dict[str, object]:
        return {
            "label": "measured",
            **asdict(self),
            "best": self.best.name if self.best else None,
            "rows": [self._row(row) for row in self.rows],
        }

    def _row(self, row: StrategyRow) -> dict[str, object]:
        speedup = self.speedup(row)
        return {
            "name": row.name,
            "strategy": asdict(row.strategy),
            "devices": row.strategy.world_size,
            "exact": row.exact,
            "engine": row.engine,
            "step_s": row.step_s,
            "step_s_least": min(row.step_seconds, default=None),
            "step_s_most": max(row.step_seconds, default=None),
            "steps_measured": len(row.step_seconds),
            "speedup": speedup,
            "efficiency": None if speedup is None else speedup / row.strategy.world_size,
            "predicted_memory_bytes": row.memory_bytes,
            "sent_bytes_per_step": row.sent_bytes,
            "difference_from_one_device": row.difference,
            "problem": row.problem,
        }

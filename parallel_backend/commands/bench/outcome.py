"""The result of a benchmark: one row per strategy and what it was measured on, also as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median

from ...requests import RunInfo
from ...strategy import ParallelStrategy


@dataclass
class StrategyRow:
    """One strategy. `step_seconds`: all warm steps of all rounds; `memory_bytes`: predicted for the fullest device.

    `difference`: the largest from the latent of the first strategy that ran, relative to that latent's largest value;
    `sent_bytes`: sent by all ranks in one step; `problem`: why it did not run, or empty.
    """

    strategy: ParallelStrategy
    engine: str = ""
    step_seconds: tuple[float, ...] = ()
    memory_bytes: float | None = None
    sent_bytes: float = 0.0
    difference: float | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        return self.strategy.describe() + ("" if self.strategy.exact else " ≈")

    @property
    def step_s(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None

    def add_run(self, info: RunInfo) -> None:
        """Adds the steps of a run. The first one also waits for earlier work, so it only counts if it is the only
        one."""
        self.engine = info.engine
        self.step_seconds += info.step_seconds[1:] or info.step_seconds
        self.sent_bytes = sum(info.bytes_sent) / max(1, len(info.step_seconds))


@dataclass(frozen=True)
class BenchResult:
    """The rows and what they were measured on. `model`, `request`: descriptions without names or paths.

    `interleaved`: True if all strategies took turns in each round. Otherwise only those on the same group of ranks did,
    because the groups do not fit in memory at once. `links`: measured times and rates of the links, as text.
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
        """The row of the strategy on one device; None if it did not run."""
        return next((r for r in self.rows if r.strategy.world_size == 1 and r.step_seconds), None)

    @property
    def reference(self) -> StrategyRow | None:
        """The row with whose latent the others were compared: the first that ran. None if none ran."""
        compared = [row for row in self.rows if row.difference is not None]
        return next((row for row in compared if row.difference == 0.0), next(iter(compared), None))

    def speedup(self, row: StrategyRow) -> float | None:
        """Returns how many times as fast as one device `row` is; None if either did not run."""
        one = self.one.step_s if self.one else None
        return None if one is None or row.step_s is None else one / row.step_s

    @property
    def best(self) -> StrategyRow | None:
        """The fastest exact row that ran, or the fastest approximate one if no exact one ran; None if none ran."""
        return min(
            (r for r in self.rows if r.step_seconds),
            key=lambda r: (not r.strategy.exact, r.step_s),
            default=None,
        )

    def as_dict(self) -> dict[str, object]:
        return {
            "label": "measured",
            **asdict(self),
            "best": self.best.name if self.best else None,
            "reference": self.reference.name if self.reference else None,
            "rows": [self._row(row) for row in self.rows],
        }

    def _row(self, row: StrategyRow) -> dict[str, object]:
        speedup = self.speedup(row)
        return {
            "name": row.name,
            "strategy": asdict(row.strategy),
            "devices": row.strategy.world_size,
            "exact": row.strategy.exact,
            "engine": row.engine,
            "step_s": row.step_s,
            "step_s_least": min(row.step_seconds, default=None),
            "step_s_most": max(row.step_seconds, default=None),
            "steps_measured": len(row.step_seconds),
            "speedup": speedup,
            "efficiency": None if speedup is None else speedup / row.strategy.world_size,
            "predicted_memory_bytes": row.memory_bytes,
            "sent_bytes_per_step": row.sent_bytes,
            "difference": row.difference,
            "problem": row.problem,
        }

"""The result of a benchmark: one row per strategy and what it was measured on, also as JSON; and its report: a table
with notes in 100 columns, and a PNG bar chart if matplotlib is installed."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from ...requests import RunInfo
from ...strategy import ParallelStrategy

_WIDTH = 100
_INK, _BAR, _BEST = "#222222", "#9db4c8", "#2f6f9f"


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


def as_text(outcome: BenchResult) -> str:
    """Returns the table with its notes."""
    names = max(map(len, ["strategy", *(row.name for row in outcome.rows)]))
    head = f"  {'strategy':{names}s} {'devices':>7s} {'step s':>9s} {'least–most':>15s} {'speed-up':>8s}"
    head += f" {'MiB/step':>9s}"
    lines = [f"MEASURED: {outcome.model}, {outcome.request}", "", head]
    lines += [_line(outcome, row, names) for row in outcome.rows]
    turns = (
        "taking turns in each round"
        if outcome.interleaved
        else "one after the other (they do not run side by side here)"
    )
    notes = [
        f"Medians of the warm steps of {outcome.rounds} rounds, {turns}. The text encoder and the VAE are not in it.",
        *_verdict(outcome),
    ]
    notes += [f"Links: {line}" for line in outcome.links]
    notes += [f"On: {'; '.join(outcome.hardware)}. With: {', '.join(outcome.software)}."]
    wrapped = [line for note in notes for line in textwrap.wrap(note, _WIDTH)]
    return "\n".join([*lines, "", *wrapped])


def _line(outcome: BenchResult, row: StrategyRow, names: int) -> str:
    mark = "→" if row is outcome.best else " "
    start = f"{mark} {row.name:{names}s} {row.strategy.world_size:7d}"
    if row.step_s is None:
        return textwrap.shorten(f"{start}  did not run: {row.problem}", 4 * _WIDTH, placeholder="…")
    span = f"{min(row.step_seconds):.3g}–{max(row.step_seconds):.3g}"
    speedup = outcome.speedup(row)
    line = f"{start} {row.step_s:9.4g} {span:>15s} {'' if speedup is None else f'{speedup:.2f}x':>8s}"
    return f"{line} {row.sent_bytes / 2**20:9.1f}"


def _verdict(outcome: BenchResult) -> list[str]:
    best = outcome.best
    if best is None:
        return ["Nothing ran."]
    lines = []
    if outcome.one is None:
        lines.append(f"Fastest: {best.name}.")
    elif best.strategy.world_size == 1:
        lines.append("One device is the fastest here: splitting this work costs more than it gains.")
    else:
        lines.append(f"Fastest: {best.name}, {outcome.speedup(best):.2f} times as fast as one device.")
    fastest = min((r for r in outcome.rows if r.step_seconds), key=lambda r: r.step_s or 0.0)
    if best.strategy.exact and not fastest.strategy.exact:
        lines.append(f"{fastest.name} is faster still, but approximate (≈).")
    reference = outcome.reference
    compared = [r for r in outcome.rows if r is not reference]
    for exact, label in ((True, "exact"), (False, "approximate")):
        found = [r.difference for r in compared if r.strategy.exact is exact and r.difference is not None]
        if reference is not None and found:
            words = f"by {max(found):.1e} of its largest value"
            lines.append(f"Latents of {label} strategies differ from {reference.name}'s {words}.")
    return lines


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw(outcome: BenchResult, path: Path) -> None:
    """Writes a picture to `path`: a bar per strategy for its median step, with a line from least to most."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    rows = [row for row in outcome.rows if row.step_seconds]
    figure = Figure(figsize=(9, 2.4 + 0.42 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        colour = _BEST if row is outcome.best else _BAR
        axes.barh(place, median(row.step_seconds), color=colour, height=0.62)
        axes.hlines(place, min(row.step_seconds), max(row.step_seconds), color=_INK, linewidth=1.2)
        speedup = outcome.speedup(row)
        label = f"  {row.step_s:.3g} s" + (f"  ({speedup:.2f}×)" if speedup is not None else "")
        axes.text(max(row.step_seconds), place, label, va="center", color=_INK, fontsize=9)
    names = [r.name + (f"  ·  {n} devices" if (n := r.strategy.world_size) > 1 else "") for r in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.invert_yaxis()
    longest = max(max(row.step_seconds) for row in rows)
    axes.set_xlim(0, 1.25 * longest)
    axes.set_xlabel("seconds per denoising step (median; line: least to most)", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(
        "\n".join(textwrap.wrap(f"{outcome.model}, {outcome.request}", 95)), loc="left", fontsize=10
    )
    below = f"{'; '.join(outcome.hardware)}. {', '.join(outcome.software)}."
    figure.supxlabel("\n".join(textwrap.wrap(below, 150)), x=0.01, ha="left", fontsize=6.5, color="#666666")
    figure.savefig(path)

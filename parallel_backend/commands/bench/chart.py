"""Draws the benchmark as a PNG bar chart if matplotlib is installed."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from .outcome import BenchResult

_INK, _BAR, _BEST = "#222222", "#9db4c8", "#2f6f9f"


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

"""The benchmark's report: a table with notes in 100 columns, and a PNG bar chart if matplotlib is installed."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from .outcome import BenchResult, StrategyRow

_WIDTH = 100
_INK, _BAR, _BEST = "#222222", "#9db4c8", "#2f6f9f"


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

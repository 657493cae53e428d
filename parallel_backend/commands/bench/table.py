"""Writes the benchmark as text: a table, and notes with what was measured and the verdict, in 100 columns."""

from __future__ import annotations

import textwrap

from .outcome import BenchResult, StrategyRow

_WIDTH = 100


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
    if best.exact and not fastest.exact:
        lines.append(f"{fastest.name} is faster still, but approximate (≈).")
    reference = outcome.reference
    compared = [r for r in outcome.rows if r is not reference]
    for exact, label in ((True, "exact"), (False, "approximate")):
        found = [r.difference for r in compared if r.exact is exact and r.difference is not None]
        if reference is not None and found:
            words = f"by {max(found):.1e} of its largest value"
            lines.append(f"Latents of {label} strategies differ from {reference.name}'s {words}.")
    return lines

#!/usr/bin/env python3
"""Writes docs/results.md from the results that people sent in (docs/results/*.json)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parallel_backend.commands.bench.shared import SharedResult, SharedStrategy, read_shared

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "results.md", ROOT / "docs" / "results"

_PAGE = """# Results that people sent in

Written by `scripts/draw_results.py` from the files in `docs/results/`. Each is one run of `bench` on one machine:
medians of warm steps, strategies taking turns. A step is the model's work alone; text encoder and VAE are not in it.
Exact strategies differ from one device by rounding: the last column is the largest difference of their latents,
relative to the largest value.

## Send one in

1. `python -m parallel_backend doctor --gpu --share result.json`, or `bench --model FILE --share result.json` with a
   Flux.1 file of yours.
2. Look at it: it has cards, driver, links, versions, kind of model, times and differences; no path, name or prompt.
3. Add it to `docs/results/` in a pull request, or attach it to an issue.
"""
_GPUS, _CPUS = "GPUs", "CPUs, which show that it runs and not how fast GPUs are"
_SOFTWARE = ("driver", "torch")  # shown in a row; the result's file has all of it
_NOTHING = "\nNone yet.\n"
_HEAD = """
| machine | model and request | one device, s | fastest exact | times as fast | least to most, s | difference |
|---|---|---|---|---|---|---|
"""


def page(files: list[Path]) -> str:
    """Returns the whole page. Raises RequestError for a file that `bench --share` did not write."""
    results = [(file.name, read_shared(file.read_text())) for file in files]
    results.sort(key=lambda named: (named[1].date, named[0]))
    text = _PAGE
    for title, on_cpus in ((_GPUS, False), (_CPUS, True)):
        rows = [_row(name, one) for name, one in results if one.hardware[0].startswith("no GPU") == on_cpus]
        text += f"\n## {title}\n" + (_HEAD + "".join(rows) if rows else _NOTHING)
    return text


def _row(name: str, result: SharedResult) -> str:
    exact = [one for one in result.strategies if one.exact]
    best = min(exact or result.strategies, key=lambda one: one.step_s)
    software = [line for line in result.software if line.startswith(_SOFTWARE)]
    links = [line for line in result.links if line.startswith(f"{best.name} ")]
    one = result.one_s
    cells = (
        f"[{result.date}](results/{name}): {'; '.join((*result.hardware, *links, *software))}",
        f"{result.model}; {result.request}",
        "" if one is None else f"{one:.3g}",
        best.name,
        "" if one is None else f"{one / best.step_s:.2f}",
        f"{best.least_s:.3g} to {best.most_s:.3g}",
        _largest(exact),
    )
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def _largest(strategies: list[SharedStrategy]) -> str:
    found = [one.difference for one in strategies if one.difference is not None]
    return f"{max(found):.0e}" if found else ""


if __name__ == "__main__":
    PAGE.write_text(page(sorted(RESULTS.glob("*.json"))))

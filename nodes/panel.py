"""The candidates of a choice as rows for the panel under Strategy Selector (web/strategy_panel.js draws them)."""

from __future__ import annotations

from ..parallel_backend.decide import Decided
from ..parallel_backend.memory_model import in_gib
from ..parallel_backend.outlook import Outlook, same, table
from ..parallel_backend.strategy import ParallelStrategy


def panel_rows(decided: Decided | None) -> list[dict[str, object]]:
    """One dict per candidate, the chosen one first; empty where nothing was measured or predicted."""
    if decided is None:
        return []
    chosen = decided.decision.strategy
    return [_row(outlook, chosen) for outlook in table(decided.outlooks, chosen)]


def _row(outlook: Outlook, chosen: ParallelStrategy) -> dict[str, object]:
    return {
        "strategy": outlook.strategy.describe(),
        "seconds": outlook.step_s,
        "step": f"{outlook.step_s:.3g} s",
        "how": "measured" if outlook.measured else f"predicted ± {outlook.band:.0%}",
        "memory": f"{in_gib(outlook.memory_bytes)} GiB" if outlook.fits else "does not fit",
        "result": "exact" if outlook.exact else "approximate",
        "chosen": same(outlook.strategy, chosen),
        "possible": outlook.fits and outlook.permitted,
    }

"""The rows of a ranking that a person sees, and what was expected of the one that ran. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from ..strategy import ParallelStrategy
from .ranking import RankedCandidate

SHOWN = 8  # rows of a table that still fits under a node


def table(candidates: Iterable[RankedCandidate], chosen: ParallelStrategy) -> tuple[RankedCandidate, ...]:
    """At most SHOWN rows worth showing: the chosen one first, one device always among them."""
    own: list[RankedCandidate] = []
    rest: list[RankedCandidate] = []
    for candidate in candidates:
        (own if candidate.strategy == chosen.canonical else rest).append(candidate)
    shown = (own + rest)[:SHOWN]
    alone = [o for o in rest if o.strategy == ParallelStrategy() and o not in shown]
    return tuple(shown[: SHOWN - len(alone)] + alone)


def expected(candidates: Iterable[RankedCandidate], strategy: ParallelStrategy) -> RankedCandidate | None:
    """The prediction or measurement for `strategy`; None where it was not among the candidates."""
    return next((c for c in candidates if c.strategy == strategy.canonical), None)

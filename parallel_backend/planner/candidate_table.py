"""A choice as a person sees it: each candidate's step time, memory, and whether it is exact. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..strategy import ParallelStrategy
from .history.records import candidate_of, strategy_of
from .ranking import RankedCandidate, Ranking

SHOWN = 8  # rows of a table that still fits under a node


@dataclass(frozen=True)
class CandidateEstimate:
    """One candidate. `step_s`: seconds of a step; `band`: of that prediction, 0.0 where it was measured before.

    `memory_bytes`: of the fullest device; `permitted`: False for an approximate one that was not asked for.
    """

    strategy: ParallelStrategy
    step_s: float
    band: float
    memory_bytes: float
    exact: bool
    fits: bool
    permitted: bool

    @property
    def measured(self) -> bool:
        return self.band == 0.0


def outlooks_of(choice: Ranking, steps: int, fixed_s: float) -> tuple[CandidateEstimate, ...]:
    """All candidates of `choice`, in its order. `fixed_s`: seconds of a request that are not steps."""
    return tuple(_outlook(entry, steps, fixed_s, choice.band) for entry in choice.ranked)


def table(outlooks: Iterable[CandidateEstimate], chosen: ParallelStrategy) -> tuple[CandidateEstimate, ...]:
    """At most SHOWN rows worth showing: the chosen one first, one device always among them."""
    own, rest = [], []
    for outlook in outlooks:
        (own if same(outlook.strategy, chosen) else rest).append(outlook)
    shown = (own + rest)[:SHOWN]
    alone = [o for o in rest if o.strategy == ParallelStrategy() and o not in shown]
    return tuple(shown[: SHOWN - len(alone)] + alone)


def expected(outlooks: Iterable[CandidateEstimate], strategy: ParallelStrategy) -> CandidateEstimate | None:
    """What was foreseen for `strategy`; None where it was not among the candidates."""
    return next((o for o in outlooks if same(o.strategy, strategy)), None)


def same(one: ParallelStrategy, other: ParallelStrategy) -> bool:
    """Whether both are the same candidate; without stages, patches and warm-up mean nothing."""
    return candidate_of(one) == candidate_of(other) is not None


def _outlook(entry: RankedCandidate, steps: int, fixed_s: float, band: float) -> CandidateEstimate:
    return CandidateEstimate(
        strategy=strategy_of(entry.candidate),
        step_s=max(0.0, entry.seconds - fixed_s) / steps,
        band=0.0 if entry.measured else band,
        memory_bytes=entry.prediction.memory_bytes,
        exact=entry.candidate.exact,
        fits=entry.fits,
        permitted=entry.permitted,
    )

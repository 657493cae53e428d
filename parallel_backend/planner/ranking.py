"""Ranks strategies by what they are predicted or were measured to take, and says why one is chosen. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

from ..errors import StrategyError
from ..strategy import ParallelStrategy
from .cost.communication import Candidate, Work
from .cost.model import DEFAULT, Constants, Machine, Prediction, predict

APPROXIMATION = ("never", "if_needed", "allowed")
# A prediction must promise this much before it outranks the rule "CFG, then Ulysses"; measurements need less.
PREDICTED_GAIN = 0.10
# PipeFusion for speed only where the exact choice spends this share of its arithmetic's time on moving bytes.
SLOW_LINKS = 0.2
MEASURED_GAIN = 0.02
# Half-width of the bands on predicted times: the 90th percentile of the errors in docs/selector.md, rounded up; once
# one GPU's time is known, and without it.
BAND_WITH_ONE_GPU = 0.30
BAND_WITHOUT = 0.60


@dataclass(frozen=True)
class RankedCandidate:
    """One candidate in the ranking. `seconds`: of the whole request, measured where `measured`, else predicted."""

    prediction: Prediction
    seconds: float
    measured: bool
    fits: bool
    permitted: bool
    reason: str

    @property
    def candidate(self) -> Candidate:
        return self.prediction.candidate


@dataclass(frozen=True)
class Ranking:
    """All candidates, and why the first is chosen, in one paragraph.

    Order: the chosen one, then by time the permitted ones, those not permitted, those that do not fit.
    """

    ranked: tuple[RankedCandidate, ...]
    reason: str
    band: float

    @property
    def best(self) -> RankedCandidate:
        return self.ranked[0]


def enumerate_candidates(work: Work, count: int, *, sharded: bool = True) -> tuple[Candidate, ...]:
    """Every valid strategy on 1 to `count` devices: degrees that divide heads, blocks and rows as they must."""
    found = []
    family = work.family
    for cfg in (1, 2) if work.rows == 2 else (1,):
        for data, pipe, ring, ulysses, tensor in product(
            range(1, min(count, work.batch) + 1), *[range(1, count + 1)] * 4
        ):
            strategy = ParallelStrategy(data, cfg, pipe, ring, ulysses, tensor)
            if strategy.world_size > count:
                continue
            split = pipe * ring * ulysses * tensor
            if split > 1 and (not family.is_transformer or family.heads % (ulysses * tensor)):
                continue
            if pipe > 1 and (tensor > 1 or pipe > family.block_count or ring * ulysses > work.image_tokens):
                continue
            found.append(Candidate(strategy))
            if sharded and strategy.world_size > 1 and tensor == pipe == 1 and family.is_transformer:
                found.append(Candidate(strategy, shard_weights=True))
    return tuple(found)


def rule_key(candidate: Candidate) -> tuple:
    """Orders by the rule: all devices, then CFG, then Ulysses, then Ring; exact, unsharded and unsplit layers first."""
    s = candidate.strategy
    return (
        s.world_size,
        candidate.exact,
        s.cfg_degree,
        not candidate.shard_weights,
        s.ulysses_degree,
        s.ring_degree,
        s.data_degree,
    )


def choose(
    candidates: Iterable[Candidate],
    work: Work,
    machine: Machine,
    *,
    constants: Constants = DEFAULT,
    mode: str = "eager",
    one_gpu_s: float | None = None,
    measured: Mapping[Candidate, float] | None = None,
    approximation: str = "if_needed",
    links_measured: bool = False,
    memory_of: Callable[[Candidate], float] | None = None,
) -> Ranking:
    """Ranks `candidates` for `work` on `machine`; raises StrategyError when none is given or none is permitted.

    `one_gpu_s`: measured seconds of a step on one device; `measured`: seconds of whole requests seen before, which
    outrank predictions. `approximation`: PipeFusion never, only when nothing exact fits, or also for speed where the
    links were measured and are slow. `memory_of`: bytes on the fullest rank, where more is known of the model than its
    family. When nothing fits, the smallest comes first and the reason says so.
    """
    if approximation not in APPROXIMATION:
        raise StrategyError(
            f"approximation {approximation!r} is unknown; choose one of {', '.join(APPROXIMATION)}."
        )
    predictions = [
        predict(work, c, machine, constants, mode=mode, one_gpu_s=one_gpu_s)
        for c in dict.fromkeys(candidates)
        if c.strategy.world_size <= machine.count
    ]
    if memory_of is not None:
        predictions = [replace(p, memory_bytes=memory_of(p.candidate)) for p in predictions]
    entries = _entries(predictions, machine, dict(measured or {}))
    if not entries:
        raise StrategyError("No candidate strategy was given to choose from.")
    fitting = [e for e in entries if e.fits]
    exact = [e for e in fitting if e.candidate.exact]
    pool, forced = exact, ""
    if not exact and approximation != "never":
        pool, forced = fitting, "nothing exact fits in memory, so the approximate PipeFusion is used"
    elif approximation == "allowed" and links_measured and _links_are_slow(exact):
        pool = fitting
    elif approximation == "allowed":
        pool = [
            e for e in fitting if e.candidate.exact or e.measured
        ]  # what was seen needs no model of the links
    if not pool:
        pool = [e for e in entries if e.candidate.exact or approximation != "never"]
        if not pool:
            raise StrategyError(
                "Only approximate strategies (PipeFusion) are left and approximation is set to never; "
                "set it to if_needed, or add devices or memory."
            )
        smallest = min(pool, key=lambda e: e.prediction.memory_bytes)
        forced = (
            f"nothing is predicted to fit: the smallest needs {_gb(smallest.prediction.memory_bytes)} a GPU and "
            f"{_gb(machine.usable)} can be used; store the weights in fp8, or make the image smaller"
        )
        chosen = rule = smallest
    else:
        rule = max(pool, key=lambda e: rule_key(e.candidate))
        by_time = sorted(pool, key=lambda e: e.seconds)
        chosen = next((e for e in by_time if _outranks(e, rule)), rule)
    band = BAND_WITH_ONE_GPU if one_gpu_s or measured else BAND_WITHOUT
    entries = [replace(e, permitted=any(e is p for p in pool)) for e in entries if e is not chosen]
    rest = sorted(entries, key=lambda e: (not e.fits, not e.permitted, e.seconds))
    return Ranking((chosen, *rest), _reason(chosen, rule, rest, work, machine, band, forced), band)


def _outranks(entry: RankedCandidate, rule: RankedCandidate) -> bool:
    gain = rule.seconds / entry.seconds
    if entry.measured and rule.measured:
        return gain > 1 + MEASURED_GAIN
    # Split layers are for weights that do not fit: no published row shows them ahead, so only having seen it counts.
    if not entry.measured and entry.candidate.strategy.tensor_degree > rule.candidate.strategy.tensor_degree:
        return False
    # What the CPU needs to launch is in no data sheet: a prediction may not outrank the rule by that alone.
    return min(gain, rule.prediction.gpu_s / entry.prediction.gpu_s) > 1 + PREDICTED_GAIN


def _links_are_slow(exact: list[RankedCandidate]) -> bool:
    rule = max(exact, key=lambda e: rule_key(e.candidate)).prediction
    return rule.transfer_s > SLOW_LINKS * rule.compute_s


def _entries(
    predictions: list[Prediction], machine: Machine, measured: Mapping[Candidate, float]
) -> list[RankedCandidate]:
    # What was measured also tells how far the predictions are off for this work; the others are scaled by it.
    off = [measured[p.candidate] / p.total_s for p in predictions if p.candidate in measured]
    scale = median(off) if off else 1.0
    entries = []
    for p in predictions:
        seen = measured.get(p.candidate)
        fits = seen is not None or p.memory_bytes <= machine.usable
        entries.append(
            RankedCandidate(
                p, seen or p.total_s * scale, seen is not None, fits, True, _why(p, fits, machine)
            )
        )
    return entries


def _why(p: Prediction, fits: bool, machine: Machine) -> str:
    if not fits:
        return f"does not fit: {_gb(p.memory_bytes)} a GPU, {_gb(machine.usable)} can be used"
    kind = "exact" if p.candidate.exact else "approximate"
    return f"{kind}; {_gb(p.memory_bytes)} a GPU; limited by {p.limits}"


def _reason(chosen, rule, rest, work, machine, band, forced) -> str:
    s = chosen.candidate.strategy
    name = "one GPU" if s.world_size == 1 else chosen.candidate.describe()
    parts = [f"{name} on {s.world_size} of {machine.count} GPUs ({machine.card.name}, {machine.link.name})"]
    if forced:
        parts.append(forced)
    elif chosen is not rule:
        gain = rule.seconds / chosen.seconds - 1
        parts.append(
            f"it is {'measured' if chosen.measured and rule.measured else 'predicted'} {gain:.0%} faster than the "
            f"rule's {rule.candidate.describe()} (CFG, then Ulysses), which is limited by {rule.prediction.limits}"
        )
    elif s.world_size > 1:
        parts.append("as the rule says (CFG, then Ulysses); nothing else promises more than 10 % over it")
    parts.append(f"what limits it is {chosen.prediction.limits}")
    shown = [chosen, *[e for e in rest if e.fits and e.permitted][:2]]
    one = next((e for e in rest if e.candidate.strategy.world_size == 1 and e.fits), None)
    if one is not None and one not in shown:
        shown.append(one)
    parts.append("a step takes " + ", ".join(_step(e, work, band) for e in shown))
    seen = [e for e in (chosen, *rest) if e.measured]
    parts.append(f"{len(seen)} of these were measured before" if seen else "nothing was measured yet")
    faster = min((e for e in rest if e.fits and not e.permitted), key=lambda e: e.seconds, default=None)
    if faster is not None and chosen.seconds / faster.seconds > 1 + PREDICTED_GAIN:
        parts.append(f"{_step(faster, work, band)} would be faster but is approximate and was not asked for")
    unfit = [e for e in rest if not e.fits]
    if unfit and not forced:
        parts.append(f"{len(unfit)} of {len(rest) + 1} candidates do not fit in {_gb(machine.usable)} a GPU")
    return "; ".join(parts) + "."


def _step(entry: RankedCandidate, work: Work, band: float) -> str:
    seconds = entry.prediction.step_s
    if entry.measured:
        return (
            f"{entry.candidate.describe()} {entry.seconds / work.steps:.3g} s (measured, with its fixed part)"
        )
    return f"{entry.candidate.describe()} {seconds:.3g} s (predicted, ± {band:.0%})"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"

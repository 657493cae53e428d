"""Ranks strategies by what they are predicted or were measured to take, and says why one is chosen. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median

from ..errors import StrategyError
from ..strategy import ParallelStrategy
from .cost.model import DEFAULT, Constants, Machine, Prediction, predict
from .job import Job
from .memory.rank_memory import fullest_rank

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
class Evidence:
    """All that was measured and bears on a job. `request_s`: seconds of whole requests by strategies seen before, which
    outrank predictions; `one_gpu_s`: of a step on one device; `constants`: of the cost model, with `links_measured` as
    calibrations of these devices have them."""

    request_s: Mapping[ParallelStrategy, float] = field(default_factory=dict)
    one_gpu_s: float | None = None
    constants: Constants = DEFAULT
    links_measured: bool = False

    @property
    def band(self) -> float:
        return BAND_WITH_ONE_GPU if self.one_gpu_s or self.request_s else BAND_WITHOUT


NOTHING_MEASURED = Evidence()


@dataclass(frozen=True)
class RankedCandidate:
    """One strategy in the ranking. `seconds`: of the whole request, `step_s`: of a step without its fixed part; `band`:
    of that prediction, 0.0 where it was measured; `memory_bytes`: of the fullest device; `permitted`: False for an
    approximate one that was not asked for."""

    prediction: Prediction
    seconds: float
    step_s: float
    band: float
    memory_bytes: float
    fits: bool
    permitted: bool
    reason: str

    @property
    def strategy(self) -> ParallelStrategy:
        return self.prediction.strategy

    @property
    def measured(self) -> bool:
        return self.band == 0.0


@dataclass(frozen=True)
class Ranking:
    """All candidates, and why the first is chosen, in one paragraph; none where nothing can be predicted.

    Order: the chosen one, then by time the permitted ones, those not permitted, those that do not fit. `notes`: of the
    machine, in words.
    """

    ranked: tuple[RankedCandidate, ...]
    reason: str = ""
    band: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> RankedCandidate:
        return self.ranked[0]


def enumerate_candidates(job: Job, count: int, *, sharded: bool = True) -> tuple[ParallelStrategy, ...]:
    """Every valid strategy on 1 to `count` devices: degrees that divide heads, blocks and rows as they must."""
    found = []
    family = job.model.family
    for cfg in (1, 2) if job.has_cfg else (1,):
        for data, pipe, ring, ulysses, tensor in product(
            range(1, min(count, job.batch) + 1), *[range(1, count + 1)] * 4
        ):
            strategy = ParallelStrategy(data, cfg, pipe, ring, ulysses, tensor)
            if strategy.world_size > count:
                continue
            split = pipe * ring * ulysses * tensor
            if split > 1 and (not family.is_transformer or family.heads % (ulysses * tensor)):
                continue
            if pipe > 1 and (tensor > 1 or pipe > family.block_count or ring * ulysses > job.image_tokens):
                continue
            found.append(strategy)
            if sharded and strategy.world_size > 1 and tensor == pipe == 1 and family.is_transformer:
                found.append(strategy.replace(shard_weights=True))
    return tuple(found)


def rule_key(strategy: ParallelStrategy) -> tuple[int, ...]:
    """Orders by the rule: all devices, then CFG, then Ulysses, then Ring; exact, unsharded and unsplit layers first."""
    return (
        strategy.world_size,
        strategy.exact,
        strategy.cfg_degree,
        not strategy.shard_weights,
        strategy.ulysses_degree,
        strategy.ring_degree,
        strategy.data_degree,
    )


def rank_candidates(
    candidates: Iterable[ParallelStrategy],
    job: Job,
    machine: Machine,
    evidence: Evidence = NOTHING_MEASURED,
    *,
    approximation: str = "if_needed",
) -> Ranking:
    """Ranks `candidates` for `job` on `machine`; raises StrategyError when none is given or none is permitted.

    `approximation`: PipeFusion never, only when nothing exact fits, or also for speed where the links were measured and
    are slow.
    """
    predictions = [
        predict(job, strategy, machine, evidence.constants, one_gpu_s=evidence.one_gpu_s)
        for strategy in dict.fromkeys(candidates)
        if strategy.world_size <= machine.count
    ]
    return rank_predictions(predictions, job, machine, evidence, approximation=approximation)


def rank_predictions(
    predictions: Sequence[Prediction],
    job: Job,
    machine: Machine,
    evidence: Evidence = NOTHING_MEASURED,
    *,
    approximation: str = "if_needed",
) -> Ranking:
    """The same from predictions. When nothing fits, the smallest comes first and the reason says so."""
    if approximation not in APPROXIMATION:
        raise StrategyError(
            f"approximation {approximation!r} is unknown; choose one of {', '.join(APPROXIMATION)}."
        )
    entries = _entries(predictions, job, machine, evidence)
    if not entries:
        raise StrategyError("No candidate strategy was given to choose from.")
    fitting = [e for e in entries if e.fits]
    exact = [e for e in fitting if e.strategy.exact]
    pool, forced = exact, ""
    if not exact and approximation != "never":
        pool, forced = fitting, "nothing exact fits in memory, so the approximate PipeFusion is used"
    elif approximation == "allowed" and evidence.links_measured and _links_are_slow(exact):
        pool = fitting
    elif approximation == "allowed":
        pool = [
            e for e in fitting if e.strategy.exact or e.measured
        ]  # what was seen needs no model of the links
    if not pool:
        pool = [e for e in entries if e.strategy.exact or approximation != "never"]
        if not pool:
            raise StrategyError(
                "Only approximate strategies (PipeFusion) are left and approximation is set to never; "
                "set it to if_needed, or add devices or memory."
            )
        smallest = min(pool, key=lambda e: e.memory_bytes)
        forced = (
            f"nothing is predicted to fit: the smallest needs {_gb(smallest.memory_bytes)} a GPU and "
            f"{_gb(machine.usable)} can be used; store the weights in fp8, or make the image smaller"
        )
        chosen = rule = smallest
    else:
        rule = max(pool, key=lambda e: rule_key(e.strategy))
        by_time = sorted(pool, key=lambda e: e.seconds)
        chosen = next((e for e in by_time if _outranks(e, rule)), rule)
    entries = [replace(e, permitted=any(e is p for p in pool)) for e in entries if e is not chosen]
    rest = sorted(entries, key=lambda e: (not e.fits, not e.permitted, e.seconds))
    return Ranking((chosen, *rest), _reason(chosen, rule, rest, job, machine, forced), evidence.band)


def _outranks(entry: RankedCandidate, rule: RankedCandidate) -> bool:
    gain = rule.seconds / entry.seconds
    if entry.measured and rule.measured:
        return gain > 1 + MEASURED_GAIN
    # Split layers are for weights that do not fit: no published row shows them ahead, so only having seen it counts.
    if not entry.measured and entry.strategy.tensor_degree > rule.strategy.tensor_degree:
        return False
    # What the CPU needs to launch is in no data sheet: a prediction may not outrank the rule by that alone.
    return min(gain, rule.prediction.gpu_s / entry.prediction.gpu_s) > 1 + PREDICTED_GAIN


def _links_are_slow(exact: Sequence[RankedCandidate]) -> bool:
    rule = max(exact, key=lambda e: rule_key(e.strategy)).prediction
    return rule.transfer_s > SLOW_LINKS * rule.compute_s


def _entries(
    predictions: Sequence[Prediction], job: Job, machine: Machine, evidence: Evidence
) -> list[RankedCandidate]:
    # What was measured also tells how far the predictions are off for this work; the others are scaled by it.
    off = [
        evidence.request_s[p.strategy] / p.total_s for p in predictions if p.strategy in evidence.request_s
    ]
    scale = median(off) if off else 1.0
    entries = []
    for p in predictions:
        seen = evidence.request_s.get(p.strategy)
        seconds = seen or p.total_s * scale
        memory = fullest_rank(job.model.memory(job, p.strategy, on_cpu=machine.on_cpu)).private_bytes
        fits = seen is not None or memory <= machine.usable
        entries.append(
            RankedCandidate(
                prediction=p,
                seconds=seconds,
                step_s=max(0.0, seconds - p.fixed_s) / job.steps,
                band=0.0 if seen is not None else evidence.band,
                memory_bytes=memory,
                fits=fits,
                permitted=True,
                reason=_why(p, memory, fits, machine),
            )
        )
    return entries


def _why(p: Prediction, memory: float, fits: bool, machine: Machine) -> str:
    if not fits:
        return f"does not fit: {_gb(memory)} a GPU, {_gb(machine.usable)} can be used"
    kind = "exact" if p.strategy.exact else "approximate"
    return f"{kind}; {_gb(memory)} a GPU; limited by {p.limits}"


def _reason(
    chosen: RankedCandidate,
    rule: RankedCandidate,
    rest: Sequence[RankedCandidate],
    job: Job,
    machine: Machine,
    forced: str,
) -> str:
    world = chosen.strategy.world_size
    name = "one GPU" if world == 1 else chosen.strategy.describe()
    parts = [f"{name} on {world} of {machine.count} GPUs ({machine.card.name}, {machine.link.name})"]
    if forced:
        parts.append(forced)
    elif chosen is not rule:
        gain = rule.seconds / chosen.seconds - 1
        parts.append(
            f"it is {'measured' if chosen.measured and rule.measured else 'predicted'} {gain:.0%} faster than the "
            f"rule's {rule.strategy.describe()} (CFG, then Ulysses), which is limited by {rule.prediction.limits}"
        )
    elif world > 1:
        parts.append("as the rule says (CFG, then Ulysses); nothing else promises more than 10 % over it")
    parts.append(f"what limits it is {chosen.prediction.limits}")
    shown = [chosen, *[e for e in rest if e.fits and e.permitted][:2]]
    one = next((e for e in rest if e.strategy.world_size == 1 and e.fits), None)
    if one is not None and one not in shown:
        shown.append(one)
    parts.append("a step takes " + ", ".join(_step(e, job) for e in shown))
    seen = [e for e in (chosen, *rest) if e.measured]
    parts.append(f"{len(seen)} of these were measured before" if seen else "nothing was measured yet")
    faster = min((e for e in rest if e.fits and not e.permitted), key=lambda e: e.seconds, default=None)
    if faster is not None and chosen.seconds / faster.seconds > 1 + PREDICTED_GAIN:
        parts.append(f"{_step(faster, job)} would be faster but is approximate and was not asked for")
    unfit = [e for e in rest if not e.fits]
    if unfit and not forced:
        parts.append(f"{len(unfit)} of {len(rest) + 1} candidates do not fit in {_gb(machine.usable)} a GPU")
    return "; ".join(parts) + "."


def _step(entry: RankedCandidate, job: Job) -> str:
    name = entry.strategy.describe()
    if entry.measured:
        return f"{name} {entry.seconds / job.steps:.3g} s (measured, with its fixed part)"
    return f"{name} {entry.prediction.step_s:.3g} s (predicted, ± {entry.band:.0%})"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"

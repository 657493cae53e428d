"""What was measured on one machine: step times of real runs and calibrations of links. Pure functions.

A prediction comes from data sheets; what was seen before outranks it (choice.choose takes `measured` and `one_gpu_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from ...models.catalog import Family
from ...models.flux.keys import FluxDims
from ...options import DEFAULT_COMPUTE, ComputeOptions
from ...strategy import DEGREES, ParallelStrategy
from ...wire.calibration import Calibration
from ..cost.communication import Candidate, Work
from ..machine.fingerprint import device_key, hashed

MAX_AGE_S = 30 * 86400.0  # drivers, cooling and neighbours change within a month
KEPT_RUNS = 20  # the median of as many is steady, and follows a change within ten runs
KEPT_KINDS = 400  # a person's models, sizes and strategies; the oldest are forgotten first
KEPT_CALIBRATIONS = 40


@dataclass(frozen=True)
class WorkKey:
    """What of a request decides how long a step takes. Pixels; `rows`: 2 with CFG; `calls`: model calls per step."""

    width: int
    height: int
    frames: int
    batch: int
    rows: int
    text: int
    calls: int = 1

    @classmethod
    def of(cls, work: Work, calls: int = 1) -> WorkKey:
        return cls(work.width, work.height, work.frames, work.batch, work.rows, work.text_tokens, calls)

    def work(self, family: Family, steps: int = 1) -> Work:
        return Work(
            family, self.width, self.height, self.frames, self.batch, self.rows, steps, text=self.text
        )


@dataclass(frozen=True)
class Kind:
    """Runs whose step times can be compared. `model`: model_key(); `devices`: device_key() of those in use."""

    model: str
    work: WorkKey
    strategy: ParallelStrategy
    engine: str
    devices: str


@dataclass(frozen=True)
class Observed:
    """The latest runs of one kind, oldest first. `seconds`: the median warm step of each; `at`: when, Unix time."""

    kind: Kind
    seconds: tuple[float, ...]
    at: tuple[float, ...]


@dataclass(frozen=True)
class Calibrated:
    """The latest calibration of one group of devices, one entry per rank. `at`: Unix time."""

    devices: str
    at: float
    ranks: tuple[Calibration, ...]


@dataclass(frozen=True)
class Measurements:
    """Everything that is kept of one fingerprint."""

    observed: tuple[Observed, ...] = ()
    calibrated: tuple[Calibrated, ...] = ()


def model_key(
    dims: FluxDims,
    tensor_bytes: int,
    weight_dtype: str = "auto",
    compute_options: ComputeOptions = DEFAULT_COMPUTE,
) -> str:
    """Stands for a model by its sizes and how it is computed, not by its file's name: fine-tunes take equally long."""
    parts = [*(f"{k}={v}" for k, v in asdict(dims).items()), str(tensor_bytes), weight_dtype]
    return hashed("flux", *parts, *(f"{k}={v}" for k, v in asdict(compute_options).items()))


def warm_step(step_seconds: Sequence[float]) -> float | None:
    """The median step without the first, which warms up; None where no other was made."""
    return median(step_seconds[1:]) if len(step_seconds) > 1 else None


def record(known: Measurements, kind: Kind, seconds: float, now: float) -> Measurements:
    """`known` and one more run of `kind`, whose median warm step took `seconds`; the old is left out."""
    if not 0 < seconds < float("inf"):
        return known
    before = next((o for o in known.observed if o.kind == kind), Observed(kind, (), ()))
    recent = [(s, t) for s, t in zip(before.seconds, before.at, strict=True) if _is_recent(t, now)]
    recent = [*recent, (seconds, now)][-KEPT_RUNS:]
    updated = Observed(kind, tuple(s for s, _ in recent), tuple(t for _, t in recent))
    others = [o for o in known.observed if o.kind != kind and _is_recent(o.at[-1], now)]
    kept = sorted([*others, updated], key=lambda o: o.at[-1])[-KEPT_KINDS:]
    return replace(known, observed=tuple(kept))


def with_calibration(
    known: Measurements, devices: Sequence[str], ranks: tuple[Calibration, ...], now: float
) -> Measurements:
    """`known` and the newest calibration of the strategy's groups over `devices`, in place of an older one."""
    key, strategy = device_key(devices), ranks[0].strategy
    others = [
        c
        for c in known.calibrated
        if _is_recent(c.at, now) and (c.devices, c.ranks[0].strategy) != (key, strategy)
    ]
    kept = [*others, Calibrated(key, now, ranks)][-KEPT_CALIBRATIONS:]
    return replace(known, calibrated=tuple(kept))


def calibration_of(
    known: Measurements, devices: Sequence[str], strategy: ParallelStrategy, now: float
) -> tuple[Calibration, ...] | None:
    """What the ranks measured over the groups of `strategy` on `devices`, if that is not too old."""
    key = device_key(devices)
    for found in known.calibrated:
        if _is_recent(found.at, now) and (found.devices, found.ranks[0].strategy) == (key, strategy):
            return found.ranks
    return None


def measured(
    known: Measurements,
    work: Work,
    *,
    model: str,
    devices: Sequence[str],
    now: float,
    engine: str = "native",
    calls: int = 1,
    fixed_s: float = 0.0,
) -> dict[Candidate, float]:
    """Seconds of the whole request for every strategy seen before on the first of `devices`, for choice.choose.

    A median step times the steps, and `fixed_s` for text encoder and decoder, which the ranks do not run: the cost
    model's totals have it too (cost_model.fixed_seconds).
    """
    found = {}
    for kind, seconds in _comparable(known, model, engine, devices, now):
        candidate = candidate_of(kind.strategy)
        if candidate is not None and kind.work == WorkKey.of(work, calls):
            found[candidate] = seconds * work.steps + fixed_s
    return found


def one_gpu_step(
    known: Measurements, work: Work, *, model: str, devices: Sequence[str], now: float, engine: str = "native"
) -> float | None:
    """Seconds of a step of `work` on the first device, for choice.choose: seen, or at the FLOP/s of another size.

    The nearest size counts, since small ones reach less of a card's rate. None where one device was never seen.
    """
    alone = [
        (kind.work, seconds)
        for kind, seconds in _comparable(known, model, engine, devices, now)
        if candidate_of(kind.strategy) == Candidate()
    ]
    for key, seconds in alone:
        if key == WorkKey.of(work):
            return seconds
    if not alone:
        return None
    by_flop = [(key.work(work.family).flop * key.calls, seconds) for key, seconds in alone]
    flop, seconds = min(by_flop, key=lambda found: abs(found[0] - work.flop))
    return work.flop * seconds / flop


def candidate_of(strategy: ParallelStrategy) -> Candidate | None:
    """`strategy` as choice.enumerate_candidates spells it; None for what it does not list (uneven shares, offload)."""
    if strategy.device_shares or strategy.offload_weights:
        return None
    stages = strategy.pipefusion_degree
    patches = strategy.num_pipeline_patch if stages > 1 else 0
    return Candidate(
        ParallelStrategy(**{name: getattr(strategy, name) for name in DEGREES}),
        shard_weights=strategy.shard_weights,
        patches=0 if patches == stages else patches,
        warmup_steps=strategy.warmup_steps if stages > 1 else 1,
    )


def strategy_of(candidate: Candidate) -> ParallelStrategy:
    """The strategy that runs `candidate`: candidate_of, the other way."""
    return candidate.strategy.replace(
        shard_weights=candidate.shard_weights,
        num_pipeline_patch=candidate.patches,
        warmup_steps=candidate.warmup_steps,
    )


def _comparable(known: Measurements, model: str, engine: str, devices: Sequence[str], now: float):
    """(kind, median seconds) of recent runs of this model by this engine on the first of `devices`."""
    keys = {count: device_key(devices[:count]) for count in range(1, len(devices) + 1)}
    for o in known.observed:
        recent = [s for s, t in zip(o.seconds, o.at, strict=True) if _is_recent(t, now)]
        same = (o.kind.model, o.kind.engine, o.kind.devices)
        if recent and same == (model, engine, keys.get(o.kind.strategy.world_size)):
            yield o.kind, median(recent)


def _is_recent(then: float, now: float) -> bool:
    # A clock that was set back makes a time lie in the future; a day of that is forgiven.
    return -86400.0 < now - then < MAX_AGE_S

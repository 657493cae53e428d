"""The measurements of one machine: step times of real runs and calibrations of links. Pure functions.

A prediction comes from data sheets; what was seen before outranks it (ranking.Evidence).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ...strategy import ParallelStrategy
from ...wire.calibration import Calibration
from ..job import Job
from ..machine.fingerprint import device_key

MAX_AGE_S = 30 * 86400.0  # drivers, cooling and neighbours change within a month
KEPT_RUNS = 20  # the median of as many is steady, and follows a change within ten runs
KEPT_KINDS = 400  # a person's models, sizes and strategies; the oldest are forgotten first
KEPT_CALIBRATIONS = 40


@dataclass(frozen=True)
class RunKind:
    """Runs whose step times can be compared: of one model (JobModel.key), one size of job (as in Job), one strategy and
    engine. `devices`: device_key() of those in use."""

    model: str
    width: int
    height: int
    frames: int
    batch: int
    prompts: int
    text_tokens: int
    model_calls: int
    strategy: ParallelStrategy
    engine: str
    devices: str

    @classmethod
    def of(cls, job: Job, strategy: ParallelStrategy, engine: str, devices: Sequence[str]) -> RunKind:
        return cls(
            job.model.key,
            job.width,
            job.height,
            job.frames,
            job.batch,
            job.prompts,
            job.text_tokens,
            job.model_calls,
            strategy,
            engine,
            device_key(devices[: strategy.world_size]),
        )

    def job(self, like: Job) -> Job:
        """`like` in the size of these runs."""
        return replace(
            like,
            width=self.width,
            height=self.height,
            frames=self.frames,
            batch=self.batch,
            prompts=self.prompts,
            text=self.text_tokens,
            model_calls=self.model_calls,
        )


@dataclass(frozen=True)
class Observed:
    """The latest runs of one kind, oldest first. `seconds`: the median warm step of each; `at`: when, Unix time."""

    kind: RunKind
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


def warm_step(step_seconds: Sequence[float]) -> float | None:
    """The median step without the first, which warms up; None where no other was made."""
    return median(step_seconds[1:]) if len(step_seconds) > 1 else None


def record(known: Measurements, kind: RunKind, seconds: float, now: float) -> Measurements:
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
    """The measurements of the ranks over the groups of `strategy` on `devices`, if that is not too old."""
    key = device_key(devices)
    for found in known.calibrated:
        if _is_recent(found.at, now) and (found.devices, found.ranks[0].strategy) == (key, strategy):
            return found.ranks
    return None


def newest_calibration(known: Measurements, devices: Sequence[str], now: float) -> tuple[Calibration, ...]:
    """Of a strategy over all of these devices, whichever was measured last; empty where none was, or too long ago."""
    key = device_key(devices)
    newest = max((c for c in known.calibrated if c.devices == key), key=lambda c: c.at, default=None)
    return newest.ranks if newest is not None and _is_recent(newest.at, now) else ()


def measured(
    known: Measurements,
    job: Job,
    devices: Sequence[str],
    now: float,
    *,
    engine: str = "native",
    fixed_s: float = 0.0,
) -> dict[ParallelStrategy, float]:
    """Seconds of the whole request for every strategy seen before on the first of `devices`.

    A median step times the steps, and `fixed_s` for text encoder and decoder, which the ranks do not run: the cost
    model's totals have it too (fixed_seconds). Uneven shares and offloaded weights are no candidates of the ranking.
    """
    found = {}
    for kind, seconds in _comparable(known, job, devices, now, engine):
        strategy = kind.strategy
        if strategy.device_shares or strategy.offload_weights:
            continue
        if kind == RunKind.of(job, strategy, engine, devices):
            found[strategy.canonical] = seconds * job.steps + fixed_s
    return found


def one_gpu_step(
    known: Measurements, job: Job, devices: Sequence[str], now: float, *, engine: str = "native"
) -> float | None:
    """Seconds of one model call of `job` on the first device: seen, or at the FLOP/s of another size.

    The nearest size counts, since small ones reach less of a card's rate. None where one device was never seen.
    """
    one_call = replace(job, model_calls=1)
    alone = [
        (kind, seconds)
        for kind, seconds in _comparable(known, job, devices, now, engine)
        if kind.strategy.canonical == ParallelStrategy()
    ]
    for kind, seconds in alone:
        if kind == RunKind.of(one_call, kind.strategy, engine, devices):
            return seconds
    if not alone:
        return None
    by_flop = [(kind.job(job).flop * kind.model_calls, seconds) for kind, seconds in alone]
    flop, seconds = min(by_flop, key=lambda found: abs(found[0] - job.flop))
    return job.flop * seconds / flop


def _comparable(
    known: Measurements, job: Job, devices: Sequence[str], now: float, engine: str
) -> Iterator[tuple[RunKind, float]]:
    """(kind, median seconds) of recent runs of this model by this engine on the first of `devices`."""
    model = job.model.key
    keys = {count: device_key(devices[:count]) for count in range(1, len(devices) + 1)}
    for o in known.observed:
        recent = [s for s, t in zip(o.seconds, o.at, strict=True) if _is_recent(t, now)]
        same = (o.kind.model, o.kind.engine, o.kind.devices)
        if recent and same == (model, engine, keys.get(o.kind.strategy.world_size)):
            yield o.kind, median(recent)


def _is_recent(then: float, now: float) -> bool:
    # A clock that was set back makes a time lie in the future; a day of that is forgiven.
    return -86400.0 < now - then < MAX_AGE_S

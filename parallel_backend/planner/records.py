"""The measurements of one machine: step times of real runs. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ..machine.fingerprint import device_key
from ..strategy import ParallelStrategy
from .workload.workload import Job

MAX_AGE_S = 30 * 86400.0  # drivers, cooling and neighbours change within a month
MAX_RUNS = 20  # the median of this many is steady, and follows a change within ten runs
MAX_LINKS = 20  # groups of devices whose link was measured
MAX_KINDS = 400  # combinations of a person's models, sizes and strategies; the oldest are dropped first


@dataclass(frozen=True)
class RunKind:
    """A kind of runs whose step times can be compared: one model (CheckpointModel.key), one job size (as in Job), one
    strategy and engine. `devices`: device_key() of the devices in use."""

    model: str
    width: int
    height: int
    frames: int
    batch: int
    prompts: int
    text_tokens: int
    reference_tokens: int
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
            job.reference_tokens,
            job.model_calls,
            strategy,
            engine,
            device_key(devices[: strategy.world_size]),
        )


@dataclass(frozen=True)
class Observed:
    """The latest runs of one kind, oldest first. `seconds`: each run's median warm step; `at`: its Unix time."""

    kind: RunKind
    seconds: tuple[float, ...]
    at: tuple[float, ...]


@dataclass(frozen=True)
class LinkRate:
    """The exchange rate of some devices when all exchange at once. `devices`: device_key() in rank order;
    `bytes_per_second`: sent by the slowest device; `latency_s`: of a collective of one number; `at`: Unix time of the
    measurement."""

    devices: str
    bytes_per_second: float
    latency_s: float
    at: float


@dataclass(frozen=True)
class Measurements:
    """All stored measurements of one fingerprint. `links`: one for each group of devices, oldest first."""

    observed: tuple[Observed, ...] = ()
    links: tuple[LinkRate, ...] = ()


def warm_step(step_seconds: Sequence[float]) -> float | None:
    """Returns the median step without the first, which warms up; None if there was no other."""
    return median(step_seconds[1:]) if len(step_seconds) > 1 else None


def record(known: Measurements, kind: RunKind, seconds: float, now: float) -> Measurements:
    """Returns `known` with one more run of `kind`, whose median warm step took `seconds`; drops old runs."""
    if not 0 < seconds < float("inf"):
        return known
    before = next((o for o in known.observed if o.kind == kind), Observed(kind, (), ()))
    recent = [(s, t) for s, t in zip(before.seconds, before.at, strict=True) if _is_recent(t, now)]
    recent = [*recent, (seconds, now)][-MAX_RUNS:]
    updated = Observed(kind, tuple(s for s, _ in recent), tuple(t for _, t in recent))
    other_kinds = [o for o in known.observed if o.kind != kind and _is_recent(o.at[-1], now)]
    latest = sorted([*other_kinds, updated], key=lambda o: o.at[-1])[-MAX_KINDS:]
    return replace(known, observed=tuple(latest))


def keep_link(known: Measurements, link: LinkRate) -> Measurements:
    """Returns `known` with `link` in place of the stored link of the same devices."""
    other_links = [one for one in known.links if one.devices != link.devices]
    return replace(known, links=tuple([*other_links, link][-MAX_LINKS:]))


def measured(
    known: Measurements, job: Job, devices: Sequence[str], now: float, *, engine: str = "native"
) -> dict[ParallelStrategy, float]:
    """Returns the median seconds of a step of `job` by strategy, of all that ran before on the first of `devices`.

    Leaves out uneven shares and offloaded weights: `auto` does not rank them.
    """
    found = {}
    for o in known.observed:
        strategy, seconds = o.kind.strategy, _median(o, now)
        if (
            seconds is None
            or strategy.device_shares
            or strategy.offload_weights
            or strategy.world_size > len(devices)
        ):
            continue
        if o.kind == RunKind.of(job, strategy, engine, devices):
            found[strategy.canonical] = seconds
    return found


def median_of(known: Measurements, kind: RunKind, now: float) -> float | None:
    """Returns the median of the recent runs of one kind, None if there is none."""
    observed = next((o for o in known.observed if o.kind == kind), None)
    return None if observed is None else _median(observed, now)


def _median(observed: Observed, now: float) -> float | None:
    recent = [s for s, t in zip(observed.seconds, observed.at, strict=True) if _is_recent(t, now)]
    return median(recent) if recent else None


def _is_recent(then: float, now: float) -> bool:
    # If the clock was set back, a stored time lies in the future; up to a day of that is accepted.
    return -86400.0 < now - then < MAX_AGE_S

"""The measurement history of a set of devices: records runs on them, and reads earlier measurements."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from ..devices import is_cpu
from ..machine.fingerprint import device_ids, device_key, take_fingerprint
from ..machine.local import topology_of
from ..machine.probe import visible_topology
from ..machine.topology import Topology
from ..requests import RunInfo
from ..strategy import ParallelStrategy
from .store import LinkRate, MeasurementStore, RunKind
from .workload.workload import Job

log = logging.getLogger(__name__)
_NOT_READ = "parallel sampling: what was measured before does not count"
# Both last as long as this process. JOBS: number of jobs of a kind since one that tried strategies.
GIVEN_UP: set[RunKind] = set()
JOBS: Counter[RunKind] = Counter()


class MeasurementHistory:
    """The measurements of one set of devices. `devices`: names in rank order; `visible`: all devices that this process
    can see. `ids`: names that identify these devices, stored only as digests; `topology`: of these devices alone."""

    def __init__(self, devices: tuple[str, ...], visible: Topology | None = None) -> None:
        visible = visible_topology() if visible is None else visible
        self.devices = devices
        self.ids = device_ids(devices, visible)
        self.topology = topology_of(devices, visible)
        self.fingerprint = take_fingerprint(self.topology if is_cpu(devices) else visible)
        self.store = MeasurementStore(self.fingerprint)

    def record(self, job: Job, info: RunInfo) -> bool:
        """Stores the median warm step of a run on the first of these devices. Returns True if it reached the disk.

        If the run tried strategies, stores the median of each one. A strategy without a timed step is not tried again
        in this process. A run whose blocks were not compiled counts as uncompiled, whatever was requested.
        """
        if info.reused_calls:  # steps that skip blocks say nothing about steps that do not
            return False
        if info.compiled is None:
            job = replace(job, model=job.model.uncompiled)
        found: list[tuple[RunKind, float]] = []
        for trial in info.trials:
            kind = RunKind.of(job, trial.strategy, info.engine, self.ids)
            if trial.seconds:
                found.append((kind, median(trial.seconds)))
            else:
                GIVEN_UP.add(kind)
        ended_under = RunKind.of(job, info.strategy, info.engine, self.ids)
        JOBS[ended_under] = 0 if info.trials else JOBS[ended_under] + 1
        if not found and (seconds := warm_step(info.step_seconds)) is not None:
            found.append((ended_under, seconds))
        return bool(found) and self.store.record(found, time.time())

    def link(self, count: int) -> LinkRate | None:
        """Returns the measured link of the first `count` of these devices, None if it was never measured."""
        return self.store.link(device_key(self.ids[:count]))

    def steps(self, job: Job, engine: str) -> Mapping[ParallelStrategy, float]:
        """Returns the seconds of a step of `job` by strategy; of uncompiled blocks if it was not measured compiled.
        Empty on any error, which must not stop a job."""
        uncompiled = replace(job, model=job.model.uncompiled)
        try:
            return self.steps_of(job, engine) or self.steps_of(uncompiled, engine)
        except Exception:
            log.warning(_NOT_READ, exc_info=True)
            return {}

    def steps_of(self, job: Job, engine: str = "native") -> Mapping[ParallelStrategy, float]:
        """Returns the seconds of a step by strategy, with blocks compiled or not as `job` says."""
        kind = RunKind.of(job, ParallelStrategy(), engine, self.ids)
        return self.store.seconds_by_strategy(kind, self.ids, time.time())

    def gave_up(self, job: Job, strategy: ParallelStrategy, engine: str) -> bool:
        """Returns True if a trial of `strategy` failed in this process: it crashed, or was far behind."""
        return any(kind in GIVEN_UP for kind in self._kinds(job, strategy, engine))

    def jobs_before(self, job: Job, strategy: ParallelStrategy, engine: str) -> int:
        """Counts the jobs like `job` that ran under `strategy` in this process since one of them tried strategies."""
        return sum(JOBS[kind] for kind in self._kinds(job, strategy, engine))

    def _kinds(self, job: Job, strategy: ParallelStrategy, engine: str) -> set[RunKind]:
        """Returns the run kinds with blocks compiled as `job` says, and uncompiled."""
        models = (job.model, job.model.uncompiled)
        return {RunKind.of(replace(job, model=m), strategy, engine, self.ids) for m in models}


def warm_step(step_seconds: Sequence[float]) -> float | None:
    """Returns the median step without the first, which warms up; None if there was no other."""
    return median(step_seconds[1:]) if len(step_seconds) > 1 else None


def open_history(devices: tuple[str, ...]) -> MeasurementHistory | None:
    """Returns the history, or None if it cannot be opened: a failure here must not stop a job."""
    try:
        return MeasurementHistory(devices)
    except Exception:
        log.warning(_NOT_READ, exc_info=True)
        return None


def record_link(devices: tuple[str, ...], bytes_per_second: float, latency_s: float) -> None:
    """Stores the measured link of these devices, if their history can be opened."""
    if (history := open_history(devices)) is not None:
        history.store.keep_link(LinkRate(device_key(history.ids), bytes_per_second, latency_s, time.time()))


def record_run(devices: tuple[str, ...], job: Job, info: RunInfo) -> None:
    """Stores a run, see MeasurementHistory.record. Failures are logged, so that a finished image is not lost."""
    try:
        MeasurementHistory(devices).record(job, info)
    except Exception:
        log.debug("a run's step times are not kept", exc_info=True)

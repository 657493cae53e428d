"""The measurement history of a set of devices: records runs on them, and reads what was measured before."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from ..devices import is_cpu
from ..machine.fingerprint import device_ids, device_key, take_fingerprint
from ..machine.local import topology_of
from ..machine.probe import visible_topology
from ..machine.topology import Topology
from ..requests import RunInfo
from ..strategy import ParallelStrategy
from .records import LinkRate, Measurements, RunKind, keep_link, measured, record, warm_step
from .store import MeasurementStore
from .workload.workload import Job

log = logging.getLogger(__name__)
# Of this process. JOBS: since one tried strategies on its way.
GIVEN_UP: set[RunKind] = set()
JOBS: Counter[RunKind] = Counter()


class MeasurementHistory:
    """`devices`: names in rank order; `visible`: what this process can see. `ids`: what tells these devices from
    others, of which only digests are kept; `topology`: of them alone."""

    def __init__(self, devices: tuple[str, ...], visible: Topology | None = None) -> None:
        visible = visible_topology() if visible is None else visible
        self.devices = devices
        self.ids = device_ids(devices, visible)
        self.topology = topology_of(devices, visible)
        self.fingerprint = take_fingerprint(self.topology if is_cpu(devices) else visible)
        self.store = MeasurementStore(self.fingerprint)

    def read(self) -> Measurements:
        return self.store.read()

    def record(self, job: Job, info: RunInfo) -> bool:
        """Keeps the median warm step of a run on the first of these devices; whether it reached the disk.

        Of a run that tried strategies, that of each; those that did not come to a timed step are given up for as long
        as this process lives. A run whose blocks were not compiled after all counts as uncompiled.
        """
        if info.reused_calls:  # steps that skip blocks tell nothing of those that do not
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
        own = RunKind.of(job, info.strategy, info.engine, self.ids)
        JOBS[own] = 0 if info.trials else JOBS[own] + 1
        if not found and (seconds := warm_step(info.step_seconds)) is not None:
            found.append((own, seconds))

        def with_found(known: Measurements) -> Measurements:
            for kind, seconds in found:
                known = record(known, kind, seconds, time.time())
            return known

        return bool(found) and self.store.update(with_found)

    def keep_link(self, bytes_per_second: float, latency_s: float) -> bool:
        """Keeps what these devices were measured to exchange; whether it reached the disk."""
        link = LinkRate(device_key(self.ids), bytes_per_second, latency_s, time.time())
        return self.store.update(lambda known: keep_link(known, link))

    def link(self, count: int) -> LinkRate | None:
        """Returns what the first `count` of these devices were measured to exchange, None where nobody did."""
        key = device_key(self.ids[:count])
        return next((link for link in self.read().links if link.devices == key), None)

    def steps(self, job: Job, engine: str) -> Mapping[ParallelStrategy, float]:
        """Seconds of a step of `job` by strategy; of uncompiled blocks where none was seen compiled."""
        return self.steps_of(job, engine) or self.steps_of(replace(job, model=job.model.uncompiled), engine)

    def steps_of(self, job: Job, engine: str = "native") -> Mapping[ParallelStrategy, float]:
        """The same of blocks just as `job` has them."""
        return measured(self.read(), job, self.ids, time.time(), engine=engine)

    def gave_up(self, job: Job, strategy: ParallelStrategy, engine: str) -> bool:
        """Whether a trial of `strategy` came to nothing while this process lives: it crashed, or was far behind."""
        return any(kind in GIVEN_UP for kind in self._kinds(job, strategy, engine))

    def jobs_before(self, job: Job, strategy: ParallelStrategy, engine: str) -> int:
        """How many like `job` ran under `strategy` in this process since one of them tried others."""
        return sum(JOBS[kind] for kind in self._kinds(job, strategy, engine))

    def _kinds(self, job: Job, strategy: ParallelStrategy, engine: str) -> set[RunKind]:
        """With blocks compiled, as the job may want them, and as they are."""
        models = (job.model, job.model.uncompiled)
        return {RunKind.of(replace(job, model=m), strategy, engine, self.ids) for m in models}


def open_history(devices: tuple[str, ...]) -> MeasurementHistory | None:
    """None where it cannot be opened, which is never the reason why a picture is not made."""
    try:
        return MeasurementHistory(devices)
    except Exception:
        log.warning("parallel sampling: what was measured before does not count", exc_info=True)
        return None


def record_link(devices: tuple[str, ...], bytes_per_second: float, latency_s: float) -> None:
    """Keeps the link by MeasurementHistory.keep_link; an examination never fails by it, so what goes wrong is
    logged."""
    try:
        MeasurementHistory(devices).keep_link(bytes_per_second, latency_s)
    except Exception:
        log.debug("what links carry is not kept", exc_info=True)


def record_run(devices: tuple[str, ...], job: Job, info: RunInfo) -> None:
    """MeasurementHistory.record, which never costs a finished picture: whatever fails is only logged."""
    try:
        MeasurementHistory(devices).record(job, info)
    except Exception:
        log.debug("a run's step times are not kept", exc_info=True)

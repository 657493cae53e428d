"""The measurement history of a set of devices: records runs on them, and reads what was measured before."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from ...devices import is_cpu
from ...requests import RunInfo
from ..job import Job
from ..machine.fingerprint import device_ids, take_fingerprint
from ..machine.local import topology_of
from ..machine.probe import visible_topology
from ..machine.topology import Topology
from .records import Measurements, RunKind, record, warm_step
from .store import MeasurementStore

log = logging.getLogger(__name__)


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

        A run whose blocks were not compiled after all counts as uncompiled.
        """
        seconds = warm_step(info.step_seconds)
        if seconds is None or info.reused_calls:  # steps that skip blocks tell nothing of those that do not
            return False
        if info.compiled is None:
            job = replace(job, model=job.model.uncompiled)
        kind = RunKind.of(job, info.strategy, info.engine, self.ids)
        return self.store.update(lambda known: record(known, kind, seconds, time.time()))


def open_history(devices: tuple[str, ...]) -> MeasurementHistory | None:
    """None where it cannot be opened, which is never the reason why a picture is not made."""
    try:
        return MeasurementHistory(devices)
    except Exception:
        log.warning("parallel sampling: what was measured before does not count", exc_info=True)
        return None


def record_run(devices: tuple[str, ...], job: Job, info: RunInfo) -> None:
    """MeasurementHistory.record, which never costs a finished picture: whatever fails is only logged."""
    try:
        MeasurementHistory(devices).record(job, info)
    except Exception:
        log.debug("a run's step times are not kept", exc_info=True)

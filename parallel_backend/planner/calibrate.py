"""Calibrates a group of ranks at its first use with a strategy, and reads the result from disk afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ..devices import is_cpu
from ..errors import Cancelled
from ..requests import Placement
from ..sidecar.sidecar import Sidecar
from ..wire.calibration import Calibration
from .history.measurement_history import MeasurementHistory
from .history.records import calibration_of, with_calibration
from .history.store import MeasurementStore

log = logging.getLogger(__name__)


def calibrate_once(
    sidecar: Sidecar, placement: Placement, store: MeasurementStore, device_ids: Sequence[str]
) -> tuple[Calibration, ...]:
    """The measurements of the ranks over the groups of `placement`: kept from earlier, or measured now and kept.

    Takes deadlines.CALIBRATION seconds at most when it measures; call it after a first step, so that the groups'
    connections stand. `device_ids`: fingerprint.device_ids of the sidecar's devices.
    """
    now = time.time()
    known = calibration_of(store.read(), device_ids, placement.strategy, now)
    if known is not None:
        return known
    found = sidecar.calibrate(placement)
    store.update(lambda kept: with_calibration(kept, device_ids, found, now))
    return found


def learn_links(sidecar: Sidecar, placement: Placement, report_progress: Callable[[str], None]) -> None:
    """calibrate_once after a run, for later choices between GPUs; a failure never costs the finished picture.

    Nothing on the CPU, where steps themselves are tried, nor for one device.
    """
    devices = sidecar.devices[: placement.strategy.world_size]
    if len(devices) < 2 or is_cpu(devices):
        return
    try:
        history = MeasurementHistory(devices)
        if calibration_of(history.store.read(), history.ids, placement.strategy, time.time()) is None:
            report_progress("measuring the links between the devices, once for this strategy")
            calibrate_once(sidecar, placement, history.store, history.ids)
    except Cancelled:
        raise
    except Exception:
        log.warning("parallel sampling: the links between the devices were not measured", exc_info=True)

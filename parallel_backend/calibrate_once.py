"""Calibrates a group of ranks at its first use with a strategy, and reads the result from disk afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .calibration import Calibration
from .calibration_store import CalibrationStore
from .client import Sidecar
from .measurements import calibration_of, with_calibration
from .requests import Placement


def calibrate_once(
    sidecar: Sidecar, placement: Placement, store: CalibrationStore, device_ids: Sequence[str]
) -> tuple[Calibration, ...]:
    """What the ranks measured over the groups of `placement`: kept from earlier, or measured now and kept.

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

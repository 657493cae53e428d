"""PipeFusion's drift on the trained demo model: it falls with every warm-up step more, and ends at zero."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

WARM_UPS = (0, 2, 6, 12, 20)


@pytest.fixture(scope="module")
def rows():
    from drift import measure_drift

    from parallel_backend.client import Sidecar

    sidecar = Sidecar(("cpu:0", "cpu:1"))
    try:
        return measure_drift(sidecar, patches=2, warm_ups=WARM_UPS, captions=2)
    finally:
        sidecar.stop()


def test_drift_falls_with_warm_up_and_ends_at_zero(rows):
    drift = [rows[str(warm_up)]["rms"] for warm_up in WARM_UPS]
    assert drift == sorted(drift, reverse=True) and len(set(drift)) == len(WARM_UPS)
    assert drift[-1] == 0.0


def test_pictures_come_nearer_too(rows):
    psnr = [rows[str(warm_up)]["psnr"] for warm_up in WARM_UPS]
    assert psnr == sorted(psnr)

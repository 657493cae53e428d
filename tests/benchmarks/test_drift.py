"""Drift on the trained demo model: PipeFusion's falls with every warm-up step, a cache's rises with its threshold."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.xdist_group("benchmark_drift")  # all tests share one measurement
WARM_UPS = (0, 4, 12)


@pytest.fixture(scope="module")
def measured():
    """Returns (PipeFusion's rows, the step cache's rows) of the two drift benchmarks."""
    from drift import measure_drift
    from step_cache import measure

    from parallel_backend.requests import Placement
    from parallel_backend.sidecar.sidecar import Sidecar
    from parallel_backend.strategy import ParallelStrategy

    sidecar, placement = Sidecar(("cpu:0", "cpu:1")), Placement(ParallelStrategy(cfg_degree=2))
    try:
        flowing = measure_drift(sidecar, patches=2, warm_ups=WARM_UPS, captions=1)
        return flowing, measure(sidecar, placement, "euler", (0.08, 0.3), captions=1)
    finally:
        sidecar.stop()


def test_drift_falls_with_warm_up_and_pictures_come_nearer(measured):
    drift, psnr = ([measured[0][str(warm_up)][name] for warm_up in WARM_UPS] for name in ("rms", "psnr"))
    assert drift == sorted(set(drift), reverse=True) and drift[-1] > 0.0
    assert psnr == sorted(psnr)


def test_a_higher_threshold_reuses_more_model_calls_and_drifts_further(measured):
    rows = measured[1]
    assert rows["0"]["max_abs"] == 0.0 and rows["0"]["reused"] == 0
    reused, psnr = (
        [rows[threshold][name] for threshold in ("0", "0.08", "0.3")] for name in ("reused", "psnr")
    )
    assert reused == sorted(set(reused)) and psnr == sorted(set(psnr), reverse=True)

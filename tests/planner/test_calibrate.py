"""Links are measured once for a strategy and then read from disk; a failure costs nothing but a line in the log."""

from __future__ import annotations

import pytest

from parallel_backend.errors import Cancelled
from parallel_backend.planner import calibrate as module
from parallel_backend.planner.calibrate import calibrate_once, learn_links
from parallel_backend.planner.history.measurement_history import MeasurementHistory
from parallel_backend.planner.history.store import VARIABLE
from parallel_backend.requests import Placement
from parallel_backend.strategy import ParallelStrategy

CPUS = ("cpu:0", "cpu:1")
ULYSSES = Placement(ParallelStrategy(ulysses_degree=2))
RING = Placement(ParallelStrategy(ring_degree=2))


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return MeasurementHistory(CPUS).store


@pytest.fixture
def like_gpus(monkeypatch):
    monkeypatch.setattr(module, "is_cpu", lambda devices: False)


def test_each_strategy_is_measured_once_by_real_ranks(store, like_gpus, two_real_ranks, monkeypatch):
    monkeypatch.setattr("parallel_backend.wire.deadlines.CALIBRATION", 1.0)
    sidecar, said = two_real_ranks, []
    learn_links(sidecar, ULYSSES, said.append)
    assert len(said) == 1 and "once for this strategy" in said[0]
    assert [c.ranks[0].strategy for c in store.read().calibrated] == [ULYSSES.strategy]
    learn_links(sidecar, ULYSSES, said.append)
    assert len(said) == 1
    learn_links(sidecar, RING, said.append)
    assert len(said) == 2 and len(store.read().calibrated) == 2
    known = calibrate_once(sidecar, RING, store, MeasurementHistory(CPUS).ids)
    assert [c.rank for c in known] == [0, 1]


class _Failing:
    devices = CPUS

    def __init__(self, error):
        self.error, self.asked = error, 0

    def calibrate(self, placement):
        self.asked += 1
        raise self.error


def test_a_failure_is_logged_and_a_cancel_is_not_swallowed(store, like_gpus, caplog):
    failing = _Failing(RuntimeError("a cable"))
    learn_links(failing, ULYSSES, lambda text: None)
    assert failing.asked == 1 and "were not measured" in caplog.text
    with pytest.raises(Cancelled):
        learn_links(_Failing(Cancelled("stop")), ULYSSES, lambda text: None)


def test_neither_the_cpu_nor_one_device_has_links_to_measure(store):
    failing = _Failing(RuntimeError("asked"))
    learn_links(failing, ULYSSES, lambda text: None)
    failing.devices = ("cuda:0", "cuda:1")
    learn_links(failing, Placement(), lambda text: None)
    assert failing.asked == 0

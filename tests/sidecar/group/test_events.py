"""Listeners get the events of a group in order, and their errors do not harm it."""

import pytest

from parallel_backend.errors import OutOfMemory, RankFailed
from parallel_backend.sidecar.group.events import (
    Changed,
    Loaded,
    RequestEnded,
    RequestFailed,
    Started,
    Stepped,
    listen,
)
from parallel_backend.wire import deadlines
from scripted import CRASH, NO_MEMORY, cancel_after_a_step, scripted_request, two_ranks


def facts(events):
    return [event for event in events if not isinstance(event, Changed)]


def test_a_job_is_told_from_its_start_to_its_end(sidecar, weights, events):
    result = sidecar.sample(weights, scripted_request(steps=2), two_ranks())
    started, loaded, first, second, ended = facts(events)
    assert (type(started), started.after, started.seconds > 0) == (Started, "", True)
    assert (type(loaded), loaded.spec.path, loaded.info.cached) == (Loaded, weights.path, False)
    assert [(type(one), one.step, one.steps) for one in (first, second)] == [(Stepped, 1, 2), (Stepped, 2, 2)]
    assert (type(ended), ended.request, ended.result) == (RequestEnded, "sample", "done")
    assert ended.cancel_s is None and ended.info == result.info
    assert first.strategy == ended.strategy == two_ranks().strategy and ended.images == 1
    assert {event.devices for event in events} == {sidecar.devices}
    assert isinstance(events[-1], Changed)


def test_every_way_to_end_has_its_name(sidecar, weights, events, monkeypatch):
    monkeypatch.setattr(deadlines, "REPORT", 0.5)
    cancel_after_a_step(sidecar, weights)
    cancelled = facts(events)[-1]
    assert (cancelled.result, cancelled.cancel_s > 0, cancelled.info) == ("cancelled", True, None)
    with pytest.raises(OutOfMemory):
        sidecar.sample(weights, scripted_request(NO_MEMORY), two_ranks())
    assert facts(events)[-1].result == "out_of_memory"
    with pytest.raises(RankFailed):
        sidecar.sample(weights, scripted_request(CRASH), two_ranks())
    failed, ended = facts(events)[-2:]
    assert isinstance(failed, RequestFailed) and failed.crashed and not failed.broken
    assert (failed.device, failed.reason) == ("cpu:1", "signal")
    assert ended.result == "failed"
    status = sidecar.status()
    assert (status.state, status.ranks) == ("failed", ())
    assert status.reason.startswith("process 1 failed")
    sidecar.start()
    assert next(event for event in reversed(events) if isinstance(event, Started)).after == status.reason


def test_a_listener_that_fails_harms_neither_the_job_nor_the_others(sidecar, weights, events):
    def fails(event):
        raise ValueError(event)

    stop = listen(fails)
    try:
        sidecar.load(weights)
    finally:
        stop()
    assert facts(events)[-1].result == "done"

"""Failures within ten minutes: a group that has too many is not started again, and `auto` leaves out devices that fail
again, unless nothing would be left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fault_injection import fault
from parallel_backend.errors import RankFailed
from parallel_backend.sidecar import pool
from parallel_backend.sidecar.group import exchange, failures, group
from parallel_backend.sidecar.group.failures import (
    FAILING,
    FAILURES_UNTIL_BROKEN,
    CrashHistory,
    FailingDevices,
    left_out,
)
from parallel_backend.wire import deadlines
from parallel_backend.wire.deadlines import BROKEN_WINDOW
from scripted import scripted_request, two_ranks

GPUS = ("cuda:0", "cuda:1", "cuda:2")


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def failing(clock):
    return FailingDevices()


def test_three_failures_in_ten_minutes_are_too_many_and_three_in_eleven_are_not(clock):
    history = CrashHistory()
    for number in range(2 * FAILURES_UNTIL_BROKEN):
        history.add(RankFailed(1, f"crash {number}"), "cuda:1")
        assert not history.is_broken
        clock.now += BROKEN_WINDOW / 2 + 10
    history.add(RankFailed(1, "the second within ten minutes"), "cuda:1")
    assert not history.is_broken and history.count == 2
    history.add(RankFailed(0, "the third"), "cuda:0")
    assert history.is_broken
    clock.now += BROKEN_WINDOW
    assert not history.is_broken and history.count == 0


def test_the_refusal_has_the_history_and_what_to_do(clock):
    history = CrashHistory()
    for number in range(FAILURES_UNTIL_BROKEN):
        history.add(RankFailed(1, f"crash {number}\nwith a traceback"), "cuda:1")
        clock.now += 30
    text = str(history.refusal())
    assert "3 times within 10 minutes" in text and "another 510 s" in text
    assert "All came from cuda:1: leave it out" in text and "doctor" in text
    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        f"- {90 - 30 * number} s ago, process 1 on cuda:1: crash {number}" for number in range(3)
    ]


@pytest.mark.parametrize(
    ("crashes", "named"),
    [
        ([(RankFailed(None, "silent"), None)], "0 s ago, all processes: silent"),
        ([(RankFailed(rank, "crash"), f"cuda:{rank}") for rank in (0, 1, 2)], "process 2 on cuda:2: crash"),
    ],
)
def test_failures_of_no_one_device_blame_none(clock, crashes, named):
    history = CrashHistory()
    for number in range(FAILURES_UNTIL_BROKEN):
        history.add(*crashes[number % len(crashes)])
    text = str(history.refusal())
    assert "Leave the device that fails out" in text and named in text


def test_one_failure_is_forgiven_and_two_are_not(failing, clock):
    failing.add("cuda:1")
    assert failing.among(GPUS) == ()
    clock.now += BROKEN_WINDOW - 1
    failing.add("cuda:1")
    assert failing.among(GPUS) == ("cuda:1",)
    clock.now += 2  # the first failure is too old to count
    assert failing.among(GPUS) == ()


def test_a_device_that_is_not_there_counts_at_once(failing):
    failing.add("cuda:0", 2)
    assert failing.among(GPUS) == ("cuda:0",)
    assert failing.among(("cuda:1", "cuda:2")) == ()


def test_where_all_fail_none_is_left_out(failing):
    for device in GPUS:
        failing.add(device, 2)
    assert failing.among(GPUS) == ()
    assert failing.among((*GPUS, "cuda:3")) == GPUS


def test_ranks_on_the_cpu_share_it(failing):
    failing.add("cpu:1", 5)
    assert failing.among(("cpu:0", "cpu:1")) == ()


def test_a_reset_takes_them_back():
    FAILING.add("cuda:1", 2)
    assert FAILING.among(GPUS) == ("cuda:1",)
    pool.reset()
    assert FAILING.among(GPUS) == ()


def test_the_report_names_them_and_what_to_do():
    assert "cuda:0, cuda:2 left out" in left_out(("cuda:0", "cuda:2"))
    assert "Allow restarts" in left_out(("cuda:0",))


def test_ranks_that_hang_together_are_ended_and_none_is_blamed(sidecar, weights, monkeypatch):
    """This happens if a link between two devices fails: all ranks are in the same collective."""
    monkeypatch.setattr(deadlines, "step_budget", lambda earlier: 0.5)
    monkeypatch.setattr(exchange, "find_laggard", lambda beats, silent: None)
    failing = FailingDevices()
    monkeypatch.setattr(group, "FAILING", failing)
    with (
        fault("sleep", "an all-reduce", step=2),
        pytest.raises(RankFailed, match=r"^the processes failed: .*none of them behind the others") as caught,
    ):
        sidecar.sample(weights, scripted_request(), two_ranks())
    assert (caught.value.rank, caught.value.crashed, caught.value.reason) == (None, True, "hang")
    assert not failing._failures
    sidecar.sample(weights, scripted_request(), two_ranks())

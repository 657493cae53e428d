"""Idle ranks sleep and later end after their timeouts, by a fake clock, but never while a request runs."""

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from parallel_backend.errors import Cancelled
from parallel_backend.sidecar import idle_timer
from parallel_backend.sidecar.group.events import listen
from parallel_backend.sidecar.idle_timer import LOOK_AGAIN, IdleWatch, Timeouts
from parallel_backend.sidecar.sidecar import State
from scripted import scripted_request, scripted_sidecar, two_ranks


class Time:
    """A fake clock, whose timers fire when it is turned."""

    def __init__(self):
        self.now = 1000.0
        self.timers = []

    def timer(self, seconds, function):
        return Timer(self, self.now + seconds, function)

    def turn(self, seconds):
        self.now += seconds
        for timer in [one for one in self.timers if one.at <= self.now]:
            self.timers.remove(timer)
            timer.function()


class Timer:
    daemon = False

    def __init__(self, time, at, function):
        self.time, self.at, self.function = time, at, function

    def start(self):
        assert self.daemon
        self.time.timers.append(self)

    def cancel(self):
        if self in self.time.timers:
            self.time.timers.remove(self)


@pytest.fixture(scope="module")
def ranks():
    sidecar = scripted_sidecar()
    yield sidecar
    sidecar.stop()


@pytest.fixture
def watched(ranks, weights, monkeypatch):
    """Yields (sidecar that holds a model, clock, timeouts that can be changed)."""
    time, timeouts = Time(), {"sleep_s": 100.0, "stop_s": 500.0}
    monkeypatch.setattr(idle_timer, "time", SimpleNamespace(monotonic=lambda: time.now))
    monkeypatch.setattr(idle_timer, "Timer", time.timer)
    watch = IdleWatch(lambda: [ranks], lambda: Timeouts(**timeouts))
    stop = listen(watch.on_event)
    ranks.load(weights)
    yield ranks, time, timeouts
    stop()


def test_idle_ranks_sleep_then_end(watched):
    ranks, time, _ = watched
    time.turn(99)
    assert ranks.state is State.READY
    time.turn(2)
    assert ranks.state is State.ASLEEP and ranks.pids
    time.turn(390)
    assert ranks.state is State.ASLEEP  # going to sleep does not count as use
    time.turn(10)
    assert (ranks.state, ranks.pids) == (State.DOWN, ())
    assert time.timers == []  # there is nothing left to check


def test_a_request_begins_the_time_anew_and_is_not_disturbed(watched, weights):
    ranks, time, _ = watched
    time.turn(90)

    def long_afterwards(*_):
        time.turn(10_000)
        assert ranks.state is State.RUNNING

    ranks.sample(weights, scripted_request(steps=2), two_ranks(), on_step=long_afterwards)
    time.turn(99)
    assert ranks.state is State.READY and not ranks.status().reason
    time.turn(2)
    assert ranks.state is State.ASLEEP


def test_never_is_never_until_the_settings_change(watched):
    ranks, time, timeouts = watched
    timeouts |= {"sleep_s": 0.0, "stop_s": 0.0}
    time.turn(100_000)
    assert ranks.state is State.READY
    assert len(time.timers) == 1
    timeouts["stop_s"] = 1.0
    time.turn(LOOK_AGAIN)
    assert ranks.state is State.DOWN


def test_an_error_ends_no_watch(watched, caplog):
    ranks, time, timeouts = watched
    wished = dict(timeouts)
    timeouts["nonsense"] = 1.0  # Timeouts(**timeouts) raises TypeError
    time.turn(LOOK_AGAIN)
    time.turn(600)
    assert ranks.state is State.READY and len(time.timers) == 1
    timeouts.clear()
    timeouts |= wished
    time.turn(LOOK_AGAIN)
    assert ranks.state is State.DOWN
    assert "how long idle processes stay is not known" in caplog.text


def test_an_error_of_one_group_ends_no_watch(watched, monkeypatch):
    ranks, time, _ = watched
    with monkeypatch.context() as broken:
        broken.setattr(ranks, "stop_if_idle", lambda: 1 / 0)
        time.turn(600)
    assert ranks.state is State.READY and len(time.timers) == 1
    time.turn(LOOK_AGAIN)
    assert ranks.state is State.DOWN


def test_idle_ranks_that_somebody_wants_meanwhile_are_no_warning(watched, monkeypatch, caplog):
    ranks, time, _ = watched

    def wanted(**_):
        raise Cancelled("The request was cancelled.")

    monkeypatch.setattr(ranks, "sleep", wanted)
    time.turn(101)
    assert ranks.state is State.READY
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_ranks_that_serve_somebody_are_not_ended(watched, weights):
    ranks, _, _ = watched
    seen = []
    ranks.sample(
        weights, scripted_request(), two_ranks(), on_step=lambda *_: seen.append(ranks.stop_if_idle())
    )
    assert seen == [False] * 4
    assert ranks.stop_if_idle() and not ranks.pids


def test_ranks_of_which_memory_is_freed_are_ended_afterwards(watched):
    ranks, _, _ = watched
    with ThreadPoolExecutor() as pool:
        with ranks._ranks.lease("give back"):
            ending = pool.submit(ranks.stop_if_idle)
            with pytest.raises(TimeoutError):
                ending.result(timeout=0.2)
            assert ranks.pids
        assert ending.result() and not ranks.pids

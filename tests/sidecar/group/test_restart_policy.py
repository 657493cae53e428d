"""The limit of failures within ten minutes, and the refusal to start ranks after it."""

import pytest

from parallel_backend.errors import RankFailed
from parallel_backend.sidecar.group.failures import FAILURES_UNTIL_BROKEN, CrashHistory
from parallel_backend.wire.deadlines import BROKEN_WINDOW


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_three_failures_in_ten_minutes_are_too_many_and_three_in_eleven_are_not():
    clock = Clock()
    history = CrashHistory(clock)
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


def test_the_refusal_has_the_history_and_what_to_do():
    clock = Clock()
    history = CrashHistory(clock)
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
    ("failures", "named"),
    [
        ([(RankFailed(None, "silent"), None)], "0 s ago, all processes: silent"),
        ([(RankFailed(rank, "crash"), f"cuda:{rank}") for rank in (0, 1, 2)], "process 2 on cuda:2: crash"),
    ],
)
def test_failures_of_no_one_device_blame_none(failures, named):
    history = CrashHistory(Clock())
    for number in range(FAILURES_UNTIL_BROKEN):
        history.add(*failures[number % len(failures)])
    text = str(history.refusal())
    assert "Leave the device that fails out" in text and named in text

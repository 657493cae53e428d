"""Heartbeats: ranks record the collectives that they enter, which shows the rank that keeps the others waiting."""

import os
import threading
import time

import pytest

from parallel_backend.wire.heartbeat import COLLECTIVES, Heartbeat, Page, RankBeat, find_laggard, in_words
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")


def inside(collective, *ranks, entered=5):
    return RankBeat(True, collective, 2, entered, frozenset(ranks), 0.0)


def outside(collective="an all-to-all", entered=5, ranks=()):
    return RankBeat(False, collective, 2, entered, frozenset(ranks), 0.0)


@pytest.fixture
def page():
    page = Page()
    yield page
    page.close()


def test_the_parent_reads_what_a_rank_noted_down(page):
    rank = Heartbeat()
    rank.share(os.dup(page.descriptor), 1)
    rank.steps_done(3)
    with rank.inside("a ring step", (0, 1)):
        note = page.read(1)
        assert (note.inside, note.collective, note.step, note.entered) == (True, "a ring step", 3, 1)
        assert note.waits_for == {0, 1}
    left = page.read(1)
    assert (left.inside, left.collective) == (False, "a ring step")
    assert page.read(0).collective == ""


def test_an_observer_meets_a_collective_before_it_is_entered(page):
    rank = Heartbeat()
    rank.share(os.dup(page.descriptor), 0)
    seen = []
    rank.observer = lambda name, step: seen.append((name, step, page.read(0).inside))
    rank.steps_done(4)
    with rank.inside("an all-gather", (0, 1)):
        pass
    rank.point("load")
    assert seen == [("step", 4, False), ("an all-gather", 4, False), ("load", 4, False)]


@pytest.mark.parametrize(
    ("notes", "laggard"),
    [
        ([inside("an all-to-all", 0, 1), outside()], 1),
        ([outside(), inside("an all-to-all", 0, 1)], 0),
        # 0 waits for 1, which waits for 2, which computes
        ([inside("a ring step", 0, 1), inside("a PipeFusion hop", 1, 2), outside()], 2),
        # 2 and 3 only wait for each other, in their own group; 0 waits for 1
        (
            [
                inside("an all-to-all", 0, 1),
                outside(),
                inside("an all-to-all", 2, 3),
                inside("an all-to-all", 2, 3),
            ],
            1,
        ),
        # all are in the same collective and none is behind: a link between them may hang
        ([inside("an all-to-all", 0, 1, entered=7), inside("an all-to-all", 0, 1, entered=7)], None),
        ([outside(entered=9), outside(entered=9)], None),
        ([inside("an all-to-all", 0, 1, entered=7), inside("an all-to-all", 0, 1, entered=6)], 1),
        # none is in a collective: a device hangs, and the host that is behind has entered fewer
        ([outside(entered=9), outside(entered=8)], 1),
        # they wait in a circle
        (
            [
                inside("a ring step", 0, 1, entered=4),
                inside("a ring step", 1, 2),
                inside("a ring step", 2, 0),
            ],
            0,
        ),
    ],
)
def test_the_rank_that_keeps_the_others_waiting_is_found(notes, laggard):
    assert find_laggard(notes) == laggard


def test_a_rank_that_gave_its_answer_is_not_to_blame():
    assert find_laggard([outside(entered=3), outside(entered=4)], silent={1}) == 1
    assert find_laggard([outside(), inside("an all-to-all", 1, 2), outside()], silent={1, 2}) == 2


def test_words_name_the_collective_and_who_waits_there():
    notes = [inside("an all-to-all", 0, 1), outside("a broadcast")]
    assert in_words(notes, 1) == (
        "the last collective that it entered was a broadcast; missed in an all-to-all by process 0, after 2 steps"
    )
    assert in_words(notes, 0) == "inside an all-to-all, after 2 steps"
    assert in_words([outside(""), outside("")], 0) == ""


class Stream:
    """A stream of a device, which has completed the first `passed` of its marks."""

    def __init__(self):
        self.marks, self.passed, self.broken = 0, 0, False

    def mark(self):
        return Mark(self)


class Mark:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.stream.marks += 1
        self.number = self.stream.marks

    def query(self):
        if self.stream.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.number <= self.stream.passed

    def elapsed_time(self, end_event):
        return 10.0 * (end_event.number - self.number)


def followed(page, rank, monkeypatch):
    monkeypatch.setattr(Heartbeat, "_look_for_ever", lambda self, choose_device: None)  # tests call `look`
    one, stream = Heartbeat(), Stream()
    one.share(os.dup(page.descriptor), rank)
    one.follow(stream.mark, lambda: None)
    return one, stream


def test_on_a_gpu_a_rank_is_where_its_device_is(page, monkeypatch):
    rank, stream = followed(page, 0, monkeypatch)
    for name in ("an all-to-all", "a ring step"):
        with rank.inside(name, (0, 1)):
            pass
    rank.look()
    assert (page.read(0).inside, page.read(0).entered) == (False, 0)  # only the host has left both
    places = []
    for passed in range(1, stream.marks + 1):
        stream.passed = passed
        rank.look()
        beat = page.read(0)
        places.append((beat.inside, beat.collective, beat.entered))
    assert places == [
        (True, "an all-to-all", 1),
        (False, "an all-to-all", 1),
        (True, "a ring step", 2),
        (False, "a ring step", 2),
    ]


def test_the_time_in_collectives_belongs_to_the_step_that_they_were_asked_in(page, monkeypatch):
    rank, stream = followed(page, 0, monkeypatch)
    rank.begin()
    for collectives in (2, 1, 0):
        for _ in range(collectives):
            with rank.inside("an all-to-all", (0, 1)):
                pass
        rank.step_given()
    stream.passed = 2
    rank.look()
    assert rank.inside_seconds(3) == pytest.approx((0.01, 0.0, 0.0))  # the device has not reached the others
    stream.passed = stream.marks
    assert rank.inside_seconds(3) == pytest.approx((0.02, 0.01, 0.0))
    rank.begin()
    assert rank.inside_seconds(1) == (0.0,)


def test_where_the_host_waits_its_own_clock_counts(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    rank = Heartbeat()
    with rank.inside("an all-to-all", (0, 1)):
        next(clock)
    rank.step_given()
    with rank.inside("the agreement after a step", (0, 1)):
        pass
    assert rank.inside_seconds(2) == (2, 1)


def test_the_device_that_does_not_come_to_a_collective_is_found(page, monkeypatch):
    """All hosts have submitted the same work; one device never reaches its second collective."""
    ranks = [followed(page, rank, monkeypatch) for rank in range(3)]
    for rank, _ in ranks:
        for _ in range(2):
            with rank.inside("an all-to-all", (0, 1, 2)):
                pass
        rank.steps_done(1)
    for number, (rank, stream) in enumerate(ranks):
        stream.passed = 2 if number == 2 else 3
        rank.look()
    assert find_laggard([page.read(rank) for rank in range(3)]) == 2
    ranks[2][1].passed = 3
    ranks[2][0].look()
    assert find_laggard([page.read(rank) for rank in range(3)]) is None


@pytest.mark.parametrize("agreement", [name for name in COLLECTIVES if "agreement" in name])
def test_a_host_that_waits_is_shown_unless_its_device_holds_it_up(page, monkeypatch, agreement):
    rank, stream = followed(page, 0, monkeypatch)
    with rank.inside("an all-to-all", (0, 1)):
        pass
    with rank.inside(agreement, (0, 1)):
        assert (page.read(0).inside, page.read(0).collective) == (True, agreement)
        stream.passed = 1
        rank.look()
        assert (page.read(0).inside, page.read(0).collective) == (True, "an all-to-all")
        stream.passed = 2
        rank.look()
        assert (page.read(0).inside, page.read(0).collective) == (True, agreement)


def test_a_device_is_looked_at_without_being_asked_until_it_fails(page):
    rank, stream, before = Heartbeat(), Stream(), set(threading.enumerate())
    rank.share(os.dup(page.descriptor), 0)
    chosen_in: list[threading.Thread] = []
    rank.follow(stream.mark, lambda: chosen_in.append(threading.current_thread()))
    (looking,) = set(threading.enumerate()) - before
    with rank.inside("an all-to-all", (0, 1)):
        pass
    stream.passed = 1
    wait_until(lambda: page.read(0).inside)
    assert chosen_in == [looking]  # CUDA gives a new thread the first device, not the rank's
    stream.broken = True
    looking.join(60)
    assert not looking.is_alive()

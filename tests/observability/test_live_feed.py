"""The live feed: a watching client gets a message at once and after each change; no thread runs without watchers."""

import threading
import time

import pytest

from parallel_backend.observability.live_feed import MOST_CLIENTS, LiveSender
from waiting import wait_until


class Board:
    """Counts the composed messages and stores who got which, in order."""

    def __init__(self, **timing):
        self.value, self.composed, self.got, self.gone = 0, 0, [], set()
        self.sender = LiveSender(self.compose, self.send, **timing)

    def compose(self):
        self.composed += 1
        if self.value == "impossible":
            raise ValueError(self.value)
        return self.value

    def send(self, message, client):
        self.got.append((client, message))
        return client not in self.gone

    def messages_of(self, client):
        return [message for name, message in self.got if name == client]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "parallel-live"]


@pytest.fixture
def board():
    made = Board(gap=0.05, period=0.2)
    yield made
    made.sender.close()
    got = len(made.got)
    assert threads() == []
    made.sender.changed()
    assert len(made.got) == got


def test_nothing_is_made_and_no_thread_runs_while_nobody_looks(board):
    board.sender.changed()
    assert (board.composed, threads()) == (0, [])
    assert board.sender.watch("a", 60)
    wait_until(lambda: board.messages_of("a") == [0])
    board.sender.leave("a")
    wait_until(lambda: not threads())
    composed = board.composed
    board.sender.changed()
    assert board.composed == composed


def test_a_message_goes_out_when_it_differs_and_no_faster_than_the_gap(board):
    begun = time.monotonic()
    board.sender.watch("a", 60)
    wait_until(lambda: board.messages_of("a") == [0])
    for value in range(1, 101):
        board.value = value
        board.sender.changed()
        time.sleep(0.002)
    wait_until(lambda: board.messages_of("a")[-1] == 100)
    composed = board.composed
    assert composed <= 1 + (time.monotonic() - begun) / 0.05
    wait_until(lambda: board.composed >= composed + 2)  # it still composes once a period
    assert board.messages_of("a")[-2:] != [100, 100]


def test_a_newcomer_gets_what_others_have_already(board):
    board.sender.watch("a", 60)
    wait_until(lambda: board.messages_of("a") == [0])
    board.sender.watch("b", 60)
    wait_until(lambda: board.messages_of("b") == [0])
    assert board.messages_of("a") == [0]
    board.sender.watch("a", 60, anew=True)  # its page was loaded again
    wait_until(lambda: board.messages_of("a") == [0, 0])
    assert board.messages_of("b") == [0]


def test_a_lease_that_nobody_renews_ends_and_so_does_that_of_a_client_that_went_away(board):
    board.gone.add("closed")
    board.sender.watch("closed", 60)
    board.sender.watch("short", 60)
    wait_until(lambda: board.messages_of("closed") == board.messages_of("short") == [0])
    board.sender.watch("short", 0.1)
    wait_until(lambda: not threads())
    assert board.messages_of("closed") == board.messages_of("short") == [0]
    assert board.sender.watch("short", 60)  # a new watch gets the same message again
    wait_until(lambda: board.messages_of("short") == [0, 0])


def test_a_picture_that_fails_once_is_made_the_next_time(board):
    board.value = "impossible"
    board.sender.watch("a", 60)
    wait_until(lambda: board.composed >= 2)
    board.value = 1
    wait_until(lambda: board.messages_of("a") == [1])


def test_more_than_so_many_are_refused(board):
    assert all(board.sender.watch(f"client {i}", 60) for i in range(MOST_CLIENTS))
    assert not board.sender.watch("one more", 60)
    assert board.sender.watch("client 0", 60)

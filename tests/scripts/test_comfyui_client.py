"""The client of a running ComfyUI says what it waits for, and does not wait in silence for what never comes."""

from __future__ import annotations

import threading

import pytest

import comfyui_client
from comfyui_client import ComfyUIClient

ENDED = {"mine": {"outputs": {"9": {}}, "status": {"messages": []}}}


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(comfyui_client, "_TELL_INTERVAL", 0.0)
    return ComfyUIClient("http://nowhere")


def _answering(client, monkeypatch, queues):
    """Has ComfyUI show one of `queues` after the other, and then the history of a prompt that has ended."""
    left = iter(queues)

    def answer(path, body=None):
        if path == "/queue":
            running, pending = next(left)
            return {"queue_running": running, "queue_pending": pending}
        return {} if len(told) < len(queues) else ENDED

    told: list[str] = []
    monkeypatch.setattr(client, "_request", answer)
    return told


def test_a_wait_says_where_the_prompt_is(client, monkeypatch):
    waiting = [[3, "later", {}], [2, "mine", {}], [1, "before", {}]]
    queues = [([[0, "other", {}]], waiting), ([[2, "mine", {}]], []), ([], [])]
    told = _answering(client, monkeypatch, queues)
    assert client.wait("mine", tell=told.append) == ENDED["mine"]
    assert [words.partition(": ")[2] for words in told] == [
        "the prompt waits behind 2 others",
        "ComfyUI runs the prompt",
        "ComfyUI has no such prompt in its queue",
    ]
    assert told[0].startswith("0 s so far: ")


def test_a_last_event_that_never_comes_is_an_error(client, monkeypatch):
    monkeypatch.setattr(comfyui_client, "_LAST_EVENT_TIMEOUT", 0.01)
    listener = comfyui_client._Listener.__new__(comfyui_client._Listener)
    listener._ended, listener._changed = {"other"}, threading.Condition()
    client._listener = listener
    _answering(client, monkeypatch, [])
    with pytest.raises(TimeoutError, match="last event did not come"):
        client.wait("mine")

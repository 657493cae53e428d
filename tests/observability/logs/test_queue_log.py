"""The queue log: it holds the accepted prompts until they have ended, and never a user's key."""

import json
import logging
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.errors import RequestError
from parallel_backend.observability.logs import queue_log
from parallel_backend.observability.logs.queue_log import QueueLog, QueueLogFile, begin, read_open
from waiting import wait_until

BODY = {"prompt": {"1": {"class_type": "Something", "inputs": {}}}, "client_id": "page"}


@pytest.fixture
def queued():
    """The ids in ComfyUI's queue."""
    return set()


@pytest.fixture
def make(tmp_path, queued):
    made = []

    def new() -> QueueLog:
        made.append(QueueLog(tmp_path / "queue.jsonl", lambda: set(queued)))
        return made[-1]

    yield new
    for one in made:
        one.close()


def _accept(log: QueueLog, queued: set, *names: str, **body: object) -> None:
    for number, name in enumerate(names):
        queued.add(name)
        log.accept(name, float(number), {**BODY, **body})


def _open(path: Path) -> list[str]:
    with path.open("rb") as file:
        return list(read_open(iter(file)))


def test_what_was_accepted_is_there_until_it_has_ended(make, queued):
    log = make()
    _accept(log, queued, "a", "b", "c")
    assert _open(log.path) == ["a", "b", "c"]
    queued -= {"a", "c"}  # one has run, one was deleted
    wait_until(lambda: _open(log.path) == ["b"])
    _accept(log, queued, "d")
    queued.clear()
    wait_until(lambda: _open(log.path) == [])


def test_one_that_ends_before_it_is_noted_is_not_taken_for_waiting(make, queued):
    log = make()
    log.accept("quick", 1.0, BODY)  # it has left the queue already
    wait_until(lambda: _open(log.path) == [])


def test_keys_are_never_written_and_the_file_is_the_user_s_own(make, queued):
    log = make()
    extra = {
        "extra_pnginfo": {"workflow": {"nodes": []}},
        "api_key_comfy_org": "secret-1",
        "auth_token_comfy_org": "secret-2",
        "key_of_some_pack": "secret-3",
    }
    _accept(log, queued, "a", extra_data=extra, front=True, partial_execution_targets=["1"])
    text = log.path.read_text()
    assert "secret" not in text
    said = json.loads(text)
    assert said["left_out"] == ["api_key_comfy_org", "auth_token_comfy_org", "key_of_some_pack"]
    assert said["request"] == {
        **BODY,
        "partial_execution_targets": ["1"],
        "extra_data": {"extra_pnginfo": {"workflow": {"nodes": []}}},
    }
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_a_new_comfyui_keeps_what_the_old_one_left_and_says_how_to_send_it(make, queued, tmp_path, caplog):
    first = make()
    _accept(first, queued, "a", "b")
    queued.discard("a")
    wait_until(lambda: _open(first.path) == ["b"])
    first.close()  # as in a crash: waiting prompts stay open
    first.close = lambda: None
    with caplog.at_level(logging.WARNING):
        second = make()
    (kept,) = [path for path in tmp_path.iterdir() if path != second.path]
    assert _open(kept) == ["b"] and _open(second.path) == []
    command = f"python -m parallel_backend resend {kept}"
    assert f"1 prompts had not ended when ComfyUI did. Send them again with: {command}" in caplog.text


def test_it_stays_short_and_loses_nothing(make, queued, monkeypatch):
    monkeypatch.setattr(queue_log, "FILE_BYTES", 4096)
    log = make()
    _accept(log, queued, "kept")
    for number in range(40):
        _accept(log, queued, f"passing {number}")
        queued.discard(f"passing {number}")
        wait_until(lambda: _open(log.path) == ["kept"])
    assert log.path.stat().st_size < 3 * 4096
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    with pytest.raises(RequestError, match="belongs to a ComfyUI that is running"):
        QueueLogFile(log.path)  # the rewritten file is locked as well


def test_a_disk_that_fails_costs_the_log_and_no_prompt(make, queued, monkeypatch, caplog):
    log = make()
    _accept(log, queued, "a")
    write = os.write
    monkeypatch.setattr(queue_log.os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    _accept(log, queued, "b")
    assert "lacks something: only" in caplog.text
    monkeypatch.undo()
    _accept(log, queued, "c")
    assert _open(log.path) == ["a", "c"] and log.path.read_bytes().endswith(b"}\n")


def test_one_file_has_one_writer(make, monkeypatch, caplog):
    log = make()
    with pytest.raises(RequestError, match="belongs to a ComfyUI that is running"):
        QueueLog(log.path, set)
    monkeypatch.setenv(queue_log.VARIABLE, str(log.path))
    assert begin(set) is None and "there is no queue log" in caplog.text


@pytest.mark.parametrize("target", ["", "off", "{}/no/folder"])
def test_without_a_file_that_can_be_written_there_is_no_log(target, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(queue_log.VARIABLE, target.format(tmp_path))
    assert begin(set) is None
    assert ("there is no queue log" in caplog.text) == ("folder" in target)


LINES = [
    json.dumps({"accepted": "a", "number": 2.0, "left_out": [], "request": BODY}),
    json.dumps({"accepted": "b", "number": -1.0, "left_out": [], "request": BODY}),
    json.dumps({"sending": "a", "to": "http://there", "session": "x"}),
]


def test_a_prompt_that_was_put_in_front_comes_first():
    found = read_open(iter(f"{line}\n".encode() for line in LINES))
    assert list(found) == ["b", "a"]
    assert (found["a"].sending, found["b"].sending) == ("x", None)
    ends = [*LINES, json.dumps({"refused": "a"}), json.dumps({"sent": "b", "to": "http://there"})]
    found = read_open(iter(f"{line}\n".encode() for line in ends))
    assert list(found) == ["a"] and found["a"].sending is None


@given(st.integers(0, 400), st.binary(max_size=30))
def test_a_file_that_was_cut_off_or_damaged_gives_what_is_whole(cut, damage):
    whole = "".join(f"{line}\n" for line in LINES[:2]).encode()
    found = read_open(iter((whole[:cut] + damage).splitlines(keepends=True)))
    assert set(found) <= {"a", "b"}
    if cut > len(LINES[0]):
        assert "a" in found

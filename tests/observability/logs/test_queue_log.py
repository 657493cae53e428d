"""The queue log: it holds the accepted prompts until they have ended, and never a user's key."""

import errno
import json
import logging
import stat
from pathlib import Path

import pytest

from parallel_backend.errors import RequestError
from parallel_backend.observability.logs import queue_log
from parallel_backend.observability.logs.queue_log import Entry, QueueLog, QueueLogFolder, begin
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
        made.append(QueueLog(tmp_path / "queue", lambda: set(queued)))
        return made[-1]

    yield new
    for one in made:
        one.close()


def _accept(log: QueueLog, queued: set, *names: str, **body: object) -> None:
    for name in names:
        queued.add(name)
        log.accept(name, float(len(queued)), {**BODY, **body})


def _open(log: QueueLog) -> list[str]:
    """Returns the ids of the prompts that the log has, in queue order."""
    with log._changed:
        return list(log._folder.read_open())


def test_what_was_accepted_is_there_until_it_has_ended(make, queued):
    log = make()
    _accept(log, queued, "a", "b", "c")
    assert _open(log) == ["a", "b", "c"]
    queued -= {"a", "c"}  # one has run, one was deleted
    wait_until(lambda: _open(log) == ["b"])
    _accept(log, queued, "d")
    queued.clear()
    wait_until(lambda: _open(log) == [])


def test_one_that_ends_before_it_is_noted_is_not_taken_for_waiting(make, queued):
    log = make()
    log.accept("quick", 1.0, BODY)  # it has left the queue already
    wait_until(lambda: _open(log) == [])


def test_keys_are_never_written_and_the_file_is_the_user_s_own(make, queued):
    log = make()
    extra = {
        "extra_pnginfo": {"workflow": {"nodes": []}},
        "api_key_comfy_org": "secret-1",
        "auth_token_comfy_org": "secret-2",
        "key_of_some_pack": "secret-3",
    }
    _accept(log, queued, "a", extra_data=extra, front=True, partial_execution_targets=["1"])
    (file,) = log.path.glob("*.json")
    assert "secret" not in file.read_text()
    said = json.loads(file.read_text())
    assert said["left_out"] == ["api_key_comfy_org", "auth_token_comfy_org", "key_of_some_pack"]
    assert said["request"] == {
        **BODY,
        "partial_execution_targets": ["1"],
        "extra_data": {"extra_pnginfo": {"workflow": {"nodes": []}}},
    }
    assert [stat.S_IMODE(one.stat().st_mode) for one in (log.path, file)] == [0o700, 0o600]


def test_a_new_comfyui_keeps_what_the_old_one_left_and_says_how_to_send_it(make, queued, tmp_path, caplog):
    first = make()
    _accept(first, queued, "a", "b")
    queued.discard("a")
    wait_until(lambda: _open(first) == ["b"])
    first.close()  # as in a crash: waiting prompts stay open
    first.close = lambda: None
    with caplog.at_level(logging.WARNING):
        second = make()
    (kept,) = filter(Path.is_dir, second.path.iterdir())
    (file,) = kept.iterdir()
    assert json.loads(file.read_text())["prompt_id"] == "b" and _open(second) == []
    command = f"python -m parallel_backend resend {kept}"
    assert f"1 prompts had not ended when ComfyUI did. Send them again with: {command}" in caplog.text


def test_a_disk_that_fails_costs_the_log_and_no_prompt(make, queued, monkeypatch, caplog):
    log = make()
    _accept(log, queued, "a")

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(queue_log.os, "fsync", fail)
        _accept(log, queued, "b")
    assert "lacks something: [Errno 28] No space left on device" in caplog.text
    _accept(log, queued, "c")
    assert _open(log) == ["a", "c"]


def test_an_id_that_is_no_file_name_stays_in_the_log(make, queued):
    log = make()
    _accept(log, queued, "../a", "\ud800", "x" * 300)
    assert _open(log) == ["../a", "\ud800", "x" * 300]


def test_one_log_has_one_writer(make, monkeypatch, caplog):
    log = make()
    with pytest.raises(RequestError, match="belongs to a ComfyUI that is running"):
        QueueLog(log.path, set)
    monkeypatch.setenv(queue_log.VARIABLE, str(log.path))
    assert begin(set) is None and "there is no queue log" in caplog.text


@pytest.mark.parametrize("target", ["", "off", "{}/no/folder"])
def test_without_a_folder_that_can_be_made_there_is_no_log(target, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(queue_log.VARIABLE, target.format(tmp_path))
    assert begin(set) is None
    assert ("there is no queue log" in caplog.text) == ("folder" in target)


@pytest.fixture
def folder(tmp_path):
    """A log with two prompts, the second of which was put in front."""
    found = QueueLogFolder(tmp_path / "queue")
    found.write(Entry("a", 2.0, BODY, sending="x"))
    found.write(Entry("b", -1.0, BODY, left_out=("key",)))
    yield found
    found.close()


def test_a_prompt_that_was_put_in_front_comes_first(folder):
    found = folder.read_open()
    assert list(found) == ["b", "a"]
    assert found["a"] == Entry("a", 2.0, BODY, sending="x") and found["b"].left_out == ("key",)


@pytest.mark.parametrize("damage", [b"", b"{", b"[" * 10**5, b"\xff", b"{}", b'{"prompt_id": 1}'])
def test_a_file_that_is_damaged_is_left_out_with_a_warning(folder, damage, caplog):
    (folder.path / "c.json").write_bytes(damage)
    assert list(folder.read_open()) == ["b", "a"]
    assert "c.json makes no sense" in caplog.text

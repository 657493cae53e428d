"""The event log: what its lines of JSON contain and omit, where they go, and that no disk can harm a job."""

import json
import os
import time
from datetime import datetime, timedelta

import pytest

from parallel_backend.observability.logs import event_log
from parallel_backend.observability.logs.event_log import MAX_OLD_FILES, VARIABLE, begin_log
from parallel_backend.requests import LoadInfo, ModelSpec, RunInfo
from parallel_backend.sidecar.group import events
from parallel_backend.strategy import ParallelStrategy

TWO = ("cuda:0", "cuda:1")
ULYSSES = ParallelStrategy(ulysses_degree=2)
FLUX = ModelSpec("/home/me/secret/flux.safetensors")
RUN = RunInfo("native", ULYSSES, (0.25,), (7, 8))
STORY = (
    events.Started(TWO, 4.0, "process 1 failed: OSError: /home/me/secret"),
    events.Changed(TWO),
    events.Loaded(TWO, FLUX, LoadInfo(2.0, 24, False, "bf16", "bf16")),
    events.Stepped(TWO, 1, 28, 0.25, ULYSSES),
    events.RequestFailed(TWO, 1, "killed by SIGKILL", True, False, "signal"),
    events.RequestFailed(TWO, 0, "OSError: [Errno 5] /home/me/secret", False, False, "error"),
    events.RequestEnded(TWO, "sample", "done", 9.0, None, RUN, ULYSSES, 2, FLUX, "prompt-1", 5.0),
    events.RequestEnded(TWO, "decode", "cancelled", 1.0, 0.03, None, None, 1),
    events.Released(TWO, 60.0),
)


@pytest.fixture
def began(monkeypatch):
    """Returns a function that begins a log, which ends with the test, and emits events."""
    ends = []

    def begin(target, *story, price=0.0):
        monkeypatch.setenv(VARIABLE, str(target))
        ends.append(begin_log(lambda: price))
        for event in story:
            events.emit(event)
        return ends[-1]

    before = len(events._listeners)
    yield begin
    for end in filter(None, ends):
        end()
    assert len(events._listeners) == before


def _lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_each_event_is_one_object_with_its_time_and_nothing_private(began, tmp_path):
    file = tmp_path / "log.jsonl"
    began(file, *STORY, price=3600.0)()
    lines = _lines(file)
    found = " ".join(line["event"] for line in lines)
    assert found == "started loaded stepped failed failed ended ended released"
    assert all(line["devices"] == list(TWO) for line in lines)
    at = datetime.fromisoformat(lines[0]["time"].replace("Z", "+00:00"))
    assert at.utcoffset() == timedelta(0) and abs(at.timestamp() - time.time()) < 60
    started, loaded, stepped, killed, raised, done, cancelled, released = lines
    assert started["after_failure"] is True and (loaded["model"], loaded["bytes"]) == ("flux.safetensors", 24)
    assert (stepped["step"], stepped["steps"], stepped["strategy"]) == (1, 28, "Ulysses 2")
    assert (killed["cause"], killed["reason"], killed["device"]) == ("killed by SIGKILL", "signal", "cuda:1")
    assert (raised["cause"], raised["reason"]) == ("OSError", "error")
    assert (done["result"], done["images"], done["bytes_sent"], done["exact"]) == ("done", 2, [7, 8], True)
    assert (done["model"], done["prompt_id"]) == ("flux.safetensors", "prompt-1")
    assert (done["device_seconds"], done["idle_device_seconds"], done["cost"]) == (18.0, 10.0, 18.0)
    assert (cancelled["model"], cancelled["prompt_id"], cancelled["strategy"]) == (None, None, None)
    assert (cancelled["cancel_seconds"], released["idle_device_seconds"]) == (0.03, 120.0)
    assert "secret" not in file.read_text()


def test_nothing_is_logged_unless_asked_for(began):
    """Nor does anything listen, which the fixture sees to."""
    assert began("") is None and began("off") is None


def test_stderr_is_a_place_too(began, capfd):
    began("stderr", STORY[3])()
    assert json.loads(capfd.readouterr().err.strip())["event"] == "stepped"


def test_a_file_that_is_full_makes_room_for_the_next_and_few_are_kept(began, tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "FILE_BYTES", 400)
    file = tmp_path / "log.jsonl"
    began(file, *STORY[3:4] * 40)()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["log.jsonl", *(f"log.jsonl.{n}" for n in range(1, MAX_OLD_FILES + 1))]
    assert all(path.stat().st_size <= 400 and _lines(path) for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "target", ["/dev/full", "{}/missing/log.jsonl", "{}"], ids=["full", "missing", "a folder"]
)
def test_a_log_that_cannot_be_written_gives_one_warning(began, tmp_path, caplog, target):
    began(target.format(tmp_path), *STORY)()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert VARIABLE in caplog.text and "cannot be written" in caplog.text


def test_a_disk_that_hangs_holds_up_neither_a_job_nor_the_end(began, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(event_log, "_WAITING_LINES", 20)
    monkeypatch.setattr(event_log, "_PATIENCE", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it blocks until it has a reader
    end = began(pipe, *STORY[3:4] * 50)
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # for the lines after 20
    end()
    with pipe.open() as reader:  # lets the writer continue and end
        assert len(reader.read().splitlines()) in (20, 21)

"""The store on disk: several processes at once, damaged files, disks that cannot be written, and no private data."""

import getpass
import json
import multiprocessing
import re
import resource
import socket
import time
from pathlib import Path

import pytest

from parallel_backend.machine import cache_files
from parallel_backend.machine.fingerprint import Fingerprint, take_fingerprint
from parallel_backend.machine.topology import Topology
from parallel_backend.planner import store as module
from parallel_backend.planner.records import LinkRate, Measurements, RunKind, keep_link, record
from parallel_backend.planner.store import MeasurementStore
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.cache_folder import VARIABLE

BOX = Fingerprint(("2 cards",), ("torch 2.13",))
NOW = 2_000_000_000.0


def kind(model="m"):
    strategy = ParallelStrategy(ulysses_degree=2, device_shares=(2, 1))
    return RunKind(model, 1024, 1024, 1, 1, 1, 512, 0, 1, strategy, "native", "devices")


def full() -> Measurements:
    return keep_link(record(Measurements(), kind(), 0.25, NOW), LinkRate("devices", 8e9, 3e-5, NOW))


@pytest.fixture
def store(tmp_path):
    return MeasurementStore(BOX, tmp_path / "cache")


def test_what_is_kept_comes_back_whole(store, tmp_path):
    assert store.read() == Measurements()
    assert store.update(lambda known: full())
    assert store.read() == full()
    assert MeasurementStore(BOX, tmp_path / "cache").read() == full()


def test_another_machine_or_version_finds_nothing(store, tmp_path):
    store.update(lambda known: full())
    newer = Fingerprint(("2 cards",), ("torch 2.14",))
    assert MeasurementStore(newer, tmp_path / "cache").read() == Measurements()


def _write(folder, name, count):
    store = MeasurementStore(BOX, Path(folder))
    for i in range(count):
        assert store.update(lambda known, i=i: record(known, kind(f"{name}{i}"), 1.0, NOW))
        time.sleep(0.002)  # real jobs take longer; without it one writer can keep the lock from the other


def test_two_processes_that_write_at_once_lose_nothing(store, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_files, "LOCK_PATIENCE", 120.0)  # s; the other writer may hold the lock often
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_write, args=(str(tmp_path / "cache"), name, 40)) for name in ("a", "b")
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert len(store.read().observed) <= 80  # a reader never sees half a file
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert {o.kind.model for o in store.read().observed} == {f"{n}{i}" for n in ("a", "b") for i in range(40)}
    assert not list((tmp_path / "cache").glob("*.part"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff\x00" * 50,
        lambda data: b"[" * 100_000,
        lambda data: data.replace(b'"format": %d' % module.FORMAT, b'"format": 99'),
        lambda data: b" " * (cache_files.MAX_BYTES + 1) + data,
        lambda data: b"null",
    ],
    ids=["empty", "half", "binary", "deep", "another format", "huge", "no object"],
)
def test_a_damaged_file_counts_as_empty_and_is_replaced(store, damage):
    store.update(lambda known: full())
    store.path.write_bytes(damage(store.path.read_bytes()))
    assert store.read() == Measurements()
    assert store.update(lambda known: record(known, kind("new"), 1.0, NOW))
    assert [o.kind.model for o in store.read().observed] == ["new"]


@pytest.mark.parametrize(
    "alter",
    [
        lambda entry: entry.update(seconds=["fast"]),
        lambda entry: entry.update(seconds=[]),
        lambda entry: entry.update(seconds=[-1.0]),
        lambda entry: entry.pop("at"),
        lambda entry: entry["kind"]["strategy"].update(ulysses_degree=0),
        lambda entry: entry["kind"]["strategy"].update(unknown_degree=2),
    ],
)
def test_an_entry_that_cannot_be_true_costs_only_itself(store, alter):
    store.update(lambda known: record(full(), kind("other"), 1.0, NOW))
    frame = json.loads(store.path.read_text())
    alter(frame["observed"][0])
    store.path.write_text(json.dumps(frame))
    assert [o.kind.model for o in store.read().observed] == ["other"]


def test_a_link_that_cannot_be_true_costs_only_itself(store):
    store.update(lambda known: full())
    frame = json.loads(store.path.read_text())
    frame["links"] = [{**frame["links"][0], "bytes_per_second": 0.0}, "no link", *frame["links"]]
    store.path.write_text(json.dumps(frame))
    assert store.read() == full()


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
@pytest.mark.parametrize("where", ['"seconds": [', '"at": [', '"width": '])
def test_an_entry_with_a_number_that_nothing_holds_costs_only_itself(store, where, number):
    """JSON allows numbers of any size. If such an entry were read, every later update would fail."""
    store.update(lambda known: record(full(), kind("other"), 1.0, NOW))
    before, found, after = store.path.read_text().partition(where)
    after = re.sub(r"^(\s*)[0-9.]+", lambda start: start[1] + number, after, count=1)
    store.path.write_text(before + found + after)
    assert [o.kind.model for o in store.read().observed] == ["other"]
    assert store.update(lambda known: record(known, kind("new"), 1.0, NOW))
    assert [o.kind.model for o in store.read().observed] == ["other", "new"]


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = MeasurementStore(BOX, tmp_path / "file" / "cache")
    assert not store.update(lambda known: full())
    assert store.read() == Measurements()


def _write_on_full_disk(folder, pipe):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    pipe.send(MeasurementStore(BOX, Path(folder)).update(lambda known: record(full(), kind("b"), 1.0, NOW)))


def test_a_full_disk_keeps_the_old_file(store, tmp_path):
    store.update(lambda known: full())
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_write_on_full_disk, args=(str(tmp_path / "cache"), writer))
    process.start()
    assert reader.recv() is False
    process.join()
    reader.close(), writer.close()
    assert store.read() == full()
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_lock_that_is_never_released_delays_but_does_not_stop(store, monkeypatch):
    monkeypatch.setattr(cache_files, "LOCK_PATIENCE", 0.05)
    store.update(lambda known: full())
    with cache_files.locked(store.path.with_suffix(".lock")):
        assert not store.update(lambda known: Measurements())
    assert store.read() == full()
    assert store.update(lambda known: Measurements())


def test_a_change_that_fails_leaves_the_file_and_frees_the_lock(store):
    store.update(lambda known: full())
    with pytest.raises(ZeroDivisionError):
        store.update(lambda known: 1 / 0)
    assert store.read() == full() and store.update(lambda known: known)


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    store = MeasurementStore(BOX)
    assert store.path is None and store.read() == Measurements() and not store.update(lambda known: full())


def test_nothing_private_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = MeasurementStore(take_fingerprint(Topology(())))
    assert store.path.is_relative_to(tmp_path)
    store.update(lambda known: full())
    text = store.path.read_text()
    for private in (socket.gethostname(), getpass.getuser(), str(Path.home()), str(tmp_path)):
        assert private not in text
    assert store.path.stat().st_mode & 0o077 == 0

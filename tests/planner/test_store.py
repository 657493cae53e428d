"""The store on disk: several processes at once, damaged files, disks that cannot be written, and no private data; and
what it gives: medians, of recent runs, of only those that match a job."""

import dataclasses
import getpass
import multiprocessing
import resource
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from jobs import flux_job
from parallel_backend.machine import cache_database
from parallel_backend.machine.fingerprint import Fingerprint, take_fingerprint
from parallel_backend.machine.topology import Topology
from parallel_backend.planner import store as module
from parallel_backend.planner.store import MAX_AGE_S, MAX_LINKS, MAX_RUNS, LinkRate, MeasurementStore, RunKind
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.cache_folder import VARIABLE

BOX = Fingerprint(("2 cards",), ("torch 2.13",))
DEVICES = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
ULYSSES, RING = ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)
NOW = 2_000_000_000.0
LINK = LinkRate("devices", 8e9, 3e-5, NOW)


def kind(strategy=ULYSSES, **changes):
    return dataclasses.replace(RunKind.of(flux_job(), strategy, "native", DEVICES), **changes)


def known(store, **changes):
    """Returns the median seconds by strategy of runs like those of `kind`."""
    return store.seconds_by_strategy(kind(**changes), DEVICES, NOW)


def size(store):
    """Returns the number of all runs in the file."""
    return store.query("SELECT count(*) FROM runs")[0][0]


@pytest.fixture
def store(tmp_path):
    return MeasurementStore(BOX, tmp_path / "cache")


@pytest.fixture
def full(store):
    """Returns a store with a run and a link."""
    assert store.record([(kind(), 0.25)], NOW) and store.keep_link(LINK)
    return store


def test_what_is_kept_comes_back_in_a_new_process(full, tmp_path):
    again = MeasurementStore(BOX, tmp_path / "cache")
    assert known(again) == {ULYSSES: 0.25} and again.seconds(kind(), NOW) == 0.25
    assert again.link("devices") == LINK and again.link("others") is None
    assert all(
        again.seconds(other, NOW) is None for other in (kind(RING), kind(engine="xfuser"), kind(workload="b"))
    )


def test_the_median_of_the_latest_runs_of_a_kind_counts(store):
    for seconds in (0.5, 9.0, 0.4):
        store.record([(kind(), seconds)], NOW)
    assert known(store) == {ULYSSES: 0.5} and store.seconds(kind(), NOW) == 0.5
    for _ in range(MAX_RUNS):
        store.record([(kind(), 1.0), (kind(RING), 2.0)], NOW)
    assert known(store) == {ULYSSES: 1.0, RING: 2.0}
    assert size(store) == 2 * MAX_RUNS


def test_strategies_that_auto_does_not_rank_are_left_out(store):
    for unlisted in ({"device_shares": (2, 1)}, {"shard_weights": True, "offload_weights": True}):
        store.record([(kind(ULYSSES.replace(**unlisted)), 0.5)], NOW)
    assert known(store) == {} and size(store) == 2


def test_old_runs_are_ignored_and_forgotten_and_those_of_the_future_no_measurement(store):
    for at in (NOW - MAX_AGE_S - 1, NOW + 10 * 86400):
        store.record([(kind(), 9.0)], at)
        assert known(store) == {}
    store.record([(kind(RING), 1.0)], NOW)
    assert known(store) == {RING: 1.0} and size(store) == 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_what_is_no_duration_is_not_recorded(store, seconds):
    store.record([(kind(), seconds), (kind(RING), 1.0)], NOW)
    assert known(store) == {RING: 1.0}


def test_the_oldest_of_all_runs_are_forgotten_first(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_ALL_RUNS", 10)
    for i in range(15):
        store.record([(kind(workload=str(i)), 1.0)], NOW + i)
    assert [i for i in range(15) if known(store, workload=str(i))] == list(range(5, 15))


def test_of_each_group_of_devices_the_latest_link_is_kept(store):
    for number in range(MAX_LINKS + 2):
        store.keep_link(LinkRate(f"{number}", 1e9, 1e-5, NOW))
    store.keep_link(LinkRate("5", 2e9, 1e-5, NOW))
    found = {number: store.link(f"{number}") for number in range(MAX_LINKS + 2)}
    assert [number for number, link in found.items() if link is None] == [0, 1]
    assert found[5].bytes_per_second == 2e9


def test_another_machine_or_version_finds_nothing(full, tmp_path):
    newer = MeasurementStore(Fingerprint(("2 cards",), ("torch 2.14",)), tmp_path / "cache")
    assert known(newer) == {} and newer.link("devices") is None


def _write(folder, strategy, count):
    store = MeasurementStore(BOX, Path(folder))
    for i in range(count):
        assert store.record([(kind(strategy, workload=str(i)), 1.0)], NOW)


def test_two_processes_that_write_at_once_lose_nothing(store, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_database, "LOCK_PATIENCE", 120.0)  # s; the other writer may hold the lock often
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_write, args=(str(tmp_path / "cache"), strategy, 40))
        for strategy in (ULYSSES, RING)
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert len(known(store, workload="0")) <= 2  # a reader never meets half a run
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert all(known(store, workload=str(i)) == {ULYSSES: 1.0, RING: 1.0} for i in range(40))
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".sqlite"]


def _another_format(data: bytes) -> bytes:
    return data[:60] + (99).to_bytes(4, "big") + data[64:]  # the field user_version of a file of SQLite


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"\xff\x00" * 5000, _another_format],
    ids=["empty", "half", "no database", "another format"],
)
def test_a_damaged_file_counts_as_empty_and_is_replaced(full, damage):
    full.path.write_bytes(damage(full.path.read_bytes()))
    assert known(full) == {}
    assert full.record([(kind(RING), 1.0)], NOW)
    assert known(full) == {RING: 1.0}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"ulysses_degree": 2', '"ulysses_degree": 0'),
        ('"ulysses_degree": 2', '"unknown_degree": 2'),
        ('"ulysses_degree": 2', '"ulysses_degree": 1e999'),
        ("}", ""),
    ],
)
def test_a_strategy_that_cannot_be_read_costs_only_its_runs(full, before, after):
    full.record([(kind(RING), 1.0)], NOW)
    with closing(sqlite3.connect(full.path)) as database, database:
        values = (before, after)
        database.execute("UPDATE runs SET strategy = replace(strategy, ?, ?) WHERE seconds = 0.25", values)
    assert known(full) == {RING: 1.0}


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = MeasurementStore(BOX, tmp_path / "file" / "cache")
    assert not store.record([(kind(), 1.0)], NOW)
    assert known(store) == {} and store.link("devices") is None


def _write_on_full_disk(folder, pipe):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    pipe.send(MeasurementStore(BOX, Path(folder)).record([(kind(RING), 1.0)], NOW))


def test_a_full_disk_keeps_the_old_file(full, tmp_path):
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_write_on_full_disk, args=(str(tmp_path / "cache"), writer))
    process.start()
    assert reader.recv() is False
    process.join()
    reader.close(), writer.close()
    assert known(full) == {ULYSSES: 0.25} and full.link("devices") == LINK


def test_a_lock_that_is_never_released_delays_but_does_not_stop(full, monkeypatch):
    monkeypatch.setattr(cache_database, "LOCK_PATIENCE", 0.05)
    with closing(sqlite3.connect(full.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert not full.record([(kind(RING), 1.0)], NOW)
        assert known(full) == {ULYSSES: 0.25}
    assert full.record([(kind(RING), 1.0)], NOW)


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    store = MeasurementStore(BOX)
    assert store.path is None and not store.record([(kind(), 1.0)], NOW) and known(store) == {}


def test_a_folder_may_be_named_from_where_the_process_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "here and there")
    store = MeasurementStore(BOX)
    assert store.record([(kind(), 1.0)], NOW) and known(store) == {ULYSSES: 1.0}
    assert list((tmp_path / "here and there").iterdir())


def test_nothing_private_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = MeasurementStore(take_fingerprint(Topology(())))
    assert store.path.is_relative_to(tmp_path)
    store.record([(kind(), 1.0)], NOW)
    data = store.path.read_bytes()
    for private in (socket.gethostname(), getpass.getuser(), str(Path.home()), str(tmp_path)):
        assert private.encode() not in data
    assert store.path.stat().st_mode & 0o077 == 0

"""Device locks: one process holds one, others learn which; locks end with their processes, and CPU ranks need none."""

import contextlib
import os
import re
import signal
import sys
import tempfile

import pytest
import torch

from parallel_backend.errors import DeviceError
from parallel_backend.sidecar import pool
from parallel_backend.sidecar.group import supervisor
from parallel_backend.sidecar.group.lease import State
from parallel_backend.sidecar.process import device_lock
from parallel_backend.sidecar.process.device_lock import CPU_TOO, VARIABLE, holder_of, lock_devices
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.wire.cache_folder import lock_folder
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns the folder of this test's locks, which CPU devices get as well."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setenv(CPU_TOO, "on")
    return tmp_path / "locks"


@pytest.fixture
def other(folder):
    """Yields hold("cpu:0,cpu:1"), which returns a process that holds these devices and its only rank's process id."""
    processes = []

    def hold(devices):
        command = [sys.executable, "-m", "tests.support.rank_programs.lock_holder", devices]
        reader, writer = os.pipe()
        process = supervisor.subprocess.fork(command, {**os.environ, "OMP_NUM_THREADS": "1"}, writer)
        os.close(writer)
        with os.fdopen(reader) as said:
            rank = int(said.readline())
        processes.append((process, rank))
        return process, rank

    yield hold
    for process, rank in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def test_the_second_process_learns_who_has_the_device_and_gets_the_others(folder, other):
    holder, _ = other("cpu:0,cpu:1")
    with pytest.raises(DeviceError) as refused:
        lock_devices(("cpu:2", "cpu:1"))
    words = str(refused.value)
    assert re.search(
        rf"cpu:1 is in use .*process {holder.pid}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC", words
    )
    assert "/" not in words and refused.value.problems[0].inputs == ("devices",)
    # holder_of gives the same answer, and an empty one for devices that are free or this process's own.
    if device_lock._LOCKS.exists():  # without this list, only taking the lock would show it
        assert re.fullmatch(rf"process {holder.pid}, since [\d -]+:[\d:]+ UTC", holder_of("cpu:1"))
    apart = lock_devices(("cpu:2", "cpu:3"))  # the refusal left nothing locked
    assert holder_of("cpu:2") == holder_of("cpu:7") == ""
    apart.release()
    assert {path.name for path in folder.iterdir()} == {f"cpu-{index}.lock" for index in range(4)}


def test_a_killed_process_keeps_the_device_as_long_as_its_ranks_live(other, monkeypatch):
    holder, rank = other("cpu:0")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    monkeypatch.setattr(device_lock.deadlines, "TERMINATE", 0.1)
    with pytest.raises(DeviceError, match=f"process {holder.pid}"):
        lock_devices(("cpu:0",))
    monkeypatch.setattr(device_lock.deadlines, "TERMINATE", 60.0)
    asked = []

    def is_leaving(noted):  # the ranks end while it waits for them
        asked.append(noted)
        if len(asked) == 2:
            os.kill(rank, signal.SIGKILL)
        return True

    monkeypatch.setattr(device_lock, "_is_leaving", is_leaving)
    lock_devices(("cpu:0",)).release()
    assert asked[0]["pid"] == holder.pid


def test_a_group_holds_its_devices_from_its_start_to_its_end(folder, monkeypatch):
    sidecar, rival = pool.get_sidecar(("cpu:0",)), Sidecar(("cpu:0", "cpu:1"), exclusive=True)
    sidecar.start()
    try:
        with monkeypatch.context() as hurried, pytest.raises(DeviceError, match=f"process {os.getpid()}"):
            hurried.setattr(device_lock.deadlines, "TERMINATE", 0.1)
            rival.start()
        assert rival.state is State.DOWN and sidecar.state is State.READY
        sidecar.stop()
        rival.start()
        os.kill(rival.pids[0], signal.SIGKILL)
        wait_until(lambda: rival.state is State.FAILED)
        rival.start()  # it first releases the locks of its dead ranks
    finally:
        rival.stop()
        pool.stop_all()
    lock_devices(("cpu:0", "cpu:1")).release()


def test_a_sidecar_that_measures_uses_devices_that_are_held(folder):
    locks = lock_devices(("cpu:0",))
    with_others = Sidecar(("cpu:0",))
    with_others.start()
    with_others.stop()
    locks.release()


def test_ranks_on_the_cpu_are_not_locked_and_off_is_off(tmp_path):
    for environ in ({VARIABLE: str(tmp_path)}, {VARIABLE: "off", CPU_TOO: "on"}):
        locks = [lock_devices(("cpu:0",), environ) for _ in range(2)]
        assert [held.of("cpu:0") for held in locks] == [(), ()]
    assert list(tmp_path.iterdir()) == []


def test_gpus_are_locked_by_what_they_are_and_not_by_their_numbers(folder, monkeypatch):
    class Properties:
        uuid = "4b3a9c5e-0000-1111-2222-333344445555"

    def properties(device):
        if device == "cuda:7":
            raise AssertionError("Invalid device id")
        return Properties

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(device_lock.deadlines, "TERMINATE", 0.1)
    held = lock_devices(("cuda:0",))
    with pytest.raises(DeviceError, match="cuda:3 is in use"):
        lock_devices(("cuda:3",))
    assert lock_devices(("cuda:7",)).of("cuda:7") == ()  # its rank will report that it does not exist
    held.release()
    assert [path.name for path in folder.iterdir()] == [f"gpu-{Properties.uuid}.lock"]


def test_where_nothing_can_be_locked_ranks_start_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock_folder().chmod(0o777)  # anyone could put links there
    assert lock_devices(("cpu:0",), {CPU_TOO: "on"}).of("cpu:0") == ()
    assert "cannot be locked" in caplog.text and str(tmp_path) not in caplog.text


def test_a_damaged_note_is_no_number_and_no_link_is_followed(folder, other, tmp_path):
    other("cpu:0")
    for note in (b"", b"[", b"[" * 1024, b"7", b'{"pid": "x", "host": 3}', b"\xff" * 2000):
        (folder / "cpu-0.lock").write_bytes(note)
        with pytest.raises(DeviceError, match="has not said its number"):
            lock_devices(("cpu:0",))
    (folder / "cpu-5.lock").symlink_to(tmp_path / "elsewhere")
    assert lock_devices(("cpu:5",)).of("cpu:5") == ()
    assert not (tmp_path / "elsewhere").exists()

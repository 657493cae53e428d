"""Fixtures for all tests. Everything that a test starts must be gone when the test ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest

from comfyui_source import comfyui_version, find_comfyui
from forked_ranks import ForkedSubprocess
from parallel_backend.requests import ModelSpec
from parallel_backend.sidecar.group import supervisor
from parallel_backend.sidecar.group.events import listen
from parallel_backend.sidecar.group.failures import FAILING
from parallel_backend.wire import deadlines
from scripted import is_running, ranks_of, scripted_sidecar, scripted_weights

os.environ["PARALLEL_SAMPLING_MEASUREMENTS"] = "off"  # tests keep nothing in the user's cache folder

# On a busy machine an example may take long, and that is no failure.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

FORKED = ForkedSubprocess(supervisor)
LEAK_PATIENCE = 20.0  # s that the kernel and dying processes get to clean up


def pytest_configure() -> None:
    supervisor.subprocess = FORKED
    # The product gives up after shorter times; on a machine that is busy with tests an answer may only be slow.
    deadlines.REPORT, deadlines.DEATH_NOTICE, deadlines.STACK = 2.0, 20.0, 5.0


def pytest_report_header() -> str:
    folder = find_comfyui()
    return "ComfyUI: none" if folder is None else f"ComfyUI: {comfyui_version(folder)} in {folder}"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Puts tests that share the two warm ranks on one worker, so that no other worker starts them. Marks page tests."""
    if "two_real_ranks" in item.fixturenames and item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group("two_real_ranks"))
    if "browser" in item.fixturenames:
        item.add_marker(pytest.mark.page)


def pytest_collection_finish() -> None:
    """Freezes imported objects: every garbage collection would scan them, and in a forked rank copy their pages."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    FORKED.enabled = not {"real_start", "gpu"} & {marker.name for marker in item.iter_markers()}
    if FORKED.enabled and {"no_leaks", "two_real_ranks"} & set(item.fixturenames):
        FORKED.prepare()  # before the deadline of a start runs


def pytest_unconfigure() -> None:
    FORKED.close()
    supervisor.subprocess = subprocess


@pytest.fixture
def no_leaks():
    """Fails the test when it leaves a process, descriptor, shared memory or listening port."""
    if sys.platform != "linux":
        pytest.skip("ranks need Linux")
    supervisor.get_supervisor()  # has a descriptor and lasts as long as the process
    before = _snapshot()
    yield
    deadline = time.monotonic() + LEAK_PATIENCE
    while leaked := _added(before, _snapshot()):
        if time.monotonic() > deadline:
            pytest.fail(f"the test left behind: {leaked}")
        time.sleep(0.05)


@pytest.fixture(scope="session")
def _shared_ranks():
    if sys.platform != "linux":
        pytest.skip("ranks need Linux")
    from parallel_backend.sidecar.sidecar import Sidecar

    sidecar = Sidecar(("cpu:0", "cpu:1"))
    yield sidecar
    pids = sidecar.pids
    sidecar.stop()
    assert not any(map(is_running, pids))


@pytest.fixture
def two_real_ranks(_shared_ranks, request):
    """Two warm ranks with the real model code, for tests that leave them running. Starting them costs several times as
    much as such a test, so all tests share them."""
    _shared_ranks.start()
    request.getfixturevalue("no_leaks")
    pids = _shared_ranks.pids
    yield _shared_ranks
    assert _shared_ranks.pids == pids, "these ranks are other tests' too"


@pytest.fixture(scope="session")
def comfyui_here():
    """The real ComfyUI, imported into this process, so that its forks have it."""
    from comfy_modules import import_comfyui_here

    return import_comfyui_here()


@pytest.fixture
def own_real_ranks(no_leaks):
    """A sidecar of two ranks with the real model code, used by this test alone. Faults need it, because ranks get a
    fault when they start."""
    from parallel_backend.sidecar.sidecar import Sidecar

    sidecar = Sidecar(("cpu:0", "cpu:1"))
    yield sidecar
    sidecar.stop()
    FAILING.clear()  # else other tests leave out a device


@pytest.fixture
def weights(tmp_path) -> ModelSpec:
    """A weights file for tests/support/rank_programs/scripted_rank.py: velocity = 0.5 * x * mean(context)."""
    return scripted_weights(tmp_path / "good.safetensors", "good 0.5")


@pytest.fixture
def scaled(tmp_path):
    """A function that writes a weights file for scripted ranks, with the given scale of the velocity."""

    def written(scale: float, script: str = "good") -> ModelSpec:
        return scripted_weights(tmp_path / f"{scale:g}.safetensors", f"{script} {scale}")

    return written


@pytest.fixture
def sidecar(no_leaks):
    """A sidecar of two scripted ranks, stopped after the test."""
    with_ranks = scripted_sidecar()
    yield with_ranks
    with_ranks.stop()


@pytest.fixture
def resuming_sidecar(no_leaks):
    """A sidecar of two scripted ranks that makes a job again after a crash, stopped after the test."""
    with_ranks = scripted_sidecar(resumes=True)
    yield with_ranks
    with_ranks.stop()


@pytest.fixture
def events():
    """The events that the sidecars of this process send while the test runs."""
    found = []
    stop = listen(found.append)
    yield found
    stop()


def _snapshot() -> dict[str, set]:
    own = os.getpid()
    children = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            children |= set((task / "children").read_text().split())
        except OSError:  # the thread has ended
            continue
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208, names are wanted
        try:
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:  # the descriptor of the listing itself
            continue
    children.discard(str(FORKED.pid))  # starts with the first rank and lasts as long as this process
    descriptors.pop(str(FORKED.descriptor), None)
    return {
        "processes": {pid for pid in children if is_running(int(pid))} | set(map(str, ranks_of(own))),
        "descriptors": set(descriptors.items()),
        "shared memory": {
            entry.name for entry in Path("/dev/shm").iterdir() if entry.stat().st_uid == os.getuid()
        },
        "ports": _listening(set(descriptors.values())),
    }


def _listening(sockets: set[str]) -> set[str]:
    """Returns the local addresses on which one of these sockets (links like `socket:[inode]`) listens."""
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1])
    return found


def _added(before: dict[str, set], after: dict[str, set]) -> dict[str, list]:
    found = {kind: sorted(after[kind] - before[kind]) for kind in before}
    return {kind: names for kind, names in found.items() if names}

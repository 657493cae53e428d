"""The devices to choose from: the memory and the known users of each."""

import os
import sys

import pytest

from fake_nvml import h100_nvswitch
from parallel_backend import devices as names
from parallel_backend.machine.probe import open_nvml, read_topology
from parallel_backend.observability import device_list
from parallel_backend.observability import gauges as module
from parallel_backend.observability.device_list import list_clusters, list_devices, local_devices, selected
from parallel_backend.sidecar.group.lease import Phase, PhaseKind
from parallel_backend.sidecar.status import GroupStatus, RankStatus

RANK, BLENDER, UNSEEN, DESKTOP = 4100, 77, 78, 79  # process ids


def _group(state: str, device: str, pid: int | None) -> GroupStatus:
    rank = RankStatus(False, "", 3, 0, frozenset(), 0.0, 1.0, device=device, pid=pid)
    return GroupStatus((device,), state, "", Phase(PhaseKind.SAMPLING), ("a",), 3, 28, (), (rank,))


@pytest.fixture
def three_gpus(monkeypatch):
    nvml = h100_nvswitch(3)
    nvml.boards[0].used_gib = 20.0
    nvml.boards[0].programs = {RANK: 19.0, os.getpid(): 1.0}
    nvml.boards[1].programs = {BLENDER: 9.5, UNSEEN: 12.0, DESKTOP: 0.01}
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(module, "visible_topology", lambda: read_topology(nvml).visible({}))
    open_nvml.cache_clear()
    yield
    open_nvml.cache_clear()


def test_each_gpu_is_told_with_its_memory_and_who_uses_it(three_gpus, tmp_path, monkeypatch):
    (tmp_path / str(BLENDER)).mkdir()
    (tmp_path / str(BLENDER) / "comm").write_text("blender\n")
    monkeypatch.setattr(
        device_list.device_lock, "holder_of", lambda device: "process 9" if device == "cuda:2" else ""
    )
    groups = [_group("running", "cuda:0", RANK), _group("down", "cuda:1", None)]
    one, two, three = list_devices(("cuda:0", "cuda:1", "cuda:2"), groups, tmp_path)
    assert one["name"] == "NVIDIA H100 80GB HBM3" and one["total_bytes"] - one["free_bytes"] == 20 * 2**30
    # Neither this process nor its ranks are other programs.
    assert (one["users"], one["busy"]) == (["processes of this ComfyUI: step 3 of 28"], True)
    (waits,) = list_devices(("cuda:0",), [_group("ready", "cuda:0", RANK)])  # keep it from nobody
    assert (waits["users"], waits["busy"]) == (["processes of this ComfyUI: ready"], False)
    users = ["process 78: 12.0 GiB", "blender (process 77): 9.50 GiB"]
    assert (two["users"], two["busy"]) == (users, False)
    assert (three["users"], three["busy"]) == (["another ComfyUI (process 9)"], True)


def test_without_a_gpu_there_is_a_rank_for_each_core_and_those_that_a_text_names(monkeypatch):
    monkeypatch.setattr(names, "_only_cpu", True)
    monkeypatch.setattr(device_list, "cores", lambda: 2)
    assert local_devices() == ("cpu:0", "cpu:1")
    assert local_devices(selected("cpu:4")) == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert local_devices(("cuda:0@den/left",)) == ("cpu:0", "cpu:1")
    assert selected("gpu seven") == () and "No usable GPU" in device_list.machine_words()
    told, _ = list_devices(local_devices(), [])
    assert told["users"] == [] and 0 < told["free_bytes"] <= told["total_bytes"]


def test_a_cluster_is_counted_by_machines_and_one_that_nobody_joined_can_not_be_chosen(monkeypatch):
    den = ("cuda:0@den/left", "cuda:1@den/left", "cuda:0@den/right")
    served = {"den": den, "empty": (), "alone": ("cuda:0@alone/box",), "box": den[:2]}
    monkeypatch.setattr(device_list.clusters, "served", lambda: served)
    monkeypatch.setattr(device_list, "memory_elsewhere", lambda device: 24 * 2**30 if "den" in device else 0)
    assert [(one["devices"], one["words"], one["there"]) for one in list_clusters()] == [
        ("cluster:den", "3 devices on 2 machines, 72.0 GiB", True),
        ("cluster:empty", "no machine has joined yet", False),
        ("cluster:alone", "one device on one machine", True),
        ("cluster:box", "2 devices on one machine, 48.0 GiB", True),
    ]

"""The binding of a rank to the cores near its GPU, as a fake sysfs lists them."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.engine.comm.numa import cores_near, parse_cores, stay_near

GPU = torch.device("cuda:1")


@pytest.fixture
def sysfs(tmp_path):
    """A fake sysfs: two sockets of eight logical cores (hyperthreads last); a GPU on the second, one without a node."""
    for address, node in (("0000:3b:00.0", 1), ("0000:5e:00.0", -1)):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node, cores in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    return tmp_path


@pytest.fixture
def kept(monkeypatch):
    """Returns a list of the (pid, cores) to which a rank on GPU 1, at PCI address 0000:3b:00.0, restricts itself."""
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    found = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: found.append((pid, cores)))
    return found


def test_a_rank_keeps_to_the_cores_of_its_gpus_node(sysfs, kept):
    stay_near(GPU, sysfs)
    assert kept == [(0, {4, 5, 6, 7, 12, 13, 14, 15})]


def test_cores_that_a_container_has_not_are_left_out(sysfs, kept, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 5})
    stay_near(GPU, sysfs)
    assert kept == [(0, {4, 5})]


def test_nothing_is_changed_where_it_would_change_nothing_or_leave_nothing(sysfs, kept, monkeypatch):
    for allowed in ({4, 5}, {0, 1}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        stay_near(GPU, sysfs)
    stay_near(torch.device("cpu"), sysfs)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="older torch")
    )
    stay_near(GPU, sysfs)
    assert kept == []


def test_a_gpu_that_nobody_placed_is_near_to_no_core(sysfs):
    assert cores_near("0000:5e:00.0", sysfs) == cores_near("0000:99:00.0", sysfs) == set()


def test_lists_of_cores_are_read_as_the_kernel_writes_them():
    assert parse_cores("0-2,5,7-8\n") == {0, 1, 2, 5, 7, 8}
    assert parse_cores("\n") == set()
    with pytest.raises(ValueError):
        parse_cores("0-x")

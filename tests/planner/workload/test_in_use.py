"""The memory of other programs on a card: all used memory minus what ranks hold and what this process can free."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import fake_nvml
from parallel_backend.machine.probe import read_topology
from parallel_backend.planner.workload import in_use as memory_in_use
from parallel_backend.planner.workload.in_use import used_by_other_programs
from parallel_backend.planner.workload.rank_memory import GPU_BASE_BYTES

GIB = 2**30


@pytest.fixture
def two_cards(monkeypatch):
    """The two cards of this computer: other programs and ours use 20 and 5 GiB."""
    nvml = fake_nvml.two_4090()
    nvml.boards[0].used_gib, nvml.boards[1].used_gib = 20, 5
    monkeypatch.setattr(memory_in_use, "open_nvml", lambda: nvml)
    monkeypatch.setattr(memory_in_use, "visible_topology", read_topology(nvml).visible)


def test_ours_does_not_count(two_cards, monkeypatch):
    ours = {"cuda:0": 12 * GIB, "cuda:1": 9 * GIB}
    devices = ("cuda:1", "cuda:0", "cuda:7")
    monkeypatch.setattr(memory_in_use, "used_by_ranks", lambda device: ours.get(device, 0))
    assert used_by_other_programs(devices) == (0, 8 * GIB, 0)


def test_ranks_on_the_card_are_ours_with_their_process(two_cards, monkeypatch):
    ranks = (SimpleNamespace(device="cuda:0", weight_bytes=10 * GIB, working_bytes=GIB),)
    group = SimpleNamespace(status=lambda: SimpleNamespace(ranks=ranks))
    monkeypatch.setattr(memory_in_use.pool, "all_sidecars", lambda: (group,))
    others = used_by_other_programs(("cuda:0", "cuda:1"))
    assert others == (9 * GIB - GPU_BASE_BYTES, 5 * GIB)


def test_what_this_process_can_free_gives_way_and_the_rest_counts(two_cards, monkeypatch):
    monkeypatch.setattr(memory_in_use, "FREEABLE", [lambda device: {"cuda:0": 15 * GIB}.get(device, 0)])
    assert used_by_other_programs(("cuda:0", "cuda:1")) == (5 * GIB, 5 * GIB)


def test_nobody_to_ask_means_no_others(two_cards, monkeypatch):
    assert used_by_other_programs(("cpu:0",)) == (0,)
    monkeypatch.setattr(memory_in_use, "open_nvml", lambda: None)
    assert used_by_other_programs(("cuda:0",)) == (0,)

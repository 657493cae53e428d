"""What `auto` chooses on a topology: only what this version runs, and nothing where nothing can be predicted."""

import pytest

import fake_nvml
from jobs import FP8, flux_job, rank_on
from parallel_backend.models.catalog import find_family
from parallel_backend.planner.machine.probe import read_topology
from parallel_backend.planner.machine.topology import Device, Topology
from parallel_backend.strategy import ParallelStrategy


def test_a_flux_file_has_the_work_of_its_family():
    bf16 = flux_job()
    assert bf16.flop / 1e12 == pytest.approx(74.36, abs=0.01)
    assert bf16.model.weight_bytes == pytest.approx(23.8e9)
    assert bf16.model.family.parameters == pytest.approx(find_family("flux1-dev").parameters, rel=0.02)


def test_only_strategies_of_this_version_are_chosen(tmp_path):
    job = flux_job(FP8, prompts=2)
    found = rank_on(read_topology(fake_nvml.l40_two_sockets(), sys_root=tmp_path), job)
    assert found.best.strategy == ParallelStrategy(cfg_degree=2, ulysses_degree=4)
    for entry in found.ranked:
        assert not entry.strategy.violations(job.model.shape, 8)


def test_cards_that_differ_are_noted(tmp_path):
    found = rank_on(read_topology(fake_nvml.mixed_4080_4090(), sys_root=tmp_path), flux_job(FP8))
    assert found.best.strategy.world_size == 2 and "differ" in found.notes[-1]


@pytest.mark.parametrize("devices", [(), (Device(0, "GPU-1", "NVIDIA Mystery 1", 10**10),)])
def test_where_nothing_can_be_predicted_the_rule_is_left_to_decide(devices):
    found = rank_on(Topology(devices), flux_job(FP8))
    assert found.ranked == () and found.notes[0]

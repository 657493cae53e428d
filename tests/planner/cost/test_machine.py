"""What `auto` chooses on a topology: only what this version runs, and nothing where nothing can be predicted."""

import pytest

import fake_nvml
from flux_dev import REQUEST, SHAPE
from parallel_backend.models.catalog import find_family, flux_family
from parallel_backend.models.flux.keys import FLUX_DEV
from parallel_backend.planner.cost.machine import choose_here, flux_work
from parallel_backend.planner.history.records import strategy_of
from parallel_backend.planner.machine.probe import read_topology
from parallel_backend.planner.machine.topology import Device, Topology
from parallel_backend.strategy import ParallelStrategy


def test_a_flux_file_has_the_work_of_its_family():
    bf16 = flux_work(FLUX_DEV, 23_800_000_000, **REQUEST)
    assert bf16.flop / 1e12 == pytest.approx(74.36, abs=0.01)
    assert bf16.weight_bytes == pytest.approx(23.8e9)
    assert flux_family(3072, 24, 19, 38).parameters == pytest.approx(
        find_family("flux1-dev").parameters, rel=0.02
    )


def test_only_strategies_of_this_version_are_chosen(tmp_path):
    work = flux_work(FLUX_DEV, 11_900_000_000, **{**REQUEST, "has_cfg": True})
    topology = read_topology(fake_nvml.l40_two_sockets(), sys_root=tmp_path)
    found = choose_here(work, SHAPE, topology)
    assert found.choice.best.candidate.strategy == ParallelStrategy(cfg_degree=2, ulysses_degree=4)
    for entry in found.choice.ranked:
        assert not strategy_of(entry.candidate).violations(SHAPE, 8)


def test_cards_that_differ_are_noted(tmp_path):
    work = flux_work(FLUX_DEV, 11_900_000_000, **REQUEST)
    found = choose_here(work, SHAPE, read_topology(fake_nvml.mixed_4080_4090(), sys_root=tmp_path))
    assert found.choice.best.candidate.strategy.world_size == 2 and "differ" in found.notes[-1]


@pytest.mark.parametrize("devices", [(), (Device(0, "GPU-1", "NVIDIA Mystery 1", 10**10),)])
def test_where_nothing_can_be_predicted_the_rule_is_left_to_decide(devices):
    found = choose_here(flux_work(FLUX_DEV, 11_900_000_000, **REQUEST), SHAPE, Topology(devices))
    assert found.choice is None and found.notes[0]

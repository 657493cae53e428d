"""Measured links in the cost model: what was measured is what is predicted, and it changes the choice."""

import pytest

import fake_nvml
from flux_dev import REQUEST, SHAPE
from parallel_backend.models.flux.keys import FLUX_DEV
from parallel_backend.planner.cost.communication import Candidate, unit_load
from parallel_backend.planner.cost.machine import choose_here, flux_work, link_of, model_machine
from parallel_backend.planner.cost.measured_links import measured_constants
from parallel_backend.planner.cost.model import DEFAULT, predict
from parallel_backend.planner.machine.cards import LINKS
from parallel_backend.planner.machine.probe import read_topology
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.calibration import ALL_TO_ALL, POINT_TO_POINT, SIZES, Calibration, Transfer

ULYSSES = ParallelStrategy(ulysses_degree=4)


def calibrations(strategy, rate, collective_s=30e-6, kinds=(ALL_TO_ALL, POINT_TO_POINT)):
    transfers = tuple(Transfer(kind, size, size, size / rate) for kind in kinds for size in SIZES)
    return [
        Calibration(rank, "nccl", strategy, transfers, collective_s, 1.0)
        for rank in range(strategy.world_size)
    ]


@pytest.mark.parametrize("link", ["nvlink4", "pcie4", "pcie4-nop2p", "nvlink-pairs"])
@pytest.mark.parametrize("rate", [1e9, 12e9])
def test_the_model_predicts_what_was_measured(link, rate):
    link = LINKS[link]
    found = measured_constants(calibrations(ULYSSES, rate), link)
    reached = getattr(found, f"reached_{link.kind}")
    seconds = link.seconds(unit_load(link, ULYSSES, "ulysses"), reached, found.reached_outside)
    assert 1 / seconds == pytest.approx(rate)
    assert found.call_s == 30e-6


def test_a_ring_is_used_where_no_all_to_all_was_measured():
    link, ring = LINKS["pcie4"], ParallelStrategy(ring_degree=2)
    found = measured_constants(calibrations(ring, 5e9, kinds=(POINT_TO_POINT,)), link)
    assert 1 / link.seconds(unit_load(link, ring, "ring"), found.reached_pcie, found.reached_outside) == (
        pytest.approx(5e9)
    )
    nothing = measured_constants(calibrations(ring, 5e9, kinds=()), link)
    assert nothing == DEFAULT.replace(call_s=30e-6)
    assert measured_constants(calibrations(ParallelStrategy(), 1.0), link) == DEFAULT


def test_a_measurement_beyond_belief_is_bounded():
    link = LINKS["nvlink4"]
    assert measured_constants(calibrations(ULYSSES, 1.0), link).reached_nvlink == 1e-4
    assert measured_constants(calibrations(ULYSSES, 1e15), link).reached_nvlink == 2.0


def test_links_that_turn_out_slow_change_the_choice(tmp_path):
    """Two 4090s whose PCIe slots run at a fraction of their width: one card is faster, and the reason says so."""
    box = read_topology(fake_nvml.two_4090(), sys_root=tmp_path)
    work = flux_work(FLUX_DEV, 11_900_000_000, **{**REQUEST, "width": 512, "height": 512})
    assert choose_here(work, SHAPE, box).choice.best.candidate.strategy.world_size == 2
    slow = calibrations(ParallelStrategy(ulysses_degree=2), 0.2e9)
    choice = choose_here(work, SHAPE, box, calibrations=slow, one_gpu_s=0.25).choice
    assert choice.best.candidate == Candidate()
    assert choice.reason.startswith("one GPU on 1 of 2 GPUs")
    assert "limited by the links between the GPUs" in choice.reason


def test_fast_links_are_trusted_too(tmp_path):
    box = read_topology(fake_nvml.l40_two_sockets(), sys_root=tmp_path)
    work = flux_work(FLUX_DEV, 11_900_000_000, **REQUEST)
    machine, _ = model_machine(box)
    rule = Candidate(ParallelStrategy(ulysses_degree=8))
    before = predict(work, rule, machine)
    constants = measured_constants(calibrations(rule.strategy, 20e9), link_of(box, machine.card))
    assert predict(work, rule, machine, constants).communication_s < before.communication_s

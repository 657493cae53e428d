"""Plans for machines as NVML describes them: the strategy and its reason in words, for common jobs."""

import pytest

import fake_nvml
from jobs import BF16, FP8, flux_job
from parallel_backend.machine import device_shares
from parallel_backend.machine.local import LocalMachine
from parallel_backend.machine.probe import read_topology
from parallel_backend.planner.history import MeasurementHistory
from parallel_backend.planner.plan import plan_execution
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.strategy import ParallelStrategy


@pytest.fixture
def planned(monkeypatch):
    def plan(box, job):
        monkeypatch.setattr(device_shares, "visible_topology", lambda: box)
        devices = tuple(f"cuda:{i}" for i in range(len(box.devices)))
        history = MeasurementHistory(devices, box)
        return plan_execution(StrategySettings(), job, LocalMachine(devices), history)

    return plan


@pytest.mark.parametrize(
    ("shape", "weights", "prompts", "strategy"),
    [
        (fake_nvml.h100_nvswitch, BF16, 2, ParallelStrategy(cfg_degree=2, ulysses_degree=4)),
        (fake_nvml.two_4090, FP8, 1, ParallelStrategy(ulysses_degree=2)),
        (fake_nvml.two_4090, FP8, 2, ParallelStrategy(cfg_degree=2)),
    ],
)
def test_each_box_has_its_choice_and_says_why(shape, weights, prompts, strategy, tmp_path, planned):
    box = read_topology(shape(), sys_root=tmp_path)
    found = planned(box, flux_job(weights, prompts=prompts))
    best, reason = found.candidates[0], found.reason
    assert best.strategy == found.strategy == strategy and best.fits and best.step_s is None
    assert best.memory_bytes == found.memory.private_bytes <= 0.94 * min(d.memory for d in box.devices)
    assert ParallelStrategy() in [c.strategy for c in found.candidates]
    assert found.devices == tuple(f"cuda:{i}" for i in range(strategy.world_size))
    assert strategy.describe() in reason and "\n" not in reason
    assert "measured" not in reason and "predicted" not in reason


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA Mystery 1"])  # one has no data sheet
def test_weights_that_fill_a_card_are_split_over_both(name, tmp_path, planned):
    nvml = fake_nvml.two_4090()
    for board in nvml.boards:
        board.name = name
    found = planned(read_topology(nvml, sys_root=tmp_path), flux_job(BF16))
    best = found.candidates[0]
    assert best.fits and best.strategy == found.strategy and best.strategy.world_size == 2
    assert best.strategy.tensor_degree == 2 or best.strategy.shard_weights
    assert "the rule, as far as memory goes" in found.reason
    unfit = [c.strategy for c in found.candidates if not c.fits]
    assert ParallelStrategy(ulysses_degree=2) in unfit and ParallelStrategy() in unfit


def test_cards_that_differ_and_slices_of_one_gpu_are_noted(tmp_path, planned):
    job = flux_job(FP8)
    mixed = planned(read_topology(fake_nvml.mixed_4080_4090(), sys_root=tmp_path), job)
    assert any("the smallest sets the pace" in note for note in mixed.notes)
    sliced = planned(read_topology(fake_nvml.mig(), sys_root=tmp_path), job)
    assert any("NCCL does not join MIG slices of one GPU" in note for note in sliced.notes)
    assert sliced.devices == ("cuda:0",)


def test_slices_of_two_gpus_work_together(tmp_path, planned):
    nvml = fake_nvml.mig()
    for board in nvml.boards:
        board.slices = [("3g.40gb", 39.5)]
    found = planned(read_topology(nvml, sys_root=tmp_path), flux_job(FP8))
    assert found.strategy.world_size == 2


def test_one_card_of_a_large_box_is_one_card(tmp_path, planned):
    box = read_topology(fake_nvml.h100_nvswitch(), sys_root=tmp_path)
    found = planned(box.select([box.devices[5].uuid]), flux_job(BF16))
    assert found.strategy == ParallelStrategy() and found.reason == "one device is selected"

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

# (machine, bytes of the weights, True with CFG, expected strategy: None if the weights do not fit on one card)
CASES = [
    (fake_nvml.h100_nvswitch, BF16, True, ParallelStrategy(cfg_degree=2, ulysses_degree=4)),
    (fake_nvml.two_4090, FP8, False, ParallelStrategy(ulysses_degree=2)),
    (fake_nvml.two_4090, FP8, True, ParallelStrategy(cfg_degree=2)),
    (fake_nvml.two_4090, BF16, False, None),
    (fake_nvml.mig, FP8, False, ParallelStrategy()),
]


@pytest.fixture
def planned(monkeypatch):
    def plan(box, job):
        monkeypatch.setattr(device_shares, "visible_topology", lambda: box)
        devices = tuple(f"cuda:{i}" for i in range(len(box.devices)))
        history = MeasurementHistory(devices, box)
        return plan_execution(StrategySettings(), job, LocalMachine(devices), history)

    return plan


@pytest.mark.parametrize(
    ("shape", "weights", "has_cfg", "strategy"),
    CASES,
    ids=[f"{c[0].__name__}-{'bf16' if c[1] == BF16 else 'fp8'}{'-cfg' if c[2] else ''}" for c in CASES],
)
def test_each_box_has_its_choice_and_says_why(shape, weights, has_cfg, strategy, tmp_path, planned):
    box = read_topology(shape(), sys_root=tmp_path)
    job = flux_job(weights, prompts=2 if has_cfg else 1)
    found = planned(box, job)
    best, reason = found.candidates[0], found.reason
    assert best.fits and best.strategy.exact and best.strategy == found.strategy
    assert best.memory_bytes == found.memory.private_bytes <= 0.94 * min(d.memory for d in box.devices)
    assert best.step_s is None and ParallelStrategy() in [c.strategy for c in found.candidates]
    if strategy is None:
        # 24 GB of weights on 24 GB cards: the chosen strategy splits them over both.
        assert best.strategy.world_size == 2
        assert best.strategy.tensor_degree == 2 or best.strategy.shard_weights
        assert "the rule, as far as memory goes" in reason
        unfit = [c.strategy for c in found.candidates if not c.fits]
        assert ParallelStrategy(ulysses_degree=2) in unfit and ParallelStrategy() in unfit
    else:
        assert best.strategy == strategy
    assert found.devices == tuple(f"cuda:{i}" for i in range(best.strategy.world_size))
    assert best.strategy.describe() in reason or reason == "one device is selected"
    assert reason.count("\n") == 0 and "measured" not in reason and "predicted" not in reason
    assert not any(c.strategy.violations(job.model.shape, len(found.devices)) for c in found.candidates[:1])


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


def test_a_card_without_a_data_sheet_is_planned_by_its_memory(tmp_path, planned):
    nvml = fake_nvml.two_4090()
    for board in nvml.boards:
        board.name = "NVIDIA Mystery 1"
    found = planned(read_topology(nvml, sys_root=tmp_path), flux_job(BF16))
    assert found.candidates[0].fits and found.strategy.world_size == 2


def test_one_card_of_a_large_box_is_one_card(tmp_path, planned):
    box = read_topology(fake_nvml.h100_nvswitch(), sys_root=tmp_path)
    found = planned(box.select([box.devices[5].uuid]), flux_job(BF16))
    assert found.strategy == ParallelStrategy() and found.reason == "one device is selected"

"""Boxes as NVML describes them, from its answers to the choice and its reason in words, for the jobs people have."""

import pytest

import fake_nvml
from jobs import BF16, FP8, flux_job, rank_on
from parallel_backend.planner.machine.probe import read_topology
from parallel_backend.strategy import ParallelStrategy

# (box, bytes of the weights, CFG, the choice, what the reason must say)
CASES = [
    (
        fake_nvml.h100_nvswitch,
        BF16,
        False,
        ParallelStrategy(ulysses_degree=8),
        ["Ulysses 8 on 8 of 8 GPUs (h100, NVSWITCH 450 GB/s)", "launching kernels on the CPU"],
    ),
    (
        fake_nvml.h100_nvswitch,
        BF16,
        True,
        ParallelStrategy(cfg_degree=2, ulysses_degree=4),
        ["CFG 2 × Ulysses 4 on 8 of 8 GPUs", "as the rule says"],
    ),
    (
        fake_nvml.two_4090,
        FP8,
        False,
        ParallelStrategy(ulysses_degree=2),
        ["PCIe 32 GB/s without peer access", "and the links between the GPUs", "one device 0.8 s"],
    ),
    (
        fake_nvml.two_4090,
        FP8,
        True,
        ParallelStrategy(cfg_degree=2),
        ["CFG 2 on 2 of 2 GPUs", "what limits it is arithmetic;"],
    ),
    (fake_nvml.two_4090, BF16, False, None, ["do not fit in 24.2 GB a GPU"]),
    (
        fake_nvml.a6000_pairs,
        BF16,
        False,
        ParallelStrategy(ulysses_degree=4),
        ["NVLink in groups of 2, else PCIe", "Ulysses 4 on 4 of 4 GPUs"],
    ),
    (
        fake_nvml.a6000_pairs,
        BF16,
        True,
        ParallelStrategy(cfg_degree=2, ulysses_degree=2),
        ["CFG 2 × Ulysses 2 on 4 of 4 GPUs", "what limits it is arithmetic;"],
    ),
    (
        fake_nvml.l40_two_sockets,
        FP8,
        False,
        ParallelStrategy(ulysses_degree=8),
        ["PCIe 32 GB/s (SYS)", "what limits it is the links between the GPUs"],
    ),
    (
        fake_nvml.l40_two_sockets,
        FP8,
        True,
        ParallelStrategy(cfg_degree=2, ulysses_degree=4),
        ["CFG 2 × Ulysses 4 on 8 of 8 GPUs"],
    ),
    (
        fake_nvml.mixed_4080_4090,
        FP8,
        False,
        ParallelStrategy(ulysses_degree=2),
        ["rtx4080", "Ulysses 2 on 2 of 2 GPUs"],
    ),
    (fake_nvml.mig, FP8, False, ParallelStrategy(), ["one GPU on 1 of 1 GPUs (h100"]),
    (fake_nvml.mig, FP8, True, ParallelStrategy(), ["one GPU on 1 of 1 GPUs (h100"]),
]


@pytest.mark.parametrize(
    ("shape", "weights", "has_cfg", "strategy", "said"),
    CASES,
    ids=[f"{c[0].__name__}-{'bf16' if c[1] == BF16 else 'fp8'}{'-cfg' if c[2] else ''}" for c in CASES],
)
def test_each_box_has_its_choice_and_says_why(shape, weights, has_cfg, strategy, said, tmp_path):
    box = read_topology(shape(), sys_root=tmp_path)
    found = rank_on(box, flux_job(weights, prompts=2 if has_cfg else 1))
    best = found.best
    assert best.fits and best.strategy.exact
    if strategy is None:
        # 24 GB of weights on 24 GB cards: what is chosen splits them over both.
        assert best.strategy.world_size == 2
        assert best.strategy.tensor_degree == 2 or best.strategy.shard_weights
    else:
        assert best.strategy == strategy
    for words in [*said, "predicted, ± 60%", "nothing was measured yet"]:
        assert words in found.reason
    assert found.reason.count("\n") == 0  # one paragraph


def test_cards_that_differ_and_slices_of_one_gpu_are_noted(tmp_path):
    job = flux_job(FP8)
    mixed = rank_on(read_topology(fake_nvml.mixed_4080_4090(), sys_root=tmp_path), job)
    assert any("all wait for the rtx4080" in note for note in mixed.notes)
    sliced = rank_on(read_topology(fake_nvml.mig(), sys_root=tmp_path), job)
    assert any("Slices of one GPU cannot work together" in note for note in sliced.notes)


def test_slices_of_two_gpus_work_together(tmp_path):
    nvml = fake_nvml.mig()
    for board in nvml.boards:
        board.slices = [("3g.40gb", 39.5)]
    found = rank_on(read_topology(nvml, sys_root=tmp_path), flux_job(FP8))
    assert found.best.strategy.world_size == 2
    assert "PCIe 64 GB/s without peer access" in found.reason


def test_one_card_of_a_large_box_is_one_card(tmp_path):
    box = read_topology(fake_nvml.h100_nvswitch(), sys_root=tmp_path)
    found = rank_on(box.select([box.devices[5].uuid]), flux_job(BF16))
    assert found.best.strategy == ParallelStrategy()
    assert found.reason.startswith("one GPU on 1 of 1 GPUs (h100, one device)")

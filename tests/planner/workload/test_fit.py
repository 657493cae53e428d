"""A job that cannot fit is refused before anything starts, with the smallest change that would make it fit."""

from __future__ import annotations

import pytest

from jobs import flux_job
from parallel_backend.errors import StrategyError
from parallel_backend.planner.workload.fit import Capacity, MemoryCheck, check_capacity, fits
from parallel_backend.strategy import ParallelStrategy

GIB = 2**30
ULYSSES = ParallelStrategy(ulysses_degree=2)


def plan(strategy=ULYSSES, devices=None, **job) -> MemoryCheck:
    names = devices or tuple(f"cuda:{i}" for i in range(strategy.world_size))
    return MemoryCheck(flux_job(**job), strategy, names)


def gib(*sizes: float, used_elsewhere: tuple[float, ...] = ()) -> Capacity:
    return Capacity(
        tuple(int(size * GIB) for size in sizes), tuple(int(size * GIB) for size in used_elsewhere)
    )


def refusal(size_gib: float, **what) -> str:
    subject = plan(**what)
    with pytest.raises(StrategyError) as refused:
        check_capacity(subject, gib(*(size_gib,) * len(subject.devices)))
    assert not fits(subject, gib(*(size_gib,) * len(subject.devices)))
    return str(refused.value)


def test_what_fits_gives_its_fullest_rank():
    assert check_capacity(plan(), gib(48, 48)).private_bytes > 22 * GIB
    assert check_capacity(plan(), gib(0, 0)).private_bytes > 0, "nobody could measure them"


def test_two_small_cards_are_told_to_share_the_weights():
    said = refusal(16)
    assert "Ulysses 2 needs about" in said and "on cuda:0, which has 16.0 GiB" in said
    assert "smallest change that would fit: shard_weights on (same picture)" in said


def test_one_card_is_told_to_offload_and_then_to_use_half_precision():
    assert "offload_weights on (same picture, slower)" in refusal(16, strategy=ParallelStrategy())
    stages = ParallelStrategy(pipefusion_degree=2)
    assert "weight_dtype float8_e4m3fn" in refusal(12, strategy=stages)


def test_a_batch_is_told_to_be_smaller_and_an_image_too():
    fp8 = {"weight_dtype": "float8_e4m3fn", "strategy": ParallelStrategy(pipefusion_degree=2)}
    assert "a batch of 2 instead of 4" in refusal(14, batch=4, **fp8)
    assert "an image of 1536x1536 instead of 2048x2048" in refusal(14, width=2048, height=2048, **fp8)


def test_what_no_change_saves_is_told_so_and_the_smallest_card_counts():
    assert "none of this version; use a smaller model" in refusal(1)
    with pytest.raises(StrategyError, match=r"on cuda:1, which has 12\.0 GiB"):
        check_capacity(plan(), gib(80, 12))


def test_what_other_programs_hold_now_is_not_there_to_take():
    assert fits(plan(), gib(48, 48, used_elsewhere=(0, 10)))
    with pytest.raises(
        StrategyError,
        match=r"on cuda:1, which has 48\.0 GiB, of which 25\.0 are used by other programs or reserved for them\.",
    ) as refused:
        check_capacity(plan(), gib(48, 48, used_elsewhere=(0, 25)))
    assert "smallest change that would fit: shard_weights on" in str(refused.value)


def test_ranks_on_the_cpu_share_the_computers_memory():
    cpus = ("cpu:0", "cpu:1")
    assert check_capacity(plan(devices=cpus), gib(64)).mapped > 20 * GIB
    with pytest.raises(
        StrategyError, match=r"Processes on the CPU \(2\) need about .* this computer has 2.00 GiB"
    ):
        check_capacity(plan(devices=cpus, width=4096, height=4096), gib(2))

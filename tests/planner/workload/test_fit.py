"""A job that cannot fit is refused before anything starts, with the smallest change that would make it fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobs import flux_job
from parallel_backend.errors import StrategyError
from parallel_backend.layout import RankCoordinates
from parallel_backend.planner.workload.fit import Capacity, MemoryCheck, check_capacity, cut_by_memory, fits
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


def test_stages_that_do_not_fit_with_equal_numbers_of_blocks_are_cut_by_memory():
    stages = plan(ParallelStrategy(pipefusion_degree=2))
    assert not fits(stages, gib(16, 16))
    moved = cut_by_memory(stages, gib(16, 16))
    assert moved.device_shares == (20.0, 37.0), "Flux.1's first blocks are the larger ones"
    assert fits(replace(stages, strategy=moved), gib(16, 16))
    assert cut_by_memory(stages, gib(20, 20), share=0.8) == moved
    assert cut_by_memory(stages, gib(12, 24)).device_shares[0] < 20, "a smaller device computes fewer blocks"
    in_use = gib(24, 24, used_elsewhere=(8, 0))
    assert fits(replace(stages, strategy=cut_by_memory(stages, in_use)), in_use)
    assert cut_by_memory(stages, gib(24, 24)).device_shares == (28.0, 29.0), "no more than needed"
    assert cut_by_memory(stages, gib(14, 14)) is None, "no cut fits"
    assert cut_by_memory(replace(stages, devices=("cpu:0", "cpu:1")), gib(1, 1)) is None


@pytest.mark.parametrize("strategy", [
    ParallelStrategy(pipefusion_degree=4, ulysses_degree=2),
    ParallelStrategy(cfg_degree=2, pipefusion_degree=4),
])  # fmt: skip
def test_all_ranks_of_a_stage_share_its_cut(strategy):
    stages = plan(strategy, prompts=2)
    room = gib(*(10.5,) * 8)
    assert not fits(stages, room)
    moved = cut_by_memory(stages, room)
    assert fits(replace(stages, strategy=moved), room)
    places = [RankCoordinates.of(moved, rank) for rank in range(8)]
    blocks = {(place.stage, place.blocks(moved, 57)) for place in places}
    assert len(blocks) == 4 and sum(len(its) for _, its in blocks) == 57
    assert len(set(places[0].sequence_shares(moved))) == 1, "tokens are still shared out evenly"

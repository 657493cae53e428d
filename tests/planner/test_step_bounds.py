"""FLOPs and bytes of a step against closed forms, and its lower bound against what holds on any hardware."""

from dataclasses import replace

import pytest

from jobs import FP8, flux_file, flux_job
from parallel_backend.errors import RequestError
from parallel_backend.machine.cards import CARDS, find_card
from parallel_backend.models.diffusers.keys import FLUX_DEV
from parallel_backend.planner.step_bounds import bytes_sent, compute_share, lower_bound, step_by_links
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.planner.workload.workload import Job
from parallel_backend.strategy import ParallelStrategy

FLUX = flux_job()
TOKENS, HIDDEN, BLOCKS = 4096 + 512, 3072, 57


def _strategy(**degrees):
    return ParallelStrategy(**{f"{name}_degree": value for name, value in degrees.items()})


def _sent(job, **degrees):
    return bytes_sent(job, _strategy(**degrees))


def test_flux_takes_74_teraflop_a_step():
    linear, attention = FLUX.flop_parts
    assert linear / 1e12 == pytest.approx(59.49, abs=0.01)
    assert attention / 1e12 == pytest.approx(14.87, abs=0.01)
    assert FLUX.flop / 1e12 == pytest.approx(74.36, abs=0.01)
    assert linear == 2 * BLOCKS * 12 * HIDDEN**2 * TOKENS
    assert attention == 4 * BLOCKS * HIDDEN * TOKENS**2


def test_cfg_and_batch_multiply_the_work():
    assert replace(FLUX, batch=3, prompts=2).flop == 6 * FLUX.flop


def test_the_forms_are_those_of_the_engine():
    """Engine tests compare tests/closed_forms/traffic.py with counted bytes. Here: bf16, without the last gathers."""
    traffic = pytest.importorskip("tests.closed_forms.traffic")
    degrees = ((2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 4))
    strategies = [ParallelStrategy(ulysses_degree=ulysses, ring_degree=ring) for ulysses, ring in degrees]
    for strategy in (*strategies, strategies[0].replace(sends_tokens=True)):
        counted = traffic.expected_bytes(
            strategy, 0, rows=1, text=512, image=4096, layers=BLOCKS, hidden=HIDDEN, latent_elements=0,
            patch_channels=0, element_size=2,
        )  # fmt: skip
        assert bytes_sent(FLUX, strategy) == pytest.approx(counted)


def test_tensor_parallelism_reduces_twice_in_a_double_and_once_in_a_single_block():
    assert _sent(FLUX, tensor=4) == pytest.approx((2 * 19 + 38) * 2 * 3 / 4 * TOKENS * HIDDEN * 2)


def test_pipefusion_sends_activations_once_and_sharding_sends_weights():
    assert _sent(FLUX, pipefusion=4) == TOKENS * HIDDEN * 2
    sharded = ParallelStrategy(ulysses_degree=4, shard_weights=True)
    weights = bytes_sent(FLUX, sharded) - _sent(FLUX, ulysses=4)
    assert weights == pytest.approx(FLUX.model.weight_bytes * 3 / 4)


def test_cfg_moves_next_to_nothing():
    job = replace(FLUX, prompts=2)
    assert _sent(job, cfg=2) < _sent(job, ulysses=2) / 100


def test_a_step_by_the_links_is_the_busiest_device_s_share_and_exchanges_that_nothing_hides():
    sent_s, waits_s = bytes_sent(FLUX, _strategy(ulysses=2)) / 8e9, 2 * BLOCKS * 3e-5
    assert step_by_links(FLUX, _strategy(ulysses=2), 1.0, 8e9, 3e-5) == pytest.approx(0.5 + sent_s + waits_s)
    job = replace(FLUX, prompts=2)
    assert step_by_links(job, _strategy(cfg=2), 1.0, 8e9, 3e-5) == pytest.approx(0.5, abs=1e-3)


def test_what_does_not_divide_costs_the_busiest_rank():
    flux3 = replace(FLUX, batch=3)
    assert compute_share(flux3, _strategy(data=2)) == pytest.approx(2 / 3)
    thirty_heads = Job(CheckpointModel(flux_file(dims=replace(FLUX_DEV, heads=30))))
    assert compute_share(thirty_heads, _strategy(ulysses=4)) == pytest.approx(32 / 30 / 4, rel=1e-3)
    assert compute_share(FLUX, _strategy(pipefusion=4)) == pytest.approx(15 / 57)


def test_no_step_goes_below_the_cards_peak_or_its_memory():
    card, small = CARDS["h100"], flux_job(width=64, height=64, text=1)
    assert lower_bound(FLUX, ParallelStrategy(), card) == FLUX.flop / 989e12
    assert lower_bound(small, ParallelStrategy(), card) == FLUX.model.weight_bytes / 3350e9
    # Weights in fp8 may be multiplied in fp8, at twice the rate.
    assert lower_bound(flux_job(FP8), ParallelStrategy(), card) == FLUX.flop / 2 / 989e12


@pytest.mark.parametrize(
    ("written", "card"),
    [
        ("rtx4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("AMD Instinct MI300X", "mi300x"),
        ("L40S", "l40s"),
        ("Tesla T4", "t4"),
    ],
)
def test_cards_are_known_as_the_driver_writes_them(written, card):
    assert find_card(written).name == card


@pytest.mark.parametrize("name", ["RTX 9999", "A1000", "NVIDIA GeForce RTX 4090 Laptop GPU", ""])
def test_an_unknown_card_is_refused_with_the_known_ones(name):
    with pytest.raises(RequestError, match="rtx4090"):
        find_card(name)

"""The ranking: the rule unless something promises clearly more, memory first, exact first, and reasons in words."""

from dataclasses import replace

import pytest

import fake_nvml
from jobs import catalog_job
from parallel_backend.errors import StrategyError
from parallel_backend.options import ComputeOptions
from parallel_backend.planner.cost.machine import model_machine
from parallel_backend.planner.cost.model import Machine
from parallel_backend.planner.machine.cards import CARDS, LINKS, find_link
from parallel_backend.planner.machine.probe import read_topology
from parallel_backend.planner.ranking import Evidence, enumerate_candidates, rank_candidates, rule_key
from parallel_backend.strategy import ParallelStrategy

FLUX, COMPILED = catalog_job(), catalog_job(compiled=True)
FLUX_FP8 = catalog_job(storage=1.0)
ONE = ParallelStrategy()


def _strategy(**degrees):
    return ParallelStrategy(**{f"{name}_degree": value for name, value in degrees.items()})


def _machine(card, count, link=None, memory=0.0):
    card = CARDS[card]
    return Machine(card, LINKS[link] if link else find_link("pcie", card), count, memory)


def _rank(job, machine, *evidence, **options):
    return rank_candidates(enumerate_candidates(job, machine.count), job, machine, *evidence, **options)


def test_every_enumerated_strategy_divides_as_it_must():
    found = enumerate_candidates(catalog_job(prompts=2, batch=2), 8)
    assert len(set(found)) == len(found) and ONE in found
    for candidate in found:
        s = candidate
        assert s.world_size <= 8 and s.cfg_degree <= 2 and s.data_degree <= 2
        assert 24 % (s.ulysses_degree * s.tensor_degree) == 0
    assert {c.world_size for c in found} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert not any(c.ulysses_degree == 5 for c in found)


def test_without_cfg_nothing_is_split_by_prompt():
    assert all(c.cfg_degree == 1 for c in enumerate_candidates(FLUX, 4))


def test_a_unet_is_split_by_rows_only():
    job = catalog_job("sdxl", prompts=2, batch=2)
    assert {c.describe() for c in enumerate_candidates(job, 4)} == {
        "one device",
        "CFG 2",
        "data 2",
        "data 2 × CFG 2",
    }


def test_the_rule_is_cfg_then_ulysses_then_ring_on_all_devices():
    ordered = sorted(enumerate_candidates(catalog_job(prompts=2), 8), key=rule_key, reverse=True)
    assert ordered[0] == ParallelStrategy(cfg_degree=2, ulysses_degree=4)
    five = max(enumerate_candidates(FLUX, 5), key=rule_key)
    assert five == ParallelStrategy(ring_degree=5)


BOXES = {
    "eight H100": (fake_nvml.h100_nvswitch, FLUX, ParallelStrategy(ulysses_degree=8)),
    "two 4090, bf16 does not fit unsplit": (fake_nvml.two_4090, FLUX, None),
    "two 4090, fp8": (fake_nvml.two_4090, FLUX_FP8, ParallelStrategy(ulysses_degree=2)),
    "four A6000": (fake_nvml.a6000_pairs, FLUX, ParallelStrategy(ulysses_degree=4)),
    "mixed 4090 and 4080, fp8": (fake_nvml.mixed_4080_4090, FLUX_FP8, ParallelStrategy(ulysses_degree=2)),
    "MIG slices, fp8": (fake_nvml.mig, FLUX_FP8, None),
}


@pytest.mark.parametrize("name", BOXES)
def test_a_ranking_for_each_box(name, tmp_path):
    shape, job, expected = BOXES[name]
    machine, _ = model_machine(read_topology(shape(), sys_root=tmp_path))
    ranking = _rank(replace(job, model=replace(job.model, compute_options=ComputeOptions("blocks"))), machine)
    best = ranking.best
    assert best.fits and best.strategy.exact
    assert best.memory_bytes <= machine.usable
    if expected:
        assert best.strategy == expected
    assert (
        machine.card.name in ranking.reason and "predicted" in ranking.reason and "limits" in ranking.reason
    )


def test_over_two_sockets_the_links_are_named_and_cfg_keeps_each_half_in_its_socket(tmp_path):
    machine, _ = model_machine(read_topology(fake_nvml.l40_two_sockets(), sys_root=tmp_path))
    ranking = _rank(COMPILED, machine)
    four = next(e for e in ranking.ranked if e.strategy == _strategy(ulysses=4))
    assert "links" in ranking.reason and four.seconds < 1.5 * ranking.best.seconds
    with_cfg = _rank(catalog_job(compiled=True, prompts=2), machine)
    assert with_cfg.best.strategy == _strategy(cfg=2, ulysses=4)


def test_what_does_not_fit_is_never_chosen_and_says_how_much_it_needs():
    machine = _machine("rtx4090", 4)
    ranking = _rank(FLUX, machine)
    assert ranking.best.fits
    unfit = [e for e in ranking.ranked if not e.fits]
    assert _strategy(ulysses=4) in [e.strategy for e in unfit]
    assert all(e.memory_bytes > machine.usable and "does not fit" in e.reason for e in unfit)
    assert ranking.ranked.index(unfit[0]) == len(ranking.ranked) - len(unfit)


def test_when_nothing_fits_it_says_so_and_names_a_remedy():
    machine = _machine("rtx4090", 2, memory=4e9)
    ranking = _rank(FLUX, machine, approximation="never")
    assert (
        not ranking.best.fits and "nothing is predicted to fit" in ranking.reason and "fp8" in ranking.reason
    )


def test_pipefusion_only_when_nothing_exact_fits():
    exact, pipe = _strategy(ulysses=4), _strategy(pipefusion=4)
    roomy, small = _machine("l40", 4), _machine("l40", 4, memory=12e9)
    assert rank_candidates([exact, pipe], FLUX, roomy).best.strategy == exact
    chosen = rank_candidates([exact, pipe], FLUX, small)
    assert chosen.best.strategy == pipe and "nothing exact fits" in chosen.reason
    assert not rank_candidates([exact, pipe], FLUX, small, approximation="never").best.fits
    with pytest.raises(StrategyError, match="approximation is set to never"):
        rank_candidates([pipe], FLUX, roomy, approximation="never")


def test_pipefusion_for_speed_needs_permission_and_measured_links():
    machine = _machine("rtx4090", 8, memory=40e9)
    candidates = [_strategy(ulysses=8), _strategy(pipefusion=8), ONE]
    asked = {"approximation": "allowed"}
    assert rank_candidates(candidates, COMPILED, machine).best.strategy.exact
    assert rank_candidates(candidates, COMPILED, machine, **asked).best.strategy.exact
    allowed = rank_candidates(candidates, COMPILED, machine, Evidence(links_measured=True), **asked)
    assert allowed.best.strategy == _strategy(pipefusion=8)
    told = rank_candidates(candidates, COMPILED, machine).reason
    assert "would be faster but is approximate" in told


def test_pipefusion_is_not_taken_for_speed_on_fast_links():
    machine = _machine("a100", 8, "nvlink3")
    job = catalog_job("pixart", prompts=2, steps=20)
    ranking = _rank(job, machine, Evidence(links_measured=True), approximation="allowed")
    assert ranking.best.strategy == _strategy(cfg=2, ulysses=4)


def test_the_rule_stands_unless_more_than_ten_percent_are_promised():
    machine = _machine("h100", 2, "nvlink4")
    rule, other = _strategy(ulysses=2), _strategy(ring=2)
    predicted = {e.strategy: e.seconds for e in rank_candidates([rule, other], COMPILED, machine).ranked}
    assert predicted[other] < predicted[rule] < 1.1 * predicted[other]
    assert rank_candidates([rule, other], COMPILED, machine).best.strategy == rule


def test_a_measurement_outranks_the_prediction_and_the_rule():
    machine = _machine("h100", 2, "nvlink4")
    rule, other = _strategy(ulysses=2), _strategy(ring=2)
    ranking = rank_candidates([rule, other, ONE], FLUX, machine, Evidence({rule: 3.0, other: 2.7, ONE: 4.9}))
    assert ranking.best.strategy == other and ranking.best.measured
    assert "measured" in ranking.reason and "3 of these were measured" in ranking.reason


def test_one_gpu_when_that_is_faster():
    machine = _machine("rtx4090", 2)
    rule = _strategy(ulysses=2)
    measured = rank_candidates([rule, ONE], FLUX_FP8, machine, Evidence({rule: 30.0, ONE: 22.0}))
    assert measured.best.strategy == ONE and measured.reason.startswith("one GPU on 1 of 2")
    # Small job on a slow link: the collectives alone take longer than the step.
    small = catalog_job("pixart", compiled=True, width=256, height=256)
    predicted = rank_candidates([rule, ONE], small, machine)
    assert predicted.best.strategy == ONE


def test_measurements_also_scale_what_was_not_measured():
    machine = _machine("h100", 4, "nvlink4")
    rule, other = _strategy(ulysses=4), _strategy(ring=4)
    plain = {e.strategy: e.seconds for e in rank_candidates([rule, other], FLUX, machine).ranked}
    scaled = rank_candidates([rule, other], FLUX, machine, Evidence({rule: 3 * plain[rule]}))
    entry = next(e for e in scaled.ranked if e.strategy == other)
    assert not entry.measured and entry.seconds == pytest.approx(3 * plain[other])


def test_launch_cost_alone_does_not_outrank_the_rule():
    """In eager mode fewer collectives look faster on a fast link; that rests on a guess about the CPU."""
    machine = _machine("h100", 4, "nvlink4")
    rule, fewer = _strategy(ulysses=4), _strategy(ring=2)
    ranking = rank_candidates([rule, fewer], FLUX, machine, Evidence(one_gpu_s=0.14))
    assert ranking.best.strategy == rule


def test_a_known_step_narrows_the_band():
    machine = _machine("h100", 2, "nvlink4")
    assert _rank(FLUX, machine, Evidence(one_gpu_s=0.2)).band < _rank(FLUX, machine).band


def test_misuse_is_refused():
    machine = _machine("h100", 2, "nvlink4")
    with pytest.raises(StrategyError, match="sometimes"):
        rank_candidates([ONE], FLUX, machine, approximation="sometimes")
    with pytest.raises(StrategyError, match="No candidate"):
        rank_candidates([_strategy(ulysses=4)], FLUX, machine)

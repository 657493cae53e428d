"""The choice: the rule unless something promises clearly more, memory first, exact first, and reasons in words."""

import pytest

import fake_nvml
from parallel_backend.errors import StrategyError
from parallel_backend.models.catalog import find_family
from parallel_backend.planner.cost.communication import Candidate, Work
from parallel_backend.planner.cost.machine import model_machine
from parallel_backend.planner.cost.model import Machine
from parallel_backend.planner.machine.cards import CARDS, LINKS, find_link
from parallel_backend.planner.machine.probe import read_topology
from parallel_backend.planner.ranking import choose, enumerate_candidates, rule_key
from parallel_backend.strategy import ParallelStrategy

FLUX = Work(find_family("flux1-dev"))
FLUX_FP8 = Work(find_family("flux1-dev"), storage=1.0)
ONE = Candidate()


def _candidate(**degrees):
    return Candidate(ParallelStrategy(**{f"{name}_degree": value for name, value in degrees.items()}))


def _machine(card, count, link=None, memory=0.0):
    card = CARDS[card]
    return Machine(card, LINKS[link] if link else find_link("pcie", card), count, memory)


def _choose(work, machine, **options):
    return choose(enumerate_candidates(work, machine.count), work, machine, **options)


def test_every_enumerated_strategy_divides_as_it_must():
    found = enumerate_candidates(Work(find_family("flux1-dev"), rows=2, batch=2), 8)
    assert len(set(found)) == len(found) and ONE in found
    for candidate in found:
        s = candidate.strategy
        assert s.world_size <= 8 and s.cfg_degree <= 2 and s.data_degree <= 2
        assert 24 % (s.ulysses_degree * s.tensor_degree) == 0
    assert {c.strategy.world_size for c in found} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert not any(c.strategy.ulysses_degree == 5 for c in found)


def test_without_cfg_nothing_is_split_by_prompt():
    assert all(c.strategy.cfg_degree == 1 for c in enumerate_candidates(FLUX, 4))


def test_a_unet_is_split_by_rows_only():
    work = Work(find_family("sdxl"), rows=2, batch=2)
    assert {c.strategy.describe() for c in enumerate_candidates(work, 4)} == {
        "one device",
        "CFG 2",
        "data 2",
        "data 2 × CFG 2",
    }


def test_the_rule_is_cfg_then_ulysses_then_ring_on_all_devices():
    ordered = sorted(enumerate_candidates(Work(FLUX.family, rows=2), 8), key=rule_key, reverse=True)
    assert ordered[0].strategy == ParallelStrategy(cfg_degree=2, ulysses_degree=4)
    five = max(enumerate_candidates(FLUX, 5), key=rule_key)
    assert five.strategy == ParallelStrategy(ring_degree=5)


BOXES = {
    "eight H100": (fake_nvml.h100_nvswitch, FLUX, ParallelStrategy(ulysses_degree=8)),
    "two 4090, bf16 does not fit unsplit": (fake_nvml.two_4090, FLUX, None),
    "two 4090, fp8": (fake_nvml.two_4090, FLUX_FP8, ParallelStrategy(ulysses_degree=2)),
    "four A6000": (fake_nvml.a6000_pairs, FLUX, ParallelStrategy(ulysses_degree=4)),
    "mixed 4090 and 4080, fp8": (fake_nvml.mixed_4080_4090, FLUX_FP8, ParallelStrategy(ulysses_degree=2)),
    "MIG slices, fp8": (fake_nvml.mig, FLUX_FP8, None),
}


@pytest.mark.parametrize("name", BOXES)
def test_a_choice_for_each_box(name, tmp_path):
    shape, work, expected = BOXES[name]
    machine, _ = model_machine(read_topology(shape(), sys_root=tmp_path))
    choice = _choose(work, machine, mode="compiled")
    best = choice.best
    assert best.fits and best.candidate.exact
    assert best.prediction.memory_bytes <= machine.usable
    if expected:
        assert best.candidate == Candidate(expected)
    assert machine.card.name in choice.reason and "predicted" in choice.reason and "limits" in choice.reason


def test_over_two_sockets_the_links_are_named_and_cfg_keeps_each_half_in_its_socket(tmp_path):
    machine, _ = model_machine(read_topology(fake_nvml.l40_two_sockets(), sys_root=tmp_path))
    choice = _choose(FLUX, machine, mode="compiled")
    four = next(e for e in choice.ranked if e.candidate == _candidate(ulysses=4))
    assert "links" in choice.reason and four.seconds < 1.5 * choice.best.seconds
    with_cfg = _choose(Work(FLUX.family, rows=2), machine, mode="compiled")
    assert with_cfg.best.candidate == _candidate(cfg=2, ulysses=4)


def test_what_does_not_fit_is_never_chosen_and_says_how_much_it_needs():
    machine = _machine("rtx4090", 4)
    choice = _choose(FLUX, machine)
    assert choice.best.fits
    unfit = [e for e in choice.ranked if not e.fits]
    assert _candidate(ulysses=4) in [e.candidate for e in unfit]
    assert all(e.prediction.memory_bytes > machine.usable and "does not fit" in e.reason for e in unfit)
    assert choice.ranked.index(unfit[0]) == len(choice.ranked) - len(unfit)


def test_when_nothing_fits_it_says_so_and_names_a_remedy():
    machine = _machine("rtx4090", 2, memory=4e9)
    choice = _choose(FLUX, machine, approximation="never")
    assert not choice.best.fits and "nothing is predicted to fit" in choice.reason and "fp8" in choice.reason


def test_pipefusion_only_when_nothing_exact_fits():
    exact, pipe = _candidate(ulysses=4), _candidate(pipefusion=4)
    roomy, small = _machine("l40", 4), _machine("l40", 4, memory=12e9)
    assert choose([exact, pipe], FLUX, roomy).best.candidate == exact
    chosen = choose([exact, pipe], FLUX, small)
    assert chosen.best.candidate == pipe and "nothing exact fits" in chosen.reason
    assert not choose([exact, pipe], FLUX, small, approximation="never").best.fits
    with pytest.raises(StrategyError, match="approximation is set to never"):
        choose([pipe], FLUX, roomy, approximation="never")


def test_pipefusion_for_speed_needs_permission_and_measured_links():
    machine = _machine("rtx4090", 8, memory=40e9)
    candidates = [_candidate(ulysses=8), _candidate(pipefusion=8), ONE]
    asked = {"approximation": "allowed", "mode": "compiled"}
    assert choose(candidates, FLUX, machine, mode="compiled").best.candidate.exact
    assert choose(candidates, FLUX, machine, **asked).best.candidate.exact
    allowed = choose(candidates, FLUX, machine, **asked, links_measured=True)
    assert allowed.best.candidate == _candidate(pipefusion=8)
    told = choose(candidates, FLUX, machine, mode="compiled").reason
    assert "would be faster but is approximate" in told


def test_pipefusion_is_not_taken_for_speed_on_fast_links():
    machine = _machine("a100", 8, "nvlink3")
    work = Work(find_family("pixart"), rows=2, steps=20)
    choice = _choose(work, machine, approximation="allowed", links_measured=True)
    assert choice.best.candidate == _candidate(cfg=2, ulysses=4)


def test_the_rule_stands_unless_more_than_ten_percent_are_promised():
    machine = _machine("h100", 2, "nvlink4")
    rule, other = _candidate(ulysses=2), _candidate(ring=2)
    predicted = {e.candidate: e.seconds for e in choose([rule, other], FLUX, machine, mode="compiled").ranked}
    assert predicted[other] < predicted[rule] < 1.1 * predicted[other]
    assert choose([rule, other], FLUX, machine, mode="compiled").best.candidate == rule


def test_a_measurement_outranks_the_prediction_and_the_rule():
    machine = _machine("h100", 2, "nvlink4")
    rule, other = _candidate(ulysses=2), _candidate(ring=2)
    choice = choose([rule, other, ONE], FLUX, machine, measured={rule: 3.0, other: 2.7, ONE: 4.9})
    assert choice.best.candidate == other and choice.best.measured
    assert "measured" in choice.reason and "3 of these were measured" in choice.reason


def test_one_gpu_when_that_is_faster():
    machine = _machine("rtx4090", 2)
    rule = _candidate(ulysses=2)
    measured = choose([rule, ONE], FLUX_FP8, machine, measured={rule: 30.0, ONE: 22.0})
    assert measured.best.candidate == ONE and measured.reason.startswith("one GPU on 1 of 2")
    # Small work on a slow link: the collectives alone take longer than the step.
    small = Work(find_family("pixart"), 256, 256, rows=1)
    predicted = choose([rule, ONE], small, machine, mode="compiled")
    assert predicted.best.candidate == ONE


def test_measurements_also_scale_what_was_not_measured():
    machine = _machine("h100", 4, "nvlink4")
    rule, other = _candidate(ulysses=4), _candidate(ring=4)
    plain = {e.candidate: e.seconds for e in choose([rule, other], FLUX, machine).ranked}
    scaled = choose([rule, other], FLUX, machine, measured={rule: 3 * plain[rule]})
    entry = next(e for e in scaled.ranked if e.candidate == other)
    assert not entry.measured and entry.seconds == pytest.approx(3 * plain[other])


def test_launch_cost_alone_does_not_outrank_the_rule():
    """In eager mode fewer collectives look faster on a fast link; that rests on a guess about the CPU."""
    machine = _machine("h100", 4, "nvlink4")
    rule, fewer = _candidate(ulysses=4), _candidate(ring=2)
    choice = choose([rule, fewer], FLUX, machine, mode="eager", one_gpu_s=0.14)
    assert choice.best.candidate == rule


def test_a_known_step_narrows_the_band():
    machine = _machine("h100", 2, "nvlink4")
    assert _choose(FLUX, machine, one_gpu_s=0.2).band < _choose(FLUX, machine).band


def test_misuse_is_refused():
    machine = _machine("h100", 2, "nvlink4")
    with pytest.raises(StrategyError, match="sometimes"):
        choose([ONE], FLUX, machine, approximation="sometimes")
    with pytest.raises(StrategyError, match="No candidate"):
        choose([_candidate(ulysses=4)], FLUX, machine)

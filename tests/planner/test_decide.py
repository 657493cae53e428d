"""From a person's choice and what was measured to what runs: fallbacks, trials, memory, and the order of devices."""

from __future__ import annotations

import pytest

import fake_nvml
from parallel_backend.errors import StrategyError
from parallel_backend.models.flux.checkpoint import FluxFile
from parallel_backend.models.flux.keys import FLUX_DEV
from parallel_backend.planner import auto as experience
from parallel_backend.planner import decide as module
from parallel_backend.planner.auto import MeasurementHistory, image_work, in_good_order
from parallel_backend.planner.candidate_table import expected, table
from parallel_backend.planner.decide import LOWVRAM, NOVRAM, decide
from parallel_backend.planner.history.store import VARIABLE
from parallel_backend.planner.machine import device_shares
from parallel_backend.planner.machine.probe import read_topology
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.requests import ModelSpec, RunInfo
from parallel_backend.sidecar.device_health import FAILING
from parallel_backend.strategy import ParallelStrategy

SPEC = ModelSpec("/models/flux.safetensors")
FILE = FluxFile(SPEC.path, "original", "", FLUX_DEV, "bfloat16", 23_800_000_000)
FP8 = FluxFile(SPEC.path, "original", "", FLUX_DEV, "float8_e4m3fn", 11_900_000_000)
ONE, ULYSSES, CFG = ParallelStrategy(), ParallelStrategy(ulysses_degree=2), ParallelStrategy(cfg_degree=2)


def work(file=FILE, has_cfg=False, side=128, batch=1):
    return image_work(file, (batch, 16, side, side), text=512, has_cfg=has_cfg, steps=20)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))


@pytest.fixture
def box(tmp_path, monkeypatch, store):
    """Makes this machine look like a recorded one, to torch's count of GPUs too."""

    def pretend(nvml):
        topology = read_topology(nvml, sys_root=tmp_path)
        for owner, name in ((experience, "_visible"), (device_shares, "visible_topology")):
            monkeypatch.setattr(owner, name, lambda: topology)
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(topology.devices))
        return topology

    return pretend


def test_on_gpus_predictions_choose_and_every_candidate_is_told(box):
    box(fake_nvml.h100_nvswitch())
    decided = decide(StrategySettings(), SPEC, FILE, work(has_cfg=True))
    assert decided.decision.strategy.world_size == len(decided.devices) == 8
    assert decided.decision.strategy.cfg_degree == 2
    assert "h100" in decided.decision.reason and not decided.trials
    outlook = expected(decided.outlooks, decided.decision.strategy)
    assert outlook.exact and outlook.fits and outlook.band > 0
    assert outlook.memory_bytes == decided.memory.private_bytes
    shown = table(decided.outlooks, decided.decision.strategy)
    assert len(shown) == 8 and shown[0] == outlook and shown[-1].strategy == ONE


def test_what_was_measured_overrules_and_is_expected_again(box):
    topology = box(fake_nvml.two_4090())
    seen = MeasurementHistory(("cuda:0", "cuda:1"), topology)
    for strategy, seconds in ((ONE, 1.0), (ULYSSES, 1.5)):
        seen.remember(SPEC, FP8, work(FP8), RunInfo("native", strategy, step_seconds=(9.0, seconds, seconds)))
    decided = decide(StrategySettings(), SPEC, FP8, work(FP8))
    assert decided.decision.strategy == ONE and decided.devices == ("cuda:0",)
    outlook = expected(decided.outlooks, ONE)
    assert outlook.measured and outlook.step_s == pytest.approx(1.0)
    # By hand it is as asked for, and what was seen of it is told.
    manual = decide(StrategySettings("manual", "all", ULYSSES), SPEC, FP8, work(FP8))
    assert manual.decision.strategy == ULYSSES
    assert expected(manual.outlooks, ULYSSES).step_s == pytest.approx(1.5)


def test_weights_that_do_not_fit_are_sharded_exactly(box):
    box(fake_nvml.two_4090())
    decided = decide(StrategySettings(), SPEC, FILE, work())
    assert decided.decision.strategy.shard_weights or decided.decision.strategy.tensor_degree == 2
    assert decided.decision.strategy.pipefusion_degree == 1
    assert decided.memory.private_bytes < 24 * 2**30


def test_one_card_that_is_too_small_offloads_and_says_so(box):
    box(fake_nvml.two_4090())
    decided = decide(StrategySettings(devices="0"), SPEC, FILE, work())
    assert decided.decision.strategy.offload_weights and decided.devices == ("cuda:0",)
    assert any("offload_weights is on" in note for note in decided.decision.notes)


def test_comfyuis_flags_for_little_memory_save_it_in_auto_and_not_by_hand(box):
    box(fake_nvml.h100_nvswitch())
    usual = decide(StrategySettings(), SPEC, FILE, work())
    low = decide(StrategySettings(), SPEC, FILE, work(), economy=LOWVRAM)
    assert low.decision.strategy == usual.decision.strategy.replace(shard_weights=True)
    assert low.memory.weights < usual.memory.weights / 4
    assert "shard_weights is on: ComfyUI runs with --lowvram" in low.decision.notes
    lowest = decide(StrategySettings(), SPEC, FILE, work(), economy=NOVRAM)
    assert lowest.decision.strategy == low.decision.strategy.replace(offload_weights=True)
    assert lowest.memory.weights < low.memory.weights
    by_hand = decide(StrategySettings("manual", "all", ULYSSES), SPEC, FILE, work(), economy=NOVRAM)
    assert by_hand.decision.strategy == ULYSSES
    one = decide(StrategySettings(devices="0"), SPEC, FILE, work(), economy=LOWVRAM)
    assert one.decision.strategy == ONE  # nobody to share with


def test_the_cpu_has_nothing_to_save(store):
    usual, low = (
        decide(StrategySettings(devices="cpu:2"), SPEC, FILE, work(), economy=e) for e in ("", LOWVRAM)
    )
    assert low.decision == usual.decision


def test_by_hand_what_does_not_fit_is_refused_with_a_remedy(box):
    box(fake_nvml.two_4090())
    with pytest.raises(StrategyError, match="smallest change that would fit: shard_weights on"):
        decide(StrategySettings("manual", "all", ULYSSES), SPEC, FILE, work(side=256))


def test_ranks_sit_on_neighbours_unless_shares_name_devices(box):
    topology = box(fake_nvml.a6000_pairs())
    names = tuple(f"cuda:{i}" for i in range(4))
    order = in_good_order(names)
    assert sorted(order) == sorted(names)
    for one, other in (order[:2], order[2:]):
        uuids = [topology.devices[int(name[5:])].uuid for name in (one, other)]
        assert topology.pair(*uuids).path == "NVLINK"
    assert decide(StrategySettings(), SPEC, FP8, work(FP8)).devices == order
    shared = decide(StrategySettings(device_shares="4,3,2,1"), SPEC, FP8, work(FP8))
    assert shared.devices == names[: len(shared.devices)]


def test_on_the_cpu_only_a_trial_can_tell(store):
    choice = StrategySettings(devices="cpu:2")
    decided = decide(choice, SPEC, FP8, work(FP8, has_cfg=True, side=8))
    assert decided.decision.strategy == CFG  # the rule, until something was tried
    assert decided.trials == (CFG, ULYSSES, ParallelStrategy(ring_degree=2), ONE)
    seen = MeasurementHistory(("cpu:0", "cpu:1"))
    for strategy, seconds in ((CFG, 0.5), (ONE, 0.4), (ULYSSES, 0.6)):
        info = RunInfo("native", strategy, step_seconds=(9.0, seconds))
        seen.remember(SPEC, FP8, work(FP8, has_cfg=True, side=8), info)
    after = decide(choice, SPEC, FP8, work(FP8, has_cfg=True, side=8))
    assert after.decision.strategy == ONE and after.devices == ("cpu:0",) and not after.trials
    # Another size is another matter.
    assert decide(choice, SPEC, FP8, work(FP8, has_cfg=True, side=16)).trials


def test_nothing_is_tried_by_hand_on_one_rank_or_where_nothing_is_kept(store, monkeypatch):
    small = work(FP8, side=8)
    assert not decide(StrategySettings("manual", "cpu:2", ULYSSES), SPEC, FP8, small).trials
    assert not decide(StrategySettings(devices="cpu"), SPEC, FP8, small).trials
    monkeypatch.setenv(VARIABLE, "off")
    decided = decide(StrategySettings(devices="cpu:2"), SPEC, FP8, small)
    assert not decided.trials and decided.decision.strategy == ULYSSES


def test_measurements_that_cannot_be_read_leave_it_to_the_rule(store, monkeypatch):
    monkeypatch.setattr(module, "Experience", lambda devices: 1 / 0)
    decided = decide(StrategySettings(devices="cpu:2"), SPEC, FP8, work(FP8, side=8))
    assert decided.decision.strategy == ULYSSES and decided.outlooks == ()


def test_a_device_that_failed_again_is_left_out_in_auto_and_kept_by_hand(box):
    box(fake_nvml.two_4090())
    FAILING.add("cuda:0", 2)
    try:
        decided = decide(StrategySettings(), SPEC, FP8, work(FP8))
        assert decided.devices == ("cuda:1",) and decided.decision.strategy == ONE
        assert decided.decision.notes[0].startswith("cuda:0 left out")
        manual = decide(StrategySettings("manual", "all", ULYSSES), SPEC, FP8, work(FP8))
        assert manual.devices == ("cuda:0", "cuda:1")
    finally:
        FAILING.clear()

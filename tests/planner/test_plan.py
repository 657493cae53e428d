"""Plans from a user's settings and stored measurements: fallbacks, trials, memory, and the order of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fake_nvml
from jobs import BF16, FP8, flux_file, flux_job
from parallel_backend.commands.doctor.rank_probe import random_request
from parallel_backend.errors import StrategyError
from parallel_backend.machine import device_shares, local
from parallel_backend.machine.local import LOWVRAM, NOVRAM, order_devices
from parallel_backend.machine.probe import read_topology
from parallel_backend.models.comfyui.model_file import TYPICAL
from parallel_backend.planner import history as measurement_history
from parallel_backend.planner.candidates import table
from parallel_backend.planner.history import MeasurementHistory, open_history
from parallel_backend.planner.plan import find_machine, job_from_latent, job_from_request, plan_execution
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.requests import ROWS, RunInfo
from parallel_backend.sidecar.group.failures import FAILING
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.cache_folder import VARIABLE

ONE, ULYSSES = ParallelStrategy(), ParallelStrategy(ulysses_degree=2)


def work(tensor_bytes=BF16, has_cfg=False, side=128, batch=1):
    model = CheckpointModel(flux_file(tensor_bytes))
    return job_from_latent(model, (batch, 16, side, side), text=512, has_cfg=has_cfg, steps=20)


def plan(settings, job, memory_flag=""):
    machine = find_machine(settings.devices, in_order=settings.fixes_order, memory_flag=memory_flag)
    return plan_execution(settings, job, machine, open_history(machine.devices), tries=True)


def seen(devices, job, *measured, topology=None):
    """Records runs of `job`. `measured`: (strategy, seconds of a step)."""
    history = MeasurementHistory(devices, topology)
    for strategy, seconds in measured:
        history.record(job, RunInfo("native", strategy, step_seconds=(9.0, seconds, seconds)))


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))


@pytest.fixture
def box(tmp_path, monkeypatch, store):
    """Returns a function that makes this machine look like the one of a fake NVML, also to torch's count of GPUs."""

    def pretend(nvml):
        topology = read_topology(nvml, sys_root=tmp_path)
        for owner in (measurement_history, local, device_shares):
            monkeypatch.setattr(owner, "visible_topology", lambda: topology)
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(topology.devices))
        return topology

    return pretend


def test_what_the_doctor_measured_of_the_links_comes_along_for_just_these_devices(box):
    topology = box(fake_nvml.two_4090())
    devices = ("cuda:0", "cuda:1")
    assert plan(StrategySettings(), work(FP8)).link is None
    measurement_history.record_link(devices, 8e9, 3e-5)
    found = plan(StrategySettings(), work(FP8))
    assert found.devices == devices
    assert (found.link.bytes_per_second, found.link.latency_s) == (8e9, 3e-5)
    assert MeasurementHistory(devices, topology).link(1) is None
    measurement_history.record_link(("cpu:0", "cpu:1"), 8e9, 3e-5)
    assert plan(StrategySettings(devices="cpu:2"), work(FP8)).link is None, "processes share the cores"


def test_what_was_measured_overrules_and_is_expected_again(box):
    topology = box(fake_nvml.two_4090())
    seen(("cuda:0", "cuda:1"), work(FP8), (ONE, 1.0), (ULYSSES, 1.5), topology=topology)
    decided = plan(StrategySettings(), work(FP8))
    assert decided.strategy == ONE and decided.devices == ("cuda:0",)
    assert decided.reason == "one device: measured before, a step takes one device 1 s, Ulysses 2 1.5 s"
    assert decided.candidates[0].strategy == ONE and decided.candidates[0].step_s == 1.0
    # A strategy set by hand stays as it is, and its measured time is listed.
    manual = plan(StrategySettings("manual", "all", ULYSSES), work(FP8))
    assert manual.strategy == ULYSSES
    assert manual.candidates[0].strategy == ULYSSES and manual.candidates[0].step_s == 1.5
    # The alternatives to it are listed as well.
    assert {c.strategy: c.step_s for c in manual.candidates}[ONE] == 1.0
    assert {c.strategy for c in manual.candidates} == {c.strategy for c in decided.candidates}
    assert all(c.permitted == c.strategy.exact for c in manual.candidates)


def test_what_was_seen_without_patches_does_not_say_that_they_fit(box):
    topology = box(fake_nvml.two_4090())
    seen(("cuda:0", "cuda:1"), work(FP8), (ONE, 1.0), topology=topology)
    assert plan(StrategySettings(devices="0"), work(FP8)).candidates[0].fits
    patched = replace(work(FP8), patch_bytes=14 * 2**30)
    assert not {c.strategy: c.fits for c in plan(StrategySettings(), patched).candidates}[ONE]
    assert plan(StrategySettings(), patched).strategy.world_size == 2


def test_stages_are_cut_by_memory_if_equal_ones_do_not_fit(box):
    box(fake_nvml.mixed_4080_4090())
    stages = ParallelStrategy(pipefusion_degree=2)
    by_hand = plan(StrategySettings("manual", "all", stages), work())
    first, second = by_hand.strategy.device_shares
    assert first + second == 57 and first < second
    assert any(f"compute {first:g}, {second:g} blocks" in note for note in by_hand.notes)
    assert table(by_hand.candidates, by_hand.strategy)[0].strategy == by_hand.strategy
    assert [c.strategy.pipefusion_degree for c in by_hand.candidates].count(2) == 1
    assert plan(StrategySettings("manual", "all", stages), work(FP8)).strategy == stages, "equal ones fit"
    assert plan(
        StrategySettings("manual", "all", stages, device_shares="1,2"), work()
    ).strategy.device_shares == (1, 2)
    with pytest.raises(StrategyError, match="does not fit"):
        plan(StrategySettings("manual", "all", stages, device_shares="2,1"), work())


def test_one_card_that_is_too_small_offloads_and_says_so(box):
    box(fake_nvml.two_4090())
    decided = plan(StrategySettings(devices="0"), work())
    assert decided.strategy.offload_weights and decided.devices == ("cuda:0",)
    assert any("offload_weights is on" in note for note in decided.notes)


def test_comfyuis_flags_for_little_memory_save_it_in_auto_and_not_by_hand(box):
    box(fake_nvml.h100_nvswitch())
    usual = plan(StrategySettings(), work())
    low = plan(StrategySettings(), work(), LOWVRAM)
    assert low.strategy == usual.strategy.replace(shard_weights=True)
    assert low.memory.weights < usual.memory.weights / 4
    assert "shard_weights is on: ComfyUI runs with --lowvram" in low.notes
    lowest = plan(StrategySettings(), work(), NOVRAM)
    assert lowest.strategy == low.strategy.replace(offload_weights=True)
    assert lowest.memory.weights < low.memory.weights
    by_hand = plan(StrategySettings("manual", "all", ULYSSES), work(), NOVRAM)
    assert by_hand.strategy == ULYSSES
    one = plan(StrategySettings(devices="0"), work(), LOWVRAM)
    assert one.strategy == ONE  # no other device to shard weights with


def test_the_cpu_has_nothing_to_save(store):
    usual, low = (plan(StrategySettings(devices="cpu:2"), work(), flag) for flag in ("", LOWVRAM))
    assert low == usual


def test_by_hand_what_does_not_fit_is_refused_with_a_remedy(box):
    box(fake_nvml.two_4090())
    with pytest.raises(StrategyError, match="smallest change that would fit: shard_weights on"):
        plan(StrategySettings("manual", "all", ULYSSES), work(side=256))


def test_ranks_sit_on_neighbours_unless_shares_name_devices(box):
    topology = box(fake_nvml.a6000_pairs())
    names = tuple(f"cuda:{i}" for i in range(4))
    order = order_devices(names)
    assert sorted(order) == sorted(names)
    for one, other in (order[:2], order[2:]):
        uuids = [topology.devices[int(name[5:])].uuid for name in (one, other)]
        assert topology.pair(*uuids).path == "NVLINK"
    assert plan(StrategySettings(), work(FP8)).devices == order
    shared = plan(StrategySettings(device_shares="4,3,2,1"), work(FP8))
    assert shared.devices == names[: len(shared.devices)]


def test_for_a_comparison_auto_splits_and_one_device_keeps_the_group(store):
    job = work(FP8, side=8)
    seen(("cpu:0", "cpu:1"), job, (ULYSSES, 0.5), (ONE, 0.4))
    assert plan(StrategySettings(devices="cpu:2"), job).strategy == ONE
    split = plan(StrategySettings(devices="cpu:2", compared=True), job)
    assert split.strategy == ULYSSES and not split.trials
    alone = plan(StrategySettings("manual", "cpu:2", ONE, compared=True), job)
    assert alone.strategy == ONE and alone.devices == split.devices == ("cpu:0", "cpu:1")
    assert plan(StrategySettings("manual", "cpu:2", ONE), job).devices == ("cpu:0",)


def test_what_cannot_be_compared_is_refused_before_it_starts(box):
    with pytest.raises(StrategyError, match="1 device is selected"):
        plan(StrategySettings(devices="cpu", compared=True), work(FP8, side=8))
    box(fake_nvml.two_4090())
    with pytest.raises(StrategyError, match="One device cannot run this job, so there is nothing to compare"):
        plan(StrategySettings(compared=True), work())


def test_nothing_is_tried_by_hand_on_one_rank_or_where_nothing_is_kept(store, monkeypatch):
    small = work(FP8, side=8)
    assert not plan(StrategySettings("manual", "cpu:2", ULYSSES), small).trials
    assert not plan(StrategySettings(devices="cpu"), small).trials
    monkeypatch.setenv(VARIABLE, "off")
    decided = plan(StrategySettings(devices="cpu:2"), small)
    assert not decided.trials and decided.strategy == ULYSSES


@pytest.mark.parametrize(
    ("broken", "name"),
    [(measurement_history, "MeasurementHistory"), (MeasurementHistory, "steps_of")],
)
def test_measurements_that_cannot_be_read_leave_it_to_the_rule(store, monkeypatch, broken, name):
    monkeypatch.setattr(broken, name, lambda *arguments: 1 / 0)
    decided = plan(StrategySettings(devices="cpu:2"), work(FP8, side=8))
    assert decided.candidates[0].strategy == ULYSSES and decided.candidates[0].step_s is None


def test_a_device_that_failed_again_is_left_out_in_auto_and_kept_by_hand(box):
    box(fake_nvml.two_4090())
    FAILING.add("cuda:0", 2)
    try:
        decided = plan(StrategySettings(), work(FP8))
        assert decided.devices == ("cuda:1",) and decided.strategy == ONE
        assert decided.notes[0].startswith("cuda:0 left out")
        manual = plan(StrategySettings("manual", "all", ULYSSES), work(FP8))
        assert manual.devices == ("cuda:0", "cuda:1")
    finally:
        FAILING.clear()


def test_a_request_is_a_job_of_its_size_prompts_and_model_calls():
    model = CheckpointModel(flux_file(FP8))
    request = random_request(
        model.file.inputs, width=512, height=768, batch=3, text=16, steps=20, with_cfg=True
    )
    job = job_from_request(model, request)
    assert (job.width, job.height, job.batch, job.prompts) == (512, 768, 3, 2)
    assert (job.text_tokens, job.steps, job.model_calls, job.step_cache) == (16, 20, 1, False)
    assert job_from_request(model, replace(request, cfg=1.0)).prompts == 1
    bf16 = flux_job(FP8, weight_dtype="bfloat16").model
    assert bf16.weight_bytes == 2 * model.weight_bytes


def test_reference_images_are_tokens_of_the_job():
    model = CheckpointModel(flux_file(FP8))
    alone = job_from_latent(model, (1, 16, 128, 128), text=512, has_cfg=False, steps=20)
    shapes = [(1, 16, 128, 128), (1, 16, 31, 32)]
    beside = job_from_latent(model, (1, 16, 128, 128), text=512, has_cfg=False, steps=20, references=shapes)
    assert (alone.reference_tokens, beside.reference_tokens) == (0, 4096 + 16 * 16)
    assert beside.image_tokens == alone.image_tokens + beside.reference_tokens
    assert beside.flop > 2 * alone.flop


def test_a_model_with_one_way_to_run_is_not_tried(store):
    whole = CheckpointModel(replace(TYPICAL, mode=ROWS))
    job = job_from_latent(whole, (1, 4, 8, 8), text=77, has_cfg=False, steps=20)
    decided = plan(StrategySettings(devices="cpu:2"), job)
    assert decided.strategy == ONE and not decided.trials

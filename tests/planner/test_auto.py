"""What a machine has seen decides: runs are remembered as they were, and the choice follows the measurements."""

from dataclasses import replace

import pytest
import torch

import fake_nvml
from parallel_backend.models.flux.checkpoint import FluxFile, inspect_flux
from parallel_backend.models.flux.keys import FLUX_DEV
from parallel_backend.observability.bench.rounds import random_request
from parallel_backend.options import CompileStats, ComputeOptions
from parallel_backend.planner import auto as module
from parallel_backend.planner.auto import MeasurementHistory, remember, work_of
from parallel_backend.planner.history.records import with_calibration
from parallel_backend.planner.history.store import VARIABLE
from parallel_backend.planner.machine.probe import read_topology
from parallel_backend.planner.machine.topology import Topology
from parallel_backend.requests import ModelSpec, RunInfo
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.calibration import ALL_TO_ALL, SIZES, Calibration, Transfer
from tiny_flux import write_tiny_flux

SPEC = ModelSpec("/models/flux.safetensors")
FILE = FluxFile(SPEC.path, "original", "", FLUX_DEV, "float8_e4m3fn", 11_900_000_000)
ONE, ULYSSES, CFG = ParallelStrategy(), ParallelStrategy(ulysses_degree=2), ParallelStrategy(cfg_degree=2)
CPUS = ("cpu:0", "cpu:1")


def request(width=1024, height=1024, with_cfg=False, steps=20, sampler="euler"):
    found = random_request(FILE, width=width, height=height, batch=1, text=16, steps=steps, with_cfg=with_cfg)
    return replace(found, sampler=sampler)


def run(strategy, seconds, engine="native"):
    return RunInfo(engine, strategy, step_seconds=(9.0, seconds, seconds))


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    return MeasurementHistory(("cuda:0", "cuda:1"), read_topology(fake_nvml.two_4090(), sys_root=tmp_path))


@pytest.fixture
def cpus(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    return MeasurementHistory(CPUS, Topology((), source="none"))


def test_a_request_is_the_work_that_the_model_knows():
    work = work_of(FILE, request(width=512, height=768, with_cfg=True))
    assert (work.width, work.height, work.rows, work.text_tokens, work.steps) == (512, 768, 2, 16, 20)
    assert work_of(FILE, replace(request(with_cfg=True), cfg=1.0)).rows == 1
    assert work_of(FILE, request(), "bfloat16").weight_bytes == 2 * work_of(FILE, request()).weight_bytes


def test_measured_times_overrule_the_rule_and_the_reason_says_so(gpus):
    work = work_of(FILE, request())
    before = gpus.choose(SPEC, FILE, work).choice
    assert before.best.candidate.strategy == ULYSSES and "nothing was measured yet" in before.reason
    assert gpus.remember(SPEC, FILE, work_of(FILE, request()), run(ONE, 0.8))
    assert gpus.remember(SPEC, FILE, work_of(FILE, request()), run(ULYSSES, 1.1))
    after = gpus.choose(SPEC, FILE, work).choice
    assert after.best.candidate.strategy == ONE
    assert (
        after.reason.startswith("one GPU on 1 of 2 GPUs")
        and "2 of these were measured before" in after.reason
    )


def test_one_devices_time_replaces_the_guess_for_other_sizes(gpus):
    gpus.remember(SPEC, FILE, work_of(FILE, request()), run(ONE, 3.0))
    other = work_of(FILE, request(width=1536))
    ranked = gpus.choose(SPEC, FILE, other).choice.ranked
    alone = next(e for e in ranked if e.candidate.strategy == ONE)
    seen = work_of(FILE, request())
    assert not alone.measured
    assert alone.prediction.step_s == pytest.approx(3.0 * other.flop / seen.flop)


def test_another_model_dtype_engine_sampler_or_device_is_another_matter(gpus, tmp_path):
    gpus.remember(SPEC, FILE, work_of(FILE, request()), run(ONE, 0.1))
    gpus.remember(SPEC, FILE, work_of(FILE, request()), run(ULYSSES, 9.0))
    work = work_of(FILE, request())
    assert gpus.choose(SPEC, FILE, work).choice.best.candidate.strategy == ONE
    swapped = MeasurementHistory(("cuda:1", "cuda:0"), read_topology(fake_nvml.two_4090(), sys_root=tmp_path))
    for others in (
        gpus.choose(SPEC, replace(FILE, tensor_bytes=11_800_000_000), work),
        gpus.choose(replace(SPEC, weight_dtype="float16"), FILE, work),
        gpus.choose(SPEC, FILE, work, engine="xfuser"),
        swapped.choose(SPEC, FILE, work),
    ):
        assert others.choice.best.candidate.strategy == ULYSSES
    heun = gpus.choose(SPEC, FILE, work, sampler="heun").choice
    assert not any(e.measured for e in heun.ranked)


def test_compiled_and_uncompiled_times_and_those_of_kernels_are_kept_apart(gpus, cpus):
    work, compiled = work_of(FILE, request()), ComputeOptions("blocks")
    gpus.remember(SPEC, FILE, work, run(ONE, 0.1))
    ran = replace(run(ULYSSES, 0.2), compiled=CompileStats(0, 0.0, 0))
    gpus.remember(SPEC, FILE, work, ran, compute_options=compiled)
    for compute_options, seen in (
        (ComputeOptions(), ONE),
        (compiled, ULYSSES),
        (ComputeOptions(attention="sage"), None),
    ):
        ranked = gpus.choose(SPEC, FILE, work, compute_options=compute_options).choice.ranked
        assert [e.candidate.strategy for e in ranked if e.measured] == ([seen] if seen else [])
    # A CPU's trials run uncompiled; a machine without a compiler leaves blocks uncompiled.
    cpus.remember(SPEC, FILE, work, run(ONE, 0.5))
    cpus.remember(SPEC, FILE, work, run(ULYSSES, 0.7), compute_options=compiled)
    cpus.remember(SPEC, FILE, work, ran, compute_options=compiled)
    assert cpus.choose(SPEC, FILE, work, compute_options=compiled).choice.best.candidate.strategy == ONE


def test_a_path_does_not_matter(gpus):
    gpus.remember(SPEC, FILE, work_of(FILE, request()), run(ONE, 0.1))
    gpus.remember(SPEC, FILE, work_of(FILE, request()), run(ULYSSES, 9.0))
    moved = replace(SPEC, path="/elsewhere/fine-tune.safetensors")
    assert gpus.choose(moved, FILE, work_of(FILE, request())).choice.best.candidate.strategy == ONE


def test_calibrated_links_count(gpus):
    work = work_of(FILE, request(width=512, height=512))
    assert gpus.choose(SPEC, FILE, work).choice.best.candidate.strategy == ULYSSES
    slow = tuple(
        Calibration(
            rank, "nccl", ULYSSES, tuple(Transfer(ALL_TO_ALL, s, s // 2, s / 1e8) for s in SIZES), 1e-4, 1.0
        )
        for rank in range(2)
    )
    gpus.store.update(lambda known: with_calibration(known, gpus.ids, slow, 4e9))
    # A calibration from the future is none.
    assert gpus.choose(SPEC, FILE, work).choice.best.candidate.strategy == ULYSSES
    import time

    gpus.store.update(lambda known: with_calibration(known, gpus.ids, slow, time.time()))
    assert gpus.choose(SPEC, FILE, work).choice.best.candidate.strategy == ONE


def test_on_a_cpu_only_what_was_seen_decides(cpus):
    work = work_of(FILE, request())
    assert cpus.choose(SPEC, FILE, work).choice is None
    cpus.remember(SPEC, FILE, work_of(FILE, request()), run(ULYSSES, 0.9))
    assert cpus.choose(SPEC, FILE, work).choice is None  # one rank was not seen
    cpus.remember(SPEC, FILE, work_of(FILE, request()), run(ONE, 0.7))
    one = cpus.choose(SPEC, FILE, work).choice
    assert one.best.candidate.strategy == ONE
    assert (
        one.reason
        == "one device on the CPU: measured before, a step takes one device 0.7 s, Ulysses 2 0.9 s."
    )
    cpus.remember(SPEC, FILE, work_of(FILE, request()), run(ParallelStrategy(ring_degree=2), 0.4))
    assert cpus.choose(SPEC, FILE, work).choice.best.candidate.strategy.ring_degree == 2


def test_a_card_without_a_data_sheet_leaves_it_to_the_rule(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "off")
    nvml = fake_nvml.two_4090()
    for board in nvml.boards:
        board.name = "NVIDIA Mystery 1"
    seen = MeasurementHistory(("cuda:0", "cuda:1"), read_topology(nvml, sys_root=tmp_path))
    found = seen.choose(SPEC, FILE, work_of(FILE, request()))
    assert found.choice is None and "unknown to the cost model" in found.notes[0]


def test_a_run_of_one_step_says_nothing_about_a_warm_step(cpus):
    assert not cpus.remember(
        SPEC, FILE, work_of(FILE, request()), RunInfo("native", ONE, step_seconds=(1.0,))
    )


def test_a_run_whose_model_calls_were_reused_says_nothing_about_one_that_computes(cpus):
    info = RunInfo("native", ONE, step_seconds=(1.0, 0.1, 0.1), model_calls=3, reused_calls=2)
    assert not cpus.remember(SPEC, FILE, work_of(FILE, request()), info)


def test_remembering_never_costs_a_finished_picture(monkeypatch):
    monkeypatch.setattr(module, "read_topology", lambda: 1 / 0)
    module._visible.cache_clear()
    remember(CPUS, SPEC, FILE, work_of(FILE, request()), run(ONE, 1.0))
    module._visible.cache_clear()


def test_the_choice_on_two_real_ranks_is_the_fastest_that_was_measured(cpus, two_real_ranks, tmp_path):
    from parallel_backend.requests import Placement
    from parallel_backend.sidecar.sidecar import Sidecar

    path = write_tiny_flux(tmp_path / "tiny.safetensors")
    spec, file = ModelSpec(str(path)), inspect_flux(path)
    job = random_request(file, width=128, height=128, batch=1, text=8, steps=4, with_cfg=True)
    groups = {1: Sidecar(CPUS[:1]), 2: two_real_ranks}
    try:
        for strategy in (ONE, ULYSSES, CFG):
            result = groups[strategy.world_size].sample(spec, job, Placement(strategy))
            assert torch.isfinite(result.latent).all()
            assert cpus.remember(spec, file, work_of(file, job), result.info)
    finally:
        groups[1].stop()
    choice = cpus.choose(spec, file, work_of(file, job)).choice
    seconds = {o.kind.strategy: o.seconds[0] for o in cpus.store.read().observed}
    assert set(seconds) == {ONE, ULYSSES, CFG}
    # By more than two percent, else the rule stands.
    assert seconds[choice.best.candidate.strategy] <= 1.02 * min(seconds.values())

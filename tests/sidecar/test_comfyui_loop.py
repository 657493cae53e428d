"""ComfyUI's own loop on the ranks through a sidecar gives stock's latent, also after a crash, and tells its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from comfy_modules import import_comfyui_here
from differences import relative_difference
from fault_injection import fault
from loop_jobs import STEPS, loop_job, tiny_model
from parallel_backend.requests import SEVERAL_CALLS, Placement
from parallel_backend.strategy import ParallelStrategy
from shipped_jobs import ship, stock_latent, stock_model

TOLERANCE = 1e-5  # of the largest value, in fp32
ULYSSES, CFG = ParallelStrategy(ulysses_degree=2), ParallelStrategy(cfg_degree=2)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("loop"))


def test_the_planner_knows_how_often_every_sampler_calls_the_model(spec, subtests):
    """tests/comfy/test_parity_samplers.py compares the latent of each of them on the ranks with stock's."""
    import_comfyui_here()
    from comfy.samplers import KSampler

    names, calls = list(KSampler.SAMPLERS), []
    assert len(names) >= 40
    network = stock_model(spec).patcher.model.diffusion_model
    counter = network.register_forward_pre_hook(lambda *_: calls.append(1))
    for name in names:
        calls.clear()
        stock_latent(spec, loop_job(name))
        # The last step has one call, the one before it may have fewer than the others.
        most = (STEPS - 1) * SEVERAL_CALLS.get(name, 1) + 1
        if name not in ("dpm_fast", "dpm_adaptive"):  # these choose their own steps
            with subtests.test(sampler=name):
                assert len(calls) in (most, most - 1)
    counter.remove()


def test_a_job_gives_stocks_latent_tells_its_steps_and_shows_the_first_image(two_real_ranks, spec):
    """tests/comfy/test_parity_samplers.py does so with every sampler."""
    for strategy, mask in ((ULYSSES, True), (CFG, False)):
        told, job = [], loop_job("dpmpp_sde", batch=2, mask=mask)
        result = two_real_ranks.sample(
            spec, ship(spec, job), Placement(strategy), on_step=lambda *step, told=told: told.append(step)
        )
        assert relative_difference(result.latent, stock_latent(spec, job)) <= TOLERANCE
        assert result.info.exact and result.info.strategy == strategy and min(result.info.bytes_sent) > 0
        assert [(step, steps) for step, steps, _ in told] == [(i + 1, STEPS) for i in range(STEPS)]
        assert {preview.shape for _, _, preview in told} == {job.noise[:1].shape}
        last = told[-1][2]  # a step down to zero noise ends at the denoised latent
        assert relative_difference(last, result.latent[:1]) <= TOLERANCE
        assert len(result.info.step_seconds) == STEPS and min(result.info.step_seconds) > 0


def test_noise_and_prompts_change_the_latent_by_far_more_than_the_tolerance(two_real_ranks, spec):
    job = loop_job("dpmpp_sde")
    swapped = {"positive": job.conds["negative"], "negative": job.conds["positive"]}
    wanted = two_real_ranks.sample(spec, ship(spec, job), Placement(ULYSSES)).latent
    for other in (replace(job, conds=swapped), replace(job, cfg=1.0), replace(job, seed=12)):
        found = two_real_ranks.sample(spec, ship(spec, other), Placement(ULYSSES)).latent
        assert relative_difference(found, wanted) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["dpmpp_2m", "dpmpp_sde"])
def test_a_crash_in_the_middle_ends_in_the_bits_of_a_run_without_one(
    two_real_ranks, own_real_ranks, spec, tmp_path, name
):
    job = loop_job(name, mask=True)
    wanted = two_real_ranks.sample(spec, ship(spec, job), Placement(ULYSSES)).latent
    with fault("kill", "the agreement on a model call", step=3, once=tmp_path / name):
        found = own_real_ranks.sample(spec, ship(spec, job), Placement(ULYSSES))
    assert (tmp_path / name).exists() and torch.equal(found.latent, wanted)
    assert any("goes on after step" in note for note in found.info.notes)
    assert len(found.info.step_seconds) == STEPS

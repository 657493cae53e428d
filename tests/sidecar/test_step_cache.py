"""The step cache through a sidecar: what it tells, cancelling, and what is refused before ranks start."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flux_requests import flux_request
from parallel_backend.errors import Cancelled, RequestError, StrategyError
from parallel_backend.options import DEFAULT_THRESHOLD, check_step_cache, check_threshold
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.sidecar import Sidecar, State
from parallel_backend.strategy import ParallelStrategy
from tiny_flux import write_tiny_flux

PAIR = Placement(ParallelStrategy(ulysses_degree=2))


def cached_request(steps):
    # Heun's second call in a step is near the next step's first.
    request = replace(flux_request(), sampler="heun", sigmas=torch.linspace(1, 0, steps + 1))
    return replace(request, cache_threshold=DEFAULT_THRESHOLD)


def test_a_job_tells_what_was_reused_and_a_cancelled_one_leaves_nothing(two_real_ranks, tmp_path):
    spec = ModelSpec(path=str(write_tiny_flux(tmp_path / "tiny.safetensors")))
    sidecar = two_real_ranks

    def cancel(step, steps, preview):
        if step == 5:
            sidecar.cancel()

    exact = sidecar.sample(spec, replace(cached_request(4), cache_threshold=0.0), PAIR)
    cached = sidecar.sample(spec, cached_request(4), PAIR)
    with pytest.raises(Cancelled):
        sidecar.sample(spec, cached_request(500), PAIR, on_step=cancel)
    assert sidecar.state is State.READY
    again = sidecar.sample(spec, cached_request(4), PAIR)
    after = sidecar.sample(spec, replace(cached_request(4), cache_threshold=0.0), PAIR)
    assert exact.info.exact and (exact.info.model_calls, exact.info.reused_calls) == (0, 0)
    assert not cached.info.exact and cached.info.model_calls == 7 and 0 < cached.info.reused_calls < 7
    assert torch.equal(again.latent, cached.latent) and torch.equal(after.latent, exact.latent)
    assert not torch.equal(cached.latent, exact.latent)


def test_pipefusion_is_refused_with_the_remedy_and_nothing_starts():
    sidecar = Sidecar(("cpu:0", "cpu:1"))
    with pytest.raises(
        StrategyError, match=r"pipefusion_degree 2.*Set step_cache to off .*, or pipefusion_degree"
    ):
        sidecar.sample(ModelSpec("none"), cached_request(4), Placement(ParallelStrategy(pipefusion_degree=2)))
    assert sidecar.state is State.DOWN
    check_step_cache(0.0, ParallelStrategy(pipefusion_degree=2))


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf")])
def test_a_threshold_that_compares_with_nothing_is_refused(threshold):
    with pytest.raises(RequestError, match="cache_threshold"):
        check_threshold(threshold)

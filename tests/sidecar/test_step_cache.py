"""The step cache through a sidecar: its record, cancelling, and refused thresholds."""

from __future__ import annotations

import pytest
import torch

from loop_jobs import loop_job, tiny_model
from parallel_backend.errors import Cancelled, RequestError
from parallel_backend.options import check_step_cache
from parallel_backend.requests import Placement
from parallel_backend.sidecar.sidecar import State
from parallel_backend.strategy import ParallelStrategy
from shipped_jobs import ship

PAIR = Placement(ParallelStrategy(ulysses_degree=2))
THRESHOLD = 0.4  # high: answers of random weights change more between calls than those of trained ones


def job(threshold=THRESHOLD, steps=8):
    # The input of Heun's second call in a step is close to that of the next step's first.
    return loop_job("heun", steps=steps, sigmas=torch.linspace(1, 0, steps + 1), cache_threshold=threshold)


def test_a_job_tells_what_was_reused_and_a_cancelled_one_leaves_nothing(two_real_ranks, tmp_path):
    spec, sidecar = tiny_model(tmp_path), two_real_ranks

    def sample(*which, **how):
        return sidecar.sample(spec, ship(spec, job(*which)), PAIR, **how)

    def cancel(step, steps, preview):
        if step == 5:
            sidecar.cancel()

    exact, cached = sample(0.0), sample()
    with pytest.raises(Cancelled):
        sample(THRESHOLD, 500, on_step=cancel)
    assert sidecar.state is State.READY
    again, after = sample(), sample(0.0)
    assert exact.info.exact and (exact.info.model_calls, exact.info.reused_calls) == (15, 0)
    assert not cached.info.exact and cached.info.model_calls == 15 and 0 < cached.info.reused_calls < 15
    assert torch.equal(again.latent, cached.latent) and torch.equal(after.latent, exact.latent)
    assert not torch.equal(cached.latent, exact.latent)


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf")])
def test_a_threshold_that_compares_with_nothing_is_refused(threshold):
    with pytest.raises(RequestError, match="cache_threshold"):  # as both samplers and a job check it
        check_step_cache(threshold, ParallelStrategy())

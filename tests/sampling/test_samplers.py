"""Samplers: their model calls and their largest seed. test_patch_flow.py compares their latents with ComfyUI's."""

import pytest
import torch

from parallel_backend.requests import SEVERAL_CALLS
from parallel_backend.sampling.samplers import STEPS, Sigmas, model_calls, run, start_history

SIGMAS = Sigmas(torch.linspace(1, 0, 6), torch.device("cpu"))


@pytest.mark.parametrize("name", STEPS)
def test_steps_call_the_model_as_often_as_the_planner_counts(name):
    counts = [len(model_calls(STEPS[name], SIGMAS, i)) for i in range(5)]
    assert counts[:-1] == [SEVERAL_CALLS.get(name, 1)] * 4 and counts[-1] == 1


def test_the_largest_seed_of_the_nodes_is_a_seed():
    history = start_history(2**64 - 1, torch.device("cpu"))
    step = STEPS["euler_ancestral"](torch.randn(1, 4, 2, 2), SIGMAS, 0, history)
    assert run(step, lambda x, sigma: x / 2)[0].isfinite().all()

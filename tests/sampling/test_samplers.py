"""Samplers on models whose exact answer is known. Tests in the real ComfyUI compare them with ComfyUI's samplers."""

import math

import pytest
import torch

from parallel_backend.requests import SEVERAL_CALLS
from parallel_backend.sampling.samplers import STEPS, Sigmas, model_calls, run, start_history


def _run(name, model, x, sigmas, seed=0):
    history, sigmas = start_history(seed, x.device), Sigmas(sigmas, x.device)
    for i in range(len(sigmas) - 1):
        x, _ = run(STEPS[name](x, sigmas, i, history), model)
    return x


def _grid(steps, last=0.0):
    return torch.linspace(1.0, last, steps + 1, dtype=torch.float64)


@pytest.mark.parametrize("name", STEPS)
def test_steps_call_the_model_as_often_as_the_planner_counts(name):
    sigmas = Sigmas(_grid(5), torch.device("cpu"))
    counts = [len(model_calls(STEPS[name], sigmas, i)) for i in range(5)]
    assert counts[:-1] == [SEVERAL_CALLS.get(name, 1)] * 4 and counts[-1] == 1


def test_the_largest_seed_of_the_nodes_is_a_seed():
    x = torch.randn(1, 4, 2, 2)
    largest = _run("euler_ancestral", lambda x, sigma: x / 2, x, torch.linspace(1, 0, 4), seed=2**64 - 1)
    assert largest.isfinite().all()


@pytest.mark.parametrize("name", STEPS)
def test_a_model_that_knows_the_answer_reaches_it(name):
    target = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    x = _run(name, lambda x, sigma: target, torch.randn_like(target), _grid(7))
    torch.testing.assert_close(x, target)


def _flow_gaussian(x, sigma):
    """Returns E[x0 | x], x = sigma * noise + (1 - sigma) * x0, x0 ~ N(0, 1/4): linear in x, so the flow is known."""
    alpha = 1 - sigma
    return alpha * 0.25 / (alpha**2 * 0.25 + sigma**2) * x


def _flow_std(sigma):
    return math.sqrt((1 - sigma) ** 2 * 0.25 + sigma**2)


def _ve_gaussian(x, sigma):
    """Returns E[x0 | x], x = x0 + sigma * noise, x0 ~ N(0, 1/4): in this form DPM-Solver++(2M) has its order."""
    return 0.25 / (0.25 + sigma**2) * x


def _ve_std(sigma):
    return math.sqrt(0.25 + sigma**2)


@pytest.mark.parametrize(
    ("name", "model", "std", "order"),
    [
        ("euler", _flow_gaussian, _flow_std, 1),
        ("heun", _flow_gaussian, _flow_std, 2),
        ("dpmpp_2m", _ve_gaussian, _ve_std, 2),
    ],
)
def test_the_error_falls_at_least_with_the_order_of_the_method(name, model, std, order):
    x = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    exact = x * std(0.1) / std(0.9)
    errors = []
    for steps in (40, 80):
        sigmas = torch.exp(torch.linspace(math.log(0.9), math.log(0.1), steps + 1, dtype=torch.float64))
        errors.append((_run(name, model, x, sigmas) - exact).abs().item())
    assert math.log2(errors[0] / errors[1]) > order - 0.3
    assert errors[1] < 0.02


def test_ancestral_noise_depends_on_the_seed_and_on_nothing_else():
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    first, again, other = (_run("euler_ancestral", _flow_gaussian, x, _grid(5), seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_ancestral_sampling_keeps_the_distribution():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 100, 100, generator=generator, dtype=torch.float64)
    result = _run("euler_ancestral", _flow_gaussian, x, _grid(200), seed=3)
    assert result.std().item() == pytest.approx(0.5, rel=0.03)

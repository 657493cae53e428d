"""The loop of a plain job over a forward whose maths is known: CFG, steps, a cancel, and a model that gives NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flux_requests import request
from oracle import oracle_model, oracle_sample
from parallel_backend.errors import Cancelled, RequestError
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import PointForward, point_prompt, point_request, run_plain
from tiny_flux import write_tiny_flux


def test_the_prompt_is_reached_and_each_step_tells_its_denoised_latent_once():
    steps = []
    result = run_plain(PointForward(), point_request(), lambda i, d: steps.append((i, d.mean().item())))
    torch.testing.assert_close(result, torch.full((2, 4, 3, 5), 2.0))
    assert [i for i, _ in steps] == [0, 1, 2, 3]
    assert all(value == pytest.approx(2.0, abs=1e-5) for _, value in steps)


def test_cfg_extrapolates_from_uncond_to_cond_in_one_forward_and_one_never_evaluates_the_negative_prompt():
    forward = PointForward()
    result = run_plain(forward, point_request(negative=point_prompt(1.0), cfg=3.0))
    expected = torch.full((2, 4, 3, 5), 1.0 + 3.0 * (2.0 - 1.0))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert forward.calls == [4] * 4  # two prompts of two images
    forward = PointForward()
    run_plain(forward, point_request(negative=point_prompt(1.0), cfg=1.0))
    assert forward.calls == [2] * 4


def test_cancelling_from_the_callback_stops_the_loop():
    forward = PointForward()

    def cancel(i, denoised):
        raise Cancelled("cancelled")

    with pytest.raises(Cancelled):
        run_plain(forward, point_request(), cancel)
    assert len(forward.calls) == 1


class Failing(PointForward):
    """A forward that gives `value` from model call number `at` on."""

    def __init__(self, at: int, value: float) -> None:
        super().__init__()
        self.at, self.value = at, value

    def __call__(self, call):
        velocities = super().__call__(call)
        if len(self.calls) >= self.at:
            velocities[-1, 0, 0, 0] = self.value
        return velocities


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_step_without_numbers_is_named_and_is_the_last(value):
    forward, seen = Failing(3, value), []
    job = point_request(negative=point_prompt(1.0), cfg=2.0)
    with pytest.raises(RequestError, match="NaN or infinite in step 3 of 4; the image would be black"):
        run_plain(forward, job, lambda i, _: seen.append(i))
    assert len(forward.calls) == 3 and seen == [0, 1]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """Returns the files of a sound model and of the same model with one NaN weight in its last block."""
    folder = tmp_path_factory.mktemp("numbers")
    sound, broken = write_tiny_flux(folder / "sound.safetensors", single_blocks=2), folder / "nan.safetensors"
    tensors = load_file(sound)
    tensors["single_blocks.1.linear2.weight"][0, 0] = float("nan")
    save_file(tensors, broken)
    return sound, broken


@pytest.mark.timeout(300)
def test_ranks_refuse_weights_that_are_no_numbers_together_and_stay(two_real_ranks, files):
    sound, broken = (ModelSpec(str(path)) for path in files)
    job = request((8, 12), 2.0, 1, steps=4)
    for strategy, words in (
        (ParallelStrategy(ulysses_degree=2), "in step 1 of 4"),
        (ParallelStrategy(cfg_degree=2), "in step 1 of 4"),
        (ParallelStrategy(pipefusion_degree=2, warmup_steps=1), "in step 1 of 4"),
    ):
        with pytest.raises(RequestError, match=words):
            two_real_ranks.sample(broken, job, Placement(strategy))
    found = two_real_ranks.sample(sound, job, Placement(ParallelStrategy(ulysses_degree=2))).latent
    expected = oracle_sample(oracle_model(files[0].parent, single_blocks=2), job)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

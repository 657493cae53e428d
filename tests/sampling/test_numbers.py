"""A model that gives no numbers is told of at the step where that began, and nothing is sampled after it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle import oracle_model, oracle_sample
from parallel_backend.errors import RequestError
from parallel_backend.requests import Conditioning, ModelSpec, Placement, SampleRequest
from parallel_backend.sampling.denoise import denoise
from parallel_backend.strategy import ParallelStrategy
from tiny_flux import write_tiny_flux


def request() -> SampleRequest:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 16, 8, 12, generator=generator)
    prompt = Conditioning(
        context=torch.randn(1, 7, 64, generator=generator),
        pooled=torch.randn(1, 32, generator=generator),
        guidance=torch.tensor([3.5]),
    )
    return SampleRequest(
        noise=noise,
        latent=torch.zeros_like(noise),
        sigmas=torch.linspace(1, 0, 5),
        positive=prompt,
        negative=replace(prompt, context=-prompt.context),
        cfg=2.0,
        sampler="euler",
        seed=0,
    )


class Failing:
    """A forward that gives `value` from the model call `at` on."""

    device = torch.device("cpu")

    def start_flow(self, request, prompts):
        return None

    def __init__(self, at: int, value: float) -> None:
        self.at, self.value, self.calls = at, value, 0

    def __call__(self, rows):
        self.calls += 1
        velocities = [torch.zeros_like(row.x) for row in rows]
        if self.calls >= self.at:
            velocities[-1][0, 0, 0, 0] = self.value
        return velocities


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_step_is_named_and_is_the_last(value):
    forward, seen = Failing(3, value), []
    with pytest.raises(RequestError, match="NaN or infinite in step 3 of 4; the image would be black"):
        denoise(forward, request(), lambda i, _: seen.append(i))
    assert forward.calls == 3 and seen == [0, 1]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """(a sound model, the same with one weight of its last block that is NaN)."""
    folder = tmp_path_factory.mktemp("numbers")
    sound, broken = write_tiny_flux(folder / "sound.safetensors", single_blocks=2), folder / "nan.safetensors"
    tensors = load_file(sound)
    tensors["single_blocks.1.linear2.weight"][0, 0] = float("nan")
    save_file(tensors, broken)
    return sound, broken


@pytest.mark.timeout(300)
def test_ranks_refuse_weights_that_are_no_numbers_together_and_stay(two_real_ranks, files):
    sound, broken = (ModelSpec(str(path)) for path in files)
    for strategy, words in (
        (ParallelStrategy(ulysses_degree=2), "in step 1 of 4"),
        (ParallelStrategy(cfg_degree=2), "in step 1 of 4"),
        (ParallelStrategy(pipefusion_degree=2, warmup_steps=1), "in step 1 of 4"),
    ):
        with pytest.raises(RequestError, match=words):
            two_real_ranks.sample(broken, request(), Placement(strategy))
    found = two_real_ranks.sample(sound, request(), Placement(ParallelStrategy(ulysses_degree=2))).latent
    expected = oracle_sample(oracle_model(files[0].parent, single_blocks=2), request())
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

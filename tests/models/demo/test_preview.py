"""The shipped image coder on new drawings: sharp pictures, latents in Flux's format, previews in their colours."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import avg_pool2d

from demo_training.drawing import draw
from demo_training.judge import judge
from demo_training.scenes import random_scene
from parallel_backend.models.demo.image_coder import (
    RGB_BIAS,
    RGB_FACTORS,
    SCALE,
    SHIFT,
    DemoImageCoder,
)

LEAST_PSNR = 33.0  # dB, mean over new drawings
WEIGHTS = Path(__file__).resolve().parents[3] / "demo_model" / "image_coder.safetensors"


@pytest.fixture(scope="module")
def coder() -> DemoImageCoder:
    made = DemoImageCoder().eval().requires_grad_(False)
    made.load_state_dict(load_file(WEIGHTS))
    return made


@pytest.fixture(scope="module")
def drawings():
    rng = random.Random(2026)
    scenes = [random_scene(rng, held_out=n % 2 == 0) for n in range(60)]
    return scenes, torch.stack([draw(scene, rng) for scene in scenes])


@pytest.fixture(scope="module")
def latents(coder, drawings):
    return coder.encode(drawings[1] * 2 - 1)


def test_the_model_sees_latents_of_zero_mean_and_unit_variance(latents):
    seen = (latents - SHIFT) * SCALE
    assert seen.mean(dim=(0, 2, 3)).abs().max() < 0.15
    assert (seen.std(dim=(0, 2, 3)) - 1).abs().max() < 0.15


def test_drawings_come_back(coder, drawings, latents):
    scenes, images = drawings
    back = (coder.decode(latents) / 2 + 0.5).clamp(0, 1)
    psnr = -10 * (back - images).square().mean(dim=(1, 2, 3)).log10()
    assert psnr.mean() >= LEAST_PSNR
    assert all(judge(image, scene).right for image, scene in zip(back, scenes, strict=True))


def test_other_sizes_work(coder):
    picture = torch.zeros(1, 3, 72, 200)
    assert coder.decode(coder.encode(picture)).shape == picture.shape


def _previewed(latents: torch.Tensor) -> torch.Tensor:
    """Returns ComfyUI's previews of latents, [B, H/8, W/8, 3] in 0..1."""
    seen = ((latents - SHIFT) * SCALE).movedim(1, -1)
    rgb = torch.nn.functional.linear(seen, torch.tensor(RGB_FACTORS).T, torch.tensor(RGB_BIAS))
    return ((rgb + 1) / 2).clamp(0, 1)


def test_the_factors_are_those_of_least_squares(drawings, latents):
    wanted = avg_pool2d(drawings[1], 8).movedim(1, -1)
    assert (_previewed(latents) - wanted).square().mean().sqrt() < 0.01

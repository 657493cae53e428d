"""The shipped image coder on new drawings: its pictures are sharp enough, and its latents have Flux's format."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from demo_training.drawing import SIZE, draw
from demo_training.judge import judge
from demo_training.scenes import random_scene
from parallel_backend.models.demo.image_coder import CHANNELS, DOWNSCALE, SCALE, SHIFT, DemoImageCoder

FILE = Path(__file__).resolve().parents[3] / "demo_model" / "image_coder.safetensors"
LEAST_PSNR = 33.0  # dB, mean over new drawings


@pytest.fixture(scope="module")
def coder():
    made = DemoImageCoder().eval().requires_grad_(False)
    made.load_state_dict(load_file(FILE))
    return made


@pytest.fixture(scope="module")
def drawings():
    rng = random.Random(2026)
    scenes = [random_scene(rng, held_out=n % 2 == 0) for n in range(60)]
    return scenes, torch.stack([draw(scene, rng) for scene in scenes])


def test_latents_are_an_eighth_of_the_picture(coder, drawings):
    latent = coder.encode(drawings[1][:2] * 2 - 1)
    assert latent.shape == (2, CHANNELS, SIZE // DOWNSCALE, SIZE // DOWNSCALE)
    assert coder.decode(latent).shape == (2, 3, SIZE, SIZE)


def test_the_model_sees_latents_of_zero_mean_and_unit_variance(coder, drawings):
    seen = (coder.encode(drawings[1] * 2 - 1) - SHIFT) * SCALE
    assert seen.mean(dim=(0, 2, 3)).abs().max() < 0.15
    assert (seen.std(dim=(0, 2, 3)) - 1).abs().max() < 0.15


def test_drawings_come_back(coder, drawings):
    scenes, images = drawings
    back = (coder.decode(coder.encode(images * 2 - 1)) / 2 + 0.5).clamp(0, 1)
    psnr = -10 * (back - images).square().mean(dim=(1, 2, 3)).log10()
    assert psnr.mean() >= LEAST_PSNR
    assert all(judge(image, scene).right for image, scene in zip(back, scenes, strict=True))


def test_other_sizes_work(coder):
    picture = torch.zeros(1, 3, 72, 200)
    assert coder.decode(coder.encode(picture)).shape == picture.shape

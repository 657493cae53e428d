"""Previews of the demo have the colours of its pictures: a red circle looks red."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from demo_training.drawing import draw
from demo_training.scenes import RGB, Scene, Thing, random_scene
from parallel_backend.models.demo.image_coder import RGB_BIAS, RGB_FACTORS, SCALE, SHIFT, DemoImageCoder

WEIGHTS = Path(__file__).resolve().parents[3] / "demo_model" / "image_coder.safetensors"


@pytest.fixture(scope="module")
def coder() -> DemoImageCoder:
    made = DemoImageCoder().eval().requires_grad_(False)
    made.load_state_dict(load_file(WEIGHTS))
    return made


def _previewed(coder: DemoImageCoder, image: torch.Tensor) -> torch.Tensor:
    """Returns ComfyUI's preview of an image's latent, [H/8, W/8, 3] in 0..1. `image`: [3, H, W] in 0..1."""
    latent = (coder.encode(image[None] * 2 - 1) - SHIFT) * SCALE
    rgb = torch.nn.functional.linear(
        latent[0].movedim(0, -1), torch.tensor(RGB_FACTORS).T, torch.tensor(RGB_BIAS)
    )
    return ((rgb + 1) / 2).clamp(0, 1)


@pytest.mark.parametrize("colour", RGB)
def test_a_circle_is_previewed_in_its_own_colour(coder, colour):
    image = draw(Scene(Thing(colour, "circle")), random.Random(1))
    inside = (image - torch.tensor(RGB[colour]).view(3, 1, 1)).abs().amax(0) < 0.01
    whole = (
        torch.nn.functional.avg_pool2d(inside[None].float(), 8)[0] == 1
    )  # latent positions within the circle
    middle = _previewed(coder, image)[whole].mean(0)
    assert (middle - torch.tensor(RGB[colour])).abs().max() < 0.06


def test_the_factors_are_those_of_least_squares(coder):
    rng = random.Random(5)
    images = [draw(random_scene(rng), rng) for _ in range(100)]
    wanted = torch.cat(
        [torch.nn.functional.avg_pool2d(i[None], 8)[0].movedim(0, -1).flatten(0, 1) for i in images]
    )
    got = torch.cat([_previewed(coder, i).flatten(0, 1) for i in images])
    assert (got - wanted).square().mean().sqrt() < 0.01

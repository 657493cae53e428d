"""Draws scenes: [3, SIZE, SIZE] images in 0..1, anti-aliased from signed distances. All randomness is in `rng`."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from demo_training.scenes import BACKGROUND, RGB, Scene, Thing

SIZE = 128
# Radius of a thing and the distance of a pair's centres from the middle, in pixels.
RADIUS = (17.0, 23.0)
OFFSET = (27.0, 34.0)
_DIRECTION = {"left of": (-1.0, 0.0), "right of": (1.0, 0.0), "above": (0.0, -1.0), "below": (0.0, 1.0)}


def draw(scene: Scene, rng: random.Random) -> Tensor:
    """Returns the scene as [3, SIZE, SIZE] float32 in 0..1; places and sizes vary a little."""
    image = torch.tensor(BACKGROUND).view(3, 1, 1).expand(3, SIZE, SIZE).clone()
    middle = SIZE / 2
    if scene.second is None or scene.relation is None:
        _paint(image, scene.first, middle + rng.uniform(-12, 12), middle + rng.uniform(-12, 12), rng)
        return image
    dx, dy = _DIRECTION[scene.relation]
    for thing, sign in ((scene.first, 1), (scene.second, -1)):
        along = sign * rng.uniform(*OFFSET)
        x = middle + dx * along + (dx == 0) * rng.uniform(-10, 10)
        y = middle + dy * along + (dy == 0) * rng.uniform(-10, 10)
        _paint(image, thing, x, y, rng)
    return image


def _paint(image: Tensor, thing: Thing, x: float, y: float, rng: random.Random) -> None:
    distance = signed_distance(thing.shape, x, y, rng.uniform(*RADIUS))
    cover = (0.5 - distance).clamp(0, 1)
    colour = torch.tensor(RGB[thing.colour]).view(3, 1, 1)
    image += cover * (colour - image)


def signed_distance(shape: str, x: float, y: float, radius: float) -> Tensor:
    """Returns [SIZE, SIZE] distances in pixels to the outline, negative inside; the shapes have similar areas."""
    axis = torch.arange(SIZE) + 0.5
    u, v = (axis - x).view(1, SIZE), (axis - y).view(SIZE, 1)
    if shape == "circle":
        return (u**2 + v**2).sqrt() - radius
    if shape == "square":
        return torch.maximum(u.abs(), v.abs()) - radius * 0.9
    if shape == "triangle":
        side = u.abs() * 0.8944 - v * 0.4472 - radius * 0.5  # two sides, rising 2 in 1
        return torch.maximum(side.expand(SIZE, SIZE), (v - radius * 0.85).expand(SIZE, SIZE))
    if shape == "cross":
        arm = radius * 0.36
        across = torch.maximum(u.abs() - radius, v.abs() - arm)
        down = torch.maximum(u.abs() - arm, v.abs() - radius)
        return torch.minimum(across, down)
    raise ValueError(f"no such shape: {shape}")

"""Finds in a picture which things are where. It was written for drawings only and never sees the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from demo_training.drawing import SIZE, signed_distance
from demo_training.scenes import BACKGROUND, RGB, Scene, Thing
from parallel_backend.models.demo.text_encoder import SHAPES

_LEAST_PIXELS = 250  # a thing of the smallest drawn size has over 500
# Intersection over union with the ideal outline; drawings reach at least 0.94, the next best shape at most 0.85.
_LEAST_OVERLAP = 0.75


@dataclass(frozen=True)
class Verdict:
    """A judgement of a picture by its parts. `right`: True if all parts are right."""

    colours: bool
    shapes: bool
    relation: bool

    @property
    def right(self) -> bool:
        return self.colours and self.shapes and self.relation


def judge(image: Tensor, scene: Scene) -> Verdict:
    """Compares the things found in `image` ([3, SIZE, SIZE] in 0..1) with `scene`."""
    found = find_things(image)
    wanted = [scene.first] + ([scene.second] if scene.second else [])
    colours = set(found) == {thing.colour for thing in wanted}
    if not colours:
        return Verdict(False, False, False)
    shapes = all(found[thing.colour][0] == thing.shape for thing in wanted)
    return Verdict(True, shapes, _relation_holds(scene, found))


def _relation_holds(scene: Scene, found: dict[str, tuple[str, float, float]]) -> bool:
    if scene.second is None:
        return True
    _, x1, y1 = found[scene.first.colour]
    _, x2, y2 = found[scene.second.colour]
    ahead, beside = {
        "left of": (x2 - x1, y2 - y1),
        "right of": (x1 - x2, y1 - y2),
        "above": (y2 - y1, x2 - x1),
        "below": (y1 - y2, x1 - x2),
    }[scene.relation]
    return ahead > 2 * abs(beside)


def find_things(image: Tensor) -> dict[str, tuple[str, float, float]]:
    """Returns {colour: (shape, x, y)} for every colour that covers enough pixels; x, y in pixels."""
    palette = torch.tensor([BACKGROUND, *RGB.values()])
    distance = (image.permute(1, 2, 0).unsqueeze(2) - palette).square().sum(-1)
    nearest = distance.argmin(-1)
    axis = torch.arange(SIZE) + 0.5
    found = {}
    for index, colour in enumerate(RGB, start=1):
        mask = _without_thin_lines((nearest == index).float())
        pixels = mask.sum()
        if pixels >= _LEAST_PIXELS:
            x, y = (mask.sum(0) * axis).sum() / pixels, (mask.sum(1) * axis).sum() / pixels
            found[colour] = (_best_shape(mask, x.item(), y.item(), pixels.item()), x.item(), y.item())
    return found


def _without_thin_lines(mask: Tensor) -> Tensor:
    """Opens `mask` by 3 x 3: the blended edge of black on the background is a thin line of purple, not a thing."""
    eroded = -F.max_pool2d(-mask[None, None], 3, stride=1, padding=1)
    return F.max_pool2d(eroded, 3, stride=1, padding=1)[0, 0]


def _best_shape(mask: Tensor, x: float, y: float, pixels: float) -> str:
    """Returns the shape whose outline of equal area and centre overlaps best, or "?" below _LEAST_OVERLAP."""
    scores = {}
    for shape in SHAPES:
        # Area grows with the square of the radius; the template's centre of mass is moved onto (x, y).
        area, shift_y = _area_and_shift(shape)
        radius = 20.0 * (pixels / area) ** 0.5
        template = signed_distance(shape, x, y - shift_y * radius / 20.0, radius) < 0
        both = (template & (mask > 0)).sum().item()
        either = (template | (mask > 0)).sum().item()
        scores[shape] = both / either
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= _LEAST_OVERLAP else "?"


@cache
def _area_and_shift(shape: str) -> tuple[float, float]:
    """Returns (area, how far the centre of mass lies below the centre) of a shape of radius 20, in pixels."""
    unit = (signed_distance(shape, SIZE / 2, SIZE / 2, 20.0) < 0).float()
    axis = torch.arange(SIZE) + 0.5
    return unit.sum().item(), ((unit.sum(1) * axis).sum() / unit.sum()).item() - SIZE / 2


def describe(image: Tensor) -> list[Thing]:
    """Returns the things found, for a person to read."""
    return [Thing(colour, shape) for colour, (shape, _, _) in find_things(image).items()]

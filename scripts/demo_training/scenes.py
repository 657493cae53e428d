"""The captions of the demo: one coloured shape, or two with a relation; and the scenes that training never sees."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from parallel_backend.models.demo.text_encoder import COLOURS, SHAPES

RGB = {
    "red": (0.85, 0.15, 0.15),
    "green": (0.15, 0.62, 0.25),
    "blue": (0.15, 0.35, 0.85),
    "yellow": (0.95, 0.80, 0.15),
    "purple": (0.55, 0.20, 0.70),
    "black": (0.10, 0.10, 0.12),
}
RELATIONS = ("left of", "right of", "above", "below")
BACKGROUND = (0.94, 0.93, 0.90)
_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
# One scene of two things in eight is held out, in both ways to describe it, so that training never sees that picture.
_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Thing:
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A single thing (`second` is None), or two things: `first` is `relation` `second`."""

    first: Thing
    relation: str | None = None
    second: Thing | None = None

    @property
    def caption(self) -> str:
        return str(self.first) if self.second is None else f"{self.first} {self.relation} {self.second}"


THINGS = tuple(Thing(colour, shape) for colour, shape in product(COLOURS, SHAPES))


def is_held_out(scene: Scene) -> bool:
    """Returns True if training leaves the scene out. "a left of b" and its mirror "b right of a" are equal here."""
    if scene.second is None or scene.relation is None:
        return False
    a, b = THINGS.index(scene.first), THINGS.index(scene.second)
    axis = scene.relation in ("above", "below")
    if scene.relation in ("right of", "below"):
        a, b = b, a
    # Scatters over all pairs without a random state, so that every run holds out the same scenes.
    return (a * 7 + b * 13 + axis * 5) % _HELD_OUT_ONE_IN == 0


def mirrored(scene: Scene) -> Scene:
    """Returns the scene that describes the same picture from the second thing's side."""
    if scene.second is None or scene.relation is None:
        return scene
    return Scene(scene.second, _OPPOSITE[scene.relation], scene.first)


def random_scene(rng: random.Random, held_out: bool = False) -> Scene:
    """Draws a scene of training, or a `held_out` one that training never sees. Two things differ in colour."""
    while True:
        if not held_out and rng.random() < 0.15:
            return Scene(rng.choice(THINGS))
        scene = Scene(rng.choice(THINGS), rng.choice(RELATIONS), rng.choice(THINGS))
        assert scene.second is not None
        if scene.first.colour != scene.second.colour and is_held_out(scene) == held_out:
            return scene

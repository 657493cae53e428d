"""The demo's judge on drawings: a right drawing is judged right, and each kind of mistake is noticed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from demo_training.drawing import SIZE, draw, signed_distance
from demo_training.judge import Verdict, describe, judge
from demo_training.scenes import BACKGROUND, RGB, Scene, Thing, mirrored, random_scene
from parallel_backend.models.demo.text_encoder import SHAPES

RED_CIRCLE, BLUE_SQUARE = Thing("red", "circle"), Thing("blue", "square")
SCENE = Scene(RED_CIRCLE, "left of", BLUE_SQUARE)


def blank() -> torch.Tensor:
    return torch.tensor(BACKGROUND).view(3, 1, 1).expand(3, SIZE, SIZE).clone()


def drawn(scene: Scene, seed: int = 0) -> torch.Tensor:
    return draw(scene, random.Random(seed))


def test_drawings_are_in_range_and_anti_aliased():
    image = drawn(SCENE)
    assert image.shape == (3, SIZE, SIZE) and image.dtype == torch.float32
    assert image.min() >= 0 and image.max() <= 1
    assert len(image.flatten(1).T.unique(dim=0)) > 20  # more than three flat colours


def test_the_same_seed_draws_the_same_picture_and_another_seed_another():
    assert torch.equal(drawn(SCENE, 1), drawn(SCENE, 1))
    assert not torch.equal(drawn(SCENE, 1), drawn(SCENE, 2))


def test_things_stay_on_the_picture():
    rng = random.Random(5)
    background = torch.tensor(BACKGROUND).view(3, 1)
    for _ in range(80):
        image = draw(random_scene(rng), rng)
        edges = torch.cat([image[:, 0], image[:, -1], image[:, :, 0], image[:, :, -1]], dim=1)
        assert torch.equal(edges, background.expand_as(edges))


def test_shapes_have_similar_areas():
    areas = [(signed_distance(shape, 64, 64, 20) < 0).sum().item() for shape in SHAPES]
    assert max(areas) < 3 * min(areas)


def test_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match="pentagon"):
        signed_distance("pentagon", 64, 64, 20)


def test_every_drawing_is_judged_right_also_when_said_the_other_way_round():
    rng = random.Random(6)
    for n in range(60):
        scene = random_scene(rng, held_out=n % 2 == 0)
        image = draw(scene, rng)
        assert judge(image, scene).right, scene.caption
        assert n % 5 or judge(image, mirrored(scene)).right, scene.caption


def test_what_is_found_is_described_for_a_person():
    assert sorted(map(str, describe(drawn(SCENE)))) == ["a blue square", "a red circle"]


def test_a_random_other_caption_is_judged_wrong():
    rng = random.Random(7)
    for _ in range(40):
        scene, other = random_scene(rng), random_scene(rng)
        if other not in (scene, mirrored(scene)):
            assert not judge(draw(scene, rng), other).right, (scene.caption, other.caption)


NOTHING = Verdict(colours=False, shapes=False, relation=False)
SHAPES_WRONG = Verdict(colours=True, shapes=False, relation=True)
RELATION_WRONG = Verdict(colours=True, shapes=True, relation=False)


@pytest.mark.parametrize(
    ("claimed", "verdict"),
    [
        (Scene(Thing("green", "circle"), "left of", BLUE_SQUARE), NOTHING),
        (Scene(RED_CIRCLE), NOTHING),
        (Scene(RED_CIRCLE, "left of", Thing("blue", "triangle")), SHAPES_WRONG),
        (Scene(Thing("red", "square"), "left of", Thing("blue", "circle")), SHAPES_WRONG),
        (
            Scene(Thing("blue", "circle"), "left of", Thing("red", "square")),
            replace(SHAPES_WRONG, relation=False),
        ),
        (Scene(RED_CIRCLE, "right of", BLUE_SQUARE), RELATION_WRONG),
        (Scene(RED_CIRCLE, "above", BLUE_SQUARE), RELATION_WRONG),
    ],
    ids=str,
)
def test_each_kind_of_mistake_is_named(claimed, verdict):
    assert judge(drawn(SCENE), claimed) == verdict


def test_side_by_side_but_askew_is_no_relation():
    image = blank()
    for thing, x, y in ((RED_CIRCLE, 35, 35), (BLUE_SQUARE, 93, 93)):
        inside = signed_distance(thing.shape, x, y, 20) < 0
        image[:, inside] = torch.tensor(RGB[thing.colour]).view(3, 1)
    for relation in ("left of", "above"):
        assert judge(image, Scene(RED_CIRCLE, relation, BLUE_SQUARE)) == RELATION_WRONG


@pytest.mark.parametrize(
    "spoil",
    [
        lambda image: blank(),
        lambda image: torch.rand(3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)),
        lambda image: image.flip(2),
        lambda image: torch.maximum(image, torch.full_like(image, 0.94)),
        lambda image: image.roll(40, dims=2),
    ],
    ids=["blank", "noise", "mirrored", "washed out", "cut in two by the edge"],
)
def test_a_spoilt_drawing_is_wrong(spoil):
    assert not judge(spoil(drawn(SCENE)), SCENE).right


def test_a_thing_with_a_third_bitten_off_has_no_shape():
    image = drawn(Scene(Thing("red", "square")), 3)
    rows = ((image[0] > 0.8) & (image[1] < 0.3)).any(1).nonzero().flatten()
    image[:, rows[0] : rows[0] + len(rows) // 3, : SIZE // 2] = torch.tensor(BACKGROUND).view(3, 1, 1)
    image[:, rows[-1] - len(rows) // 3 : rows[-1] + 1, SIZE // 2 :] = torch.tensor(BACKGROUND).view(3, 1, 1)
    assert judge(image, Scene(Thing("red", "square"))) == SHAPES_WRONG


def test_a_third_thing_is_wrong():
    image = drawn(SCENE)
    image[:, 2:24, 2:24] = torch.tensor(RGB["black"]).view(3, 1, 1)
    assert not judge(image, SCENE).colours

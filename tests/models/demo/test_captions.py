"""The demo's grammar, its share of held-out captions, and its tokenizer."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from demo_training.scenes import RELATIONS, THINGS, Scene, is_held_out, mirrored, random_scene
from parallel_backend.models.demo.text_encoder import (
    CONTEXT_DIM,
    EMPTY,
    POOLED_DIM,
    TOKENS,
    UNKNOWN,
    WORDS,
    DemoTextEncoder,
    tokenize,
)

PAIRS = [
    Scene(first, relation, second)
    for first, relation, second in product(THINGS, RELATIONS, THINGS)
    if first.colour != second.colour
]


def test_training_never_draws_a_held_out_scene_and_the_judges_draw_only_those():
    rng = random.Random(0)
    assert not any(is_held_out(random_scene(rng)) for _ in range(3000))
    for _ in range(300):
        scene = random_scene(rng, held_out=True)
        assert is_held_out(scene)
        assert scene.second is not None


def test_a_scene_and_its_mirror_are_held_out_together():
    assert all(is_held_out(scene) == is_held_out(mirrored(scene)) for scene in PAIRS)


def test_held_out_pairs_are_one_in_eight_with_every_thing_and_every_relation_in_both_shares():
    held_out = [scene for scene in PAIRS if is_held_out(scene)]
    trained = [scene for scene in PAIRS if not is_held_out(scene)]
    assert 0.1 < len(held_out) / len(PAIRS) < 0.15
    for share in (held_out, trained):
        assert {scene.first for scene in share} == set(THINGS)
        assert {scene.relation for scene in share} == set(RELATIONS)


def test_every_word_of_every_caption_is_known():
    for scene in PAIRS:
        indices = tokenize(scene.caption)
        assert len(indices) == TOKENS
        assert UNKNOWN not in indices
        words = " ".join(WORDS[index] for index in indices if index != EMPTY)
        assert words == scene.caption


@pytest.mark.parametrize("text", ["", "   ", "?!", "12"])
def test_a_text_without_words_is_the_empty_prompt(text):
    assert tokenize(text) == [EMPTY] * TOKENS


def test_any_text_has_as_many_tokens_and_unknown_words_keep_their_place():
    plain = tokenize("a red circle left of a blue square")
    assert tokenize("A RED circle, left of\n(a Blue square:1.2)!") == plain
    red, dog = tokenize("a red dog")[1:3]
    assert (WORDS[red], dog) == ("red", UNKNOWN)
    assert len(tokenize("a red circle " * 50)) == TOKENS


def test_encoder_gives_context_and_pooled_of_unit_size_order():
    encoder = DemoTextEncoder()
    context, pooled = encoder(torch.tensor([tokenize(scene.caption) for scene in PAIRS[:50]]))
    assert context.shape == (50, TOKENS, CONTEXT_DIM) and pooled.shape == (50, POOLED_DIM)
    assert 0.5 < context.std() < 3 and 0.3 < pooled.std() < 3


def test_encoder_tells_a_sentence_from_its_swap():
    scene = PAIRS[0]
    swapped = Scene(scene.second, scene.relation, scene.first)
    (one, other), pooled = DemoTextEncoder()(
        torch.tensor([tokenize(scene.caption), tokenize(swapped.caption)])
    )
    assert (one - other).abs().max() > 0.1
    assert (pooled[0] - pooled[1]).abs().max() > 0.1


def test_encoder_is_the_same_everywhere():
    """It is not shipped but drawn from a seed: the transformer was trained with these numbers."""
    encoder = DemoTextEncoder()
    words, places = torch.tensor([-0.18391, 0.72964, 0.62417]), torch.tensor([0.39356, -0.42496, 0.08047])
    torch.testing.assert_close(encoder.words[0, :3], words, atol=1e-4, rtol=0)
    torch.testing.assert_close(encoder.places[-1, -3:], places, atol=1e-4, rtol=0)

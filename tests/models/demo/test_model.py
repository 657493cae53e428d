"""The shipped demo model: its files, and held-out captions sampled with a plain loop over the diffusers model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from demo_training.judge import judge
from demo_training.scenes import is_held_out, random_scene
from parallel_backend.models.demo.text_encoder import CONTEXT_DIM, POOLED_DIM
from parallel_backend.models.diffusers.checkpoint import inspect_flux

FOLDER = Path(__file__).resolve().parents[3] / "demo_model"
TRANSFORMER = FOLDER / "transformer.safetensors"

# LEAST_RIGHT of CAPTIONS held-out captions must come out right. docs/demo-model.md has the trainer's count over 200.
CAPTIONS, LEAST_RIGHT = 12, 10


@pytest.fixture(scope="module")
def trainer():
    import train_demo_model

    return train_demo_model


def test_files_are_small_enough_for_a_repository():
    files = list(FOLDER.iterdir())
    assert {file.name for file in files} == {
        "transformer.safetensors",
        "image_coder.safetensors",
        "evaluation.json",
    }
    assert sum(file.stat().st_size for file in files) <= 16_000_000


def test_the_pack_reads_its_dimensions_from_the_tensors(trainer):
    file = inspect_flux(str(TRANSFORMER))
    assert (file.layout, file.prefix, file.dims) == ("original", "", trainer.DIMS)
    assert (file.dims.context_dim, file.dims.pooled_dim) == (CONTEXT_DIM, POOLED_DIM)
    # Two heads and an even number of tokens: two ranks can share every part of it.
    assert file.dims.heads % 2 == 0


@pytest.fixture(scope="module")
def sampled(trainer):
    """Scenes that training never saw, and the pictures that the shipped model makes of their captions."""
    from safetensors.torch import load_file

    coder = trainer.DemoImageCoder().eval()
    coder.load_state_dict(load_file(FOLDER / "image_coder.safetensors"))
    rng = random.Random(99)
    scenes = [random_scene(rng, held_out=True) for _ in range(CAPTIONS)]
    captions = [scene.caption for scene in scenes]
    return scenes, trainer.sample(trainer.load_transformer(TRANSFORMER), coder, captions, seed=99)


@pytest.mark.slow
@pytest.mark.xdist_group("demo_samples")
def test_held_out_captions_come_out_right(sampled):
    scenes, pictures = sampled
    assert all(is_held_out(scene) for scene in scenes)
    right = sum(judge(picture, scene).right for picture, scene in zip(pictures, scenes, strict=True))
    assert right >= LEAST_RIGHT


@pytest.mark.slow
@pytest.mark.xdist_group("demo_samples")
def test_the_caption_is_what_makes_them_right(sampled):
    """The control: the same pictures, judged by each other's captions."""
    scenes, pictures = sampled
    others = scenes[1:] + scenes[:1]
    assert sum(judge(picture, scene).right for picture, scene in zip(pictures, others, strict=True)) <= 1

"""The prompts of the load test: pictures of three models in three sizes. They are drawn from a small set, so that each
one's latent is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from comfy_harness import ROOT
from graphs import Graph

MODELS = ("demo", "other", "third")
SIZES = ((64, 64), (128, 128), (96, 160))  # pixels
SEEDS = range(4)
STEPS = 4
CANCELLED = 0.05  # share of the prompts
_TURNS = MODELS[1:]  # ComfyUI keeps nothing of these when another runs, but the demo's text encoder
_CHANGED, _BY = "final_layer.linear.weight", {"other": 0.9, "third": 0.8}
_FIRST_THRESHOLD = 0.001  # the step cache is off, so its threshold only changes ComfyUI's cache key


@dataclass(frozen=True)
class Picture:
    """A picture of the set: its model, its size in pixels and its seed."""

    model: str
    width: int
    height: int
    seed: int


@dataclass(frozen=True)
class Order:
    """A prompt to send. `number`: unique in a run; `cancelled`: True if its program cancels it."""

    number: int
    picture: Picture
    cancelled: bool


ALL = tuple(Picture(model, *size, seed) for model, size, seed in itertools.product(MODELS, SIZES, SEEDS))


def orders(count: int, *, alternate: bool) -> list[Order]:
    """Returns the same prompts for each run. `alternate`: each has another model than the last; none is cancelled."""
    draw = random.Random(17)
    found = []
    for number in range(count):
        model = _TURNS[number % 2] if alternate else None
        picture = draw.choice([one for one in ALL if model in (None, one.model)])
        found.append(Order(number, picture, not alternate and draw.random() < CANCELLED))
    return found


def write_models(base_directory: Path) -> None:
    """Writes the two other models into ComfyUI's folder: the demo model with one weight scaled."""
    tensors = load_file(ROOT / "demo_model" / "transformer.safetensors")
    folder = base_directory / "models" / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    for model, factor in _BY.items():
        save_file({**tensors, _CHANGED: tensors[_CHANGED] * factor}, folder / f"{model}.safetensors")


def graph_of(picture: Picture, number: int, ranks: int) -> dict:
    """Returns a prompt that saves latent and picture. A new `number` keeps ComfyUI from using its cache."""
    graph = Graph()
    # Chosen by hand: `auto` tries strategies first, and its choice on a CPU changes from run to run.
    strategy = graph.strategy(f"cpu:{ranks}", ulysses=ranks)
    demo = graph.add("ParallelDemoLoader", strategy=strategy)
    loader = demo
    if picture.model != "demo":
        loader = graph.add(
            "ParallelFluxLoader",
            unet_name=f"{picture.model}.safetensors",
            weight_dtype="auto",
            strategy=strategy,
        )
    text = [graph.add("CLIPTextEncode", clip=[demo, 2], text="a red circle left of a blue square"), 0]
    size = {"width": picture.width, "height": picture.height, "batch_size": 1}
    latent = [graph.add("EmptySD3LatentImage", **size), 0]
    sampled = graph.parallel_sampler(
        loader, text, text, latent, seed=picture.seed, steps=STEPS,
        cache_threshold=_FIRST_THRESHOLD + number * 1e-6,
    )  # fmt: skip
    graph.add("SaveLatent", samples=sampled, filename_prefix="load")
    image = [graph.add("VAEDecode", samples=sampled, vae=[demo, 3]), 0]
    graph.add("SaveImage", images=image, filename_prefix="load")
    return graph.prompt


def saved_latent(outputs: dict) -> dict[str, str]:
    """Returns where the latent was saved, from a prompt's outputs in ComfyUI's history."""
    found: Iterator[dict] = (one for output in outputs.values() for one in output.get("latents", ()))
    return next(found)

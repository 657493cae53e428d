"""ControlNets, reference latents, masks, Fill and Depth models: every strategy gives the latent of one device."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file

from any_runs import TOLERANCE, compared, latents
from differences import relative_difference
from graphs import OURS, STOCK, Graph
from tiny_flux import tiny_flux_tensors, to_diffusers_layout

DEV, FILL, DEPTH = "tiny_extras.safetensors", "tiny_fill.safetensors", "tiny_depth.safetensors"
BLOCKS = {"double_blocks": 2, "single_blocks": 3}
STRATEGIES = {
    "CFG 2": ("cpu:2", {"cfg": 2}),
    "Ulysses 2": ("cpu:2", {"ulysses": 2}),
    "Ulysses 2 x Ring 2": ("cpu:4", {"ulysses": 2, "ring": 2}),
    "PipeFusion 2": ("cpu:2", {"pipefusion": 2}),
    "xfuser": ("cpu:2", {"ulysses": 2, "engine": "xfuser"}),
}


@pytest.fixture(scope="module", autouse=True)
def models(comfy):
    comfy.write_flux(DEV, **BLOCKS)
    comfy.write_flux(FILL, in_channels=384, **BLOCKS)
    comfy.write_flux(DEPTH, in_channels=128, **BLOCKS)
    save_file(_xlabs(), comfy.models("controlnet") / "xlabs.safetensors")
    save_file(_instantx(), comfy.models("controlnet") / "instantx.safetensors")


def _drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()
    }


def _xlabs() -> dict[str, torch.Tensor]:
    """Returns a ControlNet of two double blocks in XLabs' layout; its hint is the picture itself."""
    flux = tiny_flux_tensors(double_blocks=2, seed=3)
    kept = {key: value for key, value in flux.items() if not key.startswith(("single_blocks", "final_layer"))}
    hint = [(3, 16, 0), *((16, 16, index) for index in range(2, 16, 2))]
    kept |= _drawn({f"input_hint_block.{i}.weight": (out, wide, 3, 3) for wide, out, i in hint})
    kept |= {f"input_hint_block.{i}.bias": torch.zeros(out) for _, out, i in hint}
    return kept | _projections(("pos_embed_input", 64), *((f"controlnet_blocks.{i}", 256) for i in range(2)))


def _instantx() -> dict[str, torch.Tensor]:
    """Returns a ControlNet of double and single blocks in InstantX's (diffusers') layout; its hint is a latent."""
    flux = to_diffusers_layout(tiny_flux_tensors(double_blocks=2, single_blocks=2, seed=5))
    kept = {key: value for key, value in flux.items() if not key.startswith(("norm_out", "proj_out"))}
    blocks = [f"controlnet_{kind}blocks.{i}" for kind in ("", "single_") for i in range(2)]
    return kept | _projections(("controlnet_x_embedder", 64), *((name, 256) for name in blocks))


def _projections(*layers: tuple[str, int]) -> dict[str, torch.Tensor]:
    """Returns the tensors of layers by their names and input widths."""
    weights = _drawn({f"{name}.weight": (256, inputs) for name, inputs in layers})
    return weights | {f"{name}.bias": torch.zeros(256) for name, _ in layers}


def _controlnet(name: str, start: float = 0.0):
    def add(graph: Graph, positive: list, negative: list) -> tuple[list, list]:
        vae = [graph.add("TestTinyVAE"), 0]
        return graph.controlled(positive, negative, name, start_percent=start, vae=vae)

    return add


def _references(method: str, *sizes: tuple[int, int]):
    def add(graph: Graph, positive: list, negative: list) -> tuple[list, list]:
        for number, (width, height) in enumerate(sizes):
            latent = graph.latent(width=width, height=height, draw=3 + number)
            positive = [graph.add("ReferenceLatent", conditioning=positive, latent=latent), 0]
        wired = {"conditioning": positive, "reference_latents_method": method}
        return [graph.add("FluxKontextMultiReferenceLatentMethod", **wired), 0], negative

    return add


def _mask(boolean: bool):
    def add(graph: Graph, positive: list, negative: list) -> tuple[list, list]:
        masked = graph.add("TestAttentionMask", conditioning=positive, rows=6, columns=8, boolean=boolean)
        return [masked, 0], negative

    return add


def _fill(graph: Graph, positive: list, negative: list) -> tuple[list, list]:
    mask = [graph.add("SolidMask", value=0.7, width=128, height=96), 0]
    return _pictured(graph, "InpaintModelConditioning", positive, negative, mask=mask, noise_mask=True)


def _depth(graph: Graph, positive: list, negative: list) -> tuple[list, list]:
    return _pictured(graph, "InstructPixToPixConditioning", positive, negative)


def _pictured(graph: Graph, node: str, positive: list, negative: list, **inputs) -> tuple[list, list]:
    image = [graph.add("EmptyImage", width=128, height=96, batch_size=1, color=0x804020), 0]
    images = {"vae": [graph.add("TestTinyVAE"), 0], "pixels": image}
    made = graph.add(node, positive=positive, negative=negative, **images, **inputs)
    return [made, 0], [made, 1]


EXTRAS = {
    "a ControlNet of XLabs": _controlnet("xlabs.safetensors"),
    "a ControlNet of InstantX": _controlnet("instantx.safetensors"),
    "a ControlNet from the middle on": _controlnet("xlabs.safetensors", start=0.5),
    "references of other sizes": _references("offset", (10, 20), (15, 9)),
    "references by index": _references("index", (8, 8), (16, 12)),
    "references by uxo": _references("uxo/uno", (8, 8), (9, 7)),
    "an additive mask": _mask(False),
    "a boolean mask": _mask(True),
}
# Grouped by devices, since a group of another size must start first.
CASES = [
    *(("Ulysses 2", name) for name in EXTRAS),
    ("CFG 2", "references of other sizes"),
    ("xfuser", "a ControlNet of InstantX"),
    ("PipeFusion 2", "a ControlNet of InstantX"),
    ("PipeFusion 2", "an additive mask"),
    ("PipeFusion 2", "references of other sizes"),
    ("Ulysses 2 x Ring 2", "a ControlNet of InstantX"),
    ("Ulysses 2 x Ring 2", "an additive mask"),
]


def _assert_stocks(comfy, unet: str, extra, strategy: str) -> None:
    devices, settings = STRATEGIES[strategy]
    graph = Graph()
    positive, negative, latent = graph.request()
    request = (*extra(graph, positive, negative), latent)
    stock, ours = graph.model(STOCK, unet), graph.model(OURS, unet, devices, **settings)
    by_us = {"Parallel Sampler": [ours[0], 0]} if strategy == "Ulysses 2" else {"KSampler": ours}
    ways = graph.sampled_by({"stock": stock} | by_us, request, cfg=3.0)
    ways["without"] = graph.ksampler(stock, positive, negative, latent, cfg=3.0)
    found = compared(comfy, graph, ways)
    assert strategy != "Ulysses 2" or "result: exact" in found["report"]


@pytest.mark.parametrize(("strategy", "name"), CASES)
def test_every_strategy_gives_what_one_device_gives(comfy, strategy, name):
    _assert_stocks(comfy, DEV, EXTRAS[name], strategy)


@pytest.mark.parametrize(("unet", "extra"), [(FILL, _fill), (DEPTH, _depth)], ids=["Fill", "Depth"])
@pytest.mark.parametrize("strategy", ["CFG 2", "Ulysses 2"])
def test_fill_and_depth_models_take_their_images(comfy, unet, extra, strategy):
    _assert_stocks(comfy, unet, extra, strategy)


@pytest.mark.parametrize(
    "choice",
    [
        {"cfg": 2},
        {"ulysses": 2, "shard_weights": True},
        {"tensor": 2},
        {"pipefusion": 2, "warmup_steps": 2},
    ],
    ids=str,
)
def test_a_lora_that_adds_an_input_takes_its_image(comfy, loras, choice):
    """Black Forest Labs' LoRAs for Canny and Depth make `img_in` wider."""
    graph = Graph()
    positive, negative, latent = graph.request()
    request = (*_depth(graph, positive, negative), latent)
    stock, ours = graph.model(STOCK, DEV), graph.model(OURS, DEV, "cpu:2", **choice)
    changed = {
        name: graph.lora(model, loras["wider input"]) for name, model in (("stock", stock), ("ours", ours))
    }
    ways = graph.sampled_by({"without": stock} | changed, request, cfg=3.0, steps=2)
    expected = compared(comfy, graph, ways)["without"]
    after = comfy.sample(graph.prompt, graph.ksampler(ours, *request, cfg=3.0, steps=2))
    assert relative_difference(after, expected) <= TOLERANCE


def test_a_controlnet_is_read_from_its_file_and_sent_to_nobody(comfy):
    """Each rank maps the file for its large weights, for as long as jobs use the ControlNet."""
    file = "controlnet/xlabs.safetensors"

    def mapped_after_a_job(seed: int, extra=lambda graph, *prompts: prompts) -> list[bool]:
        graph = Graph()
        positive, negative, latent = graph.request()
        request = (*extra(graph, positive, negative), latent)
        ours = graph.model(OURS, DEV, "cpu:2", ulysses=2)
        comfy.sample(graph.prompt, graph.ksampler(ours, *request, seed=seed))
        return [any(one.path.endswith(file) for one in rank.memory_maps()) for rank in comfy.ranks()]

    assert mapped_after_a_job(1, EXTRAS["a ControlNet of XLabs"]) == [True, True]
    mapped_after_a_job(2)
    assert mapped_after_a_job(3) == [False, False]


def test_a_step_cache_goes_with_a_controlnet_that_begins_on_the_way(comfy):
    """A call with the ControlNet is another kind of call, whose first one the cache computes in full."""
    graph = Graph()
    stock = graph.model(STOCK, DEV)
    ours = graph.add("ParallelModel", model=stock, strategy=graph.strategy("cpu:2", ulysses=2))
    positive, negative, latent = graph.request()
    prompts = EXTRAS["a ControlNet from the middle on"](graph, positive, negative)
    caching = {"steps": 8, "step_cache": "first_block"}
    ways = {
        name: graph.parallel_sampler([ours, 1], *prompts, latent, cache_threshold=threshold, **caching)
        for name, threshold in (("exact", 0.0), ("cached", 0.5))
    }
    found = latents(comfy, graph, ways)
    counted = re.search(r"step cache: (\d+) of 8 model calls reused", found["report"])
    assert counted and 0 < int(counted[1]) < 7, found["report"]
    assert 0 < relative_difference(found["cached"], found["exact"]) < 0.5


def test_xfuser_stands_back_for_a_mask_and_says_so(comfy):
    graph = Graph()
    positive, negative, latent = graph.request()
    prompts = EXTRAS["a boolean mask"](graph, positive, negative)
    ours = graph.parallel_loader(DEV, "cpu:2", ulysses=2, engine="xfuser")
    report = latents(comfy, graph, {"ours": graph.parallel_sampler(ours, *prompts, latent)})["report"]
    assert "engine xfuser fell back to native: it computes no attention masks" in report

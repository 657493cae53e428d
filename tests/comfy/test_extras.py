"""ControlNets, reference latents, masks, Fill and Depth models: every strategy gives the latent of one device."""

from __future__ import annotations

import itertools
import re

import psutil
import pytest
import torch
from safetensors.torch import save_file

from any_runs import latents
from differences import relative_difference
from graphs import OURS, STOCK, Graph
from tiny_flux import tiny_flux_tensors

TOLERANCE = 1e-4
_SEEDS = itertools.count(100)  # a new seed makes ComfyUI sample again
DEV, FILL, DEPTH = "tiny_extras.safetensors", "tiny_fill.safetensors", "tiny_depth.safetensors"
BLOCKS = {"double_blocks": 2, "single_blocks": 3}
STRATEGIES = {
    "one": ("cpu", {}),
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
    folder = comfy.server.base_directory / "models" / "controlnet"
    folder.mkdir(exist_ok=True)
    save_file(_xlabs(), folder / "xlabs.safetensors")
    save_file(_instantx(), folder / "instantx.safetensors")


def _xlabs() -> dict[str, torch.Tensor]:
    """Returns a ControlNet of two double blocks in XLabs' layout; its hint is the picture itself."""
    flux, generator = tiny_flux_tensors(double_blocks=2, seed=3), torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    kept = {key: value for key, value in flux.items() if not key.startswith(("single_blocks", "final_layer"))}
    hint = [(3, 16, 0), *((16, 16, index) for index in range(2, 16, 2))]
    added = {f"input_hint_block.{i}.weight": draw(out, wide, 3, 3) for wide, out, i in hint}
    added |= {f"input_hint_block.{i}.bias": torch.zeros(out) for _, out, i in hint}
    added |= {"pos_embed_input.weight": draw(256, 64), "pos_embed_input.bias": torch.zeros(256)}
    for block in range(2):
        added[f"controlnet_blocks.{block}.weight"] = draw(256, 256)
        added[f"controlnet_blocks.{block}.bias"] = torch.zeros(256)
    return kept | added


def _instantx() -> dict[str, torch.Tensor]:
    """Returns a ControlNet of double and single blocks in InstantX's (diffusers') layout; its hint is a latent."""
    from diffusers import FluxControlNetModel  # takes seconds

    torch.manual_seed(5)
    model = FluxControlNetModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=128,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(16, 56, 56),
    )
    for name, parameter in model.named_parameters():
        if name.startswith(("controlnet_blocks", "controlnet_single_blocks", "controlnet_x_embedder")):
            torch.nn.init.normal_(parameter, std=0.05)
    return {key: value.clone() for key, value in model.state_dict().items()}


def _image(graph: Graph, color: int = 0x804020) -> list:
    return [graph.add("EmptyImage", width=128, height=96, batch_size=1, color=color), 0]


def _vae(graph: Graph) -> list:
    return [graph.add("TestTinyVAE"), 0]


def _controlnet(name: str, start: float = 0.0):
    def add(graph: Graph, positive: list, negative: list) -> tuple[list, list]:
        return graph.controlled(positive, negative, name, start_percent=start, vae=_vae(graph))

    return add


def _references(method: str, *sizes: tuple[int, int]):
    def add(graph: Graph, positive: list, negative: list) -> tuple[list, list]:
        for number, (width, height) in enumerate(sizes):
            latent = graph.latent(width=width, height=height, draw=3 + number)
            positive = [graph.add("ReferenceLatent", conditioning=positive, latent=latent), 0]
        placed = graph.add(
            "FluxKontextMultiReferenceLatentMethod",
            conditioning=positive,
            reference_latents_method=method,
        )
        return [placed, 0], negative

    return add


def _mask(boolean: bool):
    def add(graph: Graph, positive: list, negative: list) -> tuple[list, list]:
        masked = graph.add("TestAttentionMask", conditioning=positive, rows=6, columns=8, boolean=boolean)
        return [masked, 0], negative

    return add


EXTRAS = {
    "a ControlNet of XLabs": _controlnet("xlabs.safetensors"),
    "a ControlNet of InstantX": _controlnet("instantx.safetensors"),
    "a ControlNet from the middle on": _controlnet("xlabs.safetensors", start=0.5),
    "one reference": _references("offset", (16, 12)),
    "references of other sizes": _references("offset", (10, 20), (15, 9)),
    "references by index": _references("index", (8, 8), (16, 12)),
    "references by uxo": _references("uxo/uno", (8, 8), (9, 7)),
    "an additive mask": _mask(False),
    "a boolean mask": _mask(True),
}


def _sample(
    comfy, kind: str, extra, strategy: str = "one", *, node: str = "KSampler", unet: str = DEV, **changes
):
    devices, settings = STRATEGIES[strategy]
    graph = Graph()
    positive, negative = extra(graph, graph.text(1), graph.text(2))
    settings_of = {"cfg": 3.0, **changes}
    if kind == STOCK or node == "KSampler":
        model = graph.model(kind, unet, devices, **settings) if kind == OURS else graph.model(kind, unet)
        return comfy.sample(
            graph.prompt, graph.ksampler(model, positive, negative, graph.latent(), **settings_of)
        )
    loader = graph.parallel_loader(unet, devices, **settings)
    latent = graph.parallel_sampler(loader, positive, negative, graph.latent(), **settings_of)
    return comfy.sample_with_text(graph.prompt, latent, [latent[0], 1])


def _plain(graph: Graph, positive: list, negative: list) -> tuple[list, list]:
    return positive, negative


@pytest.fixture(scope="module")
def stock(comfy):
    """A function that returns an extra's stock latent, made once. It differs from the latent without the extra."""
    made: dict[str, torch.Tensor] = {}

    def get(name: str) -> torch.Tensor:
        if "" not in made:
            made[""] = _sample(comfy, STOCK, _plain)
        if name not in made:
            made[name] = _sample(comfy, STOCK, EXTRAS[name])
            assert relative_difference(made[name], made[""]) > 0.01
        return made[name]

    return get


# Grouped by devices, since a group of another size must start first.
CASES = [
    ("one", "a ControlNet of InstantX"),
    *(("Ulysses 2", name) for name in EXTRAS),
    ("CFG 2", "references of other sizes"),
    ("xfuser", "a ControlNet of InstantX"),
    *(
        ("PipeFusion 2", name)
        for name in ("a ControlNet of InstantX", "an additive mask", "references of other sizes")
    ),
    ("Ulysses 2 x Ring 2", "a ControlNet of InstantX"),
    ("Ulysses 2 x Ring 2", "an additive mask"),
]


@pytest.mark.parametrize(("strategy", "name"), CASES)
def test_every_strategy_gives_what_one_device_gives(comfy, stock, strategy, name):
    latent = _sample(comfy, OURS, EXTRAS[name], strategy)
    assert relative_difference(latent, stock(name)) < TOLERANCE


def test_a_controlnet_is_read_from_its_file_and_sent_to_nobody(comfy, stock):
    """Each rank maps the file for its large weights, for as long as jobs use the ControlNet."""
    name, file = "a ControlNet of XLabs", "controlnet/xlabs.safetensors"
    assert relative_difference(_sample(comfy, OURS, EXTRAS[name], "Ulysses 2"), stock(name)) < TOLERANCE
    assert [_maps(rank, file) for rank in comfy.ranks()] == [True, True]
    for _ in range(2):
        _sample(comfy, OURS, _plain, "Ulysses 2", seed=next(_SEEDS))
    assert [_maps(rank, file) for rank in comfy.ranks()] == [False, False]


def _maps(rank: psutil.Process, file: str) -> bool:
    return any(one.path.endswith(file) for one in rank.memory_maps())


def test_parallel_sampler_takes_them_too(comfy, stock):
    name = "a ControlNet of XLabs"
    latent, report = _sample(comfy, OURS, EXTRAS[name], "Ulysses 2", node="ParallelSampler")
    assert relative_difference(latent, stock(name)) < TOLERANCE
    assert "result: exact" in report


def test_a_step_cache_goes_with_a_controlnet_that_begins_on_the_way(comfy):
    """A call with the ControlNet is another kind of call, whose first one the cache computes in full."""
    found = {}
    for threshold in (0.0, 0.5):
        graph = Graph()
        stock = [graph.add("UNETLoader", unet_name=DEV, weight_dtype="default"), 0]
        ours = graph.add("ParallelModel", model=stock, strategy=graph.strategy("cpu:2", ulysses=2))
        prompts = EXTRAS["a ControlNet from the middle on"](graph, graph.text(1), graph.text(2))
        latent = graph.parallel_sampler(
            [ours, 1], *prompts, graph.latent(), steps=8, step_cache="first_block", cache_threshold=threshold
        )
        found[threshold] = comfy.sample_with_text(graph.prompt, latent, [latent[0], 1])
    (exact, _), (cached, report) = found.values()
    counted = re.search(r"step cache: (\d+) of 8 model calls reused", report)
    assert counted and 0 < int(counted[1]) < 7, report
    assert 0 < relative_difference(cached, exact) < 0.5


def test_xfuser_stands_back_for_a_mask_and_says_so(comfy):
    _, report = _sample(comfy, OURS, EXTRAS["a boolean mask"], "xfuser", node="ParallelSampler")
    assert "engine xfuser fell back to native: it computes no attention masks" in report


def _controlled(graph: Graph, positive: list, negative: list) -> tuple[list, list]:
    images = {"vae": _vae(graph), "pixels": _image(graph)}
    made = graph.add("InstructPixToPixConditioning", positive=positive, negative=negative, **images)
    return [made, 0], [made, 1]


def _inpainted(graph: Graph, positive: list, negative: list) -> tuple[list, list]:
    mask = [graph.add("SolidMask", value=0.7, width=128, height=96), 0]
    images = {"vae": _vae(graph), "pixels": _image(graph), "mask": mask, "noise_mask": True}
    made = graph.add("InpaintModelConditioning", positive=positive, negative=negative, **images)
    return [made, 0], [made, 1]


@pytest.mark.parametrize(("unet", "extra"), [(FILL, _inpainted), (DEPTH, _controlled)], ids=["Fill", "Depth"])
def test_fill_and_depth_models_take_their_images(comfy, unet, extra):
    theirs = _sample(comfy, STOCK, extra, unet=unet)
    assert relative_difference(_sample(comfy, STOCK, _plain, unet=unet), theirs) > 0.01
    assert relative_difference(_sample(comfy, OURS, extra, "CFG 2", unet=unet), theirs) < TOLERANCE
    latent, report = _sample(comfy, OURS, extra, "Ulysses 2", node="ParallelSampler", unet=unet)
    assert relative_difference(latent, theirs) < TOLERANCE and "result: exact" in report


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
    request = (*_controlled(graph, graph.text(1), graph.text(2)), graph.latent())
    models = {}
    for kind in (STOCK, OURS):
        models[kind] = graph.model(kind, DEV, "cpu:2", **choice)
        models[f"{kind} with it"] = graph.lora(models[kind], loras["wider input"], 0.8)
    ways = {name: graph.ksampler(model, *request, cfg=3.0, steps=2) for name, model in models.items()}
    found = latents(comfy, graph, ways)
    for way in ("", " with it"):
        assert relative_difference(found[OURS + way], found[STOCK + way]) <= TOLERANCE
    assert relative_difference(found[f"{STOCK} with it"], found[STOCK]) > 0.01

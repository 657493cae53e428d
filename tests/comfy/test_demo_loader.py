"""The demo model in the real ComfyUI: its CLIP and VAE are ordinary objects, and its pictures show their captions."""

from __future__ import annotations

import random
import shutil
from io import BytesIO

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from any_runs import compared, latents
from comfy_harness import ROOT
from demo_training.drawing import draw
from demo_training.judge import judge
from demo_training.scenes import random_scene
from differences import relative_difference
from graphs import Graph
from parallel_backend.models.demo.image_coder import DemoImageCoder

CAPTION = "a red circle left of a blue square"
FOLDER = ROOT / "demo_model"


@pytest.fixture(scope="module", autouse=True)
def logged_before(comfy) -> int:
    """The length of ComfyUI's log before the first test here, in characters: models of other tests cause warnings."""
    return len(comfy.server.log.read_text())


class DemoGraph(Graph):
    """A graph around one ParallelDemoLoader."""

    def __init__(self) -> None:
        super().__init__()
        self.loader = self.add("ParallelDemoLoader", strategy=self.strategy("cpu:2"))
        _, self.model_link, self.clip, self.vae = ([self.loader, slot] for slot in range(4))

    def caption(self, text: str) -> list:
        return [self.add("CLIPTextEncode", clip=self.clip, text=text), 0]

    def demo_latent(self, batch: int = 1) -> list:
        return [self.add("EmptySD3LatentImage", width=128, height=128, batch_size=batch), 0]

    def sampled(self, text: str = CAPTION, **changes) -> list:
        """Returns the LATENT of ParallelSampler with real CFG against the empty prompt."""
        settings = {"steps": 20, "cfg": 3.0, **changes}
        prompts = self.caption(text), self.caption("")
        return self.parallel_sampler(self.loader, *prompts, self.demo_latent(), **settings)

    def stock_sampled(self, model: list, steps: int) -> list:
        prompts = self.caption(CAPTION), self.caption("")
        return self.ksampler(model, *prompts, self.demo_latent(), steps=steps, cfg=3.0)

    def decoded(self, latent: list) -> list:
        return [self.add("VAEDecode", samples=latent, vae=self.vae), 0]


def picture(comfy, graph: Graph, image: list) -> torch.Tensor:
    """Returns [3, H, W] in 0..1: the first picture of the IMAGE output `image`, read from SaveImage's file."""
    save = graph.add("SaveImage", images=image, filename_prefix="demo")
    saved = comfy.run(graph.prompt)["outputs"][save]["images"][0]
    pixels = numpy.asarray(Image.open(BytesIO(comfy.client.view(saved))).convert("RGB"))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255


@pytest.fixture(scope="module")
def stock_unet(comfy):
    """The name of the demo's transformer file, copied into ComfyUI's model folder."""
    target = comfy.models() / "demo_transformer.safetensors"
    shutil.copyfile(FOLDER / "transformer.safetensors", target)
    return target.name


def test_the_picture_shows_its_caption(comfy):
    """Two of three held-out captions must be drawn right."""
    rng, right = random.Random(12), 0
    for _ in range(3):
        scene = random_scene(rng, held_out=True)
        graph = DemoGraph()
        image = picture(comfy, graph, graph.decoded(graph.sampled(scene.caption)))
        assert image.shape == (3, 128, 128)
        right += judge(image, scene).right
    assert right >= 2


def test_the_latent_is_that_of_stock_nodes_on_the_same_file(comfy, stock_unet):
    """Compares Parallel Sampler and the parallel MODEL on two ranks with stock UNETLoader and KSampler."""
    graph = DemoGraph()
    unet = [graph.add("UNETLoader", unet_name=stock_unet, weight_dtype="default"), 0]
    ways = {
        "stock": graph.stock_sampled(unet, steps=6),
        "KSampler": graph.stock_sampled(graph.model_link, steps=6),
        "Parallel Sampler": graph.sampled(steps=6),
    }
    compared(comfy, graph, ways)


def test_case_punctuation_and_fluxs_own_text_node_change_nothing(comfy):
    graph = DemoGraph()
    flux = graph.add("CLIPTextEncodeFlux", clip=graph.clip, clip_l=CAPTION, t5xxl=CAPTION, guidance=3.5)
    shouted = graph.caption("A RED circle, left of (a blue: square)!")
    prompts = {"plain": graph.caption(CAPTION), "shouted": shouted, "flux": [flux, 0]}
    others, sampling = (graph.caption(""), graph.demo_latent()), {"steps": 2, "cfg": 3.0}
    ways = {
        name: graph.parallel_sampler(graph.loader, prompt, *others, **sampling)
        for name, prompt in prompts.items()
    }
    found = latents(comfy, graph, ways)
    assert torch.equal(found["shouted"], found["plain"]) and torch.equal(found["flux"], found["plain"])


def test_clip_and_vae_pass_through_other_nodes(comfy):
    """CLIPSetLastLayer clones the CLIP. The sampler gets combined conditionings and a batch of latents."""
    graph = DemoGraph()
    graph.clip = [graph.add("CLIPSetLastLayer", clip=graph.clip, stop_at_clip_layer=-2), 0]
    both = graph.combined(graph.caption(CAPTION), graph.caption("a cross"))
    latent = graph.ksampler(graph.model_link, both, graph.caption(""), graph.demo_latent(batch=2), cfg=2.0)
    samples = comfy.sample(graph.prompt, latent)
    assert samples.shape == (2, 16, 16, 16) and samples.isfinite().all()


@pytest.fixture(scope="module")
def uploaded(comfy):
    """A drawing among ComfyUI's inputs: (scene, [3, 128, 128] as LoadImage reads it, file name)."""
    rng = random.Random(21)
    scene = random_scene(rng)
    pixels = (draw(scene, rng) * 255).round().byte()
    folder = comfy.server.base_directory / "input"
    folder.mkdir(exist_ok=True)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / "drawing.png")
    return scene, pixels.float() / 255, "drawing.png"


@pytest.mark.parametrize("tiled", [False, True])
def test_vae_encodes_and_decodes_a_drawing(comfy, uploaded, tiled):
    scene, original, name = uploaded
    graph = DemoGraph()
    pixels = [graph.add("LoadImage", image=name), 0]
    sizes = {"tile_size": 128, "overlap": 32, "temporal_size": 64, "temporal_overlap": 8} if tiled else {}
    suffix = "Tiled" if tiled else ""
    latent = [graph.add(f"VAEEncode{suffix}", pixels=pixels, vae=graph.vae, **sizes), 0]
    decoded = [graph.add(f"VAEDecode{suffix}", samples=latent, vae=graph.vae, **sizes), 0]
    image = picture(comfy, graph, decoded)
    assert judge(image, scene).right
    assert -10 * (image - original).square().mean().log10() > 24  # dB


def test_vae_encode_is_the_trainers_own(comfy, uploaded):
    _, original, name = uploaded
    coder = DemoImageCoder().eval().requires_grad_(False)
    coder.load_state_dict(load_file(FOLDER / "image_coder.safetensors"))
    graph = DemoGraph()
    latent = [graph.add("VAEEncode", pixels=[graph.add("LoadImage", image=name), 0], vae=graph.vae), 0]
    expected = coder.encode(original[None] * 2 - 1)
    assert relative_difference(comfy.sample(graph.prompt, latent), expected) < 1e-5


def test_it_still_works_after_comfyui_has_freed_its_memory(comfy):
    graph = DemoGraph()
    image = graph.decoded(graph.sampled(steps=4))
    before = picture(comfy, graph, image)
    comfy.forget()
    assert torch.equal(picture(comfy, graph, image), before)


def test_loading_it_warns_of_nothing(comfy, logged_before):
    graph = DemoGraph()
    picture(comfy, graph, graph.decoded(graph.sampled(steps=1)))
    log = comfy.server.log.read_text()[logged_before:]
    for noise in ("Missing VAE keys", "clip missing", "No VAE weights"):
        assert noise not in log

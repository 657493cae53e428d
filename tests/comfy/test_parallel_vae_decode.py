"""ParallelVAEDecode in the real ComfyUI gives the image of stock VAEDecode for every VAE and keeps the ranks warm."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file

from comfyui_client import PromptFailed, PromptInterrupted
from graphs import Graph
from parallel_backend.models.comfyui.rows.banded import STEPS
from tests.closed_forms.vae_sizes import VaeSizes
from tiny_vae import FLUX, SD, write_vae

SIZES = {"flux": FLUX, "sd": SD}
TOLERANCE = 1e-5  # relative to the largest pixel, which is 1
_numbers = itertools.count()


class DecodeGraph(Graph):
    """Builds prompts that decode a latent with a VAE from a file, by stock VAEDecode and by ours."""

    def vae(self, name: str) -> list:
        return [self.add("VAELoader", vae_name=name), 0]

    def drawn(self, width=16, height=12, batch=1, channels=16, draw=5, frames=0) -> list:
        size = {"width": width, "height": height, "batch": batch, "channels": channels, "frames": frames}
        return [self.add("TestLatent", draw=draw, batch_index="", noise_mask=False, **size), 0]

    def stock(self, latent: list, vae: list) -> list:
        return [self.add("VAEDecode", samples=latent, vae=vae), 0]

    def ours(self, latent: list, vae: list, devices: str | None = "cpu:2", **choice: str) -> list:
        strategy = {} if devices is None else {"strategy": self.strategy(devices, **choice)}
        return [self.add("ParallelVAEDecode", samples=latent, vae=vae, **strategy), 0]


def images(comfy, graph: Graph, *outputs: list) -> list[torch.Tensor]:
    """Runs the prompt and returns each IMAGE output as unrounded floats [B, H, W, 3]."""
    prompt, names = dict(graph.prompt), []
    for output in outputs:
        names.append(f"test-image-{next(_numbers)}.safetensors")
        save = {"image": output, "path": names[-1]}
        prompt[f"save-{names[-1]}"] = {"class_type": "TestSaveImage", "inputs": save}
    comfy.run(prompt)
    return [load_file(comfy.output(name))["image"] for name in names]


def decoded(comfy, graph: Graph, output: list) -> tuple[torch.Tensor, str]:
    """Runs the prompt and returns (image, report) of our node."""
    name = f"test-report-{next(_numbers)}.txt"
    report = {"text": [output[0], 1], "path": name}
    graph.prompt["report"] = {"class_type": "TestSaveText", "inputs": report}
    (image,) = images(comfy, graph, output)
    return image, comfy.output(name).read_text()


def _write(comfy, name: str, *arguments, **options) -> str:
    path = comfy.server.base_directory / "models" / "vae" / name
    if not path.exists():
        write_vae(path, *arguments, **options)
    return name


@pytest.fixture(scope="module")
def vaes(comfy):
    """File names of VAEs by kind."""
    statistics = {
        "bn.running_mean": torch.linspace(-1, 1, 128),
        "bn.running_var": torch.linspace(0.5, 2, 128),
    }
    _write(comfy, "normalised.safetensors", VaeSizes(channels=32, post_quant=True), **statistics)
    _write(comfy, "changed.safetensors", FLUX, 3)
    return {kind: _write(comfy, f"{kind}.safetensors", sizes) for kind, sizes in SIZES.items()}


def _from_file(name: str):
    return lambda graph: graph.vae(f"{name}.safetensors")


def _made_by(node: str, **inputs):
    return lambda graph: [graph.add(node, **inputs), 0]


# name: (function that adds a VAE, the latent, the picture's shape, words of the report)
DECODES = {
    "Flux": (_from_file("flux"), {}, (1, 96, 128, 3), "rows of the latent on each: 6, 6 (exact, no tiles)"),
    "Flux, odd sides": (_from_file("flux"), {"width": 7, "height": 9}, (1, 72, 56, 3), "on each: 5, 4"),
    "Flux, one row": (_from_file("flux"), {"width": 33, "height": 1}, (1, 8, 264, 3), "decoded by: "),
    "SD": (_from_file("sd"), {"width": 5, "height": 24, "channels": 4}, (1, 192, 40, 3), "on each: 12, 12"),
    "TAESD": (_made_by("TestTinyVAE"), {"height": 11}, (1, 88, 128, 3), "on each: 6, 5 (exact, no tiles)"),
    "Flux.2's normalised latents": (
        _from_file("normalised"),
        {"width": 6, "height": 5, "channels": 128},
        (1, 80, 96, 3),
        "rows of the latent on each: 3, 2 (exact, no tiles)",
    ),
    "an image of a video VAE": (
        _made_by("TestWanVAE", channels=3),
        {"width": 3, "height": 5, "frames": 1},
        (1, 40, 24, 3),
        "2 devices, 1 image in ",
    ),
    "a video": (
        _made_by("TestWanVAE", channels=3),
        {"width": 2, "height": 7, "frames": 3},
        (9, 56, 16, 3),
        "2 devices, 1 video of 9 frames in ",
    ),
    "videos with an alpha channel": (
        _made_by("TestWanVAE", channels=4),
        {"width": 2, "height": 4, "frames": 2, "batch": 2},
        (10, 32, 16, 4),
        "2 devices, 2 videos of 5 frames in ",
    ),
}


@pytest.mark.parametrize("name", DECODES)
def test_the_image_is_that_of_stock_vae_decode(comfy, vaes, name):
    add_vae, size, shape, words = DECODES[name]
    graph = DecodeGraph()
    vae, latent = add_vae(graph), graph.drawn(**size)
    (expected,) = images(comfy, graph, graph.stock(latent, vae))
    image, report = decoded(comfy, graph, graph.ours(latent, vae))
    assert image.shape == expected.shape == shape
    assert image.dtype == expected.dtype and image.min() >= 0 and image.max() <= 1
    assert expected.std() > 0.05  # no flat image
    assert (image - expected).abs().max() <= TOLERANCE
    assert words in report


def test_each_image_of_a_batch_is_that_of_stock_vae_decode(comfy, vaes):
    """One device has twice the rows of the other, as its share says."""
    graph = DecodeGraph()
    vae, latent = graph.vae(vaes["flux"]), graph.drawn(batch=3)
    singles = [
        graph.stock([graph.add("LatentFromBatch", samples=latent, batch_index=i, length=1), 0], vae)
        for i in range(3)
    ]
    expected = images(comfy, graph, *singles)
    image, report = decoded(comfy, graph, graph.ours(latent, vae, device_shares="2,1"))
    assert (image - torch.cat(expected)).abs().max() <= TOLERANCE
    for line in ("decoded by: 2 devices, 3 images in ", "latent on each: 8, 4", "computed in: float32"):
        assert line in report
    assert "moved between devices: " in report and "moved between devices: 0.00" not in report


def test_it_works_without_a_strategy(comfy, vaes):
    graph = DecodeGraph()
    vae, latent = graph.vae(vaes["flux"]), graph.drawn()
    expected, image = images(comfy, graph, graph.stock(latent, vae), graph.ours(latent, vae, devices=None))
    assert (image - expected).abs().max() <= TOLERANCE


def test_the_vae_and_the_model_stay_on_the_ranks(comfy, vaes):
    """Two ranks sample, decode three times and sample again: no rank is started, and nothing is loaded twice."""
    unet = comfy.write_flux("tiny_flux.safetensors")

    def sampled(seed):
        graph = DecodeGraph()
        sampler = graph.parallel_sampler(
            graph.parallel_loader(unet, "cpu:2"), graph.text(1), graph.text(2), graph.latent(), seed=seed
        )
        return graph, sampler

    graph, latent = sampled(1)
    comfy.sample(graph.prompt, latent)
    ranks = comfy.ranks()
    assert len(ranks) == 2
    for draw, devices in ((11, "cpu:2"), (12, "cpu:2"), (13, "cpu:4")):
        graph = DecodeGraph()
        graph.parallel_loader(unet, "cpu:2")  # without it in the graph the ranks would drop the model
        output = graph.ours(graph.drawn(draw=draw), graph.vae(vaes["flux"]), devices)
        _, report = decoded(comfy, graph, output)
        assert "devices: cpu:0, cpu:1\n" in report
        assert draw == 11 or "was on the devices already" in report
    assert "2 of the 4 devices chosen had running processes" in report
    graph, latent = sampled(2)
    _, report = comfy.sample_with_text(graph.prompt, latent, [latent[0], 1])
    assert "weights were warm" in report
    assert comfy.ranks() == ranks


def test_processes_read_a_vae_in_its_file_and_share_its_pages(comfy):
    name = _write(comfy, "to_be_mapped.safetensors", FLUX, 6)
    graph = DecodeGraph()
    decoded(comfy, graph, graph.ours(graph.drawn(draw=81), graph.vae(name)))
    assert len(comfy.ranks()) == 2
    for rank in comfy.ranks():
        assert any(one.path.endswith(name) for one in rank.memory_maps())


def _fallback(comfy, graph: DecodeGraph, latent: list, vae: list, reason: str) -> None:
    """Asserts that our node falls back to stock's decode: the image is bit-equal and the report says why."""
    expected = graph.stock(latent, vae)
    (expected,) = images(comfy, graph, expected)
    image, report = decoded(comfy, graph, graph.ours(latent, vae))
    assert torch.equal(image, expected)
    assert "ComfyUI's own VAE decode" in report and reason in report


FALLBACKS = {
    "its network is DemoImageCoder": (
        lambda graph: [graph.add("ParallelDemoLoader"), 3],
        {"width": 16, "height": 16},
    ),
    "because this VAE cannot be split: its latents are": (
        lambda graph: graph.vae("pixel_space"),
        {"width": 12, "height": 10, "channels": 3},
    ),
    "another node has changed how it computes": (
        lambda graph: [graph.add("TestCircularVAE", vae=graph.vae("changed.safetensors")), 0],
        {},
    ),
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_a_vae_that_cannot_be_split_is_decoded_by_comfyui(comfy, vaes, reason):
    add_vae, size = FALLBACKS[reason]
    graph = DecodeGraph()
    _fallback(comfy, graph, graph.drawn(**size), add_vae(graph), reason)


def test_the_noise_of_ltxs_decoder_is_what_comfyui_draws(comfy):
    """Stock and ours run in separate prompts, so that nothing draws noise between the seed and the decode."""

    def seeded(number):
        graph = DecodeGraph()
        latent = graph.drawn(3, 5, channels=128, frames=3)
        return graph, [graph.add("TestLtxVAE"), 0], [graph.add("TestSeed", latent=latent, number=number), 0]

    graph, vae, latent = seeded(5)
    (expected,) = images(comfy, graph, graph.stock(latent, vae))
    graph, vae, latent = seeded(5)
    image, report = decoded(comfy, graph, graph.ours(latent, vae))
    assert "2 devices, 1 video of 5 frames in " in report and "rows of the latent on each: 3, 2" in report
    assert image.shape == expected.shape == (5, 80, 48, 3) and expected.std() > 0.05
    assert (image - expected).abs().max() <= TOLERANCE
    graph, vae, latent = seeded(6)
    (other,) = images(comfy, graph, graph.ours(latent, vae))
    assert (other - expected).abs().max() > 100 * TOLERANCE


REFUSALS = {
    "it makes 3D shapes; use VAE Decode Hunyuan3D": (_made_by("TestShapeVAE"), {}),
    "the latent has shape [1, 16, 4, 4] … [batch, channels, frames,": (
        _made_by("TestWanVAE", channels=3),
        {"width": 4, "height": 4},
    ),
    "the latent has 4 channels and the VAE decodes 16": (_from_file("flux"), {"channels": 4}),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_cannot_be_decoded_is_refused_in_words(comfy, vaes, words):
    add_vae, size = REFUSALS[words]
    graph = DecodeGraph()
    with pytest.raises(PromptFailed) as failed:
        images(comfy, graph, graph.ours(graph.drawn(**size), add_vae(graph)))
    assert all(part in failed.value.exception_message for part in words.split(" … "))


def test_where_ranks_cannot_run_comfyui_decodes(comfy, vaes):
    graph = DecodeGraph()
    latent = [graph.add("TestOtherPlatform", latent=graph.drawn(draw=61), pretend=True), 0]
    try:
        _fallback(comfy, graph, latent, graph.vae(vaes["flux"]), "needs Linux; this is win32")
    finally:
        restore = DecodeGraph()
        latent = [restore.add("TestOtherPlatform", latent=restore.drawn(draw=62), pretend=False), 0]
        comfy.sample(restore.prompt, latent)


def test_weights_that_change_in_place_are_sent_again(comfy):
    """A node writes into the weights of a VAE object that the ranks already have."""
    name = _write(comfy, "to_be_scaled.safetensors", FLUX, 4)
    graph = DecodeGraph()
    vae, latent = graph.vae(name), graph.drawn()
    (before,) = images(comfy, graph, graph.ours(latent, vae))
    scaled = [graph.add("TestScaledVAE", vae=vae), 0]
    expected, after = images(comfy, graph, graph.stock(latent, scaled), graph.ours(latent, scaled))
    assert (after - before).abs().max() > 0.01
    assert (after - expected).abs().max() <= TOLERANCE


def test_a_function_that_a_pack_has_replaced_in_comfyui_computes_on_the_devices_too(comfy):
    """The VAE object stays the same before the replacement, with it and after it was undone."""
    name = _write(comfy, "other_swish.safetensors", FLUX, 7)
    found = []
    for replaced in (False, True, False):
        graph = DecodeGraph()
        vae = [graph.add("TestOtherSwish", vae=graph.vae(name), replaced=replaced), 0]
        latent = graph.drawn(draw=91)
        expected, image = images(comfy, graph, graph.stock(latent, vae), graph.ours(latent, vae))
        assert (image - expected).abs().max() <= TOLERANCE
        found.append(image)
    before, amid, after = found
    assert (amid - before).abs().max() > 100 * TOLERANCE and torch.equal(after, before)


def _long(vaes, draw, batch=30) -> tuple[DecodeGraph, list]:
    """Returns (a graph whose decode takes many seconds, its IMAGE output)."""
    graph = DecodeGraph()
    return graph, graph.ours(graph.drawn(48, 48, batch=batch, draw=draw), graph.vae(vaes["flux"]))


def test_an_interrupt_ends_it_and_leaves_the_ranks_warm(comfy, vaes):
    graph = DecodeGraph()
    before = images(comfy, graph, graph.ours(graph.drawn(draw=31), graph.vae(vaes["flux"])))
    ranks = comfy.ranks()
    long, output = _long(vaes, draw=32)
    with comfy.amid(output[0], comfy.client.interrupt) as events, pytest.raises(PromptInterrupted):
        images(comfy, long, output)
    steps = [(value, most) for node, value, most in events.progress if node == output[0] and most > 1]
    assert steps[-1][0] < steps[-1][1] // 2
    assert comfy.ranks() == ranks
    comfy.forget()
    graph = DecodeGraph()
    again = images(comfy, graph, graph.ours(graph.drawn(draw=31), graph.vae(vaes["flux"])))
    assert torch.equal(again[0], before[0])


def test_a_decode_whose_rank_is_killed_is_made_again_and_the_next_prompt_works(comfy, vaes):
    graph = DecodeGraph()
    expected = images(comfy, graph, graph.ours(graph.drawn(draw=41), graph.vae(vaes["flux"])))
    ranks = comfy.ranks()
    long, output = _long(vaes, draw=42, batch=2)
    with comfy.amid(output[0], ranks[1].kill):
        found = images(comfy, long, output)
    assert found[0].isfinite().all() and ranks[1] not in comfy.ranks()
    comfy.forget()
    graph = DecodeGraph()
    again = images(comfy, graph, graph.ours(graph.drawn(draw=41), graph.vae(vaes["flux"])))
    assert torch.equal(again[0], expected[0])
    assert not set(ranks) & set(comfy.ranks())


def test_progress_is_shown(comfy, vaes):
    graph = DecodeGraph()
    output = graph.ours(graph.drawn(draw=51, batch=2), graph.vae(vaes["flux"]))
    with comfy.client.listen() as events:
        images(comfy, graph, output)
    steps = [(value, most) for node, value, most in events.progress if node == output[0] and most > 1]
    assert steps[-1][0] == steps[-1][1] == 2 * STEPS

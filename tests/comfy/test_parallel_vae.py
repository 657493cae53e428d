"""ParallelVAEDecode and ParallelVAEEncode in the real ComfyUI give the image of stock VAEDecode and the latent of stock
VAEEncode for every VAE, and keep the ranks warm."""

from __future__ import annotations

import pytest
import torch

from any_runs import latents, refusal
from comfyui_client import PromptInterrupted
from graphs import Graph
from parallel_backend.models.comfyui.rows.banded import STEPS
from tests.closed_forms.vae_sizes import VaeSizes
from tiny_vae import FLUX, SD, write_vae

TOLERANCE = 1e-5  # relative to the largest pixel, which is 1, or to the largest value of a latent
DECODE, ENCODE = "VAEDecode", "VAEEncode"
TAKES = {DECODE: "samples", ENCODE: "pixels"}


class VaeGraph(Graph):
    """Builds prompts that decode latents or encode images with a VAE, by the stock node `work` and by ours."""

    def vae(self, name: str) -> list:
        return [self.add("VAELoader", vae_name=f"{name}.safetensors"), 0]

    def drawn(self, draw: int = 5, **size: int) -> list:
        return self.latent(draw=draw, **size)

    def image(self, width: int, height: int, batch: int = 1, channels: int = 3) -> list:
        return [self.add("TestImage", width=width, height=height, batch=batch, channels=channels), 0]

    def stock(self, source: list, vae: list, work: str = DECODE) -> list:
        return [self.add(work, **{TAKES[work]: source, "vae": vae}), 0]

    def ours(
        self, source: list, vae: list, work: str = DECODE, devices: str = "cpu:2", **choice: str
    ) -> list:
        inputs = {TAKES[work]: source, "vae": vae, "strategy": self.strategy(devices, **choice)}
        return [self.add(f"Parallel{work}", **inputs), 0]


def by_both(comfy, graph: VaeGraph, source: list, vae: list, work: str = DECODE, **choice: str) -> tuple:
    """Returns what stock and our node give, and our node's report."""
    stock, ours = graph.stock(source, vae, work), graph.ours(source, vae, work, **choice)
    found = latents(comfy, graph, {"stock": stock, "ours": ours}, {"report": [ours[0], 1]})
    return tuple(found.values())


def near(found: torch.Tensor, expected: torch.Tensor, largest: float = 1.0) -> bool:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert expected.std() > 0.05 * largest  # neither is flat
    return bool((found - expected).abs().max() <= TOLERANCE * largest)


@pytest.fixture(scope="module", autouse=True)
def write(comfy):
    """A function that writes a VAE's file. First writes those that several tests use, and stops the ranks: a decode
    would stay on those that run, which may be one."""
    comfy.stop_ranks()

    def write_one(name: str, *arguments, **options) -> str:
        write_vae(comfy.models("vae") / f"{name}.safetensors", *arguments, **options)
        return name

    statistics = {
        "bn.running_mean": torch.linspace(-1, 1, 128),
        "bn.running_var": torch.linspace(0.5, 2, 128),
    }
    write_one("normalised", VaeSizes(channels=32, post_quant=True), **statistics)
    write_one("flux", FLUX)
    write_one("sd", SD)
    write_one("changed", FLUX, 3)
    return write_one


def _from_file(name: str):
    return lambda graph: graph.vae(name)


def _made_by(node: str, **inputs):
    return lambda graph: [graph.add(node, **inputs), 0]


WAN, WITH_ALPHA = (_made_by("TestWanVAE", channels=channels) for channels in (3, 4))


def _decode(add_vae, shape: tuple[int, ...], words: str, **size: int) -> tuple:
    """Returns (function that adds a VAE, the latent, the picture's shape, words of the report)."""
    return add_vae, size, shape, words


DECODES = {
    "Flux": _decode(_from_file("flux"), (1, 96, 128, 3), "latent on each: 6, 6 (exact, no tiles)"),
    "Flux, odd sides": _decode(_from_file("flux"), (1, 72, 56, 3), "on each: 5, 4", width=7, height=9),
    "Flux, one row": _decode(_from_file("flux"), (1, 8, 264, 3), "decoded by: ", width=33, height=1),
    "SD": _decode(_from_file("sd"), (1, 192, 40, 3), "on each: 12, 12", width=5, height=24, channels=4),
    "TAESD": _decode(_made_by("TestTinyVAE"), (1, 88, 128, 3), "on each: 6, 5 (exact, no tiles)", height=11),
    "Flux.2's normalised latents": _decode(
        _from_file("normalised"), (1, 80, 96, 3), "on each: 3, 2 (exact,", width=6, height=5, channels=128
    ),
    "an image of a video VAE": _decode(
        WAN, (1, 40, 24, 3), "2 devices, 1 image in ", width=3, height=5, frames=1
    ),
    "a video": _decode(
        WAN, (9, 56, 16, 3), "2 devices, 1 video of 9 frames in ", width=2, height=7, frames=3
    ),
    "videos with an alpha channel": _decode(
        WITH_ALPHA,
        (10, 32, 16, 4),
        "2 devices, 2 videos of 5 frames in ",
        width=2,
        height=4,
        frames=2,
        batch=2,
    ),
}


@pytest.mark.parametrize("name", DECODES)
def test_the_image_is_that_of_stock_vae_decode(comfy, name):
    add_vae, size, shape, words = DECODES[name]
    graph = VaeGraph()
    expected, image, report = by_both(comfy, graph, graph.drawn(**size), add_vae(graph))
    assert near(image, expected) and image.shape == shape
    assert image.min() >= 0 and image.max() <= 1
    assert words in report


def test_each_image_of_a_batch_is_that_of_stock_vae_decode(comfy):
    """One device has twice the rows of the other, as its share says."""
    graph = VaeGraph()
    vae, latent = graph.vae("flux"), graph.drawn(batch=3)
    singles = {
        f"{i}": graph.stock([graph.add("LatentFromBatch", samples=latent, batch_index=i, length=1), 0], vae)
        for i in range(3)
    }
    expected = latents(comfy, graph, singles)
    _, image, report = by_both(comfy, graph, latent, vae, device_shares="2,1")
    assert near(image, torch.cat(list(expected.values())))
    for line in ("decoded by: 2 devices, 3 images in ", "latent on each: 8, 4", "computed in: float32"):
        assert line in report
    assert "moved between devices: " in report and "moved between devices: 0.00" not in report


def test_processes_read_a_vae_in_its_file_and_share_its_pages(comfy, write):
    graph = VaeGraph()
    vae = graph.vae(write("to_be_mapped", FLUX, 6))
    comfy.sample(graph.prompt, graph.ours(graph.drawn(81), vae))
    assert len(comfy.ranks()) == 2
    for rank in comfy.ranks():
        assert any(one.path.endswith("to_be_mapped.safetensors") for one in rank.memory_maps())


def _assert_comfyui_decodes(comfy, graph: VaeGraph, latent: list, vae: list, reason: str) -> None:
    expected, image, report = by_both(comfy, graph, latent, vae)
    assert torch.equal(image, expected)
    assert "ComfyUI's own VAE decode" in report and reason in report


FALLBACKS = {
    "its network is DemoImageCoder": (
        lambda graph: [graph.add("ParallelDemoLoader"), 3],
        {"width": 16, "height": 16},
    ),
    "because this VAE cannot be split: its latents are": (
        lambda graph: [graph.add("VAELoader", vae_name="pixel_space"), 0],
        {"width": 12, "height": 10, "channels": 3},
    ),
    "another node has changed how it computes": (
        lambda graph: [graph.add("TestCircularVAE", vae=graph.vae("changed")), 0],
        {},
    ),
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_a_vae_that_cannot_be_split_is_decoded_by_comfyui(comfy, reason):
    add_vae, size = FALLBACKS[reason]
    graph = VaeGraph()
    _assert_comfyui_decodes(comfy, graph, graph.drawn(**size), add_vae(graph), reason)


def test_the_noise_of_ltxs_decoder_is_what_comfyui_draws(comfy):
    """Stock and ours run in separate prompts, so that nothing draws noise between the seed and the decode."""

    def seeded(number: int, decode) -> torch.Tensor:
        graph = VaeGraph()
        latent = graph.drawn(width=3, height=5, channels=128, frames=3)
        latent = [graph.add("TestSeed", latent=latent, number=number), 0]
        output = decode(graph, latent, [graph.add("TestLtxVAE"), 0])
        if decode is VaeGraph.ours:
            graph.add("TestSaveText", text=[output[0], 1], path="ltx.txt")
        return comfy.sample(graph.prompt, output)

    expected, image = seeded(5, VaeGraph.stock), seeded(5, VaeGraph.ours)
    assert near(image, expected) and image.shape == (5, 80, 48, 3)
    assert "rows of the latent on each: 3, 2" in comfy.output("ltx.txt").read_text()
    assert (seeded(6, VaeGraph.ours) - expected).abs().max() > 100 * TOLERANCE


REFUSALS = {
    "it makes 3D shapes; use VAE Decode Hunyuan3D": (_made_by("TestShapeVAE"), {}),
    "the latent has shape [1, 16, 4, 4] … [batch, channels, frames,": (
        WAN,
        {"width": 4, "height": 4},
    ),
    "the latent has 4 channels and the VAE decodes 16": (_from_file("flux"), {"channels": 4}),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_cannot_be_decoded_is_refused_in_words(comfy, words):
    add_vae, size = REFUSALS[words]
    graph = VaeGraph()
    failure = refusal(comfy, graph, graph.ours(graph.drawn(**size), add_vae(graph)))
    assert all(part in failure.exception_message for part in words.split(" … "))


def test_a_function_that_a_pack_has_replaced_in_comfyui_computes_on_the_devices_too(comfy, write):
    """The VAE object stays the same before the replacement, with it and after it was undone."""
    write("other_swish", FLUX, 7)
    found = []
    for replaced in (False, True, False):
        graph = VaeGraph()
        vae = [graph.add("TestOtherSwish", vae=graph.vae("other_swish"), replaced=replaced), 0]
        expected, image, _ = by_both(comfy, graph, graph.drawn(91), vae)
        assert (image - expected).abs().max() <= TOLERANCE
        found.append(image)
    before, amid, after = found
    assert (amid - before).abs().max() > 100 * TOLERANCE and torch.equal(after, before)


def test_whatever_a_node_has_changed_in_a_vae_counts(comfy, write):
    """Values are sent, and code runs in ComfyUI's process: it may look beyond a band."""
    write("changed_by_nodes", FLUX, 8)
    before = None
    for change in ("", "number", "function", "layer", "method", ""):
        graph = VaeGraph()
        vae = [graph.add("TestChangedVAE", vae=graph.vae("changed_by_nodes"), change=change), 0]
        expected, image, report = by_both(comfy, graph, graph.drawn(93), vae)
        assert near(image, expected), change
        assert ("another node has changed" in report) == (change in ("function", "layer", "method")), change
        before = image if before is None else before
        assert torch.equal(image, before) == (change == ""), change


def test_a_function_of_a_pack_that_keeps_something_is_called_in_comfyuis_process_alone(comfy):
    try:
        graph = VaeGraph()
        swish = {"replaced": True, "counts": True}
        vae = [graph.add("TestOtherSwish", vae=graph.vae("flux"), **swish), 0]
        _assert_comfyui_decodes(comfy, graph, graph.drawn(92), vae, "may keep something")
    finally:
        restore = VaeGraph()
        vae = [restore.add("TestOtherSwish", vae=restore.vae("flux"), replaced=False), 0]
        comfy.sample(restore.prompt, restore.stock(restore.drawn(92), vae))


def _ours(draw: int, **size: int) -> tuple[dict, list]:
    """Returns (prompt, its IMAGE output)."""
    graph = VaeGraph()
    return graph.prompt, graph.ours(graph.drawn(draw, **size), graph.vae("flux"))


def test_an_interrupt_ends_it_and_leaves_the_ranks_warm(comfy):
    before = comfy.sample(*_ours(31))
    ranks = comfy.ranks()
    long, output = _ours(32, width=48, height=48, batch=30)
    with comfy.amid(output[0], comfy.client.interrupt) as events, pytest.raises(PromptInterrupted):
        comfy.sample(long, output)
    steps = [(value, most) for node, value, most in events.progress if node == output[0] and most > 1]
    assert steps[-1][0] < steps[-1][1] // 2
    assert comfy.ranks() == ranks
    comfy.forget()
    assert torch.equal(comfy.sample(*_ours(31)), before)


def test_progress_is_shown(comfy):
    prompt, output = _ours(51, batch=2)
    with comfy.client.listen() as events:
        comfy.sample(prompt, output)
    steps = [(value, most) for node, value, most in events.progress if node == output[0] and most > 1]
    assert steps[-1][0] == steps[-1][1] == 2 * STEPS


def test_the_latent_of_each_image_is_that_of_stock_vae_encode(comfy):
    """Sides that 8 does not divide are cropped, and an alpha channel is dropped."""
    graph = VaeGraph()
    vae, pixels = [graph.add("TestImageVAE"), 0], graph.image(61, 53, batch=2, channels=4)
    _, latent, report = by_both(comfy, graph, pixels, vae, ENCODE, device_shares="2,1")
    assert "encoded by: 2 devices, 2 images in " in report
    assert "rows of the latent on each: 4, 2 (exact, no tiles)" in report
    one = [graph.add("ImageFromBatch", image=pixels, batch_index=1, length=1), 0]
    expected, _, report = by_both(comfy, graph, one, vae, ENCODE)
    assert expected.shape == (1, 16, 6, 7)
    assert near(latent[1:], expected, expected.abs().max())
    assert "was on the devices already" in report


@pytest.mark.parametrize(
    ("channels", "pixels", "words"),
    [
        (3, dict(width=20, height=41, batch=10), "1 video of 10 frames in "),
        (4, dict(width=33, height=24, batch=1), "1 image in "),
    ],
    ids=str,
)
def test_the_latent_of_a_video_is_that_of_stock_vae_encode(comfy, channels, pixels, words):
    """The VAE uses the first 9 of 10 frames (4n + 1). An image gets an alpha channel if the VAE has one."""
    graph = VaeGraph()
    vae, image = [graph.add("TestWanVAE", channels=channels), 0], graph.image(**pixels)
    expected, latent, report = by_both(comfy, graph, image, vae, ENCODE, devices="cpu:3")
    assert latent.shape[2] == (pixels["batch"] + 3) // 4
    assert near(latent, expected, expected.abs().max()) and words in report


def test_taesd_is_encoded_by_comfyui(comfy):
    graph = VaeGraph()
    expected, latent, report = by_both(
        comfy, graph, graph.image(40, 24), [graph.add("TestTinyVAE"), 0], ENCODE
    )
    assert torch.equal(latent, expected)
    assert "ComfyUI's own VAE encode" in report and "its network is TAESD" in report


def test_an_image_smaller_than_a_position_of_the_latent_is_refused_in_words(comfy):
    graph = VaeGraph()
    output = graph.ours(graph.image(40, 7), [graph.add("TestWanVAE", channels=3), 0], ENCODE)
    refusal(comfy, graph, output, "sides no smaller than one position of the latent")

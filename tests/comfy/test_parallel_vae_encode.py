"""ParallelVAEEncode in the real ComfyUI gives the latent of stock VAEEncode for every VAE."""

from __future__ import annotations

import pytest
import torch

from any_runs import latents, refusal
from graphs import Graph

TOLERANCE = 1e-5  # relative to the largest value of the latent


class EncodeGraph(Graph):
    """Builds prompts that encode images, by stock VAEEncode and by ours."""

    def image(self, width: int, height: int, batch: int = 1, channels: int = 3) -> list:
        return [self.add("TestImage", width=width, height=height, batch=batch, channels=channels), 0]

    def stock(self, pixels: list, vae: list) -> list:
        return [self.add("VAEEncode", pixels=pixels, vae=vae), 0]

    def ours(self, pixels: list, vae: list, devices: str = "cpu:2", **choice: str) -> list:
        strategy = self.strategy(devices, **choice)
        return [self.add("ParallelVAEEncode", pixels=pixels, vae=vae, strategy=strategy), 0]


def encoded(comfy, graph: EncodeGraph, pixels: list, vae: list, *devices: str, **choice: str) -> tuple:
    """Returns the latents of stock and of our node, and our node's report."""
    stock, ours = graph.stock(pixels, vae), graph.ours(pixels, vae, *devices, **choice)
    found = latents(comfy, graph, {"stock": stock, "ours": ours}, {"report": [ours[0], 1]})
    return tuple(found.values())


def _is_near(latent: torch.Tensor, expected: torch.Tensor) -> bool:
    assert latent.shape == expected.shape and latent.dtype == expected.dtype
    assert expected.std() > 0.05 * expected.abs().max()  # no flat latent
    return bool((latent - expected).abs().max() <= TOLERANCE * expected.abs().max())


def test_the_latent_of_each_image_is_that_of_stock_vae_encode(comfy):
    """Sides that 8 does not divide are cropped, and an alpha channel is dropped."""
    graph = EncodeGraph()
    vae, pixels = [graph.add("TestImageVAE"), 0], graph.image(61, 53, batch=2, channels=4)
    _, latent, report = encoded(comfy, graph, pixels, vae, device_shares="2,1")
    assert "encoded by: 2 devices, 2 images in " in report
    assert "rows of the latent on each: 4, 2 (exact, no tiles)" in report
    one = [graph.add("ImageFromBatch", image=pixels, batch_index=1, length=1), 0]
    expected, _, report = encoded(comfy, graph, one, vae)
    assert expected.shape == (1, 16, 6, 7)
    assert _is_near(latent[1:], expected)
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
    graph = EncodeGraph()
    vae, image = [graph.add("TestWanVAE", channels=channels), 0], graph.image(**pixels)
    expected, latent, report = encoded(comfy, graph, image, vae, "cpu:3")
    assert latent.shape[2] == (pixels["batch"] + 3) // 4
    assert _is_near(latent, expected) and words in report


def test_taesd_is_encoded_by_comfyui(comfy):
    graph = EncodeGraph()
    expected, latent, report = encoded(comfy, graph, graph.image(40, 24), [graph.add("TestTinyVAE"), 0])
    assert torch.equal(latent, expected)
    assert "ComfyUI's own VAE encode" in report and "its network is TAESD" in report


def test_an_image_smaller_than_a_position_of_the_latent_is_refused_in_words(comfy):
    graph = EncodeGraph()
    output = graph.ours(graph.image(40, 7), [graph.add("TestWanVAE", channels=3), 0])
    refusal(comfy, graph, output, "sides no smaller than one position of the latent")

"""The basis of every comparison: stock UNETLoader and KSampler run the tiny Flux, and its inputs matter."""

from __future__ import annotations

import pytest
import torch

from comfyui_client import PromptFailed, PromptRejected
from differences import relative_difference
from graphs import STOCK, Graph


def stock_prompt(unet: str, *, guidance: float = -1.0, text: int = 1, **sampling) -> tuple[dict, list]:
    """Returns (prompt, LATENT output) of UNETLoader and KSampler on a 16 × 12 latent with 4 steps."""
    graph = Graph()
    texts = (graph.text(draw, guidance=guidance) for draw in (text, 1000))
    latent = graph.ksampler(graph.model(STOCK, unet), *texts, graph.latent(), **{"steps": 4, **sampling})
    return graph.prompt, latent


def test_the_same_prompt_gives_the_same_latent(comfy, unet):
    first = comfy.sample(*stock_prompt(unet))
    comfy.forget()
    # Another file name, so that neither ComfyUI's node cache nor its model cache can answer.
    copy = comfy.write_flux("tiny_dev_again.safetensors")
    assert first.shape == (1, 16, 12, 16)
    assert first.isfinite().all()
    assert torch.equal(first, comfy.sample(*stock_prompt(copy)))


@pytest.mark.parametrize(
    "change",
    [{"guidance": 3.0}, {"text": 2}, {"cfg": 4.0}, {"sampler_name": "heun"}],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_input_changes_the_latent(comfy, unet, change):
    baseline = comfy.sample(*stock_prompt(unet, guidance=3.5))
    changed = comfy.sample(*stock_prompt(unet, **{"guidance": 3.5, **change}))
    assert relative_difference(changed, baseline) > 1e-3


def test_missing_guidance_means_three_and_a_half(comfy, unet):
    assert torch.equal(
        comfy.sample(*stock_prompt(unet)),
        comfy.sample(*stock_prompt(unet, guidance=3.5)),
    )


def test_a_model_without_guidance_ignores_it(comfy):
    schnell = comfy.write_flux("tiny_schnell.safetensors", guidance=False)
    assert torch.equal(
        comfy.sample(*stock_prompt(schnell, guidance=3.0)),
        comfy.sample(*stock_prompt(schnell, guidance=9.0)),
    )


def test_both_key_layouts_are_the_same_network(comfy, unet):
    diffusers = comfy.write_flux("tiny_dev_diffusers.safetensors", layout="diffusers")
    ours = comfy.sample(*stock_prompt(unet))
    assert relative_difference(comfy.sample(*stock_prompt(diffusers)), ours) < 1e-6


def test_progress_and_previews_are_seen_for_every_step(comfy, unet):
    prompt, latent = stock_prompt(unet, text=77)
    with comfy.client.listen() as events:
        comfy.sample(prompt, latent)
    assert events.of_node(latent[0])[-4:] == [1, 2, 3, 4]
    assert events.previews == 4


def test_a_node_that_raises_is_reported_with_its_message(comfy):
    (comfy.server.base_directory / "models" / "diffusion_models" / "broken.safetensors").write_bytes(
        b"no tensors"
    )
    with pytest.raises(PromptFailed, match="UNETLoader"):
        comfy.sample(*stock_prompt("broken.safetensors"))


def test_an_invalid_input_is_rejected_before_anything_runs(comfy):
    with pytest.raises(PromptRejected, match=r"no_such_file\.safetensors"):
        comfy.sample(*stock_prompt("no_such_file.safetensors"))

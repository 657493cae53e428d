"""The ground under every comparison: stock UNETLoader and KSampler run the tiny Flux, and its inputs matter."""

from __future__ import annotations

import pytest
import torch

from comfyui_client import PromptFailed, PromptRejected
from differences import relative_difference


def stock_prompt(
    unet: str, *, guidance: float = -1.0, text: int = 1, cfg: float = 1.0, sampler: str = "euler"
):
    """UNETLoader + KSampler on a 16 × 12 latent, 4 steps; the LATENT is output 0 of node ``sampler``."""
    return {
        "unet": {"class_type": "UNETLoader", "inputs": {"unet_name": unet, "weight_dtype": "default"}},
        "positive": {"class_type": "TestConditioning", "inputs": {**_text(text), "guidance": guidance}},
        "negative": {"class_type": "TestConditioning", "inputs": {**_text(1000), "guidance": guidance}},
        "latent": {
            "class_type": "TestLatent",
            "inputs": {
                "width": 16,
                "height": 12,
                "batch": 1,
                "draw": -1,
                "batch_index": "",
                "noise_mask": False,
            },
        },
        "sampler": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["unet", 0],
                "positive": ["positive", 0],
                "negative": ["negative", 0],
                "latent_image": ["latent", 0],
                "seed": 7,
                "steps": 4,
                "cfg": cfg,
                "sampler_name": sampler,
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
    }


def _text(draw: int) -> dict[str, int]:
    return {"draw": draw, "tokens": 7, "width": 64, "pooled_width": 32, "batch": 1}


@pytest.fixture(scope="module")
def unet(comfy):
    return comfy.write_flux("tiny_dev.safetensors")


def test_the_same_prompt_gives_the_same_latent(comfy, unet):
    first = comfy.sample(stock_prompt(unet), ["sampler", 0])
    comfy.client.free()
    # Another file name, so that neither ComfyUI's node cache nor its model cache can answer.
    copy = comfy.write_flux("tiny_dev_again.safetensors")
    assert first.shape == (1, 16, 12, 16)
    assert first.isfinite().all()
    assert torch.equal(first, comfy.sample(stock_prompt(copy), ["sampler", 0]))


@pytest.mark.parametrize(
    "change",
    [{"guidance": 3.0}, {"text": 2}, {"cfg": 4.0}, {"sampler": "heun"}],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_input_changes_the_latent(comfy, unet, change):
    baseline = comfy.sample(stock_prompt(unet, guidance=3.5), ["sampler", 0])
    changed = comfy.sample(stock_prompt(unet, **{"guidance": 3.5, **change}), ["sampler", 0])
    assert relative_difference(changed, baseline) > 1e-3


def test_missing_guidance_means_three_and_a_half(comfy, unet):
    assert torch.equal(
        comfy.sample(stock_prompt(unet), ["sampler", 0]),
        comfy.sample(stock_prompt(unet, guidance=3.5), ["sampler", 0]),
    )


def test_a_model_without_guidance_ignores_it(comfy):
    schnell = comfy.write_flux("tiny_schnell.safetensors", guidance=False)
    assert torch.equal(
        comfy.sample(stock_prompt(schnell, guidance=3.0), ["sampler", 0]),
        comfy.sample(stock_prompt(schnell, guidance=9.0), ["sampler", 0]),
    )


def test_both_key_layouts_are_the_same_network(comfy, unet):
    diffusers = comfy.write_flux("tiny_dev_diffusers.safetensors", layout="diffusers")
    ours = comfy.sample(stock_prompt(unet), ["sampler", 0])
    assert relative_difference(comfy.sample(stock_prompt(diffusers), ["sampler", 0]), ours) < 1e-6


def test_progress_and_previews_are_seen_for_every_step(comfy, unet):
    with comfy.client.listen() as events:
        comfy.sample(stock_prompt(unet, text=77), ["sampler", 0])
    assert events.of_node("sampler")[-4:] == [1, 2, 3, 4]
    assert events.previews == 4


def test_a_node_that_raises_is_reported_with_its_message(comfy):
    (comfy.server.base_directory / "models" / "diffusion_models" / "broken.safetensors").write_bytes(
        b"no tensors"
    )
    with pytest.raises(PromptFailed, match="UNETLoader"):
        comfy.run({**stock_prompt("broken.safetensors"), "save": _save()})


def test_an_invalid_input_is_rejected_before_anything_runs(comfy):
    with pytest.raises(PromptRejected, match=r"no_such_file\.safetensors"):
        comfy.run({**stock_prompt("no_such_file.safetensors"), "save": _save()})


def _save():
    return {
        "class_type": "TestSaveLatent",
        "inputs": {"latent": ["sampler", 0], "path": "unused.safetensors"},
    }

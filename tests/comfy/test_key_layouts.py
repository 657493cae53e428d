"""Parallel Model Loader gives the latent of Load Diffusion Model for files in every key layout and prefix."""

import pytest
import torch

from differences import relative_difference
from graphs import Graph

TOLERANCE = 1e-4


def sampled(comfy, loader: str, name: str, weight_dtype: str) -> torch.Tensor:
    graph = Graph()
    if loader == "UNETLoader":
        inputs = {"unet_name": name}
    else:
        inputs = {"model_name": name, "strategy": graph.strategy("cpu:2", ulysses=2)}
    model = [graph.add(loader, weight_dtype=weight_dtype, **inputs), 0]
    latent = graph.ksampler(model, graph.text(1), graph.text(2), graph.latent(), cfg=2.0)
    return comfy.sample(graph.prompt, latent)


@pytest.mark.parametrize("weight_dtype", ["default", "fp8_e4m3fn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_every_spelling_of_a_file_gives_the_latent_of_load_diffusion_model(comfy, dtype, weight_dtype):
    form = str(dtype).rpartition(".")[2]
    expected = None
    is_plain = (dtype, weight_dtype) == (torch.bfloat16, "default")
    prefixes = ("", "transformer.", "diffusion_model.") if is_plain else ("",)
    for layout in ("bfl", "diffusers"):
        for prefix in prefixes:
            name = f"{form}_{layout}_{prefix}safetensors".replace("_safe", ".safe")
            comfy.write_flux(name, layout=layout, prefix=prefix, dtype=dtype)
            if expected is None:
                expected = sampled(comfy, "UNETLoader", name, weight_dtype)
            elif not prefix:
                theirs = sampled(comfy, "UNETLoader", name, weight_dtype)
                assert relative_difference(theirs, expected) <= TOLERANCE
            ours = sampled(comfy, "ParallelModelLoader", name, weight_dtype)
            assert relative_difference(ours, expected) <= TOLERANCE, (layout, prefix)

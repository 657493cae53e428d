"""Parallel Model Loader gives the latent of Load Diffusion Model for files in every key layout and prefix."""

import pytest
import torch

from any_runs import compared
from graphs import Graph


@pytest.mark.parametrize("weight_dtype", ["default", "fp8_e4m3fn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_every_spelling_of_a_file_gives_the_latent_of_load_diffusion_model(comfy, dtype, weight_dtype):
    is_plain = (dtype, weight_dtype) == (torch.bfloat16, "default")
    prefixes = ("", "transformer.", "diffusion_model.") if is_plain else ("",)
    graph, ways = Graph(), {}
    request, strategy = graph.request(), graph.strategy("cpu:2", ulysses=2)
    for layout in ("bfl", "diffusers"):
        for prefix in prefixes:
            name = f"{str(dtype).rpartition('.')[2]}_{layout}_{prefix}safetensors".replace("_safe", ".safe")
            comfy.write_flux(name, layout=layout, prefix=prefix, dtype=dtype)
            named = {"model_name": name, "weight_dtype": weight_dtype, "strategy": strategy}
            ours = [graph.add("ParallelModelLoader", **named), 0]
            ways[f"ours, {layout} {prefix}"] = graph.ksampler(ours, *request, cfg=2.0)
            if not prefix:
                theirs = [graph.add("UNETLoader", unet_name=name, weight_dtype=weight_dtype), 0]
                stock = "stock" if layout == "bfl" else "stock, diffusers"
                ways[stock] = graph.ksampler(theirs, *request, cfg=2.0)
    compared(comfy, graph, ways)

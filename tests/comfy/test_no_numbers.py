"""A file with NaN in its weights makes the sampler node fail with a clear error in ComfyUI."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from comfyui_client import PromptFailed
from graphs import OURS, Graph


@pytest.fixture(scope="module")
def broken(comfy) -> str:
    folder = comfy.server.base_directory / "models" / "diffusion_models"
    tensors = load_file(folder / comfy.write_flux("tiny_dev.safetensors"))
    tensors["final_layer.linear.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "tiny_nan.safetensors")
    return "tiny_nan.safetensors"


@pytest.mark.parametrize("node", ["KSampler", "ParallelSampler"])
def test_weights_that_are_no_numbers_are_told_of_and_no_black_image_comes_out(comfy, broken, node):
    graph = Graph()
    request = (graph.text(1), graph.text(2), graph.latent())
    model = graph.model(OURS, broken)
    sampled = (
        graph.ksampler(model, *request) if node == "KSampler" else graph.parallel_sampler(model[0], *request)
    )
    with pytest.raises(
        PromptFailed, match=r"NaN or infinite in step 1 of \d; the image would be black"
    ) as failure:
        comfy.sample(graph.prompt, sampled)
    assert failure.value.node_type == node
    assert failure.value.exception_type.endswith("RequestError")

"""Nodes that reach into the model of Parallel Flux Loader give the stock latent or a refusal in plain words."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from comfyui_client import PromptFailed
from graphs import OURS, STOCK, Graph

LATENT = {"width": 16, "height": 12, "batch": 1, "draw": -1, "batch_index": "", "noise_mask": False}


@pytest.fixture(scope="module")
def lora(comfy):
    """The file name of a LoRA with the original key names, for the fused qkv of the first double block."""
    folder = comfy.server.base_directory / "models" / "loras"
    folder.mkdir(exist_ok=True)
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 256), f"{name}.lora_B.weight": torch.ones(768, 4)}
    save_file(tensors, folder / "tiny_qkv_lora.safetensors")
    return "tiny_qkv_lora.safetensors"


def sample(graph: Graph, model: list, positive: list | None = None, **changes) -> list:
    return graph.ksampler(model, positive or graph.text(1), graph.text(2), graph.latent(), **changes)


def with_patch(comfy, unet: str, kind: str, class_type: str, **inputs) -> list[torch.Tensor]:
    """Samples with a node of `class_type` between model and sampler, and returns the latent."""
    graph = Graph()
    patched = graph.add(class_type, model=graph.model(kind, unet), **inputs)
    return comfy.sample(graph.prompt, sample(graph, [patched, 0], cfg=2.0))


@pytest.mark.parametrize(
    ("class_type", "inputs"),
    [
        ("PerturbedAttentionGuidance", {"scale": 3.0}),
        ("FluxKVCache", {}),
        (
            "SkipLayerGuidanceDiT",
            {
                "scale": 3.0,
                "start_percent": 0.0,
                "end_percent": 1.0,
                "rescaling_scale": 0.0,
                "double_layers": "0",
                "single_layers": "0",
            },
        ),
        ("LoraLoaderBypassModelOnly", {"lora_name": "tiny_qkv_lora.safetensors", "strength_model": 1.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_node_that_reaches_into_the_network_gives_the_stock_latent(comfy, unet, lora, class_type, inputs):
    ours, stock = (with_patch(comfy, unet, kind, class_type, **inputs) for kind in (OURS, STOCK))
    assert (ours - stock).abs().max() <= 1e-4 * stock.abs().max()


TRAINING = {
    **{"batch_size": 1, "grad_accumulation_steps": 1, "steps": 1, "learning_rate": 1e-4, "rank": 4},
    **{
        "optimizer": "AdamW",
        "loss_function": "MSE",
        "seed": 0,
        "training_dtype": "fp32",
        "lora_dtype": "fp32",
    },
    **{
        "quantized_backward": False,
        "algorithm": "LoRA",
        "gradient_checkpointing": False,
        "checkpoint_depth": 1,
    },
    **{"offloading": False, "existing_lora": "[None]", "bucket_mode": False, "bypass_mode": False},
}


def test_training_on_weights_that_the_devices_have_is_refused(comfy, unet):
    graph = Graph()
    model = graph.model(OURS, unet)
    request = {"latents": graph.latent(draw=3), "positive": graph.text(1)}
    node = graph.add("TrainLoraNode", model=model, **request, **TRAINING)
    graph.add("SaveLoRA", lora=[node, 0], prefix="ours")
    with pytest.raises(PromptFailed, match="a copy of its weights") as failure:
        comfy.run(graph.prompt)
    assert (failure.value.node_id, failure.value.exception_type.rpartition(".")[2]) == (node, "RequestError")
    assert not list(comfy.server.output_directory.glob("ours*"))


WRONG = {
    "width": (
        {"width": 48},
        {},
        "a prompt of width 48 came, and tiny_dev.safetensors takes prompts of width 64",
    ),
    "pooled": ({"pooled_width": 8}, {}, "cannot compute with what it was given"),
    "channels": ({}, {"channels": 4, "draw": 3}, "latent_image: a latent of 4 channels came"),
}


@pytest.mark.parametrize("node", ["KSampler", "ParallelSampler"])
def test_a_prompt_or_latent_of_another_model_is_told_and_nothing_fails(comfy, unet, node):
    for case, (text, latent, words) in WRONG.items():
        graph = Graph()
        ours = graph.model(OURS, unet)
        positive, negative = graph.text(1, **text), graph.text(2)
        samples = [graph.add("TestLatent", **{**LATENT, **latent}), 0]
        if node == "KSampler":
            out = graph.ksampler(ours, positive, negative, samples)
        else:
            out = graph.parallel_sampler(ours[0], positive, negative, samples)
        with pytest.raises(PromptFailed) as failure:
            comfy.sample(graph.prompt, out)
        assert failure.value.node_type == node and words in failure.value.exception_message, case
        assert failure.value.exception_type.endswith("RequestError")
    graph = Graph()
    ours = graph.model(OURS, unet)
    comfy.sample(graph.prompt, graph.parallel_sampler(ours[0], graph.text(1), graph.text(2), graph.latent()))

"""What the ranks cannot honour yet: each stock node that would have an effect is refused in a user's words."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from comfyui_client import PromptFailed
from graphs import OURS, STOCK, Graph

LATENT = {"width": 16, "height": 12, "batch": 1, "draw": -1, "batch_index": "", "noise_mask": False}


@pytest.fixture(scope="module")
def unet(comfy):
    return comfy.write_flux("tiny_dev.safetensors")


@pytest.fixture(scope="module")
def lora(comfy):
    """A LoRA in the original key names, on the fused qkv of the first block."""
    folder = comfy.server.base_directory / "models" / "loras"
    folder.mkdir(exist_ok=True)
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 256), f"{name}.lora_B.weight": torch.ones(768, 4)}
    save_file(tensors, folder / "tiny_qkv_lora.safetensors")
    return "tiny_qkv_lora.safetensors"


def sample(graph: Graph, model: list, positive: list | None = None, **changes) -> list:
    return graph.ksampler(model, positive or graph.text(1), graph.text(2), graph.latent(), **changes)


def with_patch(comfy, unet: str, kind: str, class_type: str, **inputs) -> list[torch.Tensor]:
    """Samples with a node between model and sampler."""
    graph = Graph()
    patched = graph.add(class_type, model=graph.model(kind, unet), **inputs)
    return comfy.sample(graph.prompt, sample(graph, [patched, 0], cfg=2.0))


@pytest.mark.parametrize(
    ("class_type", "inputs", "words"),
    [
        (
            "PerturbedAttentionGuidance",
            {"scale": 3.0},
            "replaced attention block by PerturbedAttentionGuidance",
        ),
        ("FluxKVCache", {}, "a replaced part of the network"),
    ],
)
def test_a_model_node_without_an_effect_here_is_refused(comfy, unet, class_type, inputs, words):
    with pytest.raises(PromptFailed) as failure:
        with_patch(comfy, unet, OURS, class_type, **inputs)
    assert failure.value.exception_type.endswith("RequestError")
    assert words in failure.value.exception_message
    assert "UNETLoader" in failure.value.exception_message


def test_a_lora_in_bypass_mode_is_refused_with_the_loader_that_works(comfy, unet, lora):
    loader = "LoraLoaderBypassModelOnly"
    with pytest.raises(PromptFailed, match=r"a LoRA in bypass mode .* LoraLoaderModelOnly") as failure:
        with_patch(comfy, unet, OURS, loader, lora_name=lora, strength_model=1.0)
    assert failure.value.node_type == loader
    # The same file does change the stock model: there was something to refuse.
    plain = Graph()
    without = comfy.sample(plain.prompt, sample(plain, plain.model(STOCK, unet), cfg=2.0))
    changed = with_patch(comfy, unet, STOCK, loader, lora_name=lora, strength_model=1.0)
    assert (changed - without).abs().max() > 0.01 * without.abs().max()


def refused(comfy, graph: Graph, unet: str, node: str, positive: list) -> str:
    """The message with which sampling on our model fails."""
    ours = graph.model(OURS, unet)
    if node == "KSampler":
        latent = sample(graph, ours, positive)
    else:
        latent = graph.parallel_sampler(ours[0], positive, graph.text(2), graph.latent())
    with pytest.raises(PromptFailed) as failure:
        comfy.sample(graph.prompt, latent)
    assert failure.value.node_type == node
    assert failure.value.exception_type.endswith("RequestError")
    return failure.value.exception_message


def test_merging_our_weights_into_another_model_is_refused(comfy, unet):
    graph = Graph()
    merged = graph.add(
        "ModelMergeSimple", model1=graph.model(STOCK, unet), model2=graph.model(OURS, unet), ratio=0.5
    )
    with pytest.raises(PromptFailed, match="merging"):
        comfy.sample(graph.prompt, sample(graph, [merged, 0]))


def test_merging_another_model_into_ours_is_refused(comfy, unet):
    graph = Graph()
    merged = graph.add(
        "ModelMergeSimple", model1=graph.model(OURS, unet), model2=graph.model(STOCK, unet), ratio=0.5
    )
    with pytest.raises(PromptFailed, match="another model merged into it"):
        comfy.sample(graph.prompt, sample(graph, [merged, 0]))


LORA = {"filename_prefix": "ours", "rank": 4, "lora_type": "standard"}
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


@pytest.mark.parametrize("behind", [False, True], ids=["Parallel Flux Loader", "Parallel Model"])
@pytest.mark.parametrize(
    ("class_type", "inputs", "words"),
    [
        ("ModelSave", {"filename_prefix": "ours"}, "saving the model"),
        # A LoRA without a single weight was written, and nothing said so.
        ("LoraSave", {**LORA, "bias_diff": False}, "extracting a LoRA from its weights"),
        ("LoraSave", {**LORA, "bias_diff": True}, "extracting a LoRA from its weights"),
        ("TrainLoraNode", TRAINING, "a copy of its weights"),
    ],
)
def test_what_wants_our_weights_is_refused(comfy, unet, class_type, inputs, words, behind):
    graph = Graph()
    model = graph.model(STOCK if behind else OURS, unet)
    if behind:
        model = [graph.add("ParallelModel", model=model, strategy=graph.strategy("cpu:2")), 0]
    link = {"model_diff" if class_type == "LoraSave" else "model": model}
    if class_type == "TrainLoraNode":
        link |= {"latents": graph.latent(draw=3), "positive": graph.text(1)}
    node = graph.add(class_type, **link, **inputs)
    if class_type == "TrainLoraNode":
        graph.add("SaveLoRA", lora=[node, 0], prefix="ours")
    with pytest.raises(PromptFailed, match=words) as failure:
        comfy.run(graph.prompt)
    assert (failure.value.node_id, failure.value.exception_type.rpartition(".")[2]) == (node, "RequestError")
    assert not list(comfy.server.output_directory.glob("ours*"))


WRONG = {
    "width": (
        {"width": 48},
        {},
        "a prompt of width 48 came, and tiny_dev.safetensors takes prompts of width 64",
    ),
    "pooled": ({"pooled_width": 8}, {}, "a pooled prompt of width 8 came"),
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
        remedy = "DualCLIPLoader" if text else "EmptySD3LatentImage"
        assert remedy in failure.value.exception_message
    graph = Graph()
    ours = graph.model(OURS, unet)
    comfy.sample(graph.prompt, graph.parallel_sampler(ours[0], graph.text(1), graph.text(2), graph.latent()))

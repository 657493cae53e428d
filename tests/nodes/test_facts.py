"""What planning and checks are told of ComfyUI's modules: the prompt that each takes, and no other runs."""

import pytest
import torch

import parallel_backend.models.comfyui.proof
import parallel_backend.wire.payloads  # noqa: F401  the module under test must meet these very ones
from comfy_modules import CASES, import_comfyui_here, sdxl, sdxl_controlnet
from pack_nodes import import_node_module
from parallel_backend.models.comfyui.tiny.weights import fill

# Prompts prepared by the module's own layers before, several prompts at once, or one put together of layers.
UNCHECKED = {
    "ltx-2 (video + sound)",
    "minimax-h3",
    "minimax-h3, first frame",
    "minimax-h3, references",
    "hidream",
    "krea2 + reference, gqa",
}
MODULES = {**CASES, "sdxl": (sdxl, sdxl_controlnet)}


@pytest.fixture(scope="module")
def facts():
    import_comfyui_here()
    return import_node_module("nodes.model.facts")


@pytest.mark.parametrize("name", MODULES)
@torch.inference_mode()
def test_a_prompt_of_the_known_width_is_the_only_one_that_runs(facts, name):
    build, inputs = MODULES[name]
    module = fill(build())
    args, kwargs = inputs(1, 8, 8)
    context = kwargs["context"]
    if name in UNCHECKED:
        assert facts.prompt_width(module) == 0
        return
    assert facts.prompt_width(module) == context.shape[-1]
    for width in (context.shape[-1] - 8, context.shape[-1] + 8):
        with pytest.raises(RuntimeError):
            module(*args, **kwargs | {"context": context.new_ones(*context.shape[:-1], width)})


def test_a_unet_without_cross_attention_takes_any_prompt(facts):
    module = sdxl()
    for layer in list(module.modules()):
        for name in [name for name, _ in layer.named_children() if name == "attn2"]:
            delattr(layer, name)
    assert facts.prompt_width(module) == 0

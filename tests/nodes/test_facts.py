"""The facts about ComfyUI's modules for planning and checks, such as the only prompt width with which each runs."""

from types import SimpleNamespace

import pytest
import torch

import parallel_backend.models.proof.states
import parallel_backend.wire.payloads  # noqa: F401  the module under test must share these modules
from comfy_modules import CASES
from pack_nodes import module_fixture
from parallel_backend.models.comfyui.tiny.cases import build_tiny, tiny_builder, tiny_inputs
from parallel_backend.models.comfyui.tiny.weights import fill

# Modules that prepare the prompt by layers of their own, take several prompts, or one made of several layers' outputs.
UNCHECKED = {
    "ltx-2 (video + sound)",
    "anima",
    "minimax-h3",
    "hidream",
    "krea2 + reference, gqa",
}
# The first case of each model: the widths that it takes do not depend on the other inputs of a call.
FIRST = {CASES[name][0]: name for name in reversed(CASES)}
MODULES = {name: CASES[name] for name in reversed(FIRST.values())}
MODULES["sdxl"] = tiny_builder("sdxl"), tiny_inputs("sdxl + controlnet")


facts = module_fixture("nodes.model.facts")


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
    module = build_tiny("sdxl")
    for layer in list(module.modules()):
        for name in [name for name, _ in layer.named_children() if name == "attn2"]:
            delattr(layer, name)
    assert facts.prompt_width(module) == 0


@pytest.mark.parametrize(
    ("name", "patch"),
    [
        ("flux1", (1, 2, 2)),
        ("flux2 + reference", (1, 1, 1)),
        ("wan2.1 t2v", (1, 2, 2)),
        ("cosmos predict2", (1, 2, 2)),
        ("lens", (1, 1, 1)),
        ("ideogram 4 + text mask", (1, 1, 1)),
        ("mage-flow + reference", (1, 1, 1)),
        ("omnigen2", (1, 2, 2)),
    ],
)
def test_cells_of_the_latent_in_a_token(facts, name, patch):
    assert facts._patch(CASES[name][0]()) == patch


def test_a_unets_attention_is_counted_layer_by_layer(facts):
    """At 128 x 128 there are three layers of width 32, one on the way down and two up; at 64 x 64 four of width 64."""
    flop = 4.0 * (3 * 32 * 128**4 + 4 * 64 * 64**4)
    assert facts._attention_of(build_tiny("sd1.5")) == flop


def test_the_largest_attention_of_a_unet_is_counted_in_heads_over_all_cells(facts):
    assert facts._image_heads(build_tiny("sd1.5")) == 2
    # SDXL has no attention at the first of its three resolutions. At the second it has width 64, in heads of 32.
    assert facts._image_heads(build_tiny("sdxl")) == 2 / 16


@pytest.mark.parametrize(
    ("stored", "dtype", "quantised", "kept"),
    [
        ("float8_e4m3fn", torch.bfloat16, None, "bfloat16"),  # as on an RTX 3090 with enough memory
        ("float8_e4m3fn", torch.float8_e4m3fn, None, ""),
        ("float8_e4m3fn", torch.bfloat16, {"mixed_ops": True}, ""),  # scaled fp8 stays fp8 in memory
        ("bfloat16", torch.float16, None, ""),
    ],
)
def test_the_dtype_in_which_comfyui_keeps_fp8_is_known(facts, stored, dtype, quantised, kept):
    config = SimpleNamespace(quant_config=quantised)
    model = SimpleNamespace(get_dtype=lambda: dtype, model_config=config)
    assert facts._fp8_loaded_as(stored, model) == kept

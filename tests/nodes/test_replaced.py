"""The search for what packs have replaced in ComfyUI's modules finds it in each job, however they replaced it."""

import copy
import functools
import operator
import sys
import types

import einops
import numpy
import pytest
import torch

from pack_nodes import module_fixture

PACKS = {"/packs/fast": ("/packs/fast/__init__.py", True)}


replaced = module_fixture("nodes.job.replaced")


@pytest.fixture
def search(replaced):
    return lambda: {
        (one.module, one.path, one.name) for one in replaced.replaced_by(PACKS, "/comfyui", "ours")[0]
    }


@pytest.fixture
def values(replaced):
    replaced.note_values()
    return lambda: {
        (one.module, one.path, one.name, one.value)
        for one in replaced.replaced_by(PACKS, "/comfyui", "ours")[1]
    }


def _of_the_pack() -> types.FunctionType:
    space: dict = {"__name__": "fast"}
    exec(compile("def fast(*args):\n    return args\n", "/packs/fast/__init__.py", "exec"), space)  # noqa: S102
    found: types.FunctionType = space["fast"]
    return found


def test_a_function_and_a_method_are_found_and_gone_again(search, monkeypatch):
    import comfy.ldm.flux.model
    import comfy.lora

    assert search() == search() == set()
    with monkeypatch.context() as patch:
        patch.setattr(comfy.lora, "calculate_weight", _of_the_pack())
        patch.setattr(comfy.lora, "model_lora_keys_unet", functools.partial(_of_the_pack(), 1))
        patch.setattr(comfy.ldm.flux.model.Flux, "forward_orig", _of_the_pack())
        expected = {
            ("comfy.lora", "", "calculate_weight"),
            ("comfy.lora", "", "model_lora_keys_unet"),
            ("comfy.ldm.flux.model", "Flux", "forward_orig"),
        }
        assert search() == search() == expected
    assert search() == set()


def test_code_of_comfyui_or_a_library_in_the_place_of_other_code_is_found_and_gone_again(
    search, replaced, monkeypatch
):
    import comfy.ldm.flux.math
    import comfy.ldm.flux.model
    import comfy.ldm.modules.attention
    import comfy.model_patcher
    import comfy.samplers

    replaced.note_values()
    assert search() == set()
    attention = comfy.ldm.modules.attention
    with monkeypatch.context() as patch:
        patch.setattr(comfy.ldm.flux.math, "optimized_attention", attention.attention_sub_quad)
        patch.setattr(comfy.ldm.flux.model.Flux, "forward_orig", functools.partial(_of_the_pack(), 1))
        patch.setattr(
            comfy.model_patcher.ModelPatcher, "is_injected", property(_of_the_pack()), raising=False
        )
        patch.setattr(attention, "attention_pytorch", copy.copy)
        patch.setattr(attention, "added", operator.add, raising=False)
        patch.setattr(comfy.samplers, "k_diffusion_sampling", types.SimpleNamespace())
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention.attention_sub_quad)
        patch.setattr(torch.nn.Linear, "forward", functools.partialmethod(_of_the_pack()))
        assert search() == {
            ("comfy.ldm.flux.math", "", "optimized_attention"),
            ("comfy.ldm.flux.model", "Flux", "forward_orig"),
            ("comfy.model_patcher", "ModelPatcher", "is_injected"),
            ("comfy.ldm.modules.attention", "", "attention_pytorch"),
            ("comfy.ldm.modules.attention", "", "added"),
            ("comfy.samplers", "", "k_diffusion_sampling"),
            ("torch.nn.functional", "", "scaled_dot_product_attention"),
            ("torch.nn.modules.linear", "Linear", "forward"),
        }
    assert search() == set()


def test_code_of_a_library_that_a_pack_put_there_before_this_one_was_loaded_is_found(
    search, replaced, monkeypatch
):
    import comfy.ldm.flux.math
    import comfy.ops

    linear = comfy.ops.disable_weight_init.Linear
    monkeypatch.setattr(replaced, "_spaces", [])
    with monkeypatch.context() as patch:
        patch.setattr(replaced, "_latest", None)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", einops.repeat)
        patch.setattr(comfy.ldm.flux.math, "optimized_attention", functools.partial(numpy.dot))
        patch.setattr(linear, "forward", einops.reduce)
        patch.setattr(linear, "extra_repr", torch.nn.functional.linear)
        replaced.note_values()
        assert search() == {
            ("torch.nn.functional", "", "scaled_dot_product_attention"),
            ("comfy.ldm.flux.math", "", "optimized_attention"),
            ("comfy.ops", "disable_weight_init.Linear", "forward"),
        }
    assert search() == set()


def test_a_whole_module_in_the_place_of_another_is_searched(search, monkeypatch):
    """The number and the names of the modules stay the same, so the search must compare the modules themselves."""
    import comfy.lora

    assert search() == set()
    other = types.ModuleType("comfy.lora")
    other.__dict__.update(vars(comfy.lora))
    other.calculate_weight = _of_the_pack()
    monkeypatch.setitem(sys.modules, "comfy.lora", other)
    assert search() == {("comfy.lora", "", "calculate_weight")}


class _Wrapper:
    """A pack's wrapper of a function that compares equal to the function, as wrappers of wrapt do."""

    def __init__(self, wrapped):
        self.__wrapped__ = wrapped
        self.__code__ = _of_the_pack().__code__

    def __call__(self, *args):
        return self.__wrapped__(*args)

    def __eq__(self, other):
        return self.__wrapped__ == other

    __hash__ = None


def test_a_wrapper_that_equals_what_it_wraps_is_found(search, monkeypatch):
    import comfy.lora

    assert search() == set()
    wrapper = _Wrapper(comfy.lora.calculate_weight)
    assert comfy.lora.calculate_weight == wrapper
    monkeypatch.setattr(comfy.lora, "calculate_weight", wrapper)
    assert search() == {("comfy.lora", "", "calculate_weight")}


def test_an_array_in_the_place_of_a_constant_hides_nothing(search, monkeypatch):
    """`==` of arrays gives an array, which does not tell whether the objects are the same."""
    import comfy.lora

    monkeypatch.setattr(comfy.lora, "A_CONSTANT", "abc", raising=False)
    assert search() == set()
    monkeypatch.setattr(comfy.lora, "A_CONSTANT", numpy.zeros(3))
    monkeypatch.setattr(comfy.lora, "calculate_weight", _of_the_pack())
    assert search() == {("comfy.lora", "", "calculate_weight")}


def test_plain_values_that_were_set_in_a_module_or_a_class_are_found_and_gone_again(values, monkeypatch):
    import comfy.ldm.wan.vae
    import comfy.supported_models

    assert values() == set()
    with monkeypatch.context() as patch:
        patch.setattr(comfy.ldm.wan.vae, "CACHE_T", 3)
        patch.setattr(comfy.supported_models.Flux, "memory_usage_factor", 4.5)
        expected = {
            ("comfy.ldm.wan.vae", "", "CACHE_T", 3),
            ("comfy.supported_models", "Flux", "memory_usage_factor", 4.5),
        }
        assert values() == values() == expected
        patch.setattr(comfy.supported_models.Flux, "strength", "high", raising=False)
        assert values() == {*expected, ("comfy.supported_models", "Flux", "strength", "high")}
    assert values() == set()


def test_what_comfyui_sets_itself_and_what_places_weights_stays_in_its_process(values, monkeypatch):
    import comfy.model_management

    monkeypatch.setattr(comfy.model_management, "EXTRA_RESERVED_VRAM", 2**30)
    monkeypatch.setattr(comfy.model_management, "interrupt_processing", True)
    monkeypatch.setattr(comfy.model_management, "PRIORITIZE_FP16", True)
    assert values() == {("comfy.model_management", "", "PRIORITIZE_FP16", True)}

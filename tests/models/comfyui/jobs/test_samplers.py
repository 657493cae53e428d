"""PipeFusion takes ComfyUI's samplers by name, and none around which a pack has put code; other guidance is told."""

from __future__ import annotations

import functools
import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch

from comfy_modules import import_comfyui_here
from parallel_backend.models.comfyui.jobs.samplers import fits_in_one_call, has_usual_guidance, name_of
from parallel_backend.sampling.samplers import STEPS

import_comfyui_here()


def euler():
    from comfy.samplers import sampler_object

    return sampler_object("euler")


def wrapped():
    sampler = euler()
    original = sampler.sampler_function
    sampler.sampler_function = functools.wraps(original)(
        lambda *args, **kwargs: original(*args, **kwargs) * 2
    )
    return sampler


def of_a_pack_by_the_same_name():
    def sample_euler(model, x, sigmas, **options):
        return x

    sampler = euler()
    sample_euler.__module__, sample_euler.__qualname__ = "comfy.k_diffusion.sampling", "sample_euler"
    sampler.sampler_function = sample_euler
    return sampler


def with_a_method():
    sampler = euler()
    sampler.sample = lambda *args: args[1]
    return sampler


def with_options():
    from comfy.samplers import ksampler

    return ksampler("euler", {"s_churn": 0.5})


@pytest.mark.parametrize("name", STEPS)
def test_a_sampler_of_comfyui_has_its_name(name):
    from comfy.samplers import sampler_object

    assert name_of(sampler_object(name), STEPS) == name
    assert name_of(sampler_object("dpmpp_sde"), STEPS) == ""


def test_so_has_one_of_a_module_that_was_loaded_again():
    from comfy.k_diffusion import sampling

    spec = importlib.util.spec_from_file_location("comfy.k_diffusion.loaded_again", sampling.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    sampler = euler()
    sampler.sampler_function = again.sample_euler
    assert name_of(sampler, STEPS) == "euler"


@pytest.mark.parametrize("make", [wrapped, of_a_pack_by_the_same_name, with_a_method, with_options])
def test_one_with_code_of_a_pack_or_with_options_has_none(make):
    assert name_of(make(), STEPS) == ""


def test_guidance_of_another_class_or_method_is_told_from_comfyuis_usual_one():
    from comfy.samplers import CFGGuider

    class Basic(CFGGuider):
        def set_conds(self, positive):
            self.inner_set_conds({"positive": positive})

    class Perpendicular(CFGGuider):
        def predict_noise(self, x, timestep, model_options={}, seed=None):  # noqa: B006
            return x

    usual, basic, perpendicular, changed = (
        kind.__new__(kind) for kind in (CFGGuider, Basic, Perpendicular, Basic)
    )
    changed.predict_noise = perpendicular.predict_noise
    assert [*map(has_usual_guidance, (usual, basic, perpendicular, changed))] == [True, True, False, False]


@pytest.mark.parametrize(("free", "fits"), [(1e9, True), (1e6, False)])
def test_rows_fit_in_one_call_where_comfyui_would_make_one(monkeypatch, free, fits):
    from comfy import model_management

    model = SimpleNamespace(memory_required=lambda shape: 1e3 * math.prod(shape))
    monkeypatch.setattr(model_management, "get_free_memory", lambda device: free)
    parts = [torch.empty(2, 4, 16, 16, device="meta"), torch.empty(2, 8, 7, device="meta")]
    assert fits_in_one_call(model, parts) is fits
    assert fits_in_one_call(model, [torch.empty(2, 4, 16, 16)]), "host memory is not scarce"

"""Functions of ComfyUI's own nodes that patch a UNet: taken apart, made again, and exact in bands of rows."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from comfy_modules import UNETS, import_comfyui_here
from pack_nodes import import_node_module
from parallel_backend.engine.bands import unet as unet_bands
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.errors import RequestError
from parallel_backend.models.comfyui import unet_patches
from parallel_backend.models.comfyui.tiny.cases import TinyModel
from parallel_backend.models.comfyui.tiny.weights import fill, random
from parallel_backend.models.proof.states import PROVEN_HERE
from parallel_backend.requests import BANDS, ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.arguments import pack_arguments, unpack_arguments
from ranks import run_ranks

EXACT = 1e-5  # of the largest value
CHANNELS = 32  # of the tiny UNet's first level


@pytest.fixture(scope="module", autouse=True)
def _comfyui():
    import_comfyui_here()


class Patched:
    """Stands for a MODEL: `options` are the transformer_options that a core node gives it."""

    def __init__(self):
        self.options = {"patches": {}, "patches_replace": {}}
        self.post_cfg = None

    @property
    def model(self):
        config = type("Config", (), {"unet_config": {"model_channels": CHANNELS}})
        return type("Model", (), {"model_config": config})

    def clone(self):
        return self

    def get_model_object(self, name):
        return type("Sampling", (), {"percent_to_sigma": staticmethod(lambda percent: 1 - percent)})

    def set_model_sampler_post_cfg_function(self, function):
        self.post_cfg = function

    def __getattr__(self, name):
        kind = name.removeprefix("set_model_")
        if kind == name:
            raise AttributeError(name)
        kind = kind if kind.endswith(("patch", "skip")) else f"{kind}_patch"
        return lambda function: self.options["patches"].setdefault(kind, []).append(function)


def _node(module, name, **inputs):
    patched = Patched()
    getattr(importlib.import_module(f"comfy_extras.{module}"), name).execute(patched, **inputs)
    return patched


def _pag(monkeypatch):
    """What Perturbed-Attention Guidance asks for beside the usual predictions."""
    import comfy.samplers

    asked = {}

    def predictions(model, conds, x, sigma, options):
        asked.update(options["transformer_options"])
        return [torch.zeros(1)]

    monkeypatch.setattr(comfy.samplers, "calc_cond_batch", predictions)
    tensors = dict.fromkeys(("cond_denoised", "denoised", "sigma", "input"), torch.zeros(1))
    _node("nodes_pag", "PerturbedAttentionGuidance", scale=3.0).post_cfg(
        {**tensors, "model": None, "cond": None, "model_options": {"transformer_options": {}}}
    )
    return asked


_SCALES = {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2}
_SHRINK = {
    "block_number": 1, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 0.9,
    "downscale_after_skip": True, "downscale_method": "bicubic", "upscale_method": "bicubic",
}  # fmt: skip
CASES = {  # options that a node makes, and whether bands of rows can honour them
    "FreeU": (lambda _: _node("nodes_freelunch", "FreeU", **_SCALES).options, True),
    "FreeU_V2": (lambda _: _node("nodes_freelunch", "FreeU_V2", **_SCALES).options, True),
    "PerturbedAttentionGuidance": (_pag, True),
    "PatchModelAddDownscale": (
        lambda _: _node("nodes_model_downscale", "PatchModelAddDownscale", **_SHRINK).options,
        False,
    ),
}


def _hypernetwork(dropout=False):
    """Of a file's contents, for the tokens of the tiny UNet's last level and of its prompt."""
    module = importlib.import_module("comfy_extras.nodes_hypernetwork")

    def network(width):
        linear = {f"linear.{n}.weight": random(width, width, seed=n) * width**-0.5 for n in (0, 1)}
        return linear | {f"linear.{n}.bias": random(width, seed=n) for n in (0, 1)}

    contents = {width: (network(width), network(width)) for width in (64, 48)}
    contents |= {"activation_func": "relu", "use_dropout": dropout, "last_layer_dropout": dropout}
    with patch.object(comfy_utils(), "load_torch_file", lambda *_, **__: contents):
        made = module.load_hypernetwork_patch("file", 0.7)
    return {"patches": {"attn1_patch": [made], "attn2_patch": [made]}}


def comfy_utils():
    return importlib.import_module("comfy.utils")


CASES["HypernetworkLoader"] = (lambda _: _hypernetwork(), True)
SIZE = (1, 11, 6)  # rows that the bands of three ranks do not divide


def _options(patched):
    return {**patched, "sigmas": torch.tensor([0.5]), "cond_or_uncond": [0]}


def _sent(args, kwargs, patched):
    """As it arrives at a rank."""
    arguments = import_node_module("nodes.model.arguments")
    own = import_node_module("nodes.model.patches").CarriedPatches()
    given = kwargs | {"transformer_options": _options(patched)}
    made = arguments.module_call("UNetModel", PROVEN_HERE, args, given, own)
    args, kwargs = unpack_arguments(pack_arguments((made.args, made.kwargs)))
    return ModuleCall(args, kwargs, made.rows, made.tokens)


@torch.inference_mode()
def _answers(world, model, calls, ranks, broken):
    """(answer, notes) of this rank to each call."""
    if broken:  # no patch is given whole images then
        unet_bands.WHOLE = ""
    layouts, found = Layouts(world), []
    for call in calls:
        forward = make_module_forward(model, layouts, Placement(ParallelStrategy(ulysses_degree=ranks)))
        found.append([forward(copy.deepcopy(call)), forward.notes])
    return found


@torch.inference_mode()
def test_ranks_give_what_the_patched_unet_gives(monkeypatch):
    build, inputs = UNETS["sdxl"]
    model = TinyModel(fill(build()))
    args, kwargs = inputs(*SIZE)

    def stock(patched):
        options = {"transformer_options": _options(patched)}
        return model.module(*copy.deepcopy(args), **copy.deepcopy(kwargs), **options)

    plain = stock({})
    every = [of(monkeypatch) for of, _ in CASES.values()]
    expected = [stock(copy.copy(patched)) for patched in every]
    calls = [_sent(args, kwargs, patched) for patched in every]
    assert {call.tokens for call in calls} == {BANDS}
    for rank in run_ranks(_answers, 3, model, calls, 3, False):
        for (name, (_, in_bands)), (answer, notes), alone in zip(CASES.items(), rank, expected, strict=True):
            assert (answer - alone).abs().max() <= EXACT * alone.abs().max(), name
            assert ("computes a band of the image's rows" in notes[0]) == in_bands, name
            assert in_bands or "changes the resolution between its blocks" in notes[0]
    for name, alone in zip(CASES, expected, strict=True):
        assert (plain - alone).abs().max() > 100 * EXACT * alone.abs().max(), name


@torch.inference_mode()
def test_a_function_that_is_given_a_band_alone_is_seen(monkeypatch):
    build, inputs = UNETS["sdxl"]
    model = TinyModel(fill(build()))
    args, kwargs = inputs(*SIZE)
    patched = CASES["FreeU_V2"][0](monkeypatch)
    call, given = _sent(args, kwargs, patched), {"transformer_options": _options(patched)}
    expected = model.module(*copy.deepcopy(args), **copy.deepcopy(kwargs), **given)
    ((answer, _),), _ = run_ranks(_answers, 2, model, [call], 2, True)
    assert (answer - expected).abs().max() > 100 * EXACT * expected.abs().max()


def test_another_function_of_the_same_name_is_refused_before_it_is_sent():
    def output_block_patch(h, hsp, transformer_options):
        return h, hsp

    arguments = import_node_module("nodes.model.arguments")
    output_block_patch.__qualname__ = "FreeU.execute.<locals>.output_block_patch"
    with pytest.raises(RequestError, match="cannot honour a model patch"):
        arguments.refuse_model_options({"patches": {"output_block_patch": [output_block_patch]}})
    with pytest.raises(RequestError, match="replaced attention block"):
        arguments.refuse_model_options({"patches_replace": {"attn2": {("input", 1): output_block_patch}}})


def test_a_function_that_this_comfyui_has_otherwise_is_refused(monkeypatch):
    name = "FreeU.execute.output_block_patch"
    made = unet_patches.make_function(name, {"scale_dict": {64: (1.0, 1.0)}})
    h = torch.ones(1, 3, 2, 2)
    assert made(h, h, {})[0] is h  # of another width: as it was
    for changed in (
        {"keeps": ()},
        {"path": ("FreeU", "execute", "gone")},
        {"path": ("Gone", "execute", "patch")},
    ):
        other = {name: replace(unet_patches.FUNCTIONS[name], **changed)}
        monkeypatch.setattr(unet_patches, "FUNCTIONS", other)
        with pytest.raises(RequestError, match="has another FreeU"):
            unet_patches.make_function(name, {"scale_dict": {}})
        monkeypatch.undo()


def test_a_hypernetwork_that_draws_in_each_call_is_refused():
    arguments = import_node_module("nodes.model.arguments")
    arguments.refuse_model_options(_hypernetwork())
    with pytest.raises(RequestError, match="cannot honour a model patch"):
        arguments.refuse_model_options(_hypernetwork(dropout=True))

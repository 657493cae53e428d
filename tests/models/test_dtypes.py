"""The dtypes that are chosen for mocked cards, by the same rules as ComfyUI's model_management."""

from types import SimpleNamespace

import pytest
import torch

from parallel_backend.engine.comm.groups import Layouts, World
from parallel_backend.engine.load import load_under
from parallel_backend.models.diffusers import load as flux
from parallel_backend.models.diffusers.casting import CastingLinear, Fp8Linear
from parallel_backend.models.diffusers.load import halves_of, multiply_fp8
from parallel_backend.models.dtypes import HALVES, Dtypes, halves_of_card
from parallel_backend.requests import FP8_FAST, ModelSpec
from parallel_backend.strategy import ParallelStrategy
from tiny_flux import write_tiny_flux

FP16, NONE = ("float16",), ()


@pytest.mark.parametrize(
    ("capability", "name", "halves"),
    [
        ((12, 0), "NVIDIA GeForce RTX 5090", HALVES),
        ((8, 6), "NVIDIA GeForce RTX 3090", HALVES),
        ((7, 5), "NVIDIA GeForce RTX 2080 Ti", FP16),
        ((7, 0), "Tesla V100-SXM2-16GB", FP16),
        ((7, 5), "NVIDIA GeForce GTX 1660 Ti", NONE),
        ((6, 1), "NVIDIA GeForce GTX 1080", NONE),
    ],
)
def test_what_a_card_computes_in(capability, name, halves):
    assert halves_of_card(capability, name) == halves


def test_what_an_amd_card_computes_in():
    assert halves_of_card((9, 4), "AMD Instinct MI300X", "gfx942:sramecc+") == HALVES
    assert halves_of_card((10, 3), "AMD Radeon RX 6800", "gfx1030") == FP16


@pytest.mark.parametrize(
    ("wish", "file", "halves", "storage", "compute"),
    [
        ("float32", "bfloat16", HALVES, "float32", "float32"),
        ("auto", "bfloat16", FP16, "float16", "float16"),
        ("auto", "float32", FP16, "float16", "float16"),
        ("auto", "float8_e4m3fn", FP16, "float8_e4m3fn", "float16"),
        ("bfloat16", "float32", FP16, "bfloat16", "float16"),  # as ComfyUI's --bf16-unet
        ("auto", "bfloat16", NONE, "bfloat16", "float32"),
        ("auto", "float32", NONE, "float32", "float32"),
        ("float8_e4m3fn", "bfloat16", NONE, "float8_e4m3fn", "float32"),
    ],
)
def test_dtypes_follow_what_the_cards_compute_in(wish, file, halves, storage, compute):
    dtypes = Dtypes.of(wish, file, on_cpu=False, halves=halves)
    assert (dtypes.storage, dtypes.compute) == (storage, compute)


def _cards(monkeypatch, *properties):
    monkeypatch.setattr(torch.version, "hip", None)
    found = [SimpleNamespace(major=major, minor=minor, name=name) for major, minor, name in properties]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[device.index])


def test_cards_of_two_generations_compute_in_what_both_can(monkeypatch):
    _cards(monkeypatch, (8, 9, "NVIDIA GeForce RTX 4090"), (7, 5, "NVIDIA GeForce RTX 2080 Ti"))
    assert halves_of([torch.device("cuda:0")]) == HALVES
    assert halves_of([torch.device("cuda:0"), torch.device("cuda:1")]) == FP16


def test_fp8_is_multiplied_where_all_cards_can(monkeypatch):
    capabilities = [(8, 9), (9, 0), (8, 6)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    ada, hopper, ampere = (torch.device("cuda", index) for index in range(3))
    assert multiply_fp8([ada, hopper])
    assert not multiply_fp8([ada, ampere]) and not multiply_fp8([torch.device("cpu")])


@pytest.mark.parametrize(("can", "layer"), [(True, Fp8Linear), (False, CastingLinear)])
def test_flux_multiplies_in_fp8_where_it_was_asked_for_and_can_be(tmp_path, monkeypatch, can, layer):
    monkeypatch.setattr(flux, "multiply_fp8", lambda devices: can)
    path = write_tiny_flux(tmp_path / "flux.safetensors")
    for weight_dtype, expected in ((FP8_FAST, layer), ("float8_e4m3fn", CastingLinear)):
        model = flux.load(ModelSpec(path, weight_dtype=weight_dtype), torch.device("cpu"))
        assert type(model.module.transformer.transformer_blocks[0].ff.net[2]) is expected


def test_ranks_load_flux_in_what_the_least_card_computes_in(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(flux, "halves_of", lambda devices: asked.append(devices) or HALVES)
    devices = (torch.device("cuda:0"), torch.device("cuda:1"))
    world = World(
        rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", store_path="", devices=devices
    )
    spec = ModelSpec(write_tiny_flux(tmp_path / "flux.safetensors"))
    load_under(spec, Layouts(world), ParallelStrategy())
    assert asked == [devices]

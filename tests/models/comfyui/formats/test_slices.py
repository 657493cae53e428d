"""Layers of ComfyUI's blocks cut for tensor parallelism: real ranks against one process, every class that can be."""

from __future__ import annotations

import copy

import pytest

from comfy_modules import CASES, import_comfyui_here
from module_references import Reference
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.tensor_parallel import slices_of
from parallel_backend.models.comfyui.formats.slices import slice_blocks
from parallel_backend.models.comfyui.tiny.cases import TinyModel
from parallel_backend.models.tokens.table import slices_layers
from parallel_backend.requests import Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

EXACT = 1e-5  # of the largest value
SIZE = 2, 9, 7  # rows, and tokens that ranks do not divide
TENSOR = ParallelStrategy(tensor_degree=2)
WITH_OTHERS = [TENSOR.replace(ulysses_degree=2), TENSOR.replace(ring_degree=2), TENSOR.replace(cfg_degree=2)]


@pytest.fixture(scope="module", autouse=True)
def _comfyui():
    import_comfyui_here()


def _sliced(reference, layouts, strategy):
    """The model of a reference with this rank's slice of its layers."""
    module = copy.deepcopy(reference.model.module)
    model = TinyModel(module)
    slice_blocks(module, model.regions, slices_of(layouts.get(strategy).tensor, layouts))
    return model


def _differences(world, strategies, references):
    layouts, found = Layouts(world), {}
    for name, reference in references.items():
        model = _sliced(reference, layouts, strategies[0])
        for strategy in strategies:
            forward = make_module_forward(model, layouts, Placement(strategy))
            found[f"{name}, {strategy.describe()}"] = reference.difference(forward, reference.mode)
    return found


def _wrong(strategies, names):
    references = {name: Reference(*CASES[name], SIZE) for name in names}
    ranks = run_ranks(_differences, strategies[0].world_size, strategies, references)
    return {name: far for of_rank in ranks for name, far in of_rank.items() if not far <= EXACT}


def _names():
    return [name for name, (build, _) in CASES.items() if slices_layers(type(build()).__name__)]


def test_every_class_that_can_be_sliced_gives_what_one_process_gives():
    names = _names()
    kinds = {type(CASES[name][0]()).__name__ for name in names}
    assert {"Flux", "Chroma", "HunyuanVideo", "QwenImageTransformer2DModel", "WanModel"} < kinds
    assert "OpenAISignatureMMDITWrapper" in kinds
    assert _wrong([TENSOR], names) == {}


@pytest.mark.parametrize("share", range(2))
def test_slices_go_with_ulysses_ring_and_cfg(share):
    assert _wrong(WITH_OTHERS, _names()[share::2]) == {}

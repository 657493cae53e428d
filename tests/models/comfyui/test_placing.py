"""Modules of every family with sharded blocks: no code reads a block's weights except while that block runs."""

from __future__ import annotations

import copy

import pytest
import torch

from comfy_modules import CASES, CPU, import_comfyui_here
from differences import numbers_held
from parallel_backend.engine.comm.groups import Axis
from parallel_backend.engine.sharding import ByteSharding
from parallel_backend.models.comfyui.placing import blocks_of
from parallel_backend.models.comfyui.tiny.cases import tiny_builder, tiny_inputs
from parallel_backend.models.comfyui.tiny.weights import fill

# Each module once, with its first case; sdxl is added, because CASES has no UNets.
MODULES = {case[0]: (name, case[1]) for name, case in reversed(CASES.items())} | {
    tiny_builder("sdxl"): ("sdxl", tiny_inputs("sdxl + controlnet"))
}
OPTIONS = {"cond_or_uncond": [0, 1], "sigmas": torch.ones(1), "sample_sigmas": torch.ones(5)}
# Tiny models whose layers around the blocks no option makes smaller, with the least share of bytes in their blocks.
IN_BLOCKS = {
    "wan2.1 i2v": 0.2,
    "hunyuanvideo 1.5": 0.2,
    "auraflow": 0.2,
    "anima": 0.3,
    "hunyuan-dit": 0.45,
    "humo": 0.5,
    "wan fun camera": 0.15,
    "scail": 0.2,
    "scail 2": 0.2,
    "wan2.2 animate, pose": 0.25,
    "wan dancer, silent": 0.15,
    "wan2.2 s2v, silent": 0.04,
}


def answers(module, inputs):
    args, kwargs = copy.deepcopy(inputs)
    with torch.inference_mode():
        found = module(*args, **kwargs, transformer_options=dict(OPTIONS))
    return [found] if isinstance(found, torch.Tensor) else found


@pytest.mark.parametrize("build", MODULES, ids=lambda build: build.args[0])
def test_a_module_whose_blocks_are_gathered_for_their_turn_answers_as_before(build):
    import_comfyui_here()
    name, make_inputs = MODULES[build]
    module, inputs = fill(build()), make_inputs(2, 8, 12)
    wanted = answers(module, inputs)
    total = sum(parameter.nbytes for parameter in module.parameters())
    blocks = list(blocks_of(module))
    in_blocks = sum(parameter.nbytes for block in blocks for parameter in block.parameters())
    assert in_blocks > IN_BLOCKS.get(name, 0.75) * total

    sharding = ByteSharding(Axis((0,), 0, None), CPU, offload=False)
    sharding.shard(module, blocks, {})
    assert set(map(numbers_held, module.parameters())) == {0}
    for _ in range(2):  # in the second call, blocks are gathered ahead
        with sharding.call():
            found = answers(module, inputs)
        assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))

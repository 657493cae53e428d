"""ComfyUI's modules under NCCL's semantics, in combinations: sharded weights and split tokens, hybrids, step caches."""

from __future__ import annotations

import copy

import pytest
import torch

from host_and_device import DEVICE, active
from module_references import Reference
from parallel_backend.engine.attention import queries
from parallel_backend.engine.blocks.step_cache import ModuleCache
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.engine.sharding import ByteSharding
from parallel_backend.models.comfyui.placing import blocks_of
from parallel_backend.models.comfyui.tiny.cases import tiny_builder, tiny_inputs
from parallel_backend.requests import ATTENTION, BANDS, BLOCK, ROWS, STAY, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

EXACT = 1e-5  # relative to the largest value
ODD = (2, 9, 7)  # rows, latent height and width: tokens that do not divide evenly
OPTIONS = {"cond_or_uncond": [0, 1], "sigmas": torch.tensor([0.5])}
FEW_KEYS = 4  # queries.MIN_KEYS in this file
LAYOUTS = {  # by number of ranks; the first also computes rows and queries
    2: [
        {"ulysses_degree": 2},
        {"ulysses_degree": 2, "head_groups": 2},
        {"ulysses_degree": 2, "head_groups": 2, "sends_tokens": True},
        {"ring_degree": 2},
    ],
    4: [
        {"ring_degree": 2, "ulysses_degree": 2, "device_shares": (1.0, 3.0, 2.0, 1.0)},
        {"cfg_degree": 2, "ulysses_degree": 2},
    ],
}
pytestmark = pytest.mark.usefixtures("comfyui_here")


def shared_out(layouts, model, strategy):
    """Returns a copy of a model on the device, with its weights sharded over the ranks."""
    model = copy.deepcopy(model)
    model.device = layouts.world.device
    model.byte_sharding = ByteSharding(layouts.get(strategy).shard, model.device, offload=False)
    model.byte_sharding.shard(model.module, list(blocks_of(model.module)), {})
    if (device := active()) is not None:
        device.put(model.module)  # moves its buffers
    return model


def differences(world, one, bands):
    """Returns the largest difference by strategy and mode. A step cache skips blocks in each repeated call."""
    queries.MIN_KEYS = FEW_KEYS
    layouts, found = Layouts(world), {}
    for number, degrees in enumerate(LAYOUTS[world.world_size]):
        strategy = ParallelStrategy(**degrees, shard_weights=True)
        calls = [(one, (STAY, BLOCK) if number else (STAY, BLOCK, ROWS, ATTENTION))]
        for reference, modes in calls if number else (*calls, (bands, (BANDS,))):
            model = shared_out(layouts, reference.model, strategy)
            for mode in modes:
                forward, cache = make_module_forward(model, layouts, Placement(strategy)), ModuleCache(0.5)
                far = [reference.difference(forward, mode, cache, prompts=(0,)) for _ in range(2)]
                assert cache.reused == (mode in (STAY, BLOCK, ATTENTION)), (strategy, mode)
                found[f"{strategy.describe()} {mode}"] = max(far)
    return found


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_weights_travel_beside_tokens_and_where_a_step_cache_leaves_blocks_out(ranks):
    one = Reference(tiny_builder("flux"), tiny_inputs("flux + controlnet"), ODD, OPTIONS)
    bands = Reference(
        tiny_builder("sdxl"),
        tiny_inputs("sdxl + controlnet"),
        (1, 32, 8),
        {"cond_or_uncond": [0], "sigmas": torch.tensor([0.5])},
    )
    for found in run_ranks(differences, ranks, one, bands, device=DEVICE):
        assert len(found) == 3 + 2 * len(LAYOUTS[ranks])
        assert not {name: far for name, far in found.items() if not far <= EXACT}

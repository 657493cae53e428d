"""Weights of ComfyUI's own modules through a sidecar: shared out, under LoRAs, asleep and awake."""

from __future__ import annotations

import pytest
import torch

from comfy_changes import changes
from comfy_weight_files import CPU, inputs, spec, write
from differences import relative_difference
from parallel_backend.models.comfyui.load import load
from parallel_backend.requests import Placement
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.weight_patches import NO_PATCHES, WeightPatches
from shipped_jobs import ship_call

TOLERANCE = 1e-5


def answer(model, patches):
    model.weights.apply(patches.patches, patches.tensors)
    args, kwargs = inputs()
    with torch.inference_mode():
        return model.module(*args, **kwargs)


@pytest.mark.parametrize("form", ["bf16", "float8_e4m3fn"])
def test_a_lora_reaches_whole_and_shared_weights_and_leaves_them(two_real_ranks, tmp_path, form):
    model = spec(write(tmp_path / "model.safetensors", form))
    found, tensors = changes()
    lora = WeightPatches(tuple(found), tensors)
    alone = load(model, CPU)
    plain, changed = answer(alone, NO_PATCHES), answer(alone, lora)
    assert relative_difference(changed, plain) > 1e-2
    args, kwargs = inputs()
    for shards in (False, True):
        placement = Placement(ParallelStrategy(ulysses_degree=2, shard_weights=shards))
        for patches, wanted in ((NO_PATCHES, plain), (lora, changed), (NO_PATCHES, plain)):
            found = two_real_ranks.sample(model, ship_call(model, args, kwargs), placement, patches=patches)
            assert relative_difference(found.latent, wanted) <= TOLERANCE
        two_real_ranks.sleep()
        two_real_ranks.wake()
        found = two_real_ranks.sample(model, ship_call(model, args, kwargs), placement)
        assert relative_difference(found.latent, plain) <= TOLERANCE

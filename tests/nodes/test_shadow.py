"""Modules without weights: what ComfyUI's memory manager has put beside the weights stays behind."""

import torch

from comfy_modules import import_comfyui_here
from pack_nodes import import_node_module


def test_weights_that_dynamic_vram_has_on_a_gpu_stay_behind():
    """ComfyUI gives their memory to other models when it likes: what still refers to it reads whatever lies there."""
    import_comfyui_here()
    from comfy.memory_management import vram_aligned_size
    from comfy.ops import manual_cast, resolve_cast_module_with_vbar

    layer = manual_cast.Linear(3, 2)
    own = set(vars(layer))
    geometry = [layer.weight, layer.bias]
    layer._prefetch = {
        "resident": False,
        "needs_cast": False,
        "signature": 1,
        "xfer_dest": torch.zeros(vram_aligned_size(geometry), dtype=torch.uint8),
        "cast_geometry": geometry,
    }
    device, dtype = layer.weight.device, layer.weight.dtype
    resolve_cast_module_with_vbar(layer, dtype, device, dtype, None, False)
    assert set(vars(layer)) > own
    assert set(import_node_module("nodes.model.shadow").without_loaded_state(vars(layer))) == own

"""Changes of the tiny Flux's weights for tests of the ranks, and the file with them merged in by plain arithmetic."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_backend.wire.weight_patches import Factor, WeightPatch, WeightPatches, digest

H = 256  # width of the tiny Flux with two heads
# Original tensor -> (first row, rows, columns) that a LoRA changes; every kind of layer, fused ones whole and in part.
TARGETS = {
    "double_blocks.0.img_attn.qkv.weight": (0, 3 * H, H),
    "double_blocks.0.txt_attn.qkv.weight": (H, H, H),
    "double_blocks.0.img_mod.lin.weight": (0, 6 * H, H),
    "double_blocks.0.txt_mlp.2.weight": (0, H, 4 * H),
    "single_blocks.0.linear1.weight": (0, 7 * H, H),
    "single_blocks.0.linear2.weight": (0, H, 5 * H),
    "final_layer.adaLN_modulation.1.weight": (0, 2 * H, H),
    "time_in.out_layer.weight": (0, H, H),
}
BIAS, NORM = "double_blocks.0.img_mlp.0.bias", "single_blocks.0.norm.query_norm.scale"


def patch(
    tensors: dict[str, Tensor], key: str, kind: str, strength: float, /, alpha=None, narrow=(), **factors
):
    """One change; its factors go into `tensors`."""
    named = {role: digest(tensor) for role, tensor in factors.items()}
    tensors |= {named[role]: tensor for role, tensor in factors.items()}
    roles = tuple(Factor(role, found) for role, found in named.items())
    return WeightPatch(key, kind, roles, strength, alpha=alpha, narrow=narrow)


def lora(strength: float = 1.0, seed: int = 0, targets=TARGETS) -> tuple[WeightPatches, dict[str, Tensor]]:
    """A LoRA on `targets`, a bias and a norm, and what it adds to (or, for the norm, sets) each original tensor."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    patches, deltas = [], {}
    for key, (first, rows, columns) in targets.items():
        up = 0.03 * torch.randn(rows, 4, generator=generator)
        down = torch.randn(4, columns, generator=generator)
        narrow = (0, first, rows) if first else ()
        patches.append(patch(tensors, key, "lora", strength, 8.0, narrow, up=up, down=down))
        deltas[key] = (first, strength * 2.0 * (up @ down))
    added = 0.2 * torch.randn(4 * H, generator=generator)
    scale = torch.rand(128, generator=generator)
    patches.append(patch(tensors, BIAS, "diff", strength, diff=added))
    patches.append(patch(tensors, NORM, "set", strength, value=scale))
    deltas |= {BIAS: (0, strength * added), NORM: (None, scale)}
    return WeightPatches(tuple(patches), tensors), deltas


def merge(source: Path | str, target: Path | str, *many: dict[str, tuple], dtype=torch.float32) -> str:
    """Writes the file `source` (original layout) with changes added; returns the path."""
    tensors = load_file(source)
    for deltas in many:
        for key, (first, delta) in deltas.items():
            if first is None:
                tensors[key] = delta.to(tensors[key].dtype)
                continue
            merged = tensors[key].float()
            merged[first : first + len(delta)] += delta
            tensors[key] = merged.to(dtype)
    save_file(tensors, target)
    return str(target)

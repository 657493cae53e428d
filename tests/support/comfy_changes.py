"""Changes of every kind to the tiny Flux of comfy_weight_files.py."""

from __future__ import annotations

import torch

from comfy_weight_files import HIDDEN, patch

QKV, PROJ = "double_blocks.0.img_attn.qkv.weight", "double_blocks.0.img_attn.proj.weight"
MLP, LINEAR = "double_blocks.1.txt_mlp.0.weight", "single_blocks.0.linear2.weight"
BIAS, NORM, FINAL = (
    "double_blocks.0.img_attn.qkv.bias",
    "single_blocks.1.norm.query_norm.weight",
    "final_layer.adaLN_modulation.1.weight",
)


def random(*shape, seed=0, scale=0.05):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def changes():
    """Changes of every kind, two of them on one tensor."""
    tensors = {}
    up, down = random(HIDDEN, 4), random(4, HIDDEN)
    halves = {
        f"w{n}_{x}": random(*shape, seed=n)
        for n in (1, 2)
        for x, shape in (("a", (HIDDEN, 4)), ("b", (4, HIDDEN)))
    }
    found = [
        patch(tensors, QKV, "lora", 0.8, alpha=2.0, narrow=(0, HIDDEN, HIDDEN), up=up, down=down),
        patch(tensors, QKV, "diff", -0.5, base_strength=0.9, diff=random(3 * HIDDEN, HIDDEN)),
        patch(tensors, PROJ, "loha", 1.0, alpha=8.0, **halves),
        patch(tensors, MLP, "lokr", 0.7, w1=random(32, 16), w2=random(32, 16)),
        patch(
            tensors,
            LINEAR,
            "lora",
            1.1,
            up=random(HIDDEN, 4).bfloat16(),
            down=random(4, 5 * HIDDEN).bfloat16(),
            dora_scale=1 + random(1, 5 * HIDDEN),
        ),
        patch(tensors, BIAS, "diff", 1.0, diff=random(3 * HIDDEN)),
        patch(tensors, NORM, "set", 1.0, value=random(128, scale=1)),
        patch(
            tensors, FINAL, "lora", 1.0, swap_halves=True, up=random(2 * HIDDEN, 4), down=random(4, HIDDEN)
        ),
    ]
    return found, tensors

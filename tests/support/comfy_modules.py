"""ComfyUI in the test's process, and what tests need beside the pack's own tiny models (models/comfyui/tiny/).

Builders are called after `import_comfyui_here()`. An `*_inputs(batch, height, width)` gives (args, kwargs) of a call,
sizes in latent pixels.
"""

from __future__ import annotations

import torch

from comfy_harness import require_comfyui
from parallel_backend.models.comfyui.environment import import_comfyui
from parallel_backend.models.comfyui.tiny import cases
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.requests import ComfyUISource

CPU = torch.device("cpu")
CASES: dict[str, cases.Case] = {
    name: case for by_name in cases.CASES.values() for name, case in by_name.items()
}


def import_comfyui_here() -> ComfyUISource:
    """Imports the real ComfyUI into this process, whose forks then have it; skips the test without one."""
    source = ComfyUISource(str(require_comfyui()))
    import_comfyui(source, CPU)
    return source


def sdxl():
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return UNetModel(
        image_size=32,
        in_channels=4,
        model_channels=32,
        out_channels=4,
        num_res_blocks=[2, 2, 2],
        channel_mult=(1, 2, 4),
        num_head_channels=32,
        use_spatial_transformer=True,
        transformer_depth=[0, 0, 1, 1, 2, 2],
        transformer_depth_output=[0, 0, 0, 1, 1, 1, 2, 2, 2],
        transformer_depth_middle=2,
        context_dim=48,
        use_linear_in_transformer=True,
        num_classes="sequential",
        adm_in_channels=64,
        dtype=torch.float32,
        device="cpu",
        operations=comfy.ops.disable_weight_init,
    )


def sdxl_controlnet(b, h, w):
    control = dict(output=[random(b, 128, h // 4, w // 4, seed=1)], middle=[None], input=[])
    return (random(b, 4, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 7, 48), y=random(b, 64), control=control
    )

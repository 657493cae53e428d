"""ComfyUI in the test's process, and what tests need beside the pack's own tiny models (models/comfyui/tiny/).

Builders are called after `import_comfyui_here()`. Inputs of (batch, height, width) are (args, kwargs) of a call, sizes
in latent pixels.
"""

from __future__ import annotations

import torch

from comfy_harness import require_comfyui
from parallel_backend.models.comfyui.environment import import_comfyui
from parallel_backend.models.comfyui.tiny import cases
from parallel_backend.models.comfyui.tiny.weights import Call, random
from parallel_backend.requests import ComfyUISource

CPU = torch.device("cpu")
# Of classes whose blocks take tokens; a UNet's take rows of an image.
CASES: dict[str, cases.Case] = {
    name: case
    for kind, by_name in cases.CASES.items()
    if kind != "UNetModel"
    for name, case in by_name.items()
}
UNETS = cases.CASES["UNetModel"]


def one_frame(b: int, h: int, w: int) -> Call:
    """The inputs of a Wan's call for a video of one frame."""
    (_, times), kwargs = cases.tiny_inputs("wan")(b, h, w)
    return (random(b, 16, 1, h, w), times), kwargs


def import_comfyui_here() -> ComfyUISource:
    """Imports the real ComfyUI into this process, whose forks then have it; skips the test without one."""
    source = ComfyUISource(str(require_comfyui()))
    import_comfyui(source, CPU)
    return source

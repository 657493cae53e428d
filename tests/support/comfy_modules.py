"""ComfyUI in the test's process, and additions to the pack's tiny models (models/comfyui/tiny/).

Call `import_comfyui_here()` before any builder. An inputs function takes (batch, height, width), in latent pixels, and
returns the (args, kwargs) of a call.
"""

from __future__ import annotations

import torch

from comfy_harness import require_comfyui
from parallel_backend.models.comfyui.environment import import_comfyui
from parallel_backend.models.comfyui.tiny import cases
from parallel_backend.models.comfyui.tiny.weights import Call, random
from parallel_backend.requests import ComfyUISource

CPU = torch.device("cpu")
# Cases of the classes whose blocks take tokens. (A UNet's blocks take rows of an image.)
CASES: dict[str, cases.Case] = {
    name: case
    for kind, by_name in cases.CASES.items()
    if kind != "UNetModel"
    for name, case in by_name.items()
}
UNETS = cases.CASES["UNetModel"]


def one_frame(b: int, h: int, w: int) -> Call:
    """Returns the inputs of a Wan call for a video of one frame."""
    (_, times), kwargs = cases.tiny_inputs("wan")(b, h, w)
    return (random(b, 16, 1, h, w), times), kwargs


def import_comfyui_here() -> ComfyUISource:
    """Imports the real ComfyUI into this process, so that its forks have it. Skips the test if there is none."""
    source = ComfyUISource(str(require_comfyui()))
    import_comfyui(source, CPU)
    return source

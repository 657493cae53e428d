"""The ComfyUI that ranks import: its folder, and its command-line flags that change what a model computes."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import comfy.sd
from comfy.cli_args import args

# Switches that decide dtypes, kernels or which attention runs. Memory switches are left out: they place weights, and
# ranks place theirs themselves.
_SWITCHES = (
    "force-fp32",
    "force-fp16",
    "fp32-unet",
    "fp64-unet",
    "bf16-unet",
    "fp16-unet",
    "fp8_e4m3fn-unet",
    "fp8_e5m2-unet",
    "fp8_e8m0fnu-unet",
    "force-channels-last",
    "supports-fp8-compute",
    "enable-triton-backend",
    "disable-triton-backend",
    "use-split-cross-attention",
    "use-quad-cross-attention",
    "use-pytorch-cross-attention",
    "use-sage-attention",
    "use-flash-attention",
    "disable-xformers",
    "force-upcast-attention",
    "dont-upcast-attention",
    "deterministic",
)


@functools.cache
def comfyui_root() -> str:
    """Returns the folder with ComfyUI's code, whatever --base-directory says."""
    return str(Path(comfy.sd.__file__).resolve().parents[1])


def numeric_flags(given: argparse.Namespace = args) -> tuple[str, ...]:
    """Returns the command-line words that make another process compute as this one does. `given`: the arguments as
    comfy.cli_args parses them; an older ComfyUI has fewer of these switches."""
    words = [f"--{name}" for name in _SWITCHES if getattr(given, name.replace("-", "_"), False)]
    fast = sorted(getattr(feature, "value", str(feature)) for feature in getattr(given, "fast", None) or ())
    return (*words, "--fast", *fast) if fast else tuple(words)

"""Published model families as data: the models of other people's measurements.

Widths and depths are those of the published configurations (the `config.json` with each model's weights, as read by
diffusers); parameter counts and default settings are those of the model cards.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel_backend.models.arithmetic import BlockCounts, Family

# Bytes that one weight takes in storage, by the word in a model's or file's name; q4 is GGUF Q4_K_M (4.5 bits).
WEIGHT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "q8": 1.0625, "q4": 0.5625, "fp32": 4.0}


@dataclass(frozen=True)
class Published(Family):
    """A family with the settings of its model card. `known`: False if it only stands in for an unknown model."""

    default_size: tuple[int, int, int] = (1024, 1024, 1)
    default_steps: int = 28
    known: bool = True


def _square(hidden: int, per_token: float) -> float:
    return per_token * hidden * hidden


def joint_blocks(
    count: int, hidden: int, text_hidden: int = 0, weights: float = 12.0, text_weights: float = 0
) -> BlockCounts:
    """Returns MMDiT blocks: separate image and text layers (4 h² attention + 8 h² feed-forward), joint attention."""
    text = _square(text_hidden or hidden, text_weights or weights)
    return BlockCounts(count, _square(hidden, weights), text)


def single_blocks(count: int, hidden: int, weights: float = 12.0, reduces: int = 1) -> BlockCounts:
    """Returns blocks that pass image and text tokens through the same layers as one stream."""
    return BlockCounts(count, _square(hidden, weights), _square(hidden, weights), reduces=reduces)


def _cross_attention_blocks(count: int, hidden: int, feed_forward: float) -> BlockCounts:
    """Returns blocks of image self-attention (4 h²), cross-attention to the text (2 h² on each side), feed-forward."""
    own = 6.0 * hidden * hidden + 2.0 * hidden * feed_forward
    return BlockCounts(count, own, 2.0 * hidden * hidden, attends="image", reduces=3)


_FLUX = (joint_blocks(19, 3072), single_blocks(38, 3072))
_FAMILIES = (
    Published("flux1-dev", 3072, 24, _FLUX, 11.9e9, 512),
    Published("flux1-schnell", 3072, 24, _FLUX, 11.9e9, 256, default_steps=4),
    # SwiGLU of ratio 3: 9 h² of feed-forward, 13 h² a block.
    Published(
        "flux2-dev",
        6144,
        48,
        (joint_blocks(8, 6144, weights=13.0), single_blocks(48, 6144, 13.0)),
        32e9,
        512,
        default_steps=50,
    ),
    Published("chroma", 3072, 24, _FLUX, 8.9e9, 512, default_steps=26),
    Published(
        "chroma-radiance",
        3072,
        24,
        _FLUX,
        9.5e9,
        512,
        default_steps=26,
    ),
    Published("sd3-medium", 1536, 24, (joint_blocks(24, 1536),), 2.0e9, 333),
    Published("sd3.5-medium", 1536, 24, (joint_blocks(24, 1536),), 2.5e9, 333),
    Published("sd3.5-large", 2432, 38, (joint_blocks(38, 2432),), 8.1e9, 333),
    Published("qwen-image", 3072, 24, (joint_blocks(60, 3072),), 20.4e9, 256),
    Published(
        "z-image",
        3840,
        30,
        (single_blocks(34, 3840, reduces=2),),
        6.0e9,
        256,
        default_steps=9,
    ),
    Published(
        "pixart",
        1152,
        16,
        (_cross_attention_blocks(28, 1152, 4608),),
        0.61e9,
        120,
        default_steps=20,
    ),
    Published(
        "hunyuandit",
        1408,
        16,
        (_cross_attention_blocks(40, 1408, 6144),),
        1.5e9,
        333,
        default_steps=50,
    ),
    Published("lumina2", 2304, 24, (single_blocks(26, 2304, reduces=2),), 2.6e9, 256),
    Published(
        "lumina-next",
        2304,
        32,
        (_cross_attention_blocks(24, 2304, 9216),),
        1.7e9,
        256,
    ),
    Published(
        "hunyuanvideo",
        3072,
        24,
        (joint_blocks(20, 3072), single_blocks(40, 3072)),
        12.8e9,
        256,
        temporal=4,
        default_size=(1280, 720, 129),
        default_steps=50,
    ),
    Published(
        "skyreels-v1",
        3072,
        24,
        (joint_blocks(20, 3072), single_blocks(40, 3072)),
        12.8e9,
        256,
        temporal=4,
        default_size=(960, 544, 97),
        default_steps=30,
    ),
    Published(
        "wan1.3b",
        1536,
        12,
        (_cross_attention_blocks(30, 1536, 8960),),
        1.4e9,
        512,
        temporal=4,
        default_size=(832, 480, 81),
        default_steps=50,
    ),
    Published(
        "wan14b",
        5120,
        40,
        (_cross_attention_blocks(40, 5120, 13824),),
        14.3e9,
        512,
        temporal=4,
        default_size=(832, 480, 81),
        default_steps=40,
    ),
    Published(
        "wan2.2-5b",
        3072,
        24,
        (_cross_attention_blocks(30, 3072, 14336),),
        5.0e9,
        512,
        spatial=32,
        temporal=4,
        default_size=(1280, 704, 121),
        default_steps=50,
    ),
    Published(
        "cogvideox2b",
        1920,
        30,
        (single_blocks(30, 1920, reduces=2),),
        1.7e9,
        226,
        temporal=4,
        default_size=(720, 480, 49),
        default_steps=50,
    ),
    Published(
        "cogvideox5b",
        3072,
        48,
        (single_blocks(42, 3072, reduces=2),),
        5.6e9,
        226,
        temporal=4,
        default_size=(720, 480, 49),
        default_steps=50,
    ),
    # A token covers two latent frames, which are 8 frames.
    Published(
        "cogvideox1.5-5b",
        3072,
        48,
        (single_blocks(42, 3072, reduces=2),),
        5.6e9,
        226,
        temporal=8,
        default_size=(1360, 768, 81),
        default_steps=50,
    ),
    # The text stream is half as wide, and the feed-forward is a SwiGLU of 8 h².
    Published(
        "mochi",
        3072,
        24,
        (joint_blocks(48, 3072, text_hidden=1536, text_weights=16.0),),
        10.0e9,
        256,
        temporal=6,
        default_size=(848, 480, 84),
        default_steps=64,
    ),
    Published(
        "stepvideo",
        6144,
        48,
        (_cross_attention_blocks(48, 6144, 24576),),
        30e9,
        320,
        temporal=6,
        default_size=(992, 544, 204),
        default_steps=50,
    ),
    Published(
        "ltx-2b",
        2048,
        32,
        (_cross_attention_blocks(28, 2048, 8192),),
        1.9e9,
        256,
        spatial=32,
        temporal=8,
        default_size=(704, 480, 161),
        default_steps=40,
    ),
    Published(
        "ltx-13b",
        4096,
        32,
        (_cross_attention_blocks(48, 4096, 16384),),
        13.0e9,
        256,
        spatial=32,
        temporal=8,
        default_size=(1216, 704, 121),
        default_steps=30,
    ),
    # UNets: convolutions and attention together, quoted per call at 1024 x 1024 (SDXL: 2.99 TMAC; SD 1.5: 1.36 TMAC).
    Published(
        "sdxl",
        1280,
        20,
        (),
        2.57e9,
        77,
        default_steps=30,
        image_flop=5.98e12,
    ),
    Published(
        "sd1.5",
        1280,
        8,
        (),
        0.86e9,
        77,
        default_size=(512, 512, 1),
        image_flop=2.72e12,
    ),
)
FAMILIES = {family.name: family for family in _FAMILIES}
_ALIASES = {
    "flux1": "flux1-dev",
    "flux": "flux1-dev",
    "flux.1-dev": "flux1-dev",
    "flux.1-schnell": "flux1-schnell",
    "flux2": "flux2-dev",
    "sd3": "sd3-medium",
    "sd3.5": "sd3.5-large",
    "pixart-alpha": "pixart",
    "pixart-sigma": "pixart",
    "hunyuan-dit": "hunyuandit",
    "skyreels": "skyreels-v1",
    "wan2.1-1.3b": "wan1.3b",
    "wan2.1-14b": "wan14b",
    "wan2.2-14b": "wan14b",
    "cogvideox-2b": "cogvideox2b",
    "cogvideox-5b": "cogvideox5b",
    "ltx": "ltx-2b",
    "ltx-video": "ltx-2b",
    "sd15": "sd1.5",
    "mochi1": "mochi",
}
# A medium-sized transformer that stands in for a published measurement's model that is not in the table.
GENERIC = Published(
    "a transformer of unknown size", 3072, 24, (single_blocks(48, 3072),), 8e9, 256, known=False
)


def split_name(name: str) -> tuple[str, str]:
    """Splits "flux1-fp8" into the model's name "flux1" and its weight storage "fp8" ("bf16" if the name has none)."""
    match = re.fullmatch(rf"(.+?)[-_]({'|'.join(WEIGHT_BYTES)})", name.strip().lower())
    return (match[1], match[2]) if match else (name.strip().lower(), "bf16")


def guess_family(name: str) -> Published:
    """Returns the family called `name`, with or without a storage suffix such as `-fp8`. A variant gives the family
    whose name is its longest prefix; an unknown name gives GENERIC."""
    base, _ = split_name(name)
    names = {**{n: n for n in FAMILIES}, **_ALIASES}
    fitting = [n for n in names if base == n or base.startswith((n + "-", n + "_", n + "."))]
    if not fitting:
        return replace(GENERIC)
    return FAMILIES[names[max(fitting, key=len)]]

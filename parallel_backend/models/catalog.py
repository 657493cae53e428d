"""Model families as data, for the arithmetic of their calls.

Widths and depths are those of the published configurations (the `config.json` beside each model's weights, as read by
diffusers); parameter counts and default settings are those of the model cards.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ..errors import RequestError
from .arithmetic import Family, cross_attention_blocks, joint_blocks, single_blocks

# Bytes that one weight takes in storage, by the word a person or a file name uses; q4 is GGUF Q4_K_M (4.5 bits).
WEIGHT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "q8": 1.0625, "q4": 0.5625, "fp32": 4.0}

# Causal 3-D autoencoders with 128 channels at full size: about 15 MFLOP per pixel and frame, decoded in tiles that
# overlap by a quarter on each axis, so 2.4 times that. Wan's has 96 channels and is decoded whole.
_VIDEO_DECODER = 36e6
_WAN_DECODER = 8e6

_FLUX = (joint_blocks(19, 3072), single_blocks(38, 3072))
_FAMILIES = (
    Family("flux1-dev", 3072, 24, _FLUX, 11.9e9, 512),
    Family("flux1-schnell", 3072, 24, _FLUX, 11.9e9, 256, default_steps=4),
    # SwiGLU of ratio 3: 9 h² of feed-forward, 13 h² a block.
    Family(
        "flux2-dev",
        6144,
        48,
        (joint_blocks(8, 6144, weights=13.0), single_blocks(48, 6144, 13.0)),
        32e9,
        512,
        text_encoder=24e9,
        default_steps=50,
    ),
    Family("chroma", 3072, 24, _FLUX, 8.9e9, 512, true_cfg=2, default_steps=26),
    Family(
        "chroma-radiance",
        3072,
        24,
        _FLUX,
        9.5e9,
        512,
        true_cfg=2,
        default_steps=26,
        decoder_flop=0.0,
    ),
    Family("sd3-medium", 1536, 24, (joint_blocks(24, 1536),), 2.0e9, 333, true_cfg=2),
    Family("sd3.5-medium", 1536, 24, (joint_blocks(24, 1536),), 2.5e9, 333, true_cfg=2),
    Family("sd3.5-large", 2432, 38, (joint_blocks(38, 2432),), 8.1e9, 333, true_cfg=2),
    Family("qwen-image", 3072, 24, (joint_blocks(60, 3072),), 20.4e9, 256, text_encoder=7e9, true_cfg=2),
    Family(
        "z-image",
        3840,
        30,
        (single_blocks(34, 3840, reduces=2),),
        6.0e9,
        256,
        text_encoder=4e9,
        default_steps=9,
    ),
    Family(
        "pixart",
        1152,
        16,
        (cross_attention_blocks(28, 1152, 4608),),
        0.61e9,
        120,
        true_cfg=2,
        default_steps=20,
    ),
    Family(
        "hunyuandit",
        1408,
        16,
        (cross_attention_blocks(40, 1408, 6144),),
        1.5e9,
        333,
        true_cfg=2,
        default_steps=50,
    ),
    Family(
        "lumina2", 2304, 24, (single_blocks(26, 2304, reduces=2),), 2.6e9, 256, text_encoder=2.6e9, true_cfg=2
    ),
    Family(
        "lumina-next",
        2304,
        32,
        (cross_attention_blocks(24, 2304, 9216),),
        1.7e9,
        256,
        text_encoder=2.5e9,
        true_cfg=2,
    ),
    Family(
        "hunyuanvideo",
        3072,
        24,
        (joint_blocks(20, 3072), single_blocks(40, 3072)),
        12.8e9,
        256,
        temporal=4,
        text_encoder=8e9,
        decoder_flop=_VIDEO_DECODER,
        default_size=(1280, 720, 129),
        default_steps=50,
    ),
    Family(
        "skyreels-v1",
        3072,
        24,
        (joint_blocks(20, 3072), single_blocks(40, 3072)),
        12.8e9,
        256,
        temporal=4,
        text_encoder=8e9,
        decoder_flop=_VIDEO_DECODER,
        true_cfg=2,
        default_size=(960, 544, 97),
        default_steps=30,
    ),
    Family(
        "wan1.3b",
        1536,
        12,
        (cross_attention_blocks(30, 1536, 8960),),
        1.4e9,
        512,
        temporal=4,
        decoder_flop=_WAN_DECODER,
        true_cfg=2,
        default_size=(832, 480, 81),
        default_steps=50,
    ),
    Family(
        "wan14b",
        5120,
        40,
        (cross_attention_blocks(40, 5120, 13824),),
        14.3e9,
        512,
        temporal=4,
        decoder_flop=_WAN_DECODER,
        true_cfg=2,
        default_size=(832, 480, 81),
        default_steps=40,
    ),
    Family(
        "wan2.2-5b",
        3072,
        24,
        (cross_attention_blocks(30, 3072, 14336),),
        5.0e9,
        512,
        spatial=32,
        temporal=4,
        decoder_flop=_WAN_DECODER,
        true_cfg=2,
        default_size=(1280, 704, 121),
        default_steps=50,
    ),
    Family(
        "cogvideox2b",
        1920,
        30,
        (single_blocks(30, 1920, reduces=2),),
        1.7e9,
        226,
        temporal=4,
        decoder_flop=_VIDEO_DECODER,
        true_cfg=2,
        default_size=(720, 480, 49),
        default_steps=50,
    ),
    Family(
        "cogvideox5b",
        3072,
        48,
        (single_blocks(42, 3072, reduces=2),),
        5.6e9,
        226,
        temporal=4,
        decoder_flop=_VIDEO_DECODER,
        true_cfg=2,
        default_size=(720, 480, 49),
        default_steps=50,
    ),
    # Two latent frames to a token: 8 frames.
    Family(
        "cogvideox1.5-5b",
        3072,
        48,
        (single_blocks(42, 3072, reduces=2),),
        5.6e9,
        226,
        temporal=8,
        decoder_flop=_VIDEO_DECODER,
        true_cfg=2,
        default_size=(1360, 768, 81),
        default_steps=50,
    ),
    # The text stream is half as wide, and the feed-forward is a SwiGLU of 8 h².
    Family(
        "mochi",
        3072,
        24,
        (joint_blocks(48, 3072, text_hidden=1536, text_weights=16.0),),
        10.0e9,
        256,
        temporal=6,
        decoder_flop=_VIDEO_DECODER,
        true_cfg=2,
        default_size=(848, 480, 84),
        default_steps=64,
    ),
    Family(
        "stepvideo",
        6144,
        48,
        (cross_attention_blocks(48, 6144, 24576),),
        30e9,
        320,
        temporal=6,
        text_encoder=9e9,
        decoder_flop=_VIDEO_DECODER,
        true_cfg=2,
        default_size=(992, 544, 204),
        default_steps=50,
    ),
    Family(
        "ltx-2b",
        2048,
        32,
        (cross_attention_blocks(28, 2048, 8192),),
        1.9e9,
        256,
        spatial=32,
        temporal=8,
        decoder_flop=2e6,
        true_cfg=2,
        default_size=(704, 480, 161),
        default_steps=40,
    ),
    Family(
        "ltx-13b",
        4096,
        32,
        (cross_attention_blocks(48, 4096, 16384),),
        13.0e9,
        256,
        spatial=32,
        temporal=8,
        decoder_flop=2e6,
        true_cfg=2,
        default_size=(1216, 704, 121),
        default_steps=30,
    ),
    # UNets: convolutions and attention together, quoted per call at 1024 x 1024 (SDXL: 2.99 TMAC; SD 1.5: 1.36 TMAC).
    Family(
        "sdxl",
        1280,
        20,
        (),
        2.57e9,
        77,
        text_encoder=0.8e9,
        true_cfg=2,
        default_steps=30,
        image_flop=5.98e12,
    ),
    Family(
        "sd1.5",
        1280,
        8,
        (),
        0.86e9,
        77,
        text_encoder=0.12e9,
        true_cfg=2,
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
# A middle-sized transformer, to reason about a published measurement of a model that is not in the table.
GENERIC = Family("a transformer of unknown size", 3072, 24, (single_blocks(48, 3072),), 8e9, 256, known=False)


def split_name(name: str) -> tuple[str, str]:
    """("flux1", "fp8") from "flux1-fp8": a model's name and the storage of its weights ("bf16" when unsaid)."""
    match = re.fullmatch(rf"(.+?)[-_]({'|'.join(WEIGHT_BYTES)})", name.strip().lower())
    return (match[1], match[2]) if match else (name.strip().lower(), "bf16")


def find_family(name: str) -> Family:
    """The family called `name` (aliases and a storage suffix such as `-fp8` allowed). Raises RequestError."""
    base, _ = split_name(name)
    if family := FAMILIES.get(_ALIASES.get(base, base)):
        return family
    raise RequestError(
        f"model {name!r} is unknown; known are {', '.join(sorted(FAMILIES))}, each also with "
        f"a suffix such as -fp8 or -q4."
    )


def guess_family(name: str) -> Family:
    """As find_family; a variant falls back on the longest known beginning of its name, anything else on GENERIC."""
    base, _ = split_name(name)
    names = {**{n: n for n in FAMILIES}, **_ALIASES}
    fitting = [n for n in names if base == n or base.startswith((n + "-", n + "_", n + "."))]
    if not fitting:
        return replace(GENERIC)
    return FAMILIES[names[max(fitting, key=len)]]

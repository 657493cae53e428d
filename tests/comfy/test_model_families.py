"""Every family of models behind Parallel Model gives the stock latent on 2 devices; strategies for 3 and 4 do too.

Most sizes and frame counts are not divisible by the number of devices. On 2 devices Parallel Sampler runs a single
image with CFG. KSampler runs a batch of two without CFG on 3 devices, with it on 4: there each strategy has one family
whose prompts carry more than text, where there is one. The tests in tests/engine prove each class under all strategies.
"""

from __future__ import annotations

import pytest

from any_graphs import MODELS
from any_runs import both

ULYSSES, RING, CFG, DATA = {"ulysses": 2}, {"ring": 2}, {"cfg": 2}, {"data": 2}
SHARDED = {"shard_weights": True}
ON_TWO = {
    "flux": ULYSSES,
    "flux2": ULYSSES,
    "wan_t2v": ULYSSES | SHARDED,
    "wan_i2v": ULYSSES,
    "wan_ti2v": RING,
    "wan_vace": ULYSSES,
    "wan_fp8": ULYSSES,
    "hunyuan_video": RING,
    "hunyuan_video_15": ULYSSES,
    "skyreels_i2v": ULYSSES,
    "sd3": RING,
    "ltx_video": RING,
    "ltx_sound": ULYSSES,
    "cogvideo": RING,
    "qwen_image": ULYSSES,
    "minimax": ULYSSES | SHARDED,
    "unet": CFG,
    "sdxl": ULYSSES,
    "sound": CFG,
    "wan_camera": ULYSSES,
    "wan_scail": RING,
    "wan_s2v": ULYSSES,
    "lens": RING,
    "joyimage": ULYSSES,
    "hunyuan_3d": ULYSSES | SHARDED,
}
ON_THREE = {
    "ltx_sound": {"ring": 3},
    "wan_i2v": {"ring": 3} | SHARDED,
    "hunyuan_video": {"ulysses": 3},
    "unet": {"ulysses": 3},
    "wan_ti2v": {"data": 3},
}
ON_FOUR = {
    "hunyuan_video_15": CFG | ULYSSES,
    "flux2": RING | ULYSSES,
    "wan_t2v": CFG | RING,
    "hunyuan_video": DATA | ULYSSES | SHARDED,
    "ltx_video": {"ulysses": 4},
    "minimax": DATA | RING,
    "unet": CFG | DATA,
    "sound": {"data": 4},
}
# MiniMax's module in ComfyUI refuses more than one row, and Qwen-Image is slow at its width of 3,072. SDXL gets one
# row, so that the devices compute bands of it.
SMALLER = {"minimax": {"batch": 1}, "qwen_image": {"steps": 1, "cfg": 1.0}, "sdxl": {"cfg": 1.0}}
REQUESTS = {2: {"batch": 1, "cfg": 3.0}, 3: {"batch": 2, "cfg": 1.0}, 4: {"batch": 2, "cfg": 3.0}}


# test_model_patches.py samples these with the nodes that they are made for.
PATCHED = {"wan_causal", "wan_talk"}


def test_every_family_has_its_strategy():
    assert set(ON_TWO) == set(MODELS) - PATCHED


@pytest.mark.parametrize(  # devices vary slowest, so each group of ranks starts once
    ("devices", "kind", "choice"),
    [
        (devices, kind, choice)
        for devices, strategies in enumerate((ON_TWO, ON_THREE, ON_FOUR), 2)
        for kind, choice in strategies.items()
    ],
)
def test_a_family_gives_the_stock_latent(comfy, devices, kind, choice):
    request = REQUESTS[devices] | SMALLER.get(kind, {})
    if devices > 2:
        both(comfy, kind, choice, **request)
    else:
        report = both(comfy, kind, choice, by=("Parallel Sampler",), **request)["report"]
        assert "result: exact" in report
        assert "compute all else alike" not in report, report


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("flux", {"tensor": 2}),
        ("wan_fp8", {"tensor": 2}),
        ("sd3", {"tensor": 3}),
        ("wan_t2v", {"tensor": 2, "cfg": 2} | SHARDED),
    ],
)
def test_slices_of_layers_give_the_stock_latent(comfy, kind, choice):
    """tests/models/comfyui/formats/test_slices.py proves the slices of every class, also beside other axes."""
    report = both(comfy, kind, choice, by=("Parallel Sampler",))["report"]
    assert f"tensor {choice['tensor']}" in report, report
    assert "alike" not in report, report  # each device computes its part

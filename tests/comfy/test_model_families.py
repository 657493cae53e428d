"""Every family of models behind Parallel Model gives the stock latent under strategies for 2, 3 and 4 devices.

Most sizes and frame counts are not divisible by the number of devices. On 2 devices a single image runs with CFG, once
call by call and once with the whole loop on the devices. A batch of two runs without CFG on 3 devices, with it on 4.
"""

from __future__ import annotations

import pytest

from any_graphs import MODELS
from any_runs import assert_same, both

# The strategies of each family on 2, 3 and 4 devices.
ULYSSES, RING, CFG, DATA = {"ulysses": 2}, {"ring": 2}, {"cfg": 2}, {"data": 2}
RING_3, ULYSSES_3, DATA_3 = {"ring": 3}, {"ulysses": 3}, {"data": 3}
SHARDED = {"shard_weights": True}
FAMILIES = {
    "flux": (ULYSSES, RING_3, CFG | ULYSSES),
    "flux2": (ULYSSES, RING_3, RING | ULYSSES),
    "wan_t2v": (ULYSSES | SHARDED, RING_3, CFG | RING),
    "wan_i2v": (ULYSSES, RING_3 | SHARDED, DATA | ULYSSES),
    "wan_ti2v": (RING, DATA_3, CFG | ULYSSES),
    "wan_vace": (ULYSSES, RING_3, RING | ULYSSES),
    "wan_fp8": (ULYSSES, DATA_3, CFG | RING),
    "hunyuan_video": (RING, ULYSSES_3, DATA | ULYSSES | SHARDED),
    "hunyuan_video_15": (ULYSSES, RING_3, CFG | ULYSSES),
    "skyreels_i2v": (ULYSSES, ULYSSES_3, RING | ULYSSES),
    "sd3": (RING, ULYSSES_3, CFG | RING),
    "ltx_video": (RING, ULYSSES_3, {"ulysses": 4}),
    "ltx_sound": (ULYSSES, RING_3, CFG | ULYSSES),
    "cogvideo": (RING, ULYSSES_3, RING | ULYSSES),
    "qwen_image": (ULYSSES, RING_3),  # as wide as the real one and therefore slow: no third strategy
    "minimax": (ULYSSES, RING_3, DATA | RING),
    "unet": (CFG, ULYSSES_3, CFG | DATA),
    "sdxl": (ULYSSES,),
    "sound": (CFG, DATA_3, {"data": 4}),
    # The table describes the classes of these differently from the ones above: one strategy each tests that.
    "wan_camera": (ULYSSES,),
    "wan_scail": (RING,),
    "wan_s2v": (ULYSSES,),
    "lens": (RING,),
    "joyimage": (ULYSSES,),
    "hunyuan_3d": (ULYSSES | SHARDED,),
}
# MiniMax's module in ComfyUI refuses more than one row, and Qwen-Image is slow at its width of 3,072. SDXL gets one
# row, so that the devices compute bands of it.
SMALLER = {"minimax": {"batch": 1}, "qwen_image": {"batch": 1, "steps": 1}, "sdxl": {"cfg": 1.0}}
REQUESTS = {2: {"batch": 1, "cfg": 3.0}, 3: {"batch": 2, "cfg": 1.0}, 4: {"batch": 2, "cfg": 3.0}}


# test_model_patches.py samples these with the nodes that they are made for.
PATCHED = {"wan_causal", "wan_talk"}


def test_every_family_has_its_strategies():
    assert set(FAMILIES) == set(MODELS) - PATCHED


@pytest.mark.parametrize(  # devices vary slowest, so each group of ranks starts once
    ("devices", "kind"),
    [(devices, kind) for devices in REQUESTS for kind in FAMILIES if len(FAMILIES[kind]) > devices - 2],
)
def test_a_family_gives_the_stock_latent(comfy, devices, kind):
    request = REQUESTS[devices] | SMALLER.get(kind, {})
    found = both(comfy, kind, FAMILIES[kind][devices - 2], with_sampler=devices == 2, **request)
    assert_same(found)
    if devices == 2:
        assert "result: exact" in found["report"]
        assert "compute all else alike" not in found["report"], found["report"]

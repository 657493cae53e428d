"""VAEs on ranks with device memory: they exchange tensors on the device, and the results are in host memory."""

import pytest
import torch

from banded_vaes import TOLERANCE, difference, in_frames
from host_and_device import DEVICE, HOST, active
from other_vaes import TILED, decoded
from other_vaes import build as build_tiled
from parallel_backend.engine.bands.tiles import TiledDecoder
from parallel_backend.engine.bands.vae import BandedNetwork
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.models.comfyui.rows.vae_encoder import ComfyUIVaeEncoder
from parallel_backend.models.comfyui.rows.vae_halves import ComfyUIVae, TiledComfyUIVae
from parallel_backend.models.comfyui.tiny.weights import random
from ranks import run_ranks
from video_vaes import CASES, build

NAMES = ("wan 2.1", "hunyuanvideo", "hunyuanvideo 1.5", "flux")
ROWS, COLUMNS = 4, 2  # of a latent; the rows do not divide evenly over three ranks
FLOAT = torch.float32
pytestmark = pytest.mark.usefixtures("comfyui_here")


def network(name):
    found = build(name)
    if (device := active()) is not None:
        device.put(found)
    return found


def latent_of(case):
    return random(case.channels, *((2,) if case.dims == 3 else ()), ROWS, COLUMNS)


def pixels_of(case):
    frames = (4,) if case.dims == 3 else ()
    return random(3, *frames, case.scale * ROWS, case.scale * COLUMNS)


def shared_out(world):
    """Returns on rank 0 {(VAE, way): (True if the result is on the host, result)}, and {} on the other ranks."""
    layouts, found = Layouts(world), {}
    for name in NAMES:
        case = CASES[name]
        decoder = ComfyUIVae(network(name), case.channels, case.dims, FLOAT, world.device)
        encoder = ComfyUIVaeEncoder(
            network(name), case.scale, 3, case.channels, case.dims, FLOAT, world.device
        )
        found[name, "decoded"] = BandedNetwork(decoder, layouts)(latent_of(case))
        found[name, "encoded"] = BandedNetwork(encoder, layouts)(pixels_of(case))
    tiled = build_tiled(TILED)
    active().put(tiled)
    vae = TiledComfyUIVae(tiled, TILED.channels, TILED.dims, FLOAT, world.device)
    found["tiled", "decoded"] = TiledDecoder(vae, layouts)(random(TILED.channels, 1, 5, 4))
    return {key: (one.device == HOST, one) for key, one in found.items() if one is not None}


def test_bands_and_tiles_meet_on_the_device_and_end_on_the_host():
    first, *others = run_ranks(shared_out, 3, device=DEVICE)
    assert others == [{}, {}] and all(is_host for is_host, _ in first.values())
    with torch.inference_mode():
        for name in NAMES:
            whole, case = network(name), CASES[name]
            for way, given in ((whole.decode, latent_of(case)), (whole.encode, pixels_of(case))):
                expected = in_frames(way(given[None])[0])
                found = first[name, f"{way.__name__}d"][1]
                assert difference(found, expected) <= TOLERANCE, (name, way.__name__)
    expected = decoded(build_tiled(TILED), random(TILED.channels, 1, 5, 4))
    assert difference(first["tiled", "decoded"][1], expected) <= TOLERANCE

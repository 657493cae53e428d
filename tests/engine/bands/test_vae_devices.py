"""ComfyUI's VAEs in bands on a stand-in for a GPU: the pack waits for it once, to copy the rows there."""

from __future__ import annotations

import pytest
import torch

import other_vaes
import video_vaes
from dispatch_counter import DEVICE, world_of_one_process
from module_devices import Found, watched
from parallel_backend.engine.bands.vae import BandedNetwork
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.models.comfyui.rows.vae_halves import ComfyUIVae, ComfyUIVaeEncoder
from parallel_backend.models.comfyui.tiny.weights import random

DECODERS = video_vaes.CASES | other_vaes.BANDED
LEFT_IN_HOST_MEMORY = {"ltx", "ltx with noise", "taehv"}  # these networks return frames in host memory
ROWS_ARRIVE = ["engine/bands/vae.py"]
pytestmark = pytest.mark.usefixtures("comfyui_here")


def on_rank(monkeypatch, make, given) -> Found:
    """Computes the band of the second of two ranks, and returns what it asked of the device."""
    monkeypatch.setattr(BandedNetwork, "_on_rank_0", lambda network, band: band)
    with world_of_one_process(1, 2) as world:
        network = make(Layouts(world))
        return watched(lambda: network(given))


def check(found: Found, waits: list[str]) -> None:
    assert [wait.partition(":")[0] for wait in found.own] == waits
    assert found.drawn == [] and len(found.answers) == 1


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_waits_for_its_rows_alone(name, monkeypatch):
    case = DECODERS[name]
    vae = ComfyUIVae(case.build(), case.channels, case.dims, torch.float32, DEVICE)
    frames = (3,) if vae.latent_dims == 3 else ()
    latent = random(case.channels, *frames, 4, 2)
    found = on_rank(monkeypatch, lambda layouts: BandedNetwork(vae, layouts), latent)
    noises = ["models/comfyui/rows/vae_adjustments.py"] if "noise" in name else []
    check(found, ROWS_ARRIVE + noises * (len(found.own) - 1))
    (band,) = found.answers
    assert band.device == (torch.device("cpu") if name in LEFT_IN_HOST_MEMORY else DEVICE)
    assert band.shape[1:] == (2 * case.scale, 2 * case.scale, 3)


@pytest.mark.parametrize("name", video_vaes.CASES)
def test_an_encoder_waits_for_its_rows_alone(name, monkeypatch):
    case = video_vaes.CASES[name]
    encoder = ComfyUIVaeEncoder(case.build(), case.channels, case.dims, torch.float32, DEVICE, case.scale)
    frames = (encoder.few_frames,) if case.dims == 3 else ()
    pixels = random(3, *frames, 4 * case.scale, 2 * case.scale)
    found = on_rank(monkeypatch, lambda layouts: BandedNetwork(encoder, layouts), pixels)
    check(found, ROWS_ARRIVE)
    assert found.answers[0].device == DEVICE

"""VAEs through a sidecar: real ranks hold encoders and decoders beside their model, and errors leave all loaded."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

from banded_vaes import TOLERANCE, difference, in_frames
from comfy_modules import import_comfyui_here
from flux_requests import flux_request
from other_vaes import BANDED, TILED, decoded
from other_vaes import build as other_vae
from parallel_backend.errors import PlatformError, RankFailed, RequestError
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire import payloads
from scripted import is_running
from tests.closed_forms.band_traffic import expected_decode_bytes
from tiny_flux import write_tiny_flux
from tiny_vae import FLUX, SD, random_latent, random_vae
from vae_halves import Half
from video_vaes import CASES, build

PIXELS = {"wan 2.1": (1, 3, 5, 32, 8), "flux": (2, 3, 24, 16)}


@pytest.fixture(scope="module")
def ranks():
    import_comfyui_here()
    sidecar = Sidecar(("cpu:0", "cpu:1"))
    yield sidecar
    pids = sidecar.pids
    sidecar.stop()
    assert not any(map(is_running, pids))


def flux(sizes=FLUX, seed=0):
    return Half(random_vae(sizes, seed), sizes.channels, 2)


def image_of(half, latent):
    """Decodes one image after the other: torch's CPU convolutions are ten times less precise on two at once."""
    with torch.inference_mode():
        return torch.cat([half.half.module.decode(one[None]).movedim(1, -1) for one in latent])


def is_right(image, expected):
    return image.shape == expected.shape and (image - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_weights_go_once_and_then_only_latents(ranks):
    vae, latent, steps, phases = flux(), random_latent(FLUX, 7, 5, batch=3), [], []
    first = ranks.call_module(
        vae.request(latent), on_step=lambda *step: steps.append(step), on_phase=phases.append
    )
    again = ranks.call_module(vae.request(latent), on_phase=phases.append)
    assert is_right(first.value, image_of(vae, latent))
    assert torch.equal(again.value, first.value)
    assert vae.sent == 1 and (first.is_new, again.is_new) == (True, False)
    assert phases[-3:] == ["sending the VAE to the processes", "decoding", "decoding"]
    assert first.bytes == (vae.bytes, vae.bytes)
    assert first.parts == (4, 3)
    expected = [3 * expected_decode_bytes(FLUX, (4, 3), rank, width=5) for rank in (0, 1)]
    assert list(first.bytes_sent) == expected == list(again.bytes_sent)
    assert [step for step, _ in steps] == list(range(1, steps[-1][1] + 1))
    assert first.compute_dtype == "float32"


@pytest.mark.parametrize("name", [*BANDED, *CASES, "minimax h3"])
def test_each_network_arrives_as_it_was_sent(ranks, name):
    """This includes the blocks that LTX's file lists, the scale of TAEHV's latents, and buffers that no file holds."""
    case = TILED if name == "minimax h3" else BANDED.get(name) or CASES[name]
    network = build(name) if name in CASES else other_vae(case)
    frames = (1,) if name in ("taehv", "minimax h3") else (2,)
    latent = random(1, case.channels, *(frames if case.dims == 3 else ()), 4, 3)
    found = ranks.call_module(Half(network, case.channels, case.dims).request(latent)).value
    assert difference(found, decoded(network, latent[0])) <= TOLERANCE


@pytest.mark.parametrize("name", PIXELS)
def test_the_encoder_of_a_vae_lies_beside_its_decoder(ranks, name):
    case, network, pixels = CASES[name], build(name), random(*PIXELS[name])
    decoder = Half(network, case.channels, case.dims)
    encoder = Half(network, case.channels, case.dims, encodes=True, scale=case.scale)
    latent = random(1, case.channels, *((1,) if case.dims == 3 else ()), 2, 2)
    images = ranks.call_module(decoder.request(latent)).value
    run = ranks.call_module(encoder.request(pixels, keep=(decoder.number,)))
    with torch.inference_mode():
        expected = torch.stack([in_frames(network.encode(one[None])[0]) for one in pixels])
    found = torch.stack([in_frames(one) for one in run.value])
    assert difference(found, expected) <= TOLERANCE
    assert run.value.ndim == 2 + case.dims and run.parts == ((2, 2) if name == "wan 2.1" else (2, 1))
    again = ranks.call_module(decoder.request(latent, keep=(encoder.number,)))
    assert torch.equal(again.value, images) and (decoder.sent, encoder.sent) == (1, 1)
    for shape in ((1, 3, 1, 20, 8), (1, 4, 1, 16, 8), (1, 3, 16, 9)):
        with pytest.raises(RequestError, match=r"the pixels have shape .* with sides that divide by 8"):
            ranks.call_module(encoder.request(torch.zeros(shape), keep=(decoder.number,)))


def test_another_vae_is_held_beside_it_as_long_as_it_is_kept(ranks):
    one, other = flux(), flux(SD)
    for vae, sizes, others in ((one, FLUX, other), (other, SD, one), (one, FLUX, other)):
        latent = random_latent(sizes, 4, 4)
        found = ranks.call_module(vae.request(latent, keep=(others.number,)))
        assert is_right(found.value, image_of(vae, latent))
    assert (one.sent, other.sent) == (1, 1)
    ranks.call_module(one.request(random_latent(FLUX, 4, 4)))
    ranks.call_module(other.request(random_latent(SD, 4, 4)))
    assert (one.sent, other.sent) == (1, 2)


def test_one_rank_computes_all_to_the_last_bit_where_the_others_have_no_share(ranks, monkeypatch):
    vae, latent = flux(), random_latent(FLUX, 8, 4)
    # Sets the thread count of one of two ranks: on some processors, the rounding of convolutions depends on it.
    monkeypatch.setenv("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    run = ranks.call_module(vae.request(latent, shares=(1.0, 0.0)))
    alone = Sidecar(("cpu:0",))
    try:
        expected = alone.call_module(flux().request(latent))
    finally:
        alone.stop()
    assert run.parts == (8, 0) and torch.equal(run.value, expected.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_on_the_cpu(ranks, dtype):
    vae, latent = Half(random_vae(FLUX).to(dtype), 16, 2, dtype=dtype), random_latent(FLUX, 4, 4)
    run = ranks.call_module(vae.request(latent))
    vae.half.module.float()
    assert run.value.dtype == torch.float32 and run.compute_dtype == "float32"
    assert is_right(run.value, image_of(vae, latent))


def test_the_model_stays_loaded(ranks, tmp_path):
    spec = ModelSpec(path=str(write_tiny_flux(tmp_path / "flux.safetensors")))
    assert not ranks.load(spec).cached
    pids = ranks.pids
    # The import of this engine changes parts of torch, which must not change how a VAE decodes.
    ranks.sample(spec, flux_request(), Placement(ParallelStrategy(ring_degree=2), engine="xfuser"))
    vae, latent = flux(), random_latent(FLUX, 4, 4)
    assert is_right(ranks.call_module(vae.request(latent)).value, image_of(vae, latent))
    assert ranks.load(spec).cached and ranks.pids == pids


class _Flipped(nn.Module):
    """Moves rows to places that their band does not contain."""

    def forward(self, pixels):
        return pixels.flip(-2)


def _looks_far():
    vae = flux()
    vae.half.module.decoder.conv_out = nn.Sequential(vae.half.module.decoder.conv_out, _Flipped())
    return vae


class _Raises(nn.Module):
    """Fails as a network of another release may, in a way that the code for bands does not expect."""

    def forward(self, pixels):
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")


def _does_not_work():
    vae = flux()
    vae.half.module.decoder.conv_in = _Raises()
    return vae


@pytest.mark.parametrize(
    ("make", "latent", "shares", "words"),
    [
        (flux, torch.zeros(1, 4, 6, 6), (), "has 4 channels and the VAE decodes 16"),
        (flux, torch.zeros(1, 16, 2, 6, 6), (), "expected \\[batch, channels"),
        (flux, torch.zeros(1, 16, 6, 6), (1.0,), "one per process"),
        (flux, torch.zeros(1, 16, 6, 6), (0.0, 0.0), "one above it"),
        (flux, torch.zeros(1, 16, 6, 6), (2.0, -1.0), "none below 0"),
        (_looks_far, torch.zeros(1, 16, 6, 6), (), "bands of rows are off by"),
        (_does_not_work, torch.zeros(1, 16, 6, 6), (), "than the pack knows: Cannot copy out of meta tensor"),
        (
            lambda: Half(other_vae(BANDED["ltx"]), 128, 3),
            torch.zeros(1, 128, 1, 1, 3),
            (),
            "the latent is 3 x 1 positions; this VAE decodes 2 x 2 and more. Take a larger picture.",
        ),
    ],
)
def test_what_cannot_be_decoded_is_refused_and_the_group_lives_on(ranks, make, latent, shares, words):
    vae, other, good = flux(), make(), random_latent(FLUX, 4, 4)
    ranks.call_module(vae.request(good))
    pids = ranks.pids
    for _ in range(2):  # the second time it may be held already
        with pytest.raises((RequestError, PlatformError), match=words):
            ranks.call_module(other.request(latent, shares, keep=(vae.number,)))
    assert is_right(ranks.call_module(vae.request(good)).value, image_of(vae, good))
    assert ranks.pids == pids and vae.sent == 1


@pytest.mark.parametrize(
    ("is_new", "words"),
    [
        (True, r"weights of the VAE that lie in no .* Load it from \.safetensors files, or use VAE Encode"),
        (False, r"What the VAE is given takes 0\.0 GiB, .* Give it less at a time, or use VAE Encode"),
    ],
)
def test_a_vae_or_pictures_that_are_too_large_are_refused_before(ranks, monkeypatch, is_new, words):
    vae, latent = flux(), random_latent(FLUX, 4, 4)
    if not is_new:
        ranks.call_module(vae.request(latent))
    monkeypatch.setattr(payloads, "MOST_BYTES", 100)
    with pytest.raises(RequestError, match=words):
        ranks.call_module(vae.request(latent))
    monkeypatch.undo()
    assert is_right(ranks.call_module(vae.request(latent)).value, image_of(vae, latent))


def test_a_second_killed_rank_is_named_and_the_next_decode_works(ranks):
    vae, latent = flux(), random_latent(FLUX, 16, 16)
    ranks.call_module(vae.request(latent))
    killed = []

    def kill(step, steps):
        if ranks.pids[1] not in killed:
            killed.append(ranks.pids[1])
            os.kill(killed[-1], signal.SIGKILL)

    with pytest.raises(RankFailed, match=r"process 1 failed: killed by SIGKILL"):
        ranks.call_module(vae.request(latent), on_step=kill)
    assert len(killed) == 2
    assert is_right(ranks.call_module(vae.request(latent)).value, image_of(vae, latent))
    assert vae.sent == 3
    assert not set(ranks.pids) & set(killed)

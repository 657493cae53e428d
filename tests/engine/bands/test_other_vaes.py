"""Every VAE decoder that is computed in bands of rows gives, on real ranks, the frames of one process."""

from functools import partial

import pytest
import torch

import video_vaes
from banded_vaes import TOLERANCE, difference, go_without, refusals
from host_and_device import DEVICE, HOST
from other_vaes import BANDED, decoded
from other_vaes import build as build_other
from parallel_backend.engine.bands.vae import BandedNetwork
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.models.comfyui.rows import vae_adjustments
from parallel_backend.models.comfyui.rows.banded import STEPS
from parallel_backend.models.comfyui.rows.vae_halves import ComfyUIVae
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.tokens.vae_networks import VaeMode, known
from ranks import run_ranks

# (frames, height, width), shares, for 3 ranks: bands of 2, 1 and 1 rows, and fewer rows than ranks.
SIZES = [((3, 4, 3), (2.0, 1.0, 1.0)), ((1, 2, 3), ())]
DECODERS = video_vaes.CASES | BANDED
NAMES = [name for name in DECODERS if name != "taesd"]  # tested in the real ComfyUI instead
# The networks whose bands need this from other ranks.
ASKED = {
    "rows": NAMES,
    "keys": ["wan 2.1", "hunyuanvideo", "stable video diffusion", "cosmos", "seedvr2"],
    "moments": ["hunyuanvideo", "stable video diffusion", "cosmos", "seedvr2", "mochi", "cogvideox"],
}
SHARES = [NAMES[first::3] for first in range(3)]  # three starts of ranks: one costs more than a network
pytestmark = pytest.mark.usefixtures("comfyui_here")


def build(name):
    return video_vaes.build(name) if name in video_vaes.CASES else build_other(BANDED[name])


def half(name, layouts, dtype=torch.float32):
    case, device = DECODERS[name], layouts.world.device
    return BandedNetwork(ComfyUIVae(build(name), case.channels, case.dims, dtype, device), layouts)


def latent_of(name, frames, height, width):
    case = DECODERS[name]
    return random(case.channels, *((frames,) if case.dims == 3 else ()), height, width)


def decode(world, jobs, broken=""):
    """Returns by name a list of (frames [T, H, W, 3] or an empty tensor, steps announced) on this rank, one for each
    size. `jobs`: sizes and shares by name; `broken`: what this rank goes without."""
    if broken:
        go_without(broken)
    layouts, results, usual = Layouts(world), {}, vae_adjustments._CHUNK_BYTES
    for name, sizes in jobs.items():
        # Small chunks; with noise, each chunk would draw new noise.
        vae_adjustments._CHUNK_BYTES = 4_000 if name == "ltx" else usual
        decoder, found = half(name, layouts), results.setdefault(name, [])
        for size, shares in sizes:
            steps = []
            frames = decoder(latent_of(name, *size), shares, lambda steps=steps: steps.append(1))
            assert frames is None or frames.device == HOST
            found.append((torch.empty(0) if frames is None else frames, len(steps)))
    return results


@pytest.mark.parametrize("names", SHARES, ids="-".join)
def test_the_frames_are_those_of_one_process(names):
    # taehv has its full width, so it decodes only one small latent.
    jobs = {name: SIZES[1:] if name == "taehv" else SIZES for name in names}
    results = run_ranks(decode, 3, jobs, device=DEVICE)
    for name, sizes in jobs.items():
        case, network = DECODERS[name], build(name)
        for number, (size, _) in enumerate(sizes):
            expected = decoded(network, latent_of(name, *size))
            frames = case.frames(size[0]) if case.dims == 3 else 1
            assert expected.shape == (frames, *(case.scale * side for side in size[1:]), 3), name
            assert expected.std() > 0.05 * expected.abs().max(), name  # the picture is not constant
            assert difference(results[0][name][number][0], expected) <= TOLERANCE, (name, size)
            assert [result[name][number][1] for result in results] == 3 * [STEPS], (name, size)


@pytest.mark.parametrize("what", ASKED)
def test_a_rank_that_goes_without_the_others_is_seen(what):
    jobs = {name: [((2, 2, 1 if name == "taehv" else 2), ())] for name in ASKED[what]}
    results = run_ranks(decode, 2, jobs, what)[0]
    for name, [(size, _)] in jobs.items():
        expected = decoded(build(name), latent_of(name, *size))
        assert difference(results[name][0][0], expected) > 100 * TOLERANCE, name


def test_a_network_that_looks_further_is_seen_before_it_is_used():
    """A rank that lacks its neighbours' rows stands for such a network. test_encoder.py has this in float32."""
    made, names = partial(half, dtype=torch.bfloat16), ["wan 2.1", "hunyuanvideo"]
    assert run_ranks(refusals, 2, made, names) == 2 * [["", ""]]
    first, second = run_ranks(refusals, 2, made, names, "rows")
    assert all(words.startswith("this version of ComfyUI computes its VAE i") for words in first)
    assert second == ["", ""]


@pytest.mark.parametrize("name", DECODERS)
def test_the_networks_are_those_that_nodes_send_to_the_ranks(name):
    network = DECODERS[name].build()
    assert known(network).way is VaeMode.BANDS
    network.__class__ = type("Changed", (type(network),), {})
    assert known(network) is None is known(None)


def chunks(world, shares):
    """Returns (how often LTX's last layer ran on this rank, the frames)."""
    vae_adjustments._CHUNK_BYTES = 6_000
    decoder, calls = half("ltx", Layouts(world)), []
    decoder.vae.network.decoder.conv_out.register_forward_hook(lambda *_: calls.append(1))
    frames = decoder(latent_of("ltx", 7, 4, 2), shares)
    return len(calls), torch.empty(0) if frames is None else frames


def test_ltxs_frames_go_in_as_many_chunks_on_a_rank_with_few_rows():
    """If the bytes of a band decided, ranks would have different numbers of chunks and one would wait forever."""
    (count, frames), (other, _) = run_ranks(chunks, 2, (3.0, 1.0))
    assert count == other > 2
    assert difference(frames, decoded(build("ltx"), latent_of("ltx", 7, 4, 2))) <= TOLERANCE

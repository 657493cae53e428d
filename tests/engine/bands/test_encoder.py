"""ComfyUI's own VAE encoders in bands of rows on real ranks give the latent of the same network in one process."""

from functools import partial

import pytest
import torch

from banded_vaes import TOLERANCE, difference, go_without, in_frames, refusals
from host_and_device import DEVICE, HOST
from parallel_backend.engine.bands.vae import BandedNetwork
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.models.comfyui.rows.banded import STEPS
from parallel_backend.models.comfyui.rows.vae_halves import ComfyUIVaeEncoder
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.tokens.vae_networks import encodes_in_bands
from ranks import run_ranks
from video_vaes import CASES, build

pytestmark = pytest.mark.usefixtures("comfyui_here")


def encoder(name, layouts, dtype=torch.float32):
    case, device = CASES[name], layouts.world.device
    half = ComfyUIVaeEncoder(build(name), case.channels, case.dims, dtype, device, case.scale)
    return BandedNetwork(half, layouts)


def compute(world, inputs, shares=(), broken=""):
    """Returns by name, for this rank: (output [t, h, w, C] or an empty tensor, steps reported, bytes sent)."""
    if broken:
        go_without(broken)
    layouts, found = Layouts(world), {}
    for name, given in inputs.items():
        network, steps, before = encoder(name, layouts), [], layouts.traffic.bytes_sent
        output = network(given, shares, lambda steps=steps: steps.append(1))
        sent = layouts.traffic.bytes_sent - before
        assert output is None or output.device == HOST
        found[name] = torch.empty(0) if output is None else output, len(steps), sent
    return found


def whole(name, pixels):
    """Returns the latent of ComfyUI's own network, [t, h, w, C]."""
    with torch.inference_mode():
        return in_frames(build(name).encode(pixels[None])[0])


def pixels_of(name, frames, height, width):
    case = CASES[name]
    sides = case.scale * height, case.scale * width
    return random(3, *((taken(name, frames),) if case.dims == 3 else ()), *sides)


def taken(name, frames):
    """Returns the number of frames to encode: HunyuanImage's refiner takes one, or a multiple of four."""
    return max(1, frames // 4 * 4) if name == "hunyuanimage refiner" else frames


def latent_frames(name, frames):
    return (taken(name, frames) + 3) // 4 if CASES[name].dims == 3 else 1


SIZES = [  # ranks, (frames, rows and columns of the latent), shares
    (3, (1, 6, 2), (2.0, 1.0, 1.0)),  # bands of 3, 2 and 1 rows
    (4, (6, 3, 1), ()),  # one rank has no row; the networks drop a frame
]


@pytest.mark.parametrize(("ranks", "size", "shares"), SIZES, ids=str)
def test_the_latent_is_that_of_one_process(ranks, size, shares):
    pixels = {name: pixels_of(name, *size) for name in CASES}
    results = run_ranks(compute, ranks, pixels, shares, device=DEVICE)
    for name, case in CASES.items():
        latent, of_ranks = whole(name, pixels[name]), [result[name] for result in results]
        assert latent.shape == (latent_frames(name, size[0]), *size[1:], case.channels)
        assert latent.std() > 0.05 * latent.abs().max(), name  # the latent is not constant
        assert difference(of_ranks[0][0], latent) <= TOLERANCE, name
        assert [steps for _, steps, _ in of_ranks] == ranks * [STEPS]
        assert all(sent for _, _, sent in of_ranks[:2]), name


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (list(CASES), "rows"),
        (["flux", "wan 2.1", "hunyuanvideo"], "ways"),
        (["flux", "wan 2.1", "hunyuanvideo"], "keys"),
    ],
    ids=["rows", "ways", "keys"],
)
def test_a_rank_that_goes_without_the_others_is_seen(names, what):
    pixels = {name: pixels_of(name, 5, 2, 2) for name in names}
    for name, (latent, *_) in run_ranks(compute, 2, pixels, (), what)[0].items():
        assert difference(latent, whole(name, pixels[name])) > 100 * TOLERANCE, name


def test_a_network_that_looks_further_is_seen_before_it_is_used():
    """A rank that lacks its neighbours' rows stands for such a network."""
    names, in_half = ["flux", "wan 2.1", "hunyuanimage refiner"], partial(encoder, dtype=torch.bfloat16)
    assert run_ranks(refusals, 2, encoder, names) == 2 * [3 * [""]]
    assert run_ranks(refusals, 2, in_half, ["flux"]) == 2 * [[""]]
    first, second = run_ranks(refusals, 2, in_half, ["flux"], "rows")
    assert "in another way than the pack knows" in first[0] and second == [""]


@pytest.mark.parametrize("name", CASES)
def test_the_networks_are_those_that_nodes_send_to_the_ranks(name):
    network = CASES[name].build()
    assert encodes_in_bands(network)
    network.encoder.__class__ = type("Changed", (type(network.encoder),), {})
    assert not encodes_in_bands(network) and not encodes_in_bands(None)


def test_a_network_that_draws_its_latent_stays_with_comfyui():
    network = CASES["flux"].build()
    network.regularization.sample = True
    assert not encodes_in_bands(network)

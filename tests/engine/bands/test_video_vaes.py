"""ComfyUI's own VAE decoders in bands of rows on real ranks give the frames of the same network in one process."""

from functools import partial

import pytest
import torch

from banded_vaes import TOLERANCE, compute, difference, in_frames, refusals
from parallel_backend.engine.bands.vae import BandedNetwork
from parallel_backend.models.comfyui.rows.banded import STEPS
from parallel_backend.models.comfyui.rows.vae_halves import ComfyUIVae
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.tokens.vae_networks import VaeMode, known
from ranks import run_ranks
from video_vaes import CASES, build

pytestmark = pytest.mark.usefixtures("comfyui_here")


def decoder(name, layouts, dtype=torch.float32):
    case = CASES[name]
    vae = ComfyUIVae(build(name), case.channels, case.dims, dtype, torch.device("cpu"))
    return BandedNetwork(vae, layouts)


def whole(name, latent):
    """Returns the frames of ComfyUI's own network, [T, H, W, 3]."""
    with torch.inference_mode():
        return in_frames(build(name).decode(latent[None])[0])


def latent_of(name, frames, height, width):
    case = CASES[name]
    return random(case.channels, *((frames,) if case.dims == 3 else ()), height, width)


SIZES = [  # ranks, (frames, height, width), shares
    (2, (1, 5, 2), ()),
    (3, (3, 6, 1), (2.0, 1.0, 1.0)),  # bands of 3, 2 and 1 rows
    (3, (2, 2, 3), ()),  # one rank has no row
]


@pytest.mark.parametrize(("ranks", "size", "shares"), SIZES, ids=str)
def test_the_frames_are_those_of_one_process(ranks, size, shares):
    latents = {name: latent_of(name, *size) for name in CASES}
    results = run_ranks(compute, ranks, decoder, latents, shares)
    for name, case in CASES.items():
        expected, of_ranks = whole(name, latents[name]), [result[name] for result in results]
        frames = case.frames(size[0]) if case.dims == 3 else 1
        assert expected.shape == (frames, *(case.scale * side for side in size[1:]), 3)
        assert expected.std() > 0.05 * expected.abs().max(), name  # the picture is not constant
        assert difference(of_ranks[0][0], expected) <= TOLERANCE, name
        assert [steps for _, steps, _ in of_ranks] == ranks * [STEPS]
        assert all(sent for _, _, sent in of_ranks[:2]), name


@pytest.mark.parametrize(
    ("names", "what"), [(list(CASES), "rows"), (["wan 2.1", "hunyuanvideo"], "keys")], ids=["rows", "keys"]
)
def test_a_rank_that_goes_without_the_others_is_seen(names, what):
    latents = {name: latent_of(name, 2, 2, 2) for name in names}
    for name, (frames, *_) in run_ranks(compute, 2, decoder, latents, (), what)[0].items():
        assert difference(frames, whole(name, latents[name])) > 100 * TOLERANCE, name


@pytest.mark.parametrize(
    ("names", "dtype"),
    [(["wan 2.1"], torch.float32), (["wan 2.1", "hunyuanvideo"], torch.bfloat16)],
    ids=["float32", "bfloat16"],
)
def test_a_network_that_looks_further_is_seen_before_it_is_used(names, dtype):
    """A rank that lacks its neighbours' rows stands for such a network."""
    half = partial(decoder, dtype=dtype)
    assert run_ranks(refusals, 2, half, names) == 2 * [len(names) * [""]]
    first, second = run_ranks(refusals, 2, half, names, "rows")
    assert all(words.startswith("this version of ComfyUI computes its VAE i") for words in first)
    assert second == len(names) * [""]


def test_one_rank_alone_decodes_as_comfyui_does():
    latent = latent_of("wan 2.1", 3, 3, 2)
    frames, _, sent = run_ranks(compute, 1, decoder, {"wan 2.1": latent})[0]["wan 2.1"]
    assert difference(frames, whole("wan 2.1", latent)) <= TOLERANCE and sent == 0


@pytest.mark.parametrize("name", CASES)
def test_the_networks_are_those_that_nodes_send_to_the_ranks(name):
    assert known(CASES[name].build()).way is VaeMode.BANDS


def test_a_network_of_another_class_stays_with_comfyui():
    class Changed(type(build("wan 2.1"))):
        pass

    changed = build("wan 2.1")
    changed.__class__ = Changed
    assert known(changed) is None is known(None)

"""ComfyUI's own VAE networks in bands of rows on real gloo ranks: the frames of the same network on one process."""

import pytest
import torch

from comfy_modules import import_comfyui_here
from parallel_backend.engine.vae import row_bands as bands_module
from parallel_backend.engine.vae.decoder import BandedDecoder
from parallel_backend.errors import PlatformError
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.comfyui.vae import STEPS, ComfyUIVae
from parallel_backend.models.vae.networks import decodes_in_bands
from ranks import run_ranks
from video_vaes import CASES, build

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of max|pixel|


@pytest.fixture(scope="module", autouse=True)
def comfyui():
    return import_comfyui_here()


def decode(world, name, latent, shares=(), broken=""):
    """(frames [T, H, W, 3] or an empty tensor, steps announced, bytes sent) of one rank."""
    if broken:
        _break(broken)
    case = CASES[name]
    vae = ComfyUIVae(build(name), case.channels, case.dims, torch.float32, CPU)
    decoder, steps = BandedDecoder(vae, world), []
    frames = decoder(latent, shares, lambda: steps.append(1))
    return torch.empty(0) if frames is None else frames, len(steps), decoder.bytes_sent


def _break(what):
    """Ranks then go without what the others hold."""
    if what == "rows":
        start = bands_module.Bands.start_halo

        def without(self, x, **ways):
            wait = start(self, x, **ways)
            return lambda: tuple(None if row is None else torch.zeros_like(row) for row in wait())

        bands_module.Bands.start_halo = without
    else:
        bands_module.Bands.gather = lambda self, mine: mine


def whole(name, latent):
    """[T, H, W, 3] of ComfyUI's own network."""
    with torch.inference_mode():
        pixels = build(name).decode(latent[None])[0]
    return (pixels if pixels.ndim == 4 else pixels[:, None]).permute(1, 2, 3, 0)


def latent_of(name, frames, height, width):
    case = CASES[name]
    return random(case.channels, *((frames,) if case.dims == 3 else ()), height, width)


def difference(frames, expected):
    assert frames.shape == expected.shape
    return ((frames - expected).abs().max() / expected.abs().max()).item()


SIZES = [  # ranks, (frames, height, width), shares
    (2, (1, 5, 2), ()),
    (3, (3, 6, 1), (2.0, 1.0, 1.0)),  # bands of 3, 2 and 1 rows
    (3, (2, 2, 3), ()),  # one rank has no row
]


@pytest.mark.parametrize(("ranks", "size", "shares"), SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_frames_are_those_of_one_process(name, ranks, size, shares):
    case, latent = CASES[name], latent_of(name, *size)
    expected = whole(name, latent)
    assert expected.shape == (
        case.frames(size[0]) if case.dims == 3 else 1,
        *(case.scale * side for side in size[1:]),
        3,
    )
    assert expected.std() > 0.05 * expected.abs().max()  # no flat picture
    results = run_ranks(decode, ranks, name, latent, shares)
    assert difference(results[0][0], expected) <= TOLERANCE
    assert [steps for _, steps, _ in results] == ranks * [STEPS]
    assert all(sent for _, _, sent in results[:2])


@pytest.mark.parametrize(
    ("name", "what"),
    [*((name, "rows") for name in CASES), ("wan 2.1", "keys"), ("hunyuanvideo", "keys")],
)
def test_a_rank_that_goes_without_the_others_is_seen(name, what):
    latent = latent_of(name, 2, 2, 2)
    frames = run_ranks(decode, 2, name, latent, (), what)[0][0]
    assert difference(frames, whole(name, latent)) > 100 * TOLERANCE


def check(world, name, dtype, broken=""):
    """The words in which one rank refuses a network, if it does."""
    if broken:
        _break(broken)
    case = CASES[name]
    try:
        BandedDecoder(ComfyUIVae(build(name), case.channels, case.dims, dtype, CPU), world).check()
    except PlatformError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("wan 2.1", torch.float32), ("wan 2.1", torch.bfloat16), ("hunyuanvideo", torch.bfloat16)],
    ids=str,
)
def test_a_network_that_looks_further_is_seen_before_it_is_used(name, dtype):
    """A missing neighbour stands for it."""
    assert run_ranks(check, 2, name, dtype) == ["", ""]
    assert [words[:42] for words in run_ranks(check, 2, name, dtype, "rows")] == [
        "this version of ComfyUI computes its VAE i",
        "",
    ]


def test_one_rank_alone_decodes_as_comfyui_does():
    latent = latent_of("wan 2.1", 3, 3, 2)
    ((frames, _, sent),) = run_ranks(decode, 1, "wan 2.1", latent)
    assert difference(frames, whole("wan 2.1", latent)) <= TOLERANCE and sent == 0


@pytest.mark.parametrize("name", CASES)
def test_the_networks_are_those_that_nodes_send_to_the_ranks(name):
    assert decodes_in_bands(CASES[name].build())


def test_a_network_of_another_class_stays_with_comfyui():
    class Changed(type(build("wan 2.1"))):
        pass

    changed = build("wan 2.1")
    changed.__class__ = Changed
    assert not decodes_in_bands(changed) and not decodes_in_bands(None)

"""ComfyUI's own VAE encoders in bands of rows on real gloo ranks: the latent of the same network on one process."""

import pytest
import torch
from torch import nn

from comfy_modules import import_comfyui_here
from parallel_backend.engine.collectives import Traffic
from parallel_backend.engine.vae import row_bands as bands_module
from parallel_backend.engine.vae.decoder import BandedEncoder
from parallel_backend.engine.vae.row_bands import Bands, split_rows
from parallel_backend.errors import PlatformError, RequestError
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.comfyui.vae_encoder import STEPS, ComfyUIVaeEncoder
from parallel_backend.models.vae.networks import encodes_in_bands
from ranks import run_ranks
from video_vaes import ENCODED, build

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of max|latent|


@pytest.fixture(scope="module", autouse=True)
def comfyui():
    return import_comfyui_here()


def banded_encoder(name, dtype=torch.float32):
    case = ENCODED[name]
    network = build(name)
    return ComfyUIVaeEncoder(network, case.scale, 3, case.channels, case.dims, dtype, CPU)


def encode(world, names, pixels, shares=(), broken=""):
    """Per network (latent [t, h, w, C] or an empty tensor, steps announced, bytes sent) of one rank."""
    if broken:
        _break(broken)
    found = []
    for name, of_name in zip(names, pixels, strict=True):
        encoder, steps = BandedEncoder(banded_encoder(name), world), []
        latent = encoder(of_name, shares, lambda steps=steps: steps.append(1))
        found.append((torch.empty(0) if latent is None else latent, len(steps), encoder.bytes_sent))
    return found


def _break(what):
    """Ranks then go without what the others hold."""
    if what == "rows":
        start = bands_module.Bands.start_halo

        def without(self, x, **ways):
            wait = start(self, x, **ways)
            return lambda: tuple(None if row is None else torch.zeros_like(row) for row in wait())

        bands_module.Bands.start_halo = without
    elif what == "ways":  # a halved band looks above itself in place of below, and the other way round
        start = bands_module.Bands.start_halo
        bands_module.Bands.start_halo = lambda self, x, above=True, below=True: start(
            self, x, above=below, below=above
        )
    else:
        bands_module.Bands.gather = lambda self, mine: mine


def whole(name, pixels):
    """[t, h, w, C] of ComfyUI's own network."""
    with torch.inference_mode():
        latent = build(name).encode(pixels[None])[0]
    return (latent if latent.ndim == 4 else latent[:, None]).permute(1, 2, 3, 0)


def pixels_of(name, frames, height, width):
    case = ENCODED[name]
    sides = case.scale * height, case.scale * width
    return random(3, *((taken(name, frames),) if case.dims == 3 else ()), *sides)


def taken(name, frames):
    """This one is for images alone, or takes frames by four."""
    return max(1, frames // 4 * 4) if name == "hunyuanimage refiner" else frames


def latent_frames(name, frames):
    return (taken(name, frames) + 3) // 4 if ENCODED[name].dims == 3 else 1


def difference(latent, expected):
    assert latent.shape == expected.shape
    return ((latent - expected).abs().max() / expected.abs().max()).item()


SIZES = [  # ranks, (frames, rows and columns of the latent), shares
    (2, (1, 5, 2), ()),
    (3, (6, 6, 1), (2.0, 1.0, 1.0)),  # bands of 3, 2 and 1 rows; a frame that networks drop
    (4, (5, 3, 1), ()),  # one rank has no row
]


@pytest.mark.parametrize(("ranks", "size", "shares"), SIZES, ids=str)
def test_the_latent_is_that_of_one_process(ranks, size, shares):
    pixels = [pixels_of(name, *size) for name in ENCODED]
    expected = [whole(name, of_name) for name, of_name in zip(ENCODED, pixels, strict=True)]
    results = run_ranks(encode, ranks, list(ENCODED), pixels, shares)
    for number, (name, latent) in enumerate(zip(ENCODED, expected, strict=True)):
        case, of_ranks = ENCODED[name], [result[number] for result in results]
        assert latent.shape == (latent_frames(name, size[0]), *size[1:], case.channels)
        assert latent.std() > 0.05 * latent.abs().max(), name  # no flat latent
        assert difference(of_ranks[0][0], latent) <= TOLERANCE, name
        assert [steps for _, steps, _ in of_ranks] == ranks * [STEPS]
        assert all(sent for _, _, sent in of_ranks[:2]), name


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (list(ENCODED), "rows"),
        (["flux", "wan 2.1", "hunyuanvideo"], "ways"),
        (["flux", "wan 2.1", "hunyuanvideo"], "keys"),
    ],
    ids=["rows", "ways", "keys"],
)
def test_a_rank_that_goes_without_the_others_is_seen(names, what):
    pixels = [pixels_of(name, 5, 2, 2) for name in names]
    found = run_ranks(encode, 2, names, pixels, (), what)[0]
    for name, of_name, (latent, *_) in zip(names, pixels, found, strict=True):
        assert difference(latent, whole(name, of_name)) > 100 * TOLERANCE, name


def check(world, names, dtype, broken=""):
    """The words in which one rank refuses each network, if it does."""
    if broken:
        _break(broken)
    words = []
    for name in names:
        try:
            BandedEncoder(banded_encoder(name, dtype), world).check()
        except PlatformError as refusal:
            words.append(str(refusal))
        else:
            words.append("")
    return words


def test_a_network_that_looks_further_is_seen_before_it_is_used():
    """A missing neighbour stands for it."""
    names = ["flux", "wan 2.1", "hunyuanimage refiner"]
    assert run_ranks(check, 2, names, torch.float32) == 2 * [3 * [""]]
    assert run_ranks(check, 2, ["flux"], torch.bfloat16) == 2 * [[""]]
    first, second = run_ranks(check, 2, ["flux"], torch.bfloat16, "rows")
    assert "in another way than the pack knows" in first[0] and second == [""]


@pytest.mark.parametrize("name", ENCODED)
def test_the_networks_are_those_that_nodes_send_to_the_ranks(name):
    network = ENCODED[name].build()
    assert encodes_in_bands(network)
    network.encoder.__class__ = type("Changed", (type(network.encoder),), {})
    assert not encodes_in_bands(network) and not encodes_in_bands(None)


def test_a_network_that_draws_its_latent_stays_with_comfyui():
    network = ENCODED["flux"].build()
    network.regularization.sample = True
    assert not encodes_in_bands(network)


def test_a_convolution_that_halves_rows_and_pads_them_itself_is_refused():
    split_rows(nn.Sequential(nn.Conv2d(4, 4, 3, stride=2)), Bands(Traffic()))
    for conv in (
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.Conv2d(4, 4, 2, stride=2),
        nn.Conv2d(4, 4, 1, 2),
    ):
        with pytest.raises(RequestError, match="cannot be split"):
            split_rows(nn.Sequential(conv), Bands(Traffic()))

"""MiniMax H3's VAE, whose network cuts pictures into tiles: real ranks share out the tiles."""

import pytest
import torch

from banded_vaes import TOLERANCE, difference
from host_and_device import DEVICE, HOST
from other_vaes import TILED, build, decoded
from parallel_backend.engine.bands.tiles import TiledDecoder
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.errors import PlatformError
from parallel_backend.layout import split_sizes
from parallel_backend.models.comfyui.rows.banded import STEPS
from parallel_backend.models.comfyui.rows.vae_halves import TiledComfyUIVae
from parallel_backend.models.comfyui.tiny.weights import random
from ranks import run_ranks

# (latent frames, height, width), frames, tiles, shares: a picture, fewer tiles than ranks, a video in two chunks
SIZES = [
    ((1, 5, 4), 1, 4, ()),
    ((2, 2, 3), 5, 1, ()),
    ((9, 4, 5), 30, 8, (1.0, 2.0, 1.0, 1.0)),
    ((1, 5, 4), 1, 4, (1.0, 0.0, 0.0, 0.0)),
]
pytestmark = pytest.mark.usefixtures("comfyui_here")


def tiled(device=HOST):
    return TiledComfyUIVae(build(TILED), TILED.channels, TILED.dims, torch.float32, device)


def decode(world, sizes, broken=False):
    """Returns ([(frames or an empty tensor, tiles per rank, steps announced, bytes sent) for each size], the error of
    check() or ""). `broken`: True makes rank 1 compute zeros."""
    layouts, results = Layouts(world), []
    decoder, traffic = TiledDecoder(tiled(world.device), layouts), layouts.traffic
    if broken and world.rank == 1:
        decoder.vae.compute = lambda tile: torch.zeros(decoder.vae.tile_shape(tile))
    for size, _, _, shares in sizes:
        steps, latent, sent = [], random(TILED.channels, *size), traffic.bytes_sent
        frames = decoder(latent, shares[: world.world_size], lambda steps=steps: steps.append(1))
        assert frames is None or frames.device == HOST
        results.append(
            (
                torch.empty(0) if frames is None else frames,
                decoder.parts(latent, shares[: world.world_size]),
                len(steps),
                traffic.bytes_sent - sent,
            )
        )
    try:
        decoder.check()
    except PlatformError as refusal:
        return results, str(refusal)
    return results, ""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_frames_are_those_of_one_process(ranks):
    network, outcomes = build(TILED), run_ranks(decode, ranks, SIZES, device=DEVICE)
    results = [results for results, _ in outcomes]
    for number, (size, count, tiles, shares) in enumerate(SIZES):
        expected = decoded(network, random(TILED.channels, *size))
        assert expected.shape == (count, 16 * size[1], 16 * size[2], 3)
        assert expected.std() > 0.05
        frames, parts, _, _ = results[0][number]
        assert difference(frames, expected) <= TOLERANCE
        assert parts == split_sizes(tiles, ranks, shares[:ranks])
        assert [result[number][2] for result in results] == ranks * [STEPS]
        busy = [bool(count) for count in parts[1:]]
        assert [bool(result[number][3]) for result in results[1:]] == busy and results[0][number][3] == 0
    assert [words for _, words in outcomes] == ranks * [""]


def test_a_rank_whose_tiles_are_wrong_is_seen():
    results, words = run_ranks(decode, 2, SIZES[:1], True)[0]
    expected = decoded(build(TILED), random(TILED.channels, *SIZES[0][0]))
    assert difference(results[0][0], expected) > 100 * TOLERANCE
    assert "tiles shared out are off by" in words


def test_a_rank_holds_no_picture_to_know_its_tiles():
    """Tiles are views of the latent, and tile_shape gives an output's shape without computing it."""
    vae = tiled()
    with torch.inference_mode():
        tiles = vae.tiles(random(1, TILED.channels, 9, 4, 7))
    assert all(tile.device == HOST for tile in tiles)
    assert {vae.tile_shape(tile)[1] for tile in tiles} == {3}
    with torch.inference_mode():
        assert vae.tile_shape(tiles[0]) == tuple(vae.compute(tiles[0]).shape)

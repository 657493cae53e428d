"""Text encoders and VAEs are held by all ranks or by none, and a new one takes no more descriptors than the last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comfy_modules import import_comfyui_here
from other_vaes import TILED, decoded
from other_vaes import build as other_vae
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.errors import RequestError
from parallel_backend.job.answer_tree import unpack_tree
from parallel_backend.models.comfyui.environment import import_comfyui
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.rank.jobs import vaes
from parallel_backend.rank.jobs.modules import Modules
from parallel_backend.rank.jobs.reader import JobReader
from parallel_backend.wire.protocol import ALL_RANKS, CallModule
from ranks import run_ranks
from tiny_vae import FLUX, random_latent, random_vae
from vae_halves import Half


class Steps:
    """The boundary of a request that nobody cancels."""

    def __init__(self):
        self.ended = 0

    def __call__(self, step, latent):
        pass

    def is_cancelled(self):
        return False

    def finish(self):
        self.ended += 1


def modules_of(world):
    return Modules(Layouts(world), JobReader(world), lambda source: import_comfyui(source, world.device))


def call(modules, half, latent, *, is_new=True, on_step=None):
    message = CallModule(half.number, (half.number,), ALL_RANKS, import_comfyui_here(), steps=64)
    answer, record = modules.call(message, half.payload(latent, is_new=is_new), on_step or Steps())
    return None if answer is None else unpack_tree(answer), record


def _decode_again_and_again(world):
    """Descriptors of this rank after each decode with a VAE sent anew, of a latent that leaves a rank without rows."""
    modules, half, counts = modules_of(world), Half(random_vae(FLUX), 16, 2), []
    for _ in range(5):
        call(modules, half, random_latent(FLUX, 2, 3))
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts


def test_a_vae_that_is_sent_again_takes_over_the_groups_of_the_one_before():
    import_comfyui_here()
    for counts in run_ranks(_decode_again_and_again, 3):
        assert len(set(counts[1:])) == 1, counts


def _take_where_one_rank_cannot(world):
    """In what words this rank refuses a VAE; what it decodes afterwards."""
    modules, half, latent = modules_of(world), Half(random_vae(FLUX), 16, 2), random_latent(FLUX, 2, 2)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(vaes, "_shared_out", lambda *_: (_ for _ in ()).throw(RequestError("no room here")))
        with pytest.raises(Exception) as refused:
            call(modules, half, latent)
    image, record = call(modules, half, latent)
    return str(refused.value), record.parts, None if image is None else tuple(image.shape)


def test_a_vae_that_one_rank_alone_cannot_take_is_held_by_none():
    """Without a word before they try it together, the first would wait for the second."""
    import_comfyui_here()
    first, second = run_ranks(_take_where_one_rank_cannot, 2)
    assert first == ("another process could not run the job", 1, (1, 16, 16, 3))
    assert second[0].endswith("than the pack knows: no room here") and second[1:] == (1, None)


def _decode_tiles(world):
    """(frames or None, tiles computed, ends of steps) of one rank that holds MiniMax H3's VAE."""
    modules, steps = modules_of(world), Steps()
    half = Half(other_vae(TILED), TILED.channels, TILED.dims)
    image, record = call(modules, half, random(2, TILED.channels, 1, 5, 3), on_step=steps)
    modules.drop()
    with pytest.raises(RequestError, match="send it first"):
        call(modules, half, random(2, TILED.channels, 1, 5, 3), is_new=False)
    return image, record.parts, steps.ended


def test_a_network_that_cuts_tiles_is_decoded_by_tiles():
    import_comfyui_here()
    (image, *first), (none, *second) = run_ranks(_decode_tiles, 2)
    latent = random(2, TILED.channels, 1, 5, 3)
    expected = torch.cat([decoded(other_vae(TILED), one) for one in latent])
    assert (image - expected).abs().max() <= 1e-5 * expected.abs().max() and none is None
    assert first == second == [1, 1]

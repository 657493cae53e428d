"""Decoding through a sidecar: real ranks hold a VAE beside their model, and errors leave both where they are."""

import itertools
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from comfy_modules import import_comfyui_here
from fault_injection import fault
from flux_requests import flux_request
from other_vaes import BANDED, TILED, decoded
from other_vaes import build as other_vae
from parallel_backend.errors import Cancelled, PlatformError, RankFailed, RequestError
from parallel_backend.models.comfyui.rows import vae_halves as comfyui_vae
from parallel_backend.models.comfyui.rows.vae_halves import TiledComfyUIVae
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.tokens.vae_networks import decoding_tensors, encoding_tensors, told_beside
from parallel_backend.rank.vae_worker import VaeWorker
from parallel_backend.requests import ComfyUISource, ModelSpec, Placement
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.decode_messages import VaeWeights
from parallel_backend.wire.protocol import Decode, Encode, LoadVae
from ranks import run_ranks
from scripted import is_running
from tests.closed_forms.band_traffic import expected_decode_bytes
from tiny_flux import write_tiny_flux
from tiny_vae import FLUX, SD, random_latent, random_vae, vae_tensors
from video_vaes import build

_numbers = itertools.count()


@pytest.fixture(scope="module")
def ranks():
    sidecar = Sidecar(("cpu:0", "cpu:1"))
    yield sidecar
    pids = sidecar.pids
    sidecar.stop()
    assert not any(map(is_running, pids))


class Weights:
    """A random VAE, under an identity of its own, that counts how often its tensors are asked for."""

    def __init__(self, sizes, seed=0):
        self.sizes, self.seed, self.asked = sizes, seed, 0
        self.weights = VaeWeights(f"vae {next(_numbers)}", self._tensors, import_comfyui_here())

    def _tensors(self):
        self.asked += 1
        return vae_tensors(self.sizes, self.seed)

    def image(self, latent):
        """One image after the other: torch's CPU convolutions are ten times less precise on two at once."""
        with torch.inference_mode():
            network = random_vae(self.sizes, self.seed)
            return torch.cat([network.decode(one[None]).movedim(1, -1) for one in latent])


def is_right(image, expected):
    return image.shape == expected.shape and (image - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_weights_go_once_and_then_only_latents(ranks):
    vae, latent, steps = Weights(FLUX), random_latent(FLUX, 7, 5, batch=3), []
    first = ranks.decode(vae.weights, latent, on_step=lambda *step: steps.append(step))
    again = ranks.decode(vae.weights, latent)
    assert is_right(first.image, vae.image(latent))
    assert torch.equal(again.image, first.image)
    assert vae.asked == 1
    assert (first.info.load.cached, again.info.load.cached) == (False, True)
    assert first.info.load.bytes == sum(tensor.nbytes for tensor in vae_tensors(FLUX).values())
    assert first.info.rows == (4, 3)
    expected = [3 * expected_decode_bytes(FLUX, (4, 3), rank, width=5) for rank in (0, 1)]
    assert list(first.info.bytes_sent) == expected == list(again.info.bytes_sent)
    assert [step for step, _ in steps] == list(range(1, steps[-1][1] + 1))
    assert first.info.compute_dtype == "float32"


class Steps:
    """Nobody who hears of them."""

    def __call__(self, step, latent):
        pass

    def finish(self):
        pass


def _decode_again_and_again(world, source):
    """Descriptors of this rank after each decode with a VAE sent anew, of a latent that leaves a rank without rows."""
    worker, latent, counts = VaeWorker(world, lambda error: error is None), random_latent(FLUX, 2, 3), []
    for number in range(5):
        worker.load(LoadVae(str(number), source), vae_tensors(FLUX))
        worker.decode(Decode(str(number), ()), {"latent": latent}, Steps())
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts


def test_a_vae_that_is_sent_again_takes_over_the_groups_of_the_one_before():
    for counts in run_ranks(_decode_again_and_again, 3, import_comfyui_here()):
        assert len(set(counts[1:])) == 1, counts


def _agree(error):
    """As a rank's worker does."""
    failed = torch.tensor([int(error is not None)])
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    return not failed.item()


def _load_where_one_rank_lacks_weights(world, source):
    """In what words this rank refuses a video's VAE; what it decodes afterwards."""
    worker, good = VaeWorker(world, _agree), dict(build("wan 2.1").state_dict())
    lacking = {
        key: value
        for key, value in good.items()
        if world.rank == 0 or key != "decoder.middle.0.residual.2.weight"
    }
    with pytest.raises(Exception) as refused:
        worker.load(LoadVae("one", source), lacking)
    with pytest.raises(RequestError, match="do not hold"):
        worker.decode(Decode("one", ()), {"latent": torch.zeros(1, 16, 1, 2, 2)}, Steps())
    worker.load(LoadVae("two", source), good)
    image, run = worker.decode(Decode("two", ()), {"latent": torch.ones(1, 16, 1, 2, 2)}, Steps())
    return str(refused.value), run.rows, None if image is None else tuple(image["image"].shape)


def _decode_tiles(world):
    """(frames or None, tiles computed, step boundaries) of one rank that holds MiniMax H3's VAE."""
    network, steps = other_vae(TILED), []
    vae = TiledComfyUIVae(network, TILED.channels, TILED.dims, torch.float32, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:  # ComfyUI's detection knows it in its real size alone
        patch.setattr(comfyui_vae, "load_comfyui_vae", lambda *_: vae)
        worker = VaeWorker(world, _agree)
        worker.load(LoadVae("h3", ComfyUISource(root="")), dict(network.state_dict()))
    count = Steps()
    count.finish = lambda: steps.append("end")
    latent = {"latent": random(2, TILED.channels, 1, 5, 3)}
    image, run = worker.decode(Decode("h3", ()), latent, count)
    return None if image is None else image["image"], run.rows, worker.steps(latent), steps


def test_a_network_that_cuts_tiles_is_decoded_by_tiles():
    import_comfyui_here()
    (image, first, steps, ended), (none, second, *_) = run_ranks(_decode_tiles, 2)
    latent = random(2, TILED.channels, 1, 5, 3)
    expected = torch.cat([decoded(other_vae(TILED), one) for one in latent])
    assert is_right(image, expected) and none is None
    assert (first, second, steps, ended) == (1, 1, 64, ["end"])


def _decode_a_single_row(world, source):
    """In what words this rank refuses a latent that LTX's VAE cannot pad; what it decodes afterwards."""
    network, worker = other_vae(BANDED["ltx"]), VaeWorker(world, _agree)
    worker.load(LoadVae("ltx", source, told_beside(network, 128)), decoding_tensors(network))
    with pytest.raises(RequestError) as refused:
        worker.decode(Decode("ltx", ()), {"latent": torch.zeros(1, 128, 1, 1, 3)}, Steps())
    image, _ = worker.decode(Decode("ltx", ()), {"latent": torch.ones(1, 128, 1, 2, 3)}, Steps())
    return str(refused.value), None if image is None else tuple(image["image"].shape)


def test_a_latent_that_is_too_small_for_its_vae_is_refused_by_every_rank():
    words, shapes = zip(*run_ranks(_decode_a_single_row, 2, import_comfyui_here()), strict=True)
    assert set(words) == {
        "the latent is 3 x 1 positions; this VAE decodes 2 x 2 and more. Take a larger picture."
    }
    assert shapes == ((1, 32, 48, 3), None)


def test_a_videos_vae_that_one_rank_alone_cannot_load_is_held_by_none():
    """Without a word before they try it together, the first would wait for the second."""
    source = import_comfyui_here()
    first, second = run_ranks(_load_where_one_rank_lacks_weights, 2, source)
    assert first == ("another process could not hold the VAE", 1, (1, 16, 16, 3))
    assert "lacks" in second[0] and second[1:] == (1, None)


def test_more_pixels_than_can_be_sent_are_refused_in_words_before_anything_is(ranks):
    pixels = torch.zeros(1, 1, 1, 1).expand(2**19, 3, 64, 64)  # 24 GiB, of which none is there
    with pytest.raises(RequestError, match=r"take 24.0 GiB, and at most 8.0 GiB can be sent"):
        ranks.encode(VaeWeights("none", dict, ComfyUISource(root=""), encodes=True), pixels)


def _encode_beside_a_decoder(world, source):
    """What this rank gives and says of pixels, right ones and others, with a VAE whose decoder it was sent first."""
    worker, network, said = VaeWorker(world, _agree), build("wan 2.1"), []
    worker.load(LoadVae("one", source), decoding_tensors(network))
    worker.load(LoadVae("one", source, encodes=True), encoding_tensors(network))
    for shape in ((1, 3, 1, 20, 8), (1, 4, 1, 16, 8), (1, 3, 16, 8)):
        with pytest.raises(RequestError) as refused:
            worker.encode(Encode("one", ()), {"pixels": torch.zeros(shape)}, Steps())
        said.append(str(refused.value)[:42])
    pixels = {"pixels": torch.ones(2, 3, 5, 16, 8)}
    latent, run = worker.encode(Encode("one", ()), pixels, Steps())
    image, _ = worker.decode(Decode("one", ()), {"latent": torch.ones(1, 16, 1, 2, 1)}, Steps())
    steps = worker.steps(pixels)
    worker.drop()
    with pytest.raises(RequestError, match="do not hold"):
        worker.encode(Encode("one", ()), pixels, Steps())
    shapes = [None if found is None else next(iter(found.values())).shape for found in (latent, image)]
    return said, run.rows, steps, [shape if shape is None else tuple(shape) for shape in shapes]


def test_an_encoder_is_held_beside_a_decoder():
    first, second = run_ranks(_encode_beside_a_decoder, 2, import_comfyui_here())
    shapes = ("[1, 3, 1, 20, 8]", "[1, 4, 1, 16, 8]", "[1, 3, 16, 8]")
    said = [f"the pixels have shape {shape}; expected"[:42] for shape in shapes]
    assert first == (said, 1, 64, [(2, 16, 2, 2, 1), (1, 16, 8, 3)]) and second == (said, 1, 64, [None, None])


def test_another_vae_takes_its_place(ranks):
    one, other = Weights(FLUX), Weights(SD)
    for vae in (one, other, one):
        latent = random_latent(vae.sizes, 4, 4)
        assert is_right(ranks.decode(vae.weights, latent).image, vae.image(latent))
    assert one.asked == 2


def test_shares_give_a_rank_more_rows(ranks):
    vae, latent = Weights(FLUX), random_latent(FLUX, 8, 4)
    result = ranks.decode(vae.weights, latent, shares=(3.0, 1.0))
    assert result.info.rows == (6, 2)
    assert is_right(result.image, vae.image(latent))


def test_half_precision_comes_back_as_the_ranks_computed_it(ranks):
    vae, latent = Weights(FLUX), random_latent(FLUX, 4, 4)
    tensors = {key: tensor.half() for key, tensor in vae_tensors(FLUX).items()}
    result = ranks.decode(VaeWeights("half", lambda: tensors, import_comfyui_here()), latent)
    assert result.image.dtype == torch.float32  # on the CPU
    assert (result.image - vae.image(latent)).abs().max() < 0.05 * vae.image(latent).abs().max()
    assert result.info.load.dtype == "float16"


def test_the_model_stays_loaded(ranks, tmp_path):
    spec = ModelSpec(path=str(write_tiny_flux(tmp_path / "flux.safetensors")))
    assert not ranks.load(spec).cached
    pids = ranks.pids
    # An engine whose import changes what it finds of torch must not change how a VAE decodes.
    ranks.sample(spec, flux_request(), Placement(ParallelStrategy(ring_degree=2), engine="xfuser"))
    vae, latent = Weights(FLUX), random_latent(FLUX, 4, 4)
    assert is_right(ranks.decode(vae.weights, latent).image, vae.image(latent))
    assert ranks.load(spec).cached and ranks.pids == pids


@pytest.mark.parametrize("point", ["an exchange of edge rows", "an all-gather"])
def test_a_decode_whose_rank_dies_is_made_again(tmp_path, point):
    vae, latent, texts = Weights(FLUX), random_latent(FLUX, 6, 4), []
    sidecar = Sidecar(("cpu:0", "cpu:1"))
    try:
        with fault("kill", point, once=tmp_path / "fired"):
            result = sidecar.decode(vae.weights, latent, on_phase=texts.append)
        assert (tmp_path / "fired").exists() and vae.asked == 2
        assert is_right(result.image, vae.image(latent))
        assert any("process 1 on cpu:1 failed" in text for text in texts)
    finally:
        sidecar.stop()


def another_shape():
    return vae_tensors(FLUX) | {"decoder.conv_in.weight": torch.zeros(128, 16, 1, 1)}


def another_layer():
    return vae_tensors(FLUX) | {"decoder.up.1.attn.0.q.weight": torch.zeros(64, 64, 1, 1)}


@pytest.mark.parametrize(
    ("tensors", "latent", "shares", "words"),
    [
        (dict, torch.zeros(1, 4, 6, 6), (), "has 4 channels and the VAE decodes 16"),
        (dict, torch.zeros(1, 16, 2, 6, 6), (), "expected \\[batch, channels"),
        (dict, torch.zeros(1, 16, 6, 6), (1.0,), "one per process"),
        (dict, torch.zeros(1, 16, 6, 6), (1.0, 0.0), "above 0"),
        (another_shape, torch.zeros(1, 16, 6, 6), (), "another network for these weights.*size mismatch"),
        (
            another_layer,
            torch.zeros(1, 16, 6, 6),
            (),
            "another network.* has no decoder.up.1.attn.0.q.weight",
        ),
    ],
)
def test_what_cannot_be_decoded_is_refused_and_the_group_lives_on(ranks, tensors, latent, shares, words):
    vae, good = Weights(FLUX), random_latent(FLUX, 4, 4)
    ranks.decode(vae.weights, good)
    pids = ranks.pids
    other = VaeWeights("other", tensors, import_comfyui_here())
    with pytest.raises((RequestError, PlatformError), match=words):
        ranks.decode(vae.weights if tensors is dict else other, latent, shares)
    assert is_right(ranks.decode(vae.weights, good).image, vae.image(good))
    assert ranks.pids == pids


def test_a_latent_for_a_vae_that_the_ranks_lost_is_refused(ranks):
    vae, latent = Weights(FLUX), random_latent(FLUX, 4, 4)
    ranks.decode(vae.weights, latent)
    on_ranks = ranks._holdings.vae
    held = on_ranks._held
    on_ranks._held = (held[0], "never sent", held[2])
    with pytest.raises(RequestError, match="do not hold the VAE"):
        ranks.decode(VaeWeights("never sent", dict, ComfyUISource(root="")), latent)
    on_ranks._held = held
    ranks.decode(vae.weights, latent)


def test_a_cancel_ends_it_within_an_image_and_the_group_lives_on(ranks):
    vae, latent, seen = Weights(FLUX), random_latent(FLUX, 16, 16, batch=2), []
    ranks.decode(vae.weights, latent)
    pids = ranks.pids
    with pytest.raises(Cancelled):
        ranks.decode(
            vae.weights, latent, on_step=lambda *step: seen.append(step), should_cancel=lambda: len(seen) > 1
        )
    assert len(seen) < seen[-1][1] // 2
    assert is_right(ranks.decode(vae.weights, latent).image, vae.image(latent))
    assert ranks.pids == pids


def test_a_second_killed_rank_is_named_and_the_next_decode_works(ranks):
    vae, latent = Weights(FLUX), random_latent(FLUX, 16, 16)
    ranks.decode(vae.weights, latent)
    killed = []

    def kill(step, steps):
        if ranks.pids[1] not in killed:
            killed.append(ranks.pids[1])
            os.kill(killed[-1], signal.SIGKILL)

    with pytest.raises(RankFailed, match=r"process 1 failed: killed by SIGKILL"):
        ranks.decode(vae.weights, latent, on_step=kill)
    assert len(killed) == 2
    assert is_right(ranks.decode(vae.weights, latent).image, vae.image(latent))
    assert vae.asked == 3
    assert not set(ranks.pids) & set(killed)

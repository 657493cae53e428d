"""Flux's and SD's latents decoded in bands on real ranks give ComfyUI's unsplit image, for any size and shares."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity

from banded_vaes import TOLERANCE, difference
from parallel_backend.engine.bands import row_bands as bands_module
from parallel_backend.engine.bands.vae import BandedNetwork, check_limit
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.errors import PlatformError
from parallel_backend.layout import split_sizes
from parallel_backend.models.comfyui.rows.banded import STEPS
from ranks import run_ranks
from tests.closed_forms.band_traffic import expected_decode_bytes
from tiny_vae import FLUX, SD, banded, random_latent, random_vae


def decode(world, sizes, jobs):
    """Returns for each job (latent, shares): (image [H, W, 3] or an empty tensor, bytes sent, steps announced)."""
    layouts, found = Layouts(world), []
    decoder, traffic = BandedNetwork(banded(sizes), layouts), layouts.traffic
    for latent, shares in jobs:
        parts, before = [], traffic.bytes_sent
        image = decoder(latent, shares, lambda parts=parts: parts.append(1))
        assert (image is None) == (world.rank > 0)
        found.append((torch.empty(0) if image is None else image[0], traffic.bytes_sent - before, len(parts)))
    again, first = decoder(*jobs[0]), found[0][0]
    assert again is None or torch.equal(again[0], first)
    return found


def whole(sizes, latent):
    """Returns the image of ComfyUI's own network, [H, W, 3]."""
    with torch.inference_mode():
        return random_vae(sizes).decode(latent[None])[0].permute(1, 2, 0)


CASES = {  # by ranks: (height, width), shares
    1: [((5, 7), ())],
    2: [((8, 8), ()), ((9, 5), ()), ((2, 1), ()), ((9, 6), (2.0, 1.0)), ((7, 5), (1.0, 0.0))],
    3: [
        ((7, 6), ()),
        ((4, 9), ()),  # bands of 2, 1 and 1 rows
        ((1, 6), ()),  # only one has a row
        ((11, 4), (1.0, 5.0, 2.0)),
    ],
    4: [
        ((8, 3), ()),
        ((6, 4), ()),
        ((3, 8), ()),  # one rank has no row
        ((3, 5), (1.0, 1.0, 5.0, 5.0)),  # the first ranks have none
    ],
}


@pytest.mark.parametrize(
    ("sizes", "ranks"), [(SD, 3), *((FLUX, ranks) for ranks in CASES)], ids=["sd", *map(str, CASES)]
)
def test_the_image_is_that_of_the_unsplit_decoder(sizes, ranks):
    latents = [random_latent(sizes, *side)[0] for side, _ in CASES[ranks]]
    jobs = [(latent, shares) for latent, (_, shares) in zip(latents, CASES[ranks], strict=True)]
    results = run_ranks(decode, ranks, sizes, jobs)
    for number, ((height, width), shares) in enumerate(CASES[ranks]):
        case = f"{height} x {width}, shares {shares}"
        assert difference(results[0][number][0], whole(sizes, latents[number])) <= TOLERANCE, case
        rows = split_sizes(height, ranks, shares)
        for rank, result in enumerate(results):
            _, sent, parts = result[number]
            assert sent == expected_decode_bytes(sizes, rows, rank, width=width), (case, rank)
            assert parts == STEPS, (case, rank)


def peak(world, sizes, latent):
    """Returns the peak of bytes that torch's allocator gave out during a decode, in addition to those before it."""
    decoder = BandedNetwork(banded(sizes), Layouts(world))
    decoder(latent)  # creates groups and buffers that stay
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        decoder(latent)
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(itertools.accumulate(size for _, size in sorted(changes)))


def test_a_rank_needs_its_share_of_the_memory(monkeypatch):
    """The share is 1/N of one rank's memory, plus the part that is not split: keys and values of the whole image."""
    latent = random_latent(FLUX, 24, 24)[0]
    # The largest tensor here has about 1/100 of the elements that it has in the full decoder at 1024 x 1024 pixels.
    monkeypatch.setattr(bands_module, "SLICE_ELEMENTS", 2**22 // 100)
    (one,) = run_ranks(peak, 1, FLUX, latent)
    for ranks in (2, 4):
        assert max(run_ranks(peak, ranks, FLUX, latent)) <= 1.15 * one / ranks


class OnGpu(torch.Tensor):
    device = torch.device("cuda:0")


@pytest.mark.parametrize("is_coarse", [True, False])
def test_what_tf32_rounds_is_no_fault_where_convolutions_are_computed_in_it(monkeypatch, is_coarse):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", is_coarse)
    whole = torch.ones(2, 2)
    rounded, wrong = ((whole + difference).as_subclass(OnGpu) for difference in (2.2e-3, 0.5))
    allowed = nullcontext() if is_coarse else pytest.raises(PlatformError, match=r"over 0\.001")
    with allowed:
        check_limit(rounded, whole, torch.float32, "bands of rows are")
    with pytest.raises(PlatformError, match=r"off by 5\.0e-01"):
        check_limit(wrong, whole, torch.float32, "bands of rows are")

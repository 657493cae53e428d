"""The layers of a banded decoder one by one, compared with torch's layers on the whole image."""

import pytest
import torch
from torch import nn

from parallel_backend.engine.bands import row_bands as bands_module
from parallel_backend.engine.bands.row_bands import Bands, split_rows
from parallel_backend.engine.comm.groups import Axis
from parallel_backend.errors import RequestError
from parallel_backend.layout import slice_of, split_sizes
from ranks import run_ranks


def on_bands(world, layer, x):
    """Returns this rank's rows of layer(x)."""
    n = world.world_size
    bands = Bands()
    axis = Axis(tuple(range(n)), world.rank, world.group)
    bands.share_out(axis, split_sizes(x.shape[-2], n), world.device)
    split_rows(nn.Sequential(layer), bands)
    with torch.inference_mode():
        return layer(x[..., slice_of(bands.rows, world.rank), :])


def together(ranks, layer, x):
    """Returns layer(x) for an x [B, C, ..., rows, W], joined from all bands."""
    return torch.cat(run_ranks(on_bands, ranks, layer, x), dim=-2)


def drawn(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_convolution_that_looks_further_or_halves_rows_and_pads_them_itself_is_refused():
    split_rows(nn.Sequential(nn.Conv2d(4, 4, 3, stride=2)), Bands())
    for conv in (
        nn.Conv2d(4, 4, 5, padding=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding=1, stride=2),
        nn.Conv2d(4, 4, 2, stride=2),
        nn.Conv2d(4, 4, 1, 2),
    ):
        with pytest.raises(RequestError, match="cannot be split into bands"):
            split_rows(nn.Sequential(conv), Bands())


@pytest.mark.parametrize("elements", [1, 300])
def test_a_large_group_norm_is_looked_at_in_slices(monkeypatch, elements):
    monkeypatch.setattr(bands_module, "SLICE_ELEMENTS", elements)
    norm, x = nn.GroupNorm(32, 96), drawn(2, 96, 7, 5)
    torch.testing.assert_close(together(2, norm, x), norm(x).detach(), rtol=1e-5, atol=1e-6)


def test_a_group_norm_keeps_its_precision_far_from_zero():
    """The mean is 1000 standard deviations from zero: a difference of sums of squares would lose all digits."""
    norm, x = nn.GroupNorm(32, 64, eps=1e-6), 1000 + drawn(1, 64, 16, 16)
    expected = nn.functional.group_norm(x.double(), 32, eps=1e-6)
    ours, torchs = together(2, norm, x), norm(x).detach()
    assert (ours - expected).abs().max() <= 2 * (torchs - expected).abs().max()


def test_a_flat_image_is_no_division_by_zero():
    norm = nn.GroupNorm(32, 64)
    x = torch.full((1, 64, 4, 4), 0.5)
    assert together(2, norm, x).abs().max() < 1e-5
    x[:, :, 2:] = 1.5  # each band is flat, the image is not
    torch.testing.assert_close(together(2, norm, x), norm(x).detach(), rtol=1e-5, atol=1e-6)


def test_half_precision_is_rounded_once():
    norm, x = nn.GroupNorm(32, 64).bfloat16(), (5 + drawn(1, 64, 8, 8)).bfloat16()
    out = together(2, norm, x)
    exact = nn.functional.group_norm(x.double(), 32)
    assert out.dtype == torch.bfloat16
    # Half a unit in the last of bfloat16's 8 bits, plus the rounding of mean and scale to float32.
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()

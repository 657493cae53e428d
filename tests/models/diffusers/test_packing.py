"""Flux's token layout, compared with slow code that computes it element by element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_backend.models.diffusers.packing import image_ids, pack, text_ids, token_grid, unpack

SIDES = st.integers(1, 13)


def latent_of(batch: int, channels: int, height: int, width: int) -> torch.Tensor:
    """Returns a latent whose elements all differ, so that a misplaced one shows."""
    return torch.arange(float(batch * channels * height * width)).reshape(batch, channels, height, width)


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 3), channels=st.sampled_from([1, 4, 16]), height=SIDES, width=SIDES)
def test_unpack_undoes_pack_for_any_size(batch, channels, height, width):
    latent = latent_of(batch, channels, height, width)
    tokens = pack(latent)
    assert tokens.shape == (batch, -(-height // 2) * -(-width // 2), channels * 4)
    assert torch.equal(unpack(tokens, height, width), latent)


@settings(max_examples=60, deadline=None)
@given(height=SIDES, width=SIDES)
def test_a_token_holds_the_patch_its_ids_name_and_odd_sides_wrap_around(height, width):
    latent = latent_of(2, 3, height, width)
    tokens, ids = pack(latent), image_ids(height, width)
    assert ids.shape == (tokens.shape[1], 3)
    assert ids.dtype == torch.float32
    for n, (index, row, column) in enumerate(ids.int().tolist()):
        assert index == 0
        expected = [
            latent[1, channel, (2 * row + dy) % height, (2 * column + dx) % width].item()
            for channel in range(3)
            for dy in range(2)
            for dx in range(2)
        ]
        assert tokens[1, n].tolist() == expected


@settings(max_examples=30, deadline=None)
@given(height=SIDES, width=SIDES)
def test_every_token_has_its_own_place_in_rows(height, width):
    rows, columns = token_grid(height, width)
    places = [(row, column) for _, row, column in image_ids(height, width).int().tolist()]
    assert places == [(row, column) for row in range(rows) for column in range(columns)]


def test_positions_of_a_large_image_are_exact():
    # bf16 would round everything above 256.
    assert image_ids(2, 1026)[-1].tolist() == [0.0, 0.0, 512.0]
    assert len(set(image_ids(1026, 2)[:, 1].tolist())) == 513


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packing_keeps_the_dtype(dtype):
    latent = torch.randn(1, 16, 5, 7).to(dtype)
    assert pack(latent).dtype == dtype
    assert torch.equal(unpack(pack(latent), 5, 7), latent)


def test_text_has_no_position():
    assert torch.equal(text_ids(7), torch.zeros(7, 3))
    assert text_ids(0).shape == (0, 3)

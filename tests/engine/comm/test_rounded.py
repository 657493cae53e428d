"""Vectors rounded to 8 bits for an exchange: near the originals at any scale, and of the documented size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.engine.comm.rounded import SCALE_BYTES, pack, unpack

STEP = 2**-4  # largest relative error: half of the last of e4m3's three mantissa bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(seed=st.integers(0, 10**6), power=st.integers(-12, 12))
def test_each_number_is_near_what_it_was_and_the_largest_comes_back(dtype, seed, power):
    vectors = torch.randn(3, 2, 24, generator=torch.Generator().manual_seed(seed)).to(dtype) * 2.0**power
    packed = pack(vectors)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 2, 24 + SCALE_BYTES)
    found, largest = unpack(packed, dtype), vectors.abs().amax(-1, keepdim=True).float()
    assert found.dtype == dtype
    off = (found.float() - vectors.float()).abs()
    assert (off <= STEP * vectors.float().abs() + 2**-9 * largest).all()
    assert torch.allclose(found.abs().amax(-1, keepdim=True).float(), largest, rtol=2**-7)


def test_nothing_comes_back_as_nothing():
    assert torch.equal(unpack(pack(torch.zeros(2, 16)), torch.float32), torch.zeros(2, 16))
    assert unpack(pack(torch.empty(0, 16)), torch.float32).shape == (0, 16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_none_afterwards(bad):
    """NaN and infinity must survive, so that the check for black pictures finds them."""
    vectors = torch.ones(2, 16)
    vectors[1, 3] = bad
    found = unpack(pack(vectors), torch.float32)
    assert torch.allclose(found[0], vectors[0]) and not found[1].isfinite().all()


def test_each_vector_has_a_scale_of_its_own():
    vectors = torch.stack([torch.full((16,), 1e-6), torch.full((16,), 1e6)])
    assert torch.allclose(unpack(pack(vectors), torch.float32), vectors, rtol=STEP)

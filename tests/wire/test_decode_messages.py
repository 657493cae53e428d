"""What a decode is asked with: checked before anything is started."""

import pytest
import torch

from parallel_backend.errors import RequestError
from parallel_backend.wire.decode_messages import check_decode


@pytest.mark.parametrize("shape", [(1, 16, 1, 1), (3, 4, 5, 7), (2, 16, 3, 4, 5)])
@pytest.mark.parametrize("shares", [(), (1.0, 2.5)])
def test_latents_of_images_and_videos_pass(shape, shares):
    check_decode(torch.zeros(shape), shares, ranks=2)


@pytest.mark.parametrize(
    "shape", [(16, 4, 4), (1, 1, 16, 3, 4, 4), (0, 16, 4, 4), (1, 16, 0, 4), (1, 16, 3, 0, 4)]
)
def test_other_tensors_are_refused_with_their_shape(shape):
    with pytest.raises(RequestError, match="the latent has shape") as refused:
        check_decode(torch.zeros(shape), (), ranks=2)
    assert str(list(shape)) in str(refused.value)


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 1.0, 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_shares_are_one_positive_number_per_rank(shares):
    with pytest.raises(RequestError, match="expected 2 numbers above 0"):
        check_decode(torch.zeros(1, 4, 4, 4), shares, ranks=2)

"""Linear layers of a diffusers model that compute with some rows of their weight, plain or cast on use."""

import pytest
import torch
from torch import nn

from parallel_backend.models.diffusers.casting import cast_on_use
from parallel_backend.models.diffusers.load import DiffusersModel

ROWS = slice(2, 6)


def _layer(stored, in_fp8=False):
    layer = nn.Sequential(nn.Linear(16, 16)).to(stored)
    cast_on_use(layer, torch.float32, in_fp8=in_fp8)
    return layer[0]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_layer_gives_rows_in_the_dtype_that_it_is_stored_in(stored):
    model = DiffusersModel(nn.Identity(), torch.device("cpu"), 0, "", torch.float32)
    layer, x = _layer(stored), torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    assert model.gives_rows(layer)
    assert model.multiplies(layer, x) == (stored == torch.float32)
    with torch.inference_mode():
        whole = layer(x)
        for name in ("weight", "bias"):
            layer._parameters[name] = model.weight_rows(layer._parameters[name], ROWS)
        assert torch.allclose(layer(x), whole[..., ROWS], atol=1e-6)


def test_layers_that_multiply_in_fp8_are_projected_as_before():
    model = DiffusersModel(nn.Identity(), torch.device("cpu"), 0, "", torch.float32)
    assert not model.gives_rows(_layer(torch.float8_e4m3fn, in_fp8=True))

"""Layers that cast on use compute what a cast layer computes, and keep their weights as they are stored."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.models.casting import CastingLinear, HalvesSwapped, cast_on_use


def stored_linear(dtype: torch.dtype, *, bias: bool = True, inputs: int = 8, outputs: int = 6) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_casting_layer_computes_in_the_dtype_of_its_input(stored, compute, bias):
    layer = stored_linear(stored, bias=bias)
    cast_on_use(layer, compute)
    x = torch.randn(3, 8).to(compute)
    expected = F.linear(x, layer.weight.to(compute), layer.bias.to(compute) if bias else None)
    result = layer(x)
    assert result.dtype == compute
    assert torch.equal(result, expected)


def test_weights_stay_where_and_what_they_are():
    layer = stored_linear(torch.bfloat16)
    weight, values, place = layer.weight, layer.weight.clone(), layer.weight.data_ptr()
    cast_on_use(layer, torch.float32)
    layer(torch.randn(3, 8))
    assert layer.weight is weight
    assert (layer.weight.data_ptr(), layer.weight.dtype) == (place, torch.bfloat16)
    assert torch.equal(layer.weight, values)


def test_only_layers_stored_otherwise_are_changed():
    same, other, odd_bias = (stored_linear(d) for d in (torch.float32, torch.bfloat16, torch.float32))
    odd_bias.bias = nn.Parameter(odd_bias.bias.to(torch.bfloat16), requires_grad=False)
    model = nn.ModuleDict(
        {"same": same, "deep": nn.Sequential(other, nn.SiLU(), odd_bias), "norm": nn.LayerNorm(8)}
    )
    cast_on_use(model, torch.float32)
    assert [type(layer) for layer in (same, other, odd_bias)] == [nn.Linear, CastingLinear, CastingLinear]
    assert type(model["norm"]) is nn.LayerNorm


def test_a_subclass_of_linear_keeps_its_own_forward():
    class Special(nn.Linear):
        pass

    layer = Special(8, 6).to(torch.bfloat16)
    cast_on_use(nn.Sequential(layer), torch.float32)
    assert type(layer) is Special


def test_swapped_halves_equal_swapped_weights():
    inner = stored_linear(torch.float32)
    swapped = nn.Linear(8, 6)
    swapped.load_state_dict({k: torch.cat(v.chunk(2)[::-1]) for k, v in inner.state_dict().items()})
    x = torch.randn(3, 8)
    torch.testing.assert_close(HalvesSwapped(inner)(x), swapped(x))
    assert not torch.allclose(HalvesSwapped(inner)(x), inner(x))

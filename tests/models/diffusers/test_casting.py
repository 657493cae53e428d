"""Layers that cast on use compute what a cast layer computes, and keep their weights as they are stored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_backend.models.diffusers.casting import CastingLinear, Fp8Linear, cast_on_use


def stored_linear(dtype: torch.dtype, *, bias: bool = True, inputs: int = 8, outputs: int = 6) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


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


class WeightTraffic(TorchDispatchMode):
    """Counts the bytes of tensors with as many elements as a weight that operators, except views, read and write."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.bytes = elements, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view:
            touched = [t for t in (*args, out) if isinstance(t, torch.Tensor)]
            self.bytes += sum(t.nbytes for t in touched if t.numel() == self.elements)
        return out


def test_fp8_weights_are_read_once_where_the_product_in_fp8_was_asked_for():
    layer = stored_linear(torch.float8_e4m3fn, inputs=64, outputs=48)
    layer.bias.data = layer.bias.data.to(torch.bfloat16)
    x = torch.randn(2, 5, 64).to(torch.bfloat16)
    counted, outputs = {}, {}
    for in_fp8 in (False, True):
        layer.__class__ = nn.Linear
        cast_on_use(layer, torch.bfloat16, in_fp8=in_fp8)
        with torch.no_grad(), WeightTraffic(layer.weight.numel()) as traffic:
            outputs[in_fp8] = layer(x)
        counted[in_fp8] = traffic.bytes / layer.weight.numel()
    assert counted == {False: 5, True: 1}  # fp8 read, bfloat16 written and read: 1 + 2 + 2; fp8 read: 1
    rounded = F.linear(x.to(torch.float8_e4m3fn).float(), layer.weight.float(), layer.bias.float())
    torch.testing.assert_close(outputs[True].float(), rounded, rtol=1e-2, atol=1e-2)
    assert not torch.equal(outputs[True], outputs[False])  # it changes the picture, so users must ask for it


def test_only_layers_that_the_product_in_fp8_takes_multiply_in_it():
    fits, odd = (stored_linear(torch.float8_e4m3fn, inputs=32, outputs=n) for n in (16, 24))
    half = stored_linear(torch.float16, inputs=32, outputs=16)
    cast_on_use(nn.ModuleList([fits, odd, half]), torch.bfloat16, in_fp8=True)
    assert [type(layer) for layer in (fits, odd, half)] == [Fp8Linear, CastingLinear, CastingLinear]
    assert fits(torch.empty(1, 0, 32, dtype=torch.bfloat16)).shape == (1, 0, 16)
    huge = torch.full((1, 32), 1e4, dtype=torch.bfloat16)
    assert torch.isfinite(fits(huge)).all()  # values beyond fp8's range would become NaN

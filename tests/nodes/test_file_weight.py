"""Weights that only a file has cannot be changed in place, by any of torch's ways, and can be used in all others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pack_nodes import module_fixture
from parallel_backend.errors import RequestError

file_weight = module_fixture("nodes.model.file_weight")


@pytest.fixture
def layer(file_weight) -> nn.Module:
    layer = nn.BatchNorm1d(4, device="meta")
    file_weight.mark_weights(nn.Sequential(layer))
    return layer


WAYS = {
    "a method": lambda w: w.mul_(2),
    "its data": lambda w: w.data.add_(1),
    "a view": lambda w: w.detach().view(2, 2)[0].copy_(torch.ones(2)),
    "a part": lambda w: w.data.chunk(2)[0].zero_(),
    "an item": lambda w: w.data.__setitem__(0, 1.0),
    "an operator": lambda w: w.data.__imul__(2),
    "other data": lambda w: setattr(w, "data", torch.ones(4, device="meta")),
    "an output": lambda w: torch.add(torch.ones(4, device="meta"), 1, out=w.data),
    "an initialisation": lambda w: nn.init.ones_(w),
    "an initialisation by name": lambda w: nn.init.uniform_(tensor=w),
}


@pytest.mark.parametrize("name", ["weight", "running_mean"])
@pytest.mark.parametrize("way", WAYS)
def test_a_change_in_place_is_refused(layer, name, way):
    with (
        torch.no_grad(),
        pytest.raises(RequestError, match=r"in place.*between a stock loader and Parallel Model"),
    ):
        WAYS[way](getattr(layer, name))


def test_all_else_works_as_with_any_parameter(layer):
    weight, plain = layer.weight, torch.ones(4, device="meta")
    assert isinstance(weight, nn.Parameter) and not weight.requires_grad
    with torch.no_grad():
        for found in (
            weight * 2,
            weight.clone(),
            weight + layer.running_mean,
            torch.stack([weight, plain]).sum(0),
        ):
            assert type(found) is torch.Tensor
            found.add_(1)  # a new tensor
        plain.copy_(weight)
        plain.data = weight.data
        weight.requires_grad_(False)
    assert (weight.shape, weight.dtype, weight.device.type) == ((4,), torch.float32, "meta")
    assert torch.equal(torch.empty_like(weight, device="cpu").fill_(1), torch.ones(4))
    assert {*copy.deepcopy(layer).state_dict()} == {*layer.state_dict()}
    layer.weight = nn.Parameter(torch.ones(4), requires_grad=False)  # a new weight is a change that is found
    assert layer.weight.sum() == 4

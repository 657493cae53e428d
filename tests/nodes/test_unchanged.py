"""The check that a network is unchanged since the last look: it notices each way in which nodes change one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pack_nodes import module_fixture


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)
        self.others: list[object] = []
        self.functions = [lambda: 0]
        self.table = {"first": [1]}
        self.settings = SimpleNamespace(theta=1, means=torch.zeros(4))
        self.shift = torch.zeros(4)

    def forward(self, x):
        return self.layer(x)


class OtherBlock(Block):
    pass


unchanged = module_fixture("nodes.model.unchanged")


def _base() -> nn.Module:
    base = nn.Module()
    base.diffusion_model = nn.Sequential(Block(), Block())
    base.kept = "as it is"
    return base


def _replace_data(base: nn.Module) -> None:
    weight = base.diffusion_model[1].layer.weight
    weight.data = weight.data.clone()


def _replace_function(base: nn.Module) -> None:
    """Replaces a function; Python gives the new one the address that the old one had."""
    functions = base.diffusion_model[0].functions
    functions.clear()
    functions.append(lambda: 1)


CHANGES = {
    "an attribute": lambda base: setattr(base.diffusion_model[0], "scale", 2.0),
    "an attribute of the model": lambda base: setattr(base, "kept", "another"),
    "an attribute less": lambda base: delattr(base.diffusion_model[1], "table"),
    "its forward": lambda base: setattr(base.diffusion_model[0], "forward", lambda x: x),
    "its class": lambda base: setattr(base.diffusion_model[0], "__class__", OtherBlock),
    "a child": lambda base: setattr(base.diffusion_model[0], "layer", nn.Identity()),
    "an entry of a list": lambda base: base.diffusion_model.__setitem__(0, Block()),
    "one block more": lambda base: base.diffusion_model.append(Block()),
    "a hook": lambda base: base.diffusion_model[0].register_forward_hook(lambda *_: None),
    "a field of an object": lambda base: setattr(base.diffusion_model[0].settings, "theta", 2),
    "a list": lambda base: base.diffusion_model[0].others.append(1.5),
    "a function in the place of one that is gone": _replace_function,
    "a list in a dict": lambda base: base.diffusion_model[0].table["first"].append(2),
    "a weight, in place": lambda base: base.diffusion_model[1].layer.weight.data[3:].add_(1e-3),
    "a tensor, in place": lambda base: base.diffusion_model[0].shift.data.add_(1),
    "a tensor of an object, in place": lambda base: base.diffusion_model[1].settings.means.data.add_(1),
    "a weight's memory": _replace_data,
    "a weight without numbers": lambda base: base.diffusion_model[1].layer.weight.data.fill_(torch.nan),
    "a parameter": lambda base: setattr(
        base.diffusion_model[0].layer, "weight", nn.Parameter(torch.zeros(8, 8))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(unchanged, change):
    base = _base()
    same = unchanged.SameNetwork(base, dict(base.named_parameters()))
    assert same.still_holds() and same.still_holds()
    CHANGES[change](base)
    assert not same.still_holds()
    again = unchanged.SameNetwork(base, dict(base.named_parameters()))
    assert again.still_holds(), "after the next look it is known"


def test_what_comfyui_notes_of_loading_is_no_change(unchanged):
    base = _base()
    same = unchanged.SameNetwork(base, dict(base.named_parameters()))
    base.current_weight_patches_uuid = object()
    base.model_loaded_weight_memory = 123456789
    assert same.still_holds()


def test_weights_that_only_the_devices_have_cannot_change(unchanged):
    base = _base().to("meta")
    same = unchanged.SameNetwork(base, dict(base.named_parameters()))
    assert same.still_holds()

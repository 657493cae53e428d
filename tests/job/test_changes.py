"""Changes that nodes made to a network are found, made in a rank's network, and undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import MethodType, ModuleType, SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from parallel_backend.job.changes import NetworkChange, SameModules, SameValues, changes_of
from parallel_backend.job.restore import Original, Replaced, make_changes, set_replaced
from parallel_backend.job.tensors import differing, print_of, prints_of


def curve_of(steepness, *bends):
    def curve(x, offset=0.5):
        return curve(x, offset=0.0) if offset is None else torch.tanh(x * steepness) + offset + len(bends)

    return curve


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale, self.shift = 2.0, torch.zeros(4)
        self.settings = SimpleNamespace(power=1, block=self)
        self.activation = nn.Identity
        self.clamp, self.factors = partial(torch.clamp, min=-1e3), numpy.ones(4, numpy.float32)
        self.curve = curve_of(0.5)

    def forward(self, x):
        x = self.curve(x)
        x = self.activation()(self.inner(x) * self.scale + self.shift) ** self.settings.power
        return self.clamp(x) * torch.from_numpy(self.factors)

    def note_size(self, size):
        """Stores an attribute, as methods of ComfyUI's classes do while they compute."""
        self.size = size

    note_size.__module__ = "comfy.ldm.test"


class Other(Block):
    def forward(self, x):
        return super().forward(x) + 1


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = [self.blocks[1]]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last[0].inner(x)


def known_of(network: nn.Module) -> dict[int, tuple[str, ...]]:
    return {id(module): ("module", path) for path, module in network.named_modules()}


def halved(module, args, output):
    return output / 2


def of_class(network):
    network.blocks[1].__class__ = Other


def of_a_method(network):
    block = network.blocks[0]
    block.forward = lambda x: Block.forward(block, x) * 3


def of_a_method_of_another_block(network):
    network.blocks[1].forward = network.blocks[0].forward


def of_what_a_function_closes_over(network):
    network.blocks[1].curve = curve_of(3.0)


def of_a_default_of_a_function(network):
    network.blocks[1].curve.__defaults__ = (2.0,)


def of_a_module_in_a_list(network):
    network.last[0] = network.blocks[0]


def of_a_number(network):
    network.blocks[1].scale = 5.0


def of_a_tensor(network):
    network.blocks[1].shift = torch.ones(4)


def of_an_array(network):
    network.blocks[1].factors = numpy.full(4, 2, numpy.float32)


def of_a_bound_argument(network):
    network.blocks[1].clamp = partial(torch.clamp, min=0.5)


def of_a_field_of_an_object(network):
    network.blocks[1].settings.power = 2


def of_a_class_that_is_an_attribute(network):
    network.blocks[1].activation = nn.ReLU


def of_a_child(network):
    network.blocks[0].inner = nn.Sequential(network.blocks[0].inner, nn.ReLU())


def of_hooks(network):
    network.blocks[1].register_forward_hook(halved)


def of_a_moved_block(network):
    network.blocks[0], network.blocks[1] = network.blocks[1], network.blocks[0]


WAYS = {
    of_class: "class",
    of_a_method: "attribute",
    of_a_method_of_another_block: "attribute",
    of_what_a_function_closes_over: "attribute",
    of_a_default_of_a_function: "attribute",
    of_a_module_in_a_list: "attribute",
    of_a_number: "attribute",
    of_a_tensor: "attribute",
    of_an_array: "attribute",
    of_a_bound_argument: "attribute",
    of_a_field_of_an_object: "attribute",
    of_a_class_that_is_an_attribute: "attribute",
    of_a_child: "child",
    of_hooks: "hooks",
    of_a_moved_block: "child",
}


def pair() -> tuple[Network, Network]:
    """Returns a network of ComfyUI's process and a rank's network with the same weights."""
    torch.manual_seed(1)
    here, there = Network(), Network()
    there.load_state_dict(here.state_dict())
    return here, there


def translated(changes: list[NetworkChange], paths: dict[nn.Module, str], there: Network):
    """Replaces modules that were at `paths` by those of `there`, as pickling does."""

    def over(value):
        if isinstance(value, nn.Sequential):
            return nn.Sequential(*map(over, value))
        if isinstance(value, list):
            return list(map(over, value))
        if isinstance(value, MethodType):
            return MethodType(value.__func__, over(value.__self__))
        return there.get_submodule(paths[value]) if isinstance(value, nn.Module) and value in paths else value

    return [NetworkChange(one.kind, one.path, one.name, over(one.value)) for one in changes]


@pytest.mark.parametrize("way", WAYS)
def test_a_change_is_found_made_in_a_rank_and_taken_back(way: Callable[[Network], None]):
    here, there = pair()
    pristine, known, x = Network().to("meta"), known_of(here), torch.randn(2, 4)  # shift stays on the CPU
    before, paths = there(x), {module: path for path, module in here.named_modules()}
    assert list(changes_of(here, pristine, known)) == []
    way(here)
    changes = list(changes_of(here, pristine, known))
    assert WAYS[way] in {one.kind for one in changes}
    made: list[type] = []
    with contextlib.ExitStack() as undo:
        undo.enter_context(Original(there).restored())
        if way is of_a_method:  # its closure refers to the block of ComfyUI's process
            block = there.blocks[0]
            changes = [
                NetworkChange("attribute", "blocks.0", "forward", lambda x: Block.forward(block, x) * 3)
            ]
        make_changes(there, translated(changes, paths, there), undo, made.append)
        torch.testing.assert_close(there(x), here(x))
        assert not torch.equal(there(x), before)
    assert torch.equal(there(x), before)
    assert made == ([Other] if way is of_class else [])


def test_what_a_node_keeps_on_the_network_while_it_runs_goes_with_the_job():
    _, there = pair()
    there.blocks[0].comfy_patched_weights = False
    with Original(there).restored():
        there.previous_residual, there.blocks[1].scale = torch.ones(2), 7.0
        there.blocks[0].comfy_patched_weights = True
    assert not hasattr(there, "previous_residual")
    assert there.blocks[1].scale == 2.0
    assert there.blocks[0].comfy_patched_weights is True  # ComfyUI writes this one itself


def test_attributes_that_a_jobs_code_sets_are_returned_but_not_what_comfyuis_classes_store():
    _, there = pair()
    given = NetworkChange("attribute", "blocks.0", "bonus", 1.0)
    original = Original(there)
    with contextlib.ExitStack() as undo:
        undo.enter_context(original.restored())
        assert original.attributes_set([]) == []
        make_changes(there, [given], undo, lambda kind: None)
        assert original.attributes_set([given]) == []
        there.seen, there.blocks[1].scale = 3, 7.0
        there.blocks[1].comfy_patched_weights = True
        there.blocks[1].note_size(5)
        del there.blocks[0].bonus
        found = original.attributes_set([given])
        assert [(one.path, one.values, one.gone) for one in found] == [
            ("", {"seen": 3}, []),
            ("blocks.0", {}, ["bonus"]),
            ("blocks.1", {"scale": 7.0}, []),
        ]
    assert original.attributes_set([]) == []


def test_a_parameter_is_replaced_for_one_job():
    _, there = pair()
    x = torch.randn(2, 4)
    before, weight = there(x), nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    with contextlib.ExitStack() as undo:
        make_changes(
            there, [NetworkChange("parameter", "blocks.0.inner", "weight", weight)], undo, lambda kind: None
        )
        assert there.blocks[0].inner.weight is weight
    assert torch.equal(there(x), before)


def test_what_comfyui_notes_on_a_model_for_itself_is_no_change():
    here, _ = pair()
    known = known_of(here)
    here.blocks[0].inner.comfy_patched_weights = True
    here.blocks[0].inner.weight_function = [halved]
    here.blocks[0].forward = here.blocks[0].forward  # left over when ComfyUI removes an object patch
    assert list(changes_of(here, Network().to("meta"), known)) == []


def quantised() -> type[nn.Module]:
    """Creates a class as comfy.ops does."""

    class Linear(nn.Module):
        __module__, full_precision = "comfy.ops", False

        def forward(self, x):
            return x

    return Linear


@pytest.mark.parametrize(("name", "value"), [("forward", Other.forward), ("full_precision", True)])
def test_a_class_that_a_function_of_comfyui_creates_counts_once_a_node_changes_it(name, value):
    kind = quantised()
    here, pristine = nn.Sequential(kind()), nn.Sequential(quantised()())
    known, same = known_of(here), SameModules(here)
    assert list(changes_of(here, pristine, known)) == [] and same.still_hold()
    setattr(kind, name, value)
    assert [*changes_of(here, pristine, known)] == [NetworkChange("class", "0", "", kind)]
    assert not same.still_hold()


def test_what_packs_replace_in_a_module_or_class_goes_back():
    module = ModuleType("comfy_stand_in")
    module.attention, module.Block = len, Other
    method = Other.forward
    replaced = [
        Replaced("comfy_stand_in", "", "attention", max),
        Replaced("comfy_stand_in", "Block", "forward", min),
        Replaced("comfy_stand_in", "", "added", sum),
    ]
    with contextlib.ExitStack() as undo:
        set_replaced(replaced, {"comfy_stand_in": module}.__getitem__, undo)
        assert (module.attention, Other.forward, module.added) == (max, min, sum)
    assert module.attention is len
    assert Other.forward is method
    assert not hasattr(module, "added")


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 100_000])
def test_a_print_sees_a_change_of_all_values_and_no_copy(size):
    tensor = torch.randn(size)
    prints = prints_of([("weight", tensor)])
    assert differing({"weight": tensor.clone()}, prints) == []
    assert differing({"weight": tensor * 1.01}, prints) == ["weight"]
    assert differing({}, prints) == []


def test_values_that_cannot_be_read_by_place_have_no_print():
    assert print_of(torch.empty(2, device="meta")) is None
    assert print_of(torch.zeros(0)) is None
    assert print_of(torch.zeros(2, 3).t()) is None


def test_other_values_in_a_dict_are_seen():
    backup: dict[str, object] = {}
    same = SameValues([backup])
    assert same.still_hold()
    backup["weight"] = torch.ones(2)
    assert not same.still_hold()
    backup.clear()
    assert same.still_hold()


def test_a_value_that_equals_the_one_before_is_another():
    values = {"weight": torch.ones(2)}
    same = SameValues([values])
    values["weight"] = torch.ones(2)
    assert not same.still_hold()


def test_modules_are_the_same_until_one_of_them_is_changed():
    base = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.GELU()))
    same = SameModules(base)
    assert same.still_hold()
    base[1][0].approximate = "tanh"
    assert not same.still_hold()
    base[1][0].approximate = "none"
    assert same.still_hold()
    base[1].__class__ = nn.Module
    assert not same.still_hold()

"""The mode in which ranks split a model call: nodes' functions and objects decide it, the pack's own options do not."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from comfy_modules import import_comfyui_here
from parallel_backend.job.restore import Replaced
from parallel_backend.models.comfyui.attention_router import reroute
from parallel_backend.rank.work.call_mode import Foreign, NetworkState, foreign_code, foreign_in, mode_of
from parallel_backend.requests import ATTENTION, BLOCK, ROWS, STAY

CALL = {"context": object(), "y": object(), "guidance": object()}


def mode(foreign: Foreign, proven: str = STAY, has_blocks: bool = True, **options) -> str:
    return mode_of(foreign, CALL | {"transformer_options": options}, "Flux", proven, has_blocks)


def test_tokens_stay_apart_where_nothing_foreign_takes_part():
    own = {"parallel_strategy": object(), "parallel_computing": object(), "parallel_step_cache": 0.1}
    assert mode(Foreign(), sample_sigmas=object(), cond_or_uncond=[0], **own) == STAY
    assert mode(Foreign(), somebodys_option=1) == BLOCK
    assert mode(Foreign(), proven=ROWS) == ROWS


@pytest.mark.parametrize(
    ("foreign", "has_blocks", "expected"),
    [
        (Foreign(takes_part=True, between=True), True, BLOCK),
        (Foreign(takes_part=True, between=True), False, ATTENTION),
        (Foreign(takes_part=True, between=False), True, ATTENTION),
        (Foreign(takes_part=True, kernel=True), True, ATTENTION),
    ],
)
def test_functions_of_nodes_get_whole_tokens(foreign, has_blocks, expected):
    assert mode(foreign, has_blocks=has_blocks) == expected


class Cache:
    """A step cache of the kind that Kandinsky 6 puts into its options."""


@pytest.mark.parametrize(
    "value",
    [Cache(), {"cache": Cache()}, [1.0, (Cache(),)], torch.Generator()],
    ids=["bare", "dict", "list", "generator"],
)
def test_an_object_in_the_options_may_keep_what_it_sees_so_rows_stay_together(value):
    found = foreign_in({"somebodys": value}, NetworkState(nn.Linear(2, 2), ()), Foreign())
    assert (found.takes_part, found.between, found.is_pure) == (True, True, False)


def test_numbers_words_and_tensors_in_the_options_are_data():
    options = {
        "sigmas": torch.ones(2),
        "cond_or_uncond": [0, 1],
        "dtype": torch.float16,
        "nested": {"word": "dense", "layers": {1, 2}, "none": None, "size": torch.Size((1, 2))},
        "uuids": [uuid.uuid4()],
        "parallel_strategy": Cache(),  # the pack's own
        "context_window": Cache(),  # only ComfyUI's sampling reads it
    }
    assert foreign_in(options, NetworkState(nn.Linear(2, 2), ()), Foreign()) == Foreign()


def test_functions_in_network_code_take_part_and_values_do_not():
    module = "comfy.ldm.wan.vae"
    values = [Replaced(module, "", name, value) for name, value in (("CACHE_T", 3), ("SIZES", (1, 2)))]
    assert foreign_code(values) == Foreign()
    assert foreign_code([*values, Replaced(module, "Resample", "forward", max)]).takes_part


def test_a_kernel_is_judged_by_the_packs_code_and_not_by_the_router_around_it():
    import_comfyui_here()

    def scaled(q, *others):
        return q * 2

    def counting(q, *others, calls=[]):  # noqa: B006
        calls.append(1)
        return q

    def found(function):
        kernel = reroute("optimized_attention", function)
        return foreign_code([Replaced("comfy.ldm.modules.attention", "", "optimized_attention", kernel)])

    assert [(one.kernel, one.is_pure, one.kernel_is_pure) for one in map(found, (scaled, counting))] == [
        (True, True, True),
        (True, False, False),
    ]
    assert found(scaled).code != found(counting).code


def test_hooks_that_the_load_left_are_no_change_and_those_that_come_later_are():
    """Hooks of blocks gather sharded weights, so these must not count as changes."""
    network = nn.Sequential(nn.Linear(2, 2))
    network[0].register_forward_pre_hook(lambda *_: None)
    network[0].register_forward_hook(lambda *_: None, always_call=True)
    state = NetworkState(network, ())
    assert state.find_changes() == (False, False)
    later = network[0].register_forward_pre_hook(lambda *_: None)
    assert state.find_changes() == (True, False)
    later.remove()
    assert state.find_changes() == (False, False)


def blur(x):
    return x + x.flip(0)


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation, self.norm, self.layer = torch.relu, None, nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(self.activation(x))


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("forward", "another"),
        ("activation", "a node"),
        ("norm", "a node"),
        ("new", "a node"),
        ("_forward", "a node"),
    ],
)
def test_a_method_that_is_not_the_modules_own_is_a_change(name, of):
    network = nn.Sequential(Unit(), Unit())
    network[0].new_cache, region = None, SimpleNamespace(lists=("0",))
    state = NetworkState(network, (region,))
    network[0].norm, network[1].comfy_cast_weights = 1.0, True
    network[1].forward = network[1].forward  # its own method, which ComfyUI puts back
    network[1].sizes = [2]
    assert state.find_changes() == (False, False)
    before = vars(network[0]).get(name)
    setattr(network[0], name, network[1].forward if of == "another" else blur)
    assert state.find_changes() == (True, True)
    if before is None:
        delattr(network[0], name)
    else:
        setattr(network[0], name, before)
    assert state.find_changes() == (False, False)
    network[1].forward = network[0].forward
    assert state.find_changes() == (True, False)

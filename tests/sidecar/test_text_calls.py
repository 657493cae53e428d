"""Text encoders through a sidecar give the answer of one process, wherever they run, and ranks stay usable."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from comfy_modules import import_comfyui_here
from parallel_backend.errors import Cancelled, RequestError
from parallel_backend.sidecar.holdings import RankInventory
from parallel_backend.sidecar.model_room import Room, new_number
from parallel_backend.sidecar.module_requests import (
    ALL_DEVICES,
    AUTO,
    ONE_DEVICE,
    PLACEMENTS,
    ModuleKind,
    ModuleRequest,
    ModuleRequests,
)
from parallel_backend.wire.protocol import ALL_RANKS
from shipped_jobs import ship_encoder_call, ship_module
from toy_encoder import ToyEncoder

TOKENS = torch.tensor([[1, 5, 3, 2]])
FIRST, SECOND = "one device", "the second device"


@pytest.fixture
def at(two_real_ranks, monkeypatch):
    """Returns a function that calls an encoder at a placement."""

    def call(module, place, *, number=0, keep=(), **options):
        if place == SECOND:
            monkeypatch.setattr(ModuleRequests, "_choose_rank", lambda *_: 1)
        elif place in PLACEMENTS:
            monkeypatch.undo()
        number = number or new_number()
        request = request_of(module, ONE_DEVICE if place == SECOND else place, number, keep)
        return two_real_ranks.call_module(request, **options)

    return call


def request_of(module, place, number, keep=()):
    return ModuleRequest(
        ModuleKind.TEXT,
        number=number,
        keep=(number, *keep),
        bytes=sum(parameter.nbytes for parameter in module.parameters()),
        placement=place,
        comfyui=import_comfyui_here(),
        module=lambda holdings: ship_module(module),
        tensors=lambda holdings, is_new: ship_encoder_call(module, (TOKENS,), "encode"),
    )


def same(found, expected):
    hidden, pooled, totals = found
    return (
        torch.equal(hidden, expected[0])
        and pooled is None
        and torch.equal(totals["total"], expected[2]["total"])
    )


@pytest.mark.parametrize("place", [AUTO, FIRST, SECOND, ALL_DEVICES])
def test_the_answer_is_that_of_one_process_wherever_it_is_computed(at, two_real_ranks, place):
    module = ToyEncoder()
    with torch.inference_mode():
        expected = module.encode(TOKENS)
    phases, number = [], new_number()
    first = at(module, place, number=number, on_phase=phases.append)
    again = at(module, place, number=number, on_phase=phases.append)
    assert same(first.value, expected) and same(again.value, expected)
    # The encoder is only sent before the first call.
    assert phases[-3:] == ["sending the text encoder to the processes", *["encoding the text"] * 2]
    whole = sum(parameter.nbytes for parameter in module.parameters())
    layers = sum(parameter.nbytes for parameter in module.layers.parameters())
    if place == ALL_DEVICES:
        around = whole - layers
        assert first.devices == two_real_ranks.devices and min(first.bytes_sent) > 0
        assert [size - around for size in first.bytes] == [layers * 2 // 5, layers * 3 // 5]
    else:
        rank = int(place == SECOND)
        assert first.devices == two_real_ranks.devices[rank : rank + 1] and first.bytes_sent == (0, 0)
        assert first.bytes[rank] == whole and first.bytes[1 - rank] == 0


@pytest.mark.parametrize("place", [SECOND, ALL_DEVICES])
def test_a_cancel_ends_a_call_and_the_ranks_stay_usable(at, two_real_ranks, place):
    begun = time.monotonic()
    with pytest.raises(Cancelled):
        at(
            ToyEncoder(layers=60, seconds=0.25),
            place,
            should_cancel=lambda: time.monotonic() - begun > 1.0,
        )
    pids = two_real_ranks.pids
    module = ToyEncoder()
    with torch.inference_mode():
        assert same(at(module, place).value, module.encode(TOKENS))
    assert two_real_ranks.pids == pids


@pytest.mark.parametrize("place", [SECOND, ALL_DEVICES])
def test_a_layer_that_fails_is_a_refusal_and_the_ranks_stay_usable(at, two_real_ranks, place):
    module, number = ToyEncoder(), new_number()
    at(module, place, number=number)
    pids = two_real_ranks.pids
    for failing in (0, 4):  # one layer on each rank, if layers are split
        with pytest.raises(RequestError, match="this layer cannot"):
            at(ToyEncoder(fails=failing), place, keep=(number,))
    with torch.inference_mode():
        assert same(at(module, place, number=number).value, module.encode(TOKENS))
    assert two_real_ranks.pids == pids


def test_encoders_that_nobody_has_any_more_are_dropped(at, two_real_ranks):
    held = two_real_ranks._holdings.held
    first, second, third = (new_number() for _ in range(3))
    at(ToyEncoder(), ALL_DEVICES, number=first)
    at(ToyEncoder(), FIRST, number=second, keep=(first,))
    assert {number: one.rank for number, one in held.modules.items()} == {first: ALL_RANKS, second: 0}
    at(ToyEncoder(), FIRST, number=third)
    assert list(held.modules) == [third]
    two_real_ranks.drop_modules()
    assert held.modules == {}
    at(ToyEncoder(), FIRST, number=third)
    two_real_ranks.sleep()
    assert held.modules == {}


def test_a_place_that_does_not_exist_is_refused(at):
    with pytest.raises(
        RequestError, match="placement is everywhere; choose one of auto, one device, all devices"
    ):
        at(ToyEncoder(), "everywhere")


GIB = 2**30


@pytest.mark.parametrize(
    ("placement", "free", "rank"),
    [
        (AUTO, (12 * GIB, 14 * GIB), 1),
        (AUTO, (9 * GIB, 8 * GIB), ALL_RANKS),  # an encoder of 11 GiB fits on neither
        (ONE_DEVICE, (9 * GIB, 8 * GIB), 0),
        (ALL_DEVICES, (12 * GIB, 14 * GIB), ALL_RANKS),
        (AUTO, (8 * GIB,), 0),
    ],
)
def test_it_is_computed_where_there_is_room(placement, free, rank):
    requests = ModuleRequests()
    requests.devices = tuple(f"cuda:{number}" for number in range(len(free)))
    inventory = RankInventory(requests.devices)
    requests._holdings = SimpleNamespace(held=inventory, free_room=lambda lease: Room(free))
    request = SimpleNamespace(placement=placement, bytes=11 * GIB)
    assert requests._choose_rank(request, None) == rank

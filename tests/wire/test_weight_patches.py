"""Descriptions of weight changes: what goes out comes in, equal changes have one name, and nonsense is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from lora_patches import lora
from parallel_backend.errors import RequestError, TransportError
from parallel_backend.wire.weight_patches import (
    NO_PATCHES,
    RECENT_SETS,
    Factor,
    RecentSets,
    WeightPatch,
    WeightPatches,
    digest,
    parse_description,
)

PATCH = WeightPatch("img_in.weight", "lora", (Factor("up", "aa"), Factor("down", "bb")), 0.5, alpha=4.0)


def test_a_description_arrives_as_it_was_sent():
    patches, _ = lora()
    assert set(parse_description(patches.description)) == set(patches.patches)
    assert parse_description(NO_PATCHES.description) == ()


def test_the_same_changes_have_one_identity_and_others_another():
    patches, _ = lora()
    turned = WeightPatches(tuple(reversed(patches.patches)), patches.tensors)
    assert turned.identity == patches.identity != lora(strength=0.5)[0].identity
    assert lora(seed=1)[0].identity != patches.identity
    assert NO_PATCHES.identity == ""


def test_a_deep_copy_of_options_does_not_copy_the_tensors():
    patches, _ = lora()
    assert copy.deepcopy({"options": [patches]})["options"][0] is patches


def test_two_changes_of_one_tensor_keep_their_order():
    other = WeightPatch("img_in.weight", "set", (Factor("value", "cc"),), 1.0)
    one, two = WeightPatches((PATCH, other), {}), WeightPatches((other, PATCH), {})
    assert one.identity != two.identity
    assert parse_description(two.description) == (other, PATCH)


def test_a_digest_tells_values_shapes_and_dtypes_apart():
    a = torch.arange(6.0).reshape(2, 3)
    assert digest(a) == digest(a.clone()) == digest(a.t().contiguous().t())
    assert len({digest(t) for t in (a, a + 1, a.reshape(3, 2), a.bfloat16(), a.to(torch.float8_e4m3fn))}) == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "magic"},
        {"strength": float("inf")},
        {"alpha": float("nan")},
        {"factors": (Factor("w1_a", "aa"),)},
        {"factors": (Factor("up", "aa"), Factor("up", "bb"))},
        {"narrow": (0, 1)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_impossible_change_is_refused(changes):
    fields = {"key": "img_in.weight", "kind": "lora", "factors": (), "strength": 1.0, **changes}
    with pytest.raises(RequestError, match=r"img_in\.weight"):
        WeightPatch(**fields)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[1]", b"\xff", b"[" * 10_000, b'[{"key":1}]', b"[NaN]"],
    ids=lambda data: repr(data[:12]),
)
def test_a_damaged_description_is_refused(data):
    with pytest.raises(TransportError):
        parse_description(data)


def test_a_description_with_an_unknown_kind_is_refused():
    items = json.loads(WeightPatches((PATCH,), {}).description)
    items[0]["kind"] = "magic"
    with pytest.raises(TransportError, match="magic"):
        parse_description(json.dumps(items).encode())


def test_only_the_factors_of_recent_sets_are_kept():
    recent = RecentSets()
    for i in range(RECENT_SETS):
        kept = recent.applied(f"set {i}", {f"factor {i}", "shared"})
    assert kept == {"shared", *(f"factor {i}" for i in range(RECENT_SETS))}
    recent.applied("set 0", {"factor 0", "shared"})  # used again
    kept = recent.applied("another", {"new"})
    assert "factor 1" not in kept and {"factor 0", "new", "shared"} <= kept

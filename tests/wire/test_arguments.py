"""Arguments of any model call as tensors and back: what goes in comes out, anything else is refused by its place."""

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel_backend.errors import RequestError, TransportError
from parallel_backend.wire.arguments import map_tensors, pack_arguments, unpack_arguments
from parallel_backend.wire.transport import close_all, pack_tensors, unpack_tensors

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8) | st.integers(-99, 99), inner, max_size=4)
    ),
    max_leaves=12,
)


def structure(described) -> dict[str, torch.Tensor]:
    return {"structure": torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8)}


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # on a loaded machine
@given(TREES)
def test_plain_values_come_back_as_they_were(tree):
    assert unpack_arguments(pack_arguments(tree)) == tree


def test_numbers_that_json_lacks_come_back_too():
    big, inf, minus, nan = unpack_arguments(pack_arguments([2**70, math.inf, -math.inf, math.nan]))
    assert (big, inf, minus) == (2**70, math.inf, -math.inf) and math.isnan(nan)


def test_tensors_come_back_through_a_payload_with_their_dtypes_and_shapes():
    tree = (
        [torch.randn(2, 3), torch.tensor(3)],
        {"mask": torch.ones(2, dtype=torch.bool), 7: torch.randn(4, 6).bfloat16().t(), "none": None},
    )
    descriptor = pack_tensors(pack_arguments(tree))
    try:
        found = unpack_arguments(unpack_tensors(descriptor))
    finally:
        close_all((descriptor,))
    assert found[1]["none"] is None
    for one, other in zip(
        [*tree[0], tree[1]["mask"], tree[1][7]], [*found[0], found[1]["mask"], found[1][7]], strict=True
    ):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_tensor_at_two_places_travels_once_and_is_changed_once():
    residual, changed = torch.randn(3), []
    packed = pack_arguments({"a": [residual, residual], "b": residual})
    assert len(packed) == 2
    tree = map_tensors(unpack_arguments(packed), lambda tensor: changed.append(tensor) or tensor + 1)
    assert len(changed) == 1 and tree["a"][0] is tree["b"] and torch.equal(tree["b"], residual + 1)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"patch": print}, r"call\['patch'\] is a builtin_function"),
        ([1, {"x": object()}], r"call\[1\]\['x'\] is a object"),
        ({(1, 2): 3}, r"the key \(1, 2\) is a tuple"),
        ({"sparse": torch.ones(2, 2).to_sparse()}, r"\['sparse'\] is a Tensor"),
        ({"set": {1}}, r"\['set'\] is a set"),
        ({"wave": torch.ones(2, dtype=torch.complex64)}, r"\['wave'\] is a tensor of complex64"),
        ([torch.ones(1) for _ in range(300)], "300 tensors; 255 can be sent"),
    ],
)
def test_what_is_no_plain_tree_is_refused_by_its_place(tree, words):
    with pytest.raises(RequestError, match=words):
        pack_arguments(tree)


def test_a_tree_without_end_is_refused():
    tree: list = []
    tree.append(tree)
    with pytest.raises(RequestError, match="16 levels"):
        pack_arguments(tree)


@pytest.mark.parametrize(
    "described",
    [
        ["t", 0],
        ["t", "x"],
        ["t"],
        ["z", 1],
        [],
        ["d", ["a", 1], ["a", 2]],
        ["d", [1.5, 1]],
        ["d", 3],
        ["f", "one"],
        ["i", "1e9"],
        {"a": 1},
    ],
)
def test_a_malformed_description_is_refused(described):
    with pytest.raises(TransportError):
        unpack_arguments(structure(described))


def test_a_payload_without_description_or_with_more_than_it_names_is_refused():
    with pytest.raises(TransportError, match="belong together"):
        unpack_arguments({"0": torch.ones(1)})
    with pytest.raises(TransportError, match="unknown tensors"):
        unpack_arguments(structure(None) | {"0": torch.ones(1)})
    with pytest.raises(TransportError, match="not valid JSON"):
        unpack_arguments({"structure": torch.zeros(3, dtype=torch.uint8)})

"""Answers of text encoders are packed into tensors and unpacked again."""

from __future__ import annotations

import pytest
import torch

from parallel_backend.errors import RequestError, TransportError
from parallel_backend.job.answer_tree import TREE, pack_tree, unpack_tree


def test_an_answer_comes_back_as_it_was():
    answer = (
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
        None,
        {"attention_mask": torch.ones(1, 4, dtype=torch.bool), "words": ["a", 1, 2.5, True]},
        [7, (8,)],
    )
    found = unpack_tree(pack_tree(answer))
    assert torch.equal(found[0], answer[0]) and found[0].dtype == torch.bfloat16
    assert found[1] is None and found[3] == [7, (8,)]
    assert torch.equal(found[2].pop("attention_mask"), answer[2].pop("attention_mask"))
    assert found[2] == answer[2]


@pytest.mark.parametrize("answer", [object(), {1: 2}, [torch.Size([1])]], ids=["object", "key", "size"])
def test_what_cannot_travel_is_refused_by_its_class(answer):
    with pytest.raises(RequestError, match="answered with an object of"):
        pack_tree(answer)


@pytest.mark.parametrize(
    "form", [b"", b"[]", b'["tensor", 0]', b'["set", []]', b'["value"]', b"[[", b"\xff", b'["list", 3]']
)
def test_a_form_that_is_not_known_is_refused(form):
    words = torch.frombuffer(bytearray(form or b" "), dtype=torch.uint8)
    with pytest.raises(TransportError, match="no form that is known"):
        unpack_tree({TREE: words})

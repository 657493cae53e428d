"""Operators find what does the work by name, as long as its owner lives, and an attention for its call only."""

from __future__ import annotations

import gc

import pytest
import torch

from parallel_backend.engine.comm import operators
from parallel_backend.engine.comm.operators import AttentionOperator, SliceMeeting

CPU = torch.device("cpu")


class Doubled:
    """An attention that gives its queries twice as large."""

    def attend(self, query, key, value):
        return 2 * query


def test_an_attention_is_known_for_its_call_only_also_when_that_raises():
    operator, one = AttentionOperator("test attention"), torch.ones(1, 2, 1, 4)
    with pytest.raises(ValueError), operator.of_call(Doubled(), CPU):
        assert torch.equal(operator.attend(one, one, one), 2 * one)
        raise ValueError
    with pytest.raises(AssertionError, match="inside of_call"):
        operator.attend(one, one, one)


def test_names_end_with_their_owners():
    before = set(operators._by_name)
    operator = AttentionOperator("test attention")
    meeting = SliceMeeting("test ranks", 2, CPU, lambda partial: partial, lambda columns: columns)
    assert set(operators._by_name) - before == {"test attention", "test ranks"}
    del operator, meeting
    gc.collect()
    assert set(operators._by_name) == before


def test_a_compiled_sum_is_that_of_the_meeting():
    def add_up(partial):
        return partial.mul_(3)

    meeting = SliceMeeting("test ranks", 2, CPU, add_up, lambda columns: torch.cat([columns, columns], 1))
    compiled = torch.compile(lambda x: meeting.join(meeting.add_up(x + 1)), backend="eager", fullgraph=True)
    one = torch.ones(2, 3)
    assert torch.equal(compiled(one), torch.full((2, 6), 6.0))

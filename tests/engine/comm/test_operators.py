"""Custom operators find their SliceMeeting by its name, as long as its owner keeps it."""

from __future__ import annotations

import gc

import torch

from parallel_backend.engine.comm import operators
from parallel_backend.engine.comm.operators import SliceMeeting

CPU = torch.device("cpu")


def test_names_end_with_their_owners():
    before = set(operators._by_name)
    meeting = SliceMeeting("test ranks", 2, CPU, lambda partial: partial, lambda columns: columns)
    assert set(operators._by_name) - before == {"test ranks"}
    del meeting
    gc.collect()
    assert set(operators._by_name) == before


def test_a_compiled_sum_is_that_of_the_meeting():
    def add_up(partial):
        return partial.mul_(3)

    meeting = SliceMeeting("test ranks", 2, CPU, add_up, lambda columns: torch.cat([columns, columns], 1))
    compiled = torch.compile(lambda x: meeting.join(meeting.add_up(x + 1)), backend="eager", fullgraph=True)
    one = torch.ones(2, 3)
    assert torch.equal(compiled(one), torch.full((2, 6), 6.0))

"""Messages that a stage holds beside its computation, turn by turn."""

from __future__ import annotations

import pytest

from parallel_backend.planner.workload.pipeline_messages import PipelineRound


def held(turn: PipelineRound, messages, before=()) -> list[int]:
    return [moment.held for moment in turn.moments(messages, before)]


def test_the_first_stage_asks_for_all_that_comes_back_and_keeps_what_it_sent():
    moments = list(PipelineRound(2, is_first=True, is_last=False).moments([10, 10]))
    assert [(m.chunk, m.item) for m in moments] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # Nothing; one sent and still this rank's output; two sent, one output, one asked for; three sent, one output.
    assert [m.held for m in moments] == [0, 20, 40, 40]


def test_the_last_stage_sends_one_chunk_only_and_asks_for_the_next_message():
    assert held(PipelineRound(2, is_first=False, is_last=True), [10, 10]) == [10, 30, 40, 30]
    assert held(PipelineRound(1, is_first=False, is_last=True), [10, 10]) == [10, 10]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("first", "last"), [(True, False), (False, False), (False, True)])
def test_what_the_turn_before_sent_is_kept_until_this_one_ends(chunks, first, last):
    turn = PipelineRound(chunks, first, last)
    alone, after = held(turn, [7, 5, 5]), held(turn, [7, 5, 5], before=[7, 5, 5])
    assert {b - a for a, b in zip(alone, after, strict=True)} == {17 * (chunks - last)}

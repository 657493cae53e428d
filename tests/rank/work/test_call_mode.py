"""How a call of a job is shared out: by what takes part in it, and not by what the pack itself notes in its options."""

from __future__ import annotations

import pytest

from parallel_backend.rank.work.call_mode import Foreign, mode_of
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

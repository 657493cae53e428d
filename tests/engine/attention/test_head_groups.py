"""The split of heads into groups that travel one after the other: each head is in exactly one group."""

import pytest

from parallel_backend.engine.attention.head_groups import (
    head_count,
    head_groups,
)


@pytest.mark.parametrize(
    ("shares", "most", "unit", "counts"),
    [
        ((12, 12), 4, 1, [(3, 3)] * 4),
        ((3, 3), 4, 1, [(1, 1)] * 3),  # no more groups than heads
        ((3, 2), 2, 1, [(2, 1), (1, 1)]),
        ((2, 1, 0), 2, 1, [(2, 1, 0)]),  # a rank without heads: one group
        ((8, 8), 4, 4, [(4, 4), (4, 4)]),  # four heads that share keys stay together
        ((6, 6), 4, 4, [(6, 6)]),  # a rank's share ends within four such heads: one group
        ((12, 12), 1, 1, [(12, 12)]),
    ],
)
def test_each_head_is_in_one_group(shares, most, unit, counts):
    found = head_groups(shares, most, unit)
    assert [tuple(map(head_count, heads)) for heads in found] == counts
    of_ranks = zip(*found, strict=True)
    heads = [head for of_rank in of_ranks for own in of_rank for head in range(own.start, own.stop)]
    assert heads == list(range(sum(shares)))

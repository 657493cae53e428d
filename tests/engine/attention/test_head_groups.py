"""The split of heads into groups that travel one after the other: each head is in exactly one group."""

import pytest
import torch

from parallel_backend.engine.attention.head_groups import (
    by_rank_view,
    head_count,
    head_groups,
    is_even,
    one_each,
    sharing_heads,
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


def test_even_heads_are_seen_at_once():
    heads = torch.arange(12).view(1, 12, 1)
    first, second = head_groups((6, 6), 2)
    assert is_even(first) and is_even(second)
    assert by_rank_view(heads, second, 1)[0, :, 0].tolist() == [[3, 4, 5], [9, 10, 11]]
    assert not is_even([slice(0, 2), slice(2, 3)])  # different counts
    assert not is_even([slice(0, 1), slice(0, 1)])  # the same heads
    assert not is_even([slice(0, 1), slice(2, 3), slice(3, 4)])  # different distances


def test_heads_that_share_keys_get_them_each():
    keys = torch.arange(4).view(1, 4, 1, 1)
    own = [slice(0, 3), slice(3, 6)]  # six heads; each two share one of three heads of keys
    assert sharing_heads(own, 2) == [slice(0, 2), slice(1, 3)]
    key, value = one_each(keys[:, 1:3], keys[:, 1:3], own[1], 2)
    assert key.flatten().tolist() == value.flatten().tolist() == [1, 2, 2]
    assert one_each(keys, keys, own[0], 1)[0] is keys

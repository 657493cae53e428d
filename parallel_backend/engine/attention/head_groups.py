"""Which heads each rank of a Ulysses group attends to, in how many groups, and where they lie in a tensor.

A list of slices has one for each rank.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...layout import slice_of, split_sizes


def head_count(heads: slice) -> int:
    return int(heads.stop - heads.start)


def is_even(heads: list[slice]) -> bool:
    """True if the ranks have equally many heads, each rank's as far behind those of the rank before."""
    steps = {after.start - before.start for before, after in pairwise(heads)}
    return len(set(map(head_count, heads))) == len(steps) == 1 and min(steps) > 0 and head_count(heads[0]) > 0


def by_rank_view(tensor: Tensor, heads: list[slice], dim: int) -> Tensor:
    """A view [..., ranks, ..., h] of even `heads`, which lie in `dim`."""
    first, step = heads[0], heads[1].start - heads[0].start
    return tensor.narrow(dim, first.start, heads[-1].stop - first.start).unfold(dim, head_count(first), step)


def head_groups(shares: tuple[int, ...], most: int, unit: int = 1) -> list[list[slice]]:
    """The heads of each rank in as many groups as `most`, or as the fewest heads of a rank allow; each group has some
    of every rank's. `unit`: heads that share keys, which stay together; where a rank has only some of those, and where
    one has no head, all are one group."""
    count = 1 if any(share % unit for share in shares) else max(1, min(most, min(shares) // unit))
    found: list[list[slice]] = [[] for _ in range(count)]
    for rank, share in enumerate(shares):
        start = slice_of(shares, rank).start
        sizes = [share] if count == 1 else [unit * units for units in split_sizes(share // unit, count)]
        for heads, size in zip(found, sizes, strict=True):
            heads.append(slice(start, start + size))
            start += size
    return found


def sharing_heads(heads: list[slice], group: int) -> list[slice]:
    """The heads of keys that each rank's heads need, `group` of which share each."""
    return [slice(own.start // group, -(-own.stop // group)) for own in heads]


def one_each(key: Tensor, value: Tensor, heads: slice, group: int) -> tuple[Tensor, Tensor]:
    """Keys and values of each of `heads`, from those of `sharing_heads`."""
    if group == 1:
        return key, value
    places = torch.arange(heads.start, heads.stop, device=key.device) // group - heads.start // group
    return key.index_select(1, places), value.index_select(1, places)

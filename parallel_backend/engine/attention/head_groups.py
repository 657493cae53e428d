"""The split of heads over the ranks of a Ulysses group, and into groups that travel one after the other.

Every list of slices has one slice per rank.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...layout import slice_of, split_sizes


def head_count(heads: slice) -> int:
    return int(heads.stop - heads.start)


def is_even(heads: list[slice]) -> bool:
    """Returns True if all ranks have the same number of heads, not 0, at a constant distance from rank to rank."""
    steps = {after.start - before.start for before, after in pairwise(heads)}
    return len(set(map(head_count, heads))) == len(steps) == 1 and min(steps) > 0 and head_count(heads[0]) > 0


def by_rank_view(tensor: Tensor, heads: list[slice], dim: int) -> Tensor:
    """Returns a view [..., ranks, ..., h] of `tensor`, whose `dim` has the heads. `heads`: must be even."""
    first, step = heads[0], heads[1].start - heads[0].start
    return tensor.narrow(dim, first.start, heads[-1].stop - first.start).unfold(dim, head_count(first), step)


def head_groups(shares: tuple[int, ...], most: int, unit: int = 1) -> list[list[slice]]:
    """Splits the heads into up to `most` groups, each with some heads of every rank. `shares`: heads per rank; `unit`:
    the number of heads that share keys, which stay in one group. Returns one group if a share is no multiple of `unit`
    or a rank has no head."""
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
    """Returns the heads of the keys that each rank's heads need, if `group` heads share one head of the keys."""
    return [slice(own.start // group, -(-own.stop // group)) for own in heads]


def one_each(key: Tensor, value: Tensor, heads: slice, group: int) -> tuple[Tensor, Tensor]:
    """Repeats the keys and values of `sharing_heads` so that each of `heads` has its own."""
    if group == 1:
        return key, value
    places = torch.arange(heads.start, heads.stop, device=key.device) // group - heads.start // group
    return key.index_select(1, places), value.index_select(1, places)

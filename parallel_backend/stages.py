"""Which transformer blocks each stage of a pipeline holds. Pure functions.

Flux has two kinds of blocks that cost about the same time but not the same memory: a double block has separate weights
for text and image and weighs more than twice a single one. Stages of neighbouring blocks would be even in time or in
memory, not in both. So a stage holds two chunks where it can, a run of double blocks and a run of single ones, and an
image passes the stages twice (the interleaved schedule of Narayanan et al. 2021, section 2.2, without its backward).
"""

from __future__ import annotations

from .shares import share, span


def split_blocks(double: int, single: int, shares: tuple[float, ...]) -> tuple[tuple[range, ...], ...]:
    """Per stage its chunks, each a range of blocks numbered doubles first; no chunk is empty.

    `shares`: how much of the blocks each stage takes. All stages have the same number of chunks, 1 or 2; an image
    passes chunk 0 of every stage in order, then chunk 1 of every stage.
    """
    stages = len(shares)
    doubles = share(double, stages, shares)
    totals = share(double + single, stages, shares)
    if len(set(shares)) == 1:  # surplus blocks go to stages without a surplus double block
        totals = totals[::-1]
    singles = tuple(total - own for total, own in zip(totals, doubles, strict=True))
    if stages == 1 or min(*doubles, *singles) < 1:
        return tuple((_range(totals, i, 0),) for i in range(stages))
    return tuple((_range(doubles, i, 0), _range(singles, i, double)) for i in range(stages))


def _range(sizes: tuple[int, ...], i: int, first: int) -> range:
    part = span(sizes, i)
    return range(first + part.start, first + part.stop)

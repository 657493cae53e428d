"""Coordinates of each rank in the layout of a strategy, and how rows, tokens and blocks are split. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from .devices import machine_of
from .strategy import DEGREES, ParallelStrategy

# Axes of the rank layout, slowest first, in the order of ParallelStrategy's degrees.
AXES = tuple(name.removesuffix("_degree") for name in DEGREES)
ROW_AXES = ("data", "cfg")
SEQUENCE_AXES = ("ring", "ulysses")
REPLICA_AXES = (*ROW_AXES, *SEQUENCE_AXES)  # ranks that differ in these only hold the same weights


class RankCoordinates(NamedTuple):
    """A rank's coordinates in the layout of its strategy, in the order of AXES; the stage is that of PipeFusion."""

    data: int
    cfg: int
    stage: int
    ring: int
    ulysses: int
    tensor: int

    @classmethod
    def of(cls, strategy: ParallelStrategy, rank: int) -> RankCoordinates:
        found = []
        for name in reversed(DEGREES):
            rank, local = divmod(rank, getattr(strategy, name))
            found.append(local)
        return cls(*reversed(found))

    def on(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Its coordinates on `axes` (AXES), in the order of the layout."""
        return tuple(local for axis, local in zip(AXES, self, strict=True) if axis in axes)

    def row(self, strategy: ParallelStrategy) -> int:
        """The number of the share of the rows that it computes."""
        return self.data * strategy.cfg_degree + self.cfg

    def pipeline_shares(self, strategy: ParallelStrategy) -> list[list[float]]:
        """device_shares of this rank's pipeline by stage and place in the sequence; empty for equal shares."""
        if not strategy.device_shares:
            return []
        inner = strategy.sequence_degree * strategy.tensor_degree
        first = self.row(strategy) * strategy.pipefusion_degree * inner
        local = strategy.device_shares[first : first + strategy.pipefusion_degree * inner]
        tensor = strategy.tensor_degree
        summed = [sum(local[i : i + tensor]) for i in range(0, len(local), tensor)]
        return [
            summed[i : i + strategy.sequence_degree] for i in range(0, len(summed), strategy.sequence_degree)
        ]

    def stage_shares(self, strategy: ParallelStrategy) -> tuple[float, ...]:
        """The share of the model's blocks that each stage of this rank's pipeline takes."""
        grid = self.pipeline_shares(strategy)
        return tuple(sum(stage) for stage in grid) or (1.0,) * strategy.pipefusion_degree

    def blocks(self, strategy: ParallelStrategy, count: int) -> range:
        """Returns which of a model's `count` blocks its pipeline's stage computes; all without a pipeline."""
        return stage_blocks(count, self.stage_shares(strategy))[self.stage]

    def sequence_shares(self, strategy: ParallelStrategy) -> tuple[float, ...]:
        """The share of an image's tokens that each rank of a sequence axis takes; empty for equal shares.

        Ranks that must hold the same tokens, those of other stages and of the tensor axis, take their sum.
        """
        return tuple(map(sum, zip(*self.pipeline_shares(strategy), strict=True)))

    def split_tokens(self, strategy: ParallelStrategy, total: int) -> tuple[int, ...]:
        """`total` tokens over the sequence axis, by device_shares where there are any."""
        return split_sizes(total, strategy.sequence_degree, self.sequence_shares(strategy))


def crosses_machines(strategy: ParallelStrategy, devices: Sequence[str]) -> bool:
    """Whether ranks that exchange tokens or parts of layers in each block, many times a step, would sit on several
    machines. CFG, data and PipeFusion exchange little, and are the outer axes. `devices`: one per rank."""
    inner = strategy.sequence_degree * strategy.tensor_degree
    groups = (devices[first : first + inner] for first in range(0, strategy.world_size, inner))
    return any(len(set(map(machine_of, group))) > 1 for group in groups)


def split_sizes(total: int, parts: int, weights: tuple[float, ...] = ()) -> tuple[int, ...]:
    """Sizes of `parts` contiguous shares of `total`, as even as whole numbers allow; the first are the larger.

    With `weights`, in proportion to them (largest remainders), but at least 1 for each above 0 while there is enough.
    """
    if not weights:
        return tuple(total // parts + (i < total % parts) for i in range(parts))
    exact = [total * weight / sum(weights) for weight in weights]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(parts), key=lambda i: sizes[i] - exact[i])
    for i in by_remainder[: total - sum(sizes)]:
        sizes[i] += 1
    taking = [i for i in range(parts) if weights[i]]
    while total >= len(taking) and (empty := [i for i in taking if not sizes[i]]):
        sizes[sizes.index(max(sizes))] -= 1
        sizes[empty[0]] += 1
    return tuple(sizes)


def slice_of(sizes: tuple[int, ...], i: int) -> slice:
    """The range of share `i`."""
    begin = sum(sizes[:i])
    return slice(begin, begin + sizes[i])


def stage_blocks(count: int, shares: tuple[float, ...]) -> tuple[range, ...]:
    """Per stage its blocks, of `count`: a run of neighbours each, none empty. `shares`: how much each stage takes. Of
    equal ones the last stages take the surplus, since the first one has work around its blocks."""
    sizes = split_sizes(count, len(shares), shares)
    if len(set(shares)) == 1:
        sizes = sizes[::-1]
    ends = tuple(accumulate(sizes, initial=0))
    return tuple(map(range, ends, ends[1:]))

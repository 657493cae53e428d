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
REPLICA_AXES = (*ROW_AXES, *SEQUENCE_AXES)  # ranks that differ only on these hold the same weights


class RankCoordinates(NamedTuple):
    """A rank's coordinates in the layout of its strategy, in the order of AXES; `stage` is the PipeFusion stage."""

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
        """Returns the coordinates on `axes` (names from AXES), in the order of the layout."""
        return tuple(local for axis, local in zip(AXES, self, strict=True) if axis in axes)

    def row(self, strategy: ParallelStrategy) -> int:
        """Returns the index of this rank's share of the rows."""
        return self.data * strategy.cfg_degree + self.cfg

    def pipeline_shares(self, strategy: ParallelStrategy) -> list[list[float]]:
        """Returns the device_shares of this rank's pipeline as [stage][sequence rank]; empty for equal shares."""
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
        """Returns the relative share of the model's blocks for each stage of this rank's pipeline."""
        grid = self.pipeline_shares(strategy)
        return tuple(sum(stage) for stage in grid) or (1.0,) * strategy.pipefusion_degree

    def blocks(self, strategy: ParallelStrategy, count: int) -> range:
        """Returns the indices of the model's `count` blocks that this rank's stage computes; all without a pipeline."""
        return stage_blocks(count, self.stage_shares(strategy))[self.stage]

    def sequence_shares(self, strategy: ParallelStrategy) -> tuple[float, ...]:
        """Returns the relative share of an image's tokens for each rank of a sequence axis; empty for equal shares.

        Ranks that hold the same tokens (other stages, and the tensor axis) add up their shares.
        """
        return tuple(map(sum, zip(*self.pipeline_shares(strategy), strict=True)))

    def split_tokens(self, strategy: ParallelStrategy, total: int) -> tuple[int, ...]:
        """Splits `total` tokens over the sequence axis, in proportion to device_shares if there are any."""
        return split_sizes(total, strategy.sequence_degree, self.sequence_shares(strategy))


def crosses_machines(strategy: ParallelStrategy, devices: Sequence[str]) -> bool:
    """Returns True if ranks that exchange data in every block (sequence and tensor axes) would be on several machines.
    CFG, data and PipeFusion exchange little, and are the outer axes. `devices`: one per rank."""
    inner = strategy.sequence_degree * strategy.tensor_degree
    groups = (devices[first : first + inner] for first in range(0, strategy.world_size, inner))
    return any(len(set(map(machine_of, group))) > 1 for group in groups)


def split_sizes(total: int, parts: int, weights: tuple[float, ...] = ()) -> tuple[int, ...]:
    """Returns the sizes of `parts` contiguous shares of `total`, as equal as possible; the first are the larger.

    With `weights`, the sizes are proportional to them (largest remainders), and every share with a weight above 0 gets
    at least 1 if `total` suffices.
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
    """Returns the slice that share `i` covers."""
    begin = sum(sizes[:i])
    return slice(begin, begin + sizes[i])


def stage_blocks(count: int, shares: tuple[float, ...]) -> tuple[range, ...]:
    """Returns the block indices of each stage: contiguous ranges of `count` blocks, none empty. `shares`: the relative
    share of each stage. With equal shares the last stages take the surplus: the first has work besides its blocks."""
    sizes = split_sizes(count, len(shares), shares)
    if len(set(shares)) == 1:
        sizes = sizes[::-1]
    ends = tuple(accumulate(sizes, initial=0))
    return tuple(map(range, ends, ends[1:]))

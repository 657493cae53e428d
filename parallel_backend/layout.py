"""Where each rank stands in the layout of a strategy: its place on every axis. Pure functions."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from .strategy import DEGREES, ParallelStrategy

# Axes of the rank layout, slowest first, in the order of ParallelStrategy's degrees.
AXES = tuple(name.removesuffix("_degree") for name in DEGREES)


@dataclass(frozen=True)
class Place:
    """A rank's coordinates in the layout of its strategy, in the order of AXES; the stage is that of PipeFusion."""

    data: int
    cfg: int
    stage: int
    ring: int
    ulysses: int
    tensor: int

    @classmethod
    def of(cls, strategy: ParallelStrategy, rank: int) -> Place:
        found = []
        for name in reversed(DEGREES):
            rank, own = divmod(rank, getattr(strategy, name))
            found.append(own)
        return cls(*reversed(found))

    def on(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Its coordinates on `axes` (AXES), in the order of the layout."""
        return tuple(own for axis, own in zip(AXES, astuple(self), strict=True) if axis in axes)

    def row(self, strategy: ParallelStrategy) -> int:
        """Which share of the rows it computes."""
        return self.data * strategy.cfg_degree + self.cfg

    def pipeline_shares(self, strategy: ParallelStrategy) -> list[list[float]]:
        """device_shares of this rank's pipeline by stage and place in the sequence; empty for equal shares."""
        if not strategy.device_shares:
            return []
        inner = strategy.sequence_degree * strategy.tensor_degree
        first = self.row(strategy) * strategy.pipefusion_degree * inner
        own = strategy.device_shares[first : first + strategy.pipefusion_degree * inner]
        tensor = strategy.tensor_degree
        summed = [sum(own[i : i + tensor]) for i in range(0, len(own), tensor)]
        return [
            summed[i : i + strategy.sequence_degree] for i in range(0, len(summed), strategy.sequence_degree)
        ]

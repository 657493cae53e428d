"""Counts the communicators of a rank: on a GPU, each takes memory from its first use on."""

from __future__ import annotations

from ...layout import AXES, REPLICA_AXES, ROW_AXES, SEQUENCE_AXES, RankCoordinates
from ...strategy import DEGREES, ParallelStrategy
from .rank_memory import GPU_BASE_BYTES

# Memory of NCCL's buffers and channels for one communicator, of a group or of two ranks: an allowance, not measured
# here; users report 100 MB and more.
COMMUNICATOR_BYTES = 100_000_000


def count_communicators(strategy: ParallelStrategy, rank: int) -> int:
    """Returns the number of communicators of a job on `rank`; groups of the same ranks share one. Every job has one
    for all ranks, for the model calls of ComfyUI's loop, shared noise and the VAE."""
    split = {axis for axis, name in zip(AXES, DEGREES, strict=True) if getattr(strategy, name) > 1}
    several = (AXES, ROW_AXES, SEQUENCE_AXES, ("ring",), ("ulysses",), ("tensor",))
    count = len({frozenset(split.intersection(axes)) for axes in several} - {frozenset()})
    if strategy.shards and split.intersection(REPLICA_AXES):
        count += 1
    if strategy.pipefusion_degree > 1:
        last, stage = strategy.pipefusion_degree - 1, RankCoordinates.of(strategy, rank).stage
        neighbours = (stage > 0) + (stage < last)
        count += (
            neighbours + (stage in (0, last)) + 1
        )  # the link between the last and the first stage; the group that brings results back
    return count


def gpu_base_bytes(strategy: ParallelStrategy, rank: int) -> int:
    """Returns the GPU memory in bytes that a rank's process takes before any model."""
    return GPU_BASE_BYTES + COMMUNICATOR_BYTES * count_communicators(strategy, rank)

"""The communicators that a rank takes part in: on a GPU each holds memory from its first use on."""

from __future__ import annotations

from ...layout import AXES, REPLICA_AXES, ROW_AXES, SEQUENCE_AXES, RankCoordinates
from ...strategy import DEGREES, ParallelStrategy
from .rank_memory import GPU_BASE_BYTES

# NCCL's buffers and channels of one, for a group or for two ranks that send to each other: an allowance, not measured
# here; users report 100 MB and more.
COMMUNICATOR_BYTES = 100_000_000


def count_communicators(strategy: ParallelStrategy, rank: int) -> int:
    """Those of a job under `strategy` on `rank`; groups of the same ranks share one. All ranks have one in any job: for
    what ComfyUI's loop asks the model for, shared noise, the VAE."""
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
        )  # the last stage and the first one; what brings results back
    return count


def gpu_base_bytes(strategy: ParallelStrategy, rank: int) -> int:
    """What the process of a rank holds on its GPU before any model."""
    return GPU_BASE_BYTES + COMMUNICATOR_BYTES * count_communicators(strategy, rank)

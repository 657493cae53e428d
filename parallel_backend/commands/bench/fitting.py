"""Selects the strategies that are predicted to fit in memory, and replaces others by their sharded form."""

from __future__ import annotations

from collections.abc import Sequence

from ...planner.workload.fit import Capacity, MemoryCheck, fits
from ...planner.workload.rank_memory import fullest_rank
from ...planner.workload.workload import Job
from ...strategy import ParallelStrategy


def split_by_memory(
    strategies: Sequence[ParallelStrategy],
    job: Job,
    devices: tuple[str, ...],
    capacity: Capacity | None = None,
) -> tuple[list[ParallelStrategy], dict[ParallelStrategy, str]]:
    """Returns (the strategies to run, the reason for each one left out). One that does not fit is replaced by the same
    strategy with sharded weights if that fits. `capacity`: of `devices`, read now if None."""
    run: list[ParallelStrategy] = []
    left_out: dict[ParallelStrategy, str] = {}
    for strategy in strategies:
        check = MemoryCheck(job, strategy, devices[: strategy.world_size])
        if fits(check, capacity):
            run.append(strategy)
            continue
        needed = fullest_rank(check.memories).private_bytes
        left_out[strategy] = f"predicted not to fit: {needed / 1e9:.1f} GB on the fullest device"
        sharded = strategy.replace(shard_weights=True)
        if (
            strategy.world_size > 1
            and not sharded.violations(job.model.shape, len(devices))
            and fits(MemoryCheck(job, sharded, check.devices), capacity)
        ):
            run.append(sharded)
    return list(dict.fromkeys(run)), left_out

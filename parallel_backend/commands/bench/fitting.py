"""Selects the strategies that are predicted to fit in memory, one at a time or as warm groups side by side."""

from __future__ import annotations

from collections.abc import Sequence

from ...devices import is_cpu, machine_of
from ...planner.plan import USABLE_MEMORY
from ...planner.workload.fit import Capacity, MemoryCheck, fits
from ...planner.workload.rank_memory import fullest_rank
from ...planner.workload.workload import Job
from ...strategy import ParallelStrategy

Layout = tuple[int, ParallelStrategy]


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


def layout_of(strategy: ParallelStrategy) -> Layout:
    """Returns a key: strategies with the same one can share a group of ranks without loading the model again."""
    return strategy.world_size, strategy.weights


def fit_side_by_side(
    strategies: Sequence[ParallelStrategy],
    job: Job,
    devices: tuple[str, ...],
    capacity: Capacity | None = None,
) -> bool:
    """Returns True if one group of ranks per layout of the weights can stay warm at the same time. The first device has
    a rank of each. A machine of a cluster serves only one group. `capacity`: of `devices`, read now if None."""
    if machine_of(devices[0]):
        return len(set(map(layout_of, strategies))) == 1
    on_cpu, needed = is_cpu(devices), dict[Layout, int]()
    for strategy in strategies:
        memories = MemoryCheck(job, strategy, devices[: strategy.world_size]).memories
        size = sum(m.private_bytes for m in memories) if on_cpu else fullest_rank(memories).private_bytes
        needed[layout_of(strategy)] = max(size, needed.get(layout_of(strategy), 0))
    capacity = capacity or Capacity.of(devices)
    used = capacity.used_elsewhere or (0,) * len(capacity.sizes)
    free = [USABLE_MEMORY * size - held for size, held in zip(capacity.sizes, used, strict=True) if size]
    return sum(needed.values()) <= min(free, default=float("inf"))

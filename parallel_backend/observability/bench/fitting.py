"""The strategies that are worth starting: those predicted to fit, sharded ones in place of those that do not."""

from __future__ import annotations

from collections.abc import Sequence

from ...planner.cost.model import Machine
from ...planner.job import Job
from ...planner.memory.rank_memory import fullest_rank
from ...strategy import ParallelStrategy


def split_by_memory(
    strategies: Sequence[ParallelStrategy], job: Job, machine: Machine
) -> tuple[list[ParallelStrategy], dict[ParallelStrategy, str]]:
    """(what to run, why not for the rest). What does not fit runs with sharded weights, where that fits."""
    run: list[ParallelStrategy] = []
    left_out: dict[ParallelStrategy, str] = {}
    for strategy in strategies:
        needed = predicted_bytes(strategy, job)
        if needed <= machine.usable:
            run.append(strategy)
            continue
        left_out[strategy] = (
            f"predicted not to fit: {needed / 1e9:.1f} GB a GPU, and {machine.usable / 1e9:.1f} GB can be used"
        )
        sharded = strategy.replace(shard_weights=True)
        if (
            strategy.world_size > 1
            and not sharded.violations(job.model.shape, machine.count)
            and predicted_bytes(sharded, job) <= machine.usable
        ):
            run.append(sharded)
    return list(dict.fromkeys(run)), left_out


def predicted_bytes(strategy: ParallelStrategy, job: Job) -> float:
    """On the fullest device."""
    return fullest_rank(job.model.memory(job, strategy)).private_bytes

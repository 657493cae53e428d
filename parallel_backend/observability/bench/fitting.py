"""Which strategies are worth starting: those predicted to fit, sharded ones in place of those that do not."""

from __future__ import annotations

from collections.abc import Sequence

from ...planner.cost.communication import Work
from ...planner.cost.model import Machine, memory_per_rank
from ...planner.history.records import candidate_of
from ...strategy import ModelShape, ParallelStrategy


def split_by_memory(
    strategies: Sequence[ParallelStrategy], work: Work, machine: Machine, model: ModelShape
) -> tuple[list[ParallelStrategy], dict[ParallelStrategy, str]]:
    """(what to run, why not for the rest). What does not fit runs with sharded weights, where that fits."""
    run: list[ParallelStrategy] = []
    left_out: dict[ParallelStrategy, str] = {}
    for strategy in strategies:
        needed = _bytes(strategy, work)
        if needed <= machine.usable:
            run.append(strategy)
            continue
        left_out[strategy] = (
            f"predicted not to fit: {needed / 1e9:.1f} GB a GPU, and {machine.usable / 1e9:.1f} GB can be used"
        )
        sharded = strategy.replace(shard_weights=True)
        if (
            strategy.world_size > 1
            and not sharded.violations(model, machine.count)
            and _bytes(sharded, work) <= machine.usable
        ):
            run.append(sharded)
    return list(dict.fromkeys(run)), left_out


def _bytes(strategy: ParallelStrategy, work: Work) -> float:
    candidate = candidate_of(strategy)
    return 0.0 if candidate is None else memory_per_rank(work, candidate)

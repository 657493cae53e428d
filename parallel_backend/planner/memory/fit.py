"""How much memory each device has, and the smallest change that makes a request fit that does not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...devices import is_cpu
from ...errors import StrategyError
from ...models.flux.checkpoint import FluxFile
from ...strategy import ParallelStrategy
from ..machine.device_shares import device_memory
from .model import Job, RankMemory, fullest_rank, in_gib, predict_memory

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class MemoryCheck:
    """What is about to run, as far as its memory goes. `devices`: one per rank of `strategy`."""

    file: FluxFile
    weight_dtype: str
    strategy: ParallelStrategy
    job: Job
    devices: tuple[str, ...]

    @property
    def memories(self) -> tuple[RankMemory, ...]:
        """Predicted, in rank order."""
        return predict_memory(
            self.file.dims,
            self.file.dtype,
            self.strategy,
            self.job,
            weight_dtype=self.weight_dtype,
            on_cpu=is_cpu(self.devices),
        )


def check_capacity(plan: MemoryCheck, sizes: tuple[int, ...] | None = None) -> RankMemory:
    """The fullest rank of `plan`. Raises StrategyError when it cannot fit, with the smallest change that does.

    `sizes`: bytes of each device, or of the computer's memory that ranks on the CPU share; 0 where nobody could tell.
    """
    sizes = _sizes(plan.devices) if sizes is None else sizes
    over = _overfull(plan, sizes)
    if over is None:
        return fullest_rank(plan.memories)
    change = next((words for words, other in _changes(plan) if _overfull(other, sizes) is None), None)
    raise StrategyError(
        f"This does not fit: {over} The smallest change that would fit: "
        f"{change or 'none of this version; use a smaller model, or devices with more memory'}."
    )


def fits(plan: MemoryCheck, sizes: tuple[int, ...] | None = None) -> bool:
    return _overfull(plan, _sizes(plan.devices) if sizes is None else sizes) is None


def _overfull(plan: MemoryCheck, sizes: tuple[int, ...]) -> str | None:
    """What is too full, in words."""
    memories = plan.memories
    if is_cpu(plan.devices):
        needed = sum(memory.private_bytes for memory in memories)
        if not sizes or not 0 < sizes[0] < needed:
            return None
        return (
            f"{len(memories)} rank(s) on the CPU need about {in_gib(needed)} GiB beside the model's file, and this "
            f"computer has {in_gib(sizes[0])} GiB."
        )
    for memory, device, size in zip(memories, plan.devices, sizes, strict=False):
        if 0 < size < memory.private_bytes:
            return (
                f"{plan.strategy.describe()} needs about {memory.describe()} on {device}, which has "
                f"{in_gib(size)} GiB."
            )
    return None


def _changes(plan: MemoryCheck) -> Iterator[tuple[str, MemoryCheck]]:
    """Changes in words, from those that give the same picture as fast to those that give another one."""
    strategy, job = plan.strategy, plan.job
    alike = strategy.row_degree * strategy.sequence_degree
    if strategy.pipefusion_degree == 1 and not is_cpu(plan.devices):
        if not strategy.shards and alike > 1:
            yield (
                "shard_weights on (same picture)",
                replace(plan, strategy=strategy.replace(shard_weights=True)),
            )
        if not strategy.offload_weights:
            offloaded = strategy.replace(shard_weights=alike > 1, offload_weights=True)
            yield "offload_weights on (same picture, slower)", replace(plan, strategy=offloaded)
    if plan.weight_dtype != _FP8 and plan.file.dtype != _FP8 and not is_cpu(plan.devices):
        yield (
            f"weight_dtype {_FP8} (half the weights' memory, nearly the same picture)",
            replace(plan, weight_dtype=_FP8),
        )
    for images in sorted({job.images // 2, job.images // 4, 1} - {0, job.images}, reverse=True):
        yield f"a batch of {images} instead of {job.images}", replace(plan, job=replace(job, images=images))
    for percent in (75, 50, 35, 25):
        height, width = job.height * percent // 100, job.width * percent // 100
        if height and width:
            yield (
                f"an image of {width * 8}x{height * 8} instead of {job.width * 8}x{job.height * 8}",
                replace(plan, job=replace(job, images=1, height=height, width=width)),
            )


def _sizes(devices: tuple[str, ...]) -> tuple[int, ...]:
    return (host_memory(),) if is_cpu(devices) else device_memory(devices)


def host_memory(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Bytes of main memory that this process may use: the computer's, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(cgroup_limit.read_text())
    except (OSError, ValueError):  # no such limit, or `max`
        return total
    return min(total, limit)

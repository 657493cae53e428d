"""Checks a job against the memory of its devices, and names the smallest change that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ...devices import is_cpu
from ...errors import StrategyError
from ...host_memory import host_memory
from ...layout import RankCoordinates, stage_blocks
from ...machine.device_shares import device_memory
from ...strategy import ParallelStrategy
from .in_use import used_by_other_programs
from .memory import predict_memory
from .rank_memory import RankMemory, in_gib
from .workload import Job


@dataclass(frozen=True)
class MemoryCheck:
    """The memory check of a job that is about to run. `devices`: one per rank of `strategy`."""

    job: Job
    strategy: ParallelStrategy
    devices: tuple[str, ...]

    @classmethod
    def on(cls, job: Job, strategy: ParallelStrategy, devices: tuple[str, ...]) -> MemoryCheck:
        """Returns the check on the first of `devices`."""
        return cls(job, strategy, devices[: strategy.world_size])

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        """The predicted memory of each rank, in rank order."""
        return predict_memory(self.job, self.strategy, on_cpu=is_cpu(self.devices))

    @property
    def fullest(self) -> RankMemory:
        """The memory of the rank that needs most."""
        return max(self.memories, key=lambda memory: memory.private_bytes)


@dataclass(frozen=True)
class Capacity:
    """The available memory. `sizes`: bytes of each device, or one entry for the host memory that CPU ranks share; 0 if
    unknown. `used_elsewhere`: bytes that other programs use on each device now."""

    sizes: tuple[int, ...]
    used_elsewhere: tuple[int, ...] = ()

    @property
    def in_use(self) -> tuple[int, ...]:
        """`used_elsewhere` of each entry of `sizes`."""
        return self.used_elsewhere or (0,) * len(self.sizes)

    @staticmethod
    def of(devices: tuple[str, ...]) -> Capacity:
        if is_cpu(devices):
            return Capacity((host_memory(),))
        return Capacity(device_memory(devices), used_by_other_programs(devices))


def check_capacity(check: MemoryCheck, capacity: Capacity | None = None) -> RankMemory:
    """Returns the fullest rank's memory. Raises StrategyError if it is too much, with the smallest change that fits."""
    capacity = capacity or Capacity.of(check.devices)
    over = _overfull(check, capacity)
    if over is None:
        return check.fullest
    change = next((words for words, other in _changes(check) if _overfull(other, capacity) is None), None)
    raise StrategyError(
        f"This does not fit: {over} The smallest change that would fit: "
        f"{change or 'none of this version; use a smaller model, or devices with more memory'}."
    )


def fits(check: MemoryCheck, capacity: Capacity | None = None, *, share: float = 1.0) -> bool:
    """Returns True if the job fits in the `share` of each device's memory."""
    capacity = capacity or Capacity.of(check.devices)
    capacity = replace(capacity, sizes=tuple(int(share * size) for size in capacity.sizes))
    return _overfull(check, capacity) is None


def cut_by_memory(check: MemoryCheck, capacity: Capacity, *, share: float = 1.0) -> ParallelStrategy | None:
    """Returns the strategy with its stages cut so that each fits in the `share` of its devices' memory, close to equal
    numbers of blocks; None if no cut fits, or the cut is not to be moved (shares set by hand, CPU, no stages)."""
    strategy = check.strategy
    stages = strategy.pipefusion_degree
    if stages == 1 or strategy.device_shares or is_cpu(check.devices):
        return None
    counts = [len(blocks) for blocks in stage_blocks(check.job.model.shape.blocks, (1.0,) * stages)]
    stage_of = [RankCoordinates.of(strategy, rank).stage for rank in range(strategy.world_size)]
    tried: set[tuple[int, ...]] = set()
    while min(counts) and tuple(counts) not in tried:
        tried.add(tuple(counts))
        moved = strategy.replace(device_shares=tuple(float(counts[stage]) for stage in stage_of))
        memories = replace(check, strategy=moved).memories
        excess = [
            memory.private_bytes + held - int(share * size) if size else -memory.private_bytes
            for memory, size, held in zip(memories, capacity.sizes, capacity.in_use, strict=True)
        ]
        if max(excess) <= 0:
            return moved
        by_stage = [
            max(e for e, its in zip(excess, stage_of, strict=True) if its == stage) for stage in range(stages)
        ]
        counts[by_stage.index(max(by_stage))] -= 1
        counts[by_stage.index(min(by_stage))] += 1
    return None


def _overfull(check: MemoryCheck, capacity: Capacity) -> str | None:
    """Returns a sentence on the first device that is too full; None if all fits."""
    memories, sizes = check.memories, capacity.sizes
    if is_cpu(check.devices):
        needed = sum(memory.private_bytes for memory in memories)
        if not sizes or not 0 < sizes[0] < needed:
            return None
        return (
            f"Processes on the CPU ({len(memories)}) need about {in_gib(needed)} GiB beside the model's file, and this "
            f"computer has {in_gib(sizes[0])} GiB."
        )
    for memory, device, size, held in zip(memories, check.devices, sizes, capacity.in_use, strict=False):
        if 0 < size < memory.private_bytes + held:
            beside = (
                f", of which {in_gib(held)} are used by other programs or reserved for them" if held else ""
            )
            return (
                f"{check.strategy.describe()} needs about {memory.describe()} on {device}, which has "
                f"{in_gib(size)} GiB{beside}."
            )
    return None


def _changes(check: MemoryCheck) -> Iterator[tuple[str, MemoryCheck]]:
    """Yields changes in words and as checks: first those that keep the picture and speed, last those that change it."""
    strategy, job = check.strategy, check.job
    if strategy.pipefusion_degree == 1 and not is_cpu(check.devices):
        if not strategy.shards and strategy.replicas > 1:
            yield (
                "shard_weights on (same picture)",
                replace(check, strategy=strategy.replace(shard_weights=True)),
            )
        if not strategy.offload_weights:
            offloaded = strategy.replace(shard_weights=strategy.replicas > 1, offload_weights=True)
            yield "offload_weights on (same picture, slower)", replace(check, strategy=offloaded)
    fp8 = job.model.in_fp8
    if fp8 is not None and not is_cpu(check.devices):
        yield (
            "weight_dtype float8_e4m3fn (half the weights' memory, nearly the same picture)",
            replace(check, job=replace(job, model=fp8)),
        )
    for batch in sorted({job.batch // 2, job.batch // 4, 1} - {0, job.batch}, reverse=True):
        yield f"a batch of {batch} instead of {job.batch}", replace(check, job=replace(job, batch=batch))
    for percent in (75, 50, 35, 25):
        pixels = job.model.family.latent_pixels
        height, width = (side * percent // 100 * pixels for side in job.latent_size)
        if height and width:
            yield (
                f"an image of {width}x{height} instead of {job.width}x{job.height}",
                replace(check, job=replace(job, batch=1, height=height, width=width)),
            )

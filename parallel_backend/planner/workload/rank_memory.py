"""The predicted memory of one rank at its fullest moment."""

from __future__ import annotations

from dataclasses import dataclass

from ...layout import AXES, REPLICA_AXES, ROW_AXES, SEQUENCE_AXES, RankCoordinates
from ...strategy import DEGREES, ParallelStrategy

# A CUDA context and the allocator's slack on each GPU, without communicators: an allowance, not measured here.
GPU_BASE_BYTES = 1_500_000_000
# Memory of NCCL's buffers and channels for one communicator, of a group or of two ranks: an allowance, not measured
# here; users report 100 MB and more.
COMMUNICATOR_BYTES = 100_000_000
# Private memory of an idle CPU rank that has run a job and imported ComfyUI (benchmarks/memory.py --full-size measures
# it).
CPU_BASE_BYTES = 350_000_000


@dataclass(frozen=True)
class RankMemory:
    """Predicted bytes of one rank at its fullest moment.

    `weights`: in the rank's own memory, with gathered ones; `activations`: of a model call; `buffers`: latents,
    messages and caches during the call; `base`: the process itself. `mapped`: weights used in place in the mapped file
    that all ranks share (CPU only); `host`: weights in pinned host memory (offload). `fullest`: where the peak is.
    """

    rank: int
    weights: int
    activations: int
    buffers: int
    base: int
    mapped: int = 0
    host: int = 0
    fullest: str = ""

    @property
    def private_bytes(self) -> int:
        """The bytes that this rank shares with no other: on a GPU its device memory."""
        return self.weights + self.activations + self.buffers + self.base

    def in_short(self, where: str) -> str:
        """Returns one sentence: the need of each `where` (GPU or process), and what the computer needs once."""
        each = f"Needs about {in_gib(self.private_bytes)} GiB per {where}"
        return f"{each}, plus {in_gib(self.mapped)} GiB of memory once." if self.mapped else f"{each}."

    def describe(self) -> str:
        """Returns a text, e.g. `26.1 GiB (weights 22.2, activations 0.6, buffers 1.9, the process itself 1.4)`."""
        parts = (
            f"{in_gib(self.private_bytes)} GiB (weights {in_gib(self.weights)}, activations "
            f"{in_gib(self.activations)}, buffers {in_gib(self.buffers)}, the process itself {in_gib(self.base)})"
        )
        if self.mapped:
            parts += f"; once for all processes, {in_gib(self.mapped)} GiB of the model's file"
        if self.host:
            parts += f"; and {in_gib(self.host)} GiB of host memory"
        return parts


NO_MEMORY = RankMemory(0, 0, 0, 0, 0)


def in_gib(size: float) -> str:
    """Formats bytes as GiB, with two decimals below ten and one above."""
    gib = size / 2**30
    return f"{gib:.2f}" if gib < 10 else f"{gib:.1f}"


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
        # The link between the last and the first stage; the group that brings results back.
        count += neighbours + (stage in (0, last)) + 1
    return count


def gpu_base_bytes(strategy: ParallelStrategy, rank: int) -> int:
    """Returns the GPU memory in bytes that a rank's process takes before any model."""
    return GPU_BASE_BYTES + COMMUNICATOR_BYTES * count_communicators(strategy, rank)

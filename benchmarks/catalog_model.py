"""A published family as the model of a job, with a closed form for a rank's memory."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parallel_backend.machine.fingerprint import hashed
from parallel_backend.models.arithmetic import Family
from parallel_backend.options import DEFAULT_COMPUTE, ComputeOptions
from parallel_backend.planner.workload.rank_memory import RankMemory, gpu_base_bytes
from parallel_backend.planner.workload.workload import Job
from parallel_backend.strategy import ModelShape, ParallelStrategy

# A block's live activations per token in hidden widths: residual, norm, q, k, v, their copies, feed-forward of ratio 4.
LIVE_WIDTHS = 20
_ELEMENT = 2  # bytes of bf16


def estimate_memory(job: Job, strategy: ParallelStrategy) -> RankMemory:
    """Estimates a rank's weights, live activations, communication buffers and GPU runtime; no text encoder or VAE."""
    family = job.model.family
    rows = -(-job.rows // strategy.row_degree)
    tokens = (job.image_tokens + job.text_tokens) / strategy.sequence_degree
    weights = job.model.weight_bytes / (strategy.tensor_degree * strategy.pipefusion_degree)
    if strategy.shard_weights:
        # The rank's share, and two gathered blocks: the one in use and the one being gathered.
        weights = weights / strategy.world_size + 2 * weights / max(1, family.block_count)
    layer = rows * tokens * family.hidden * _ELEMENT
    activations = layer * LIVE_WIDTHS / strategy.tensor_degree
    if strategy.sequence_degree > 1:
        activations += 4 * layer
    buffers = 0.0
    if strategy.pipefusion_degree > 1:
        # PipeFusion keeps the keys and values of every token for its own blocks.
        activations = activations / strategy.pipeline_patches
        buffers = 2 * layer * family.block_count / strategy.pipefusion_degree
    return RankMemory(0, int(weights), int(activations), int(buffers), gpu_base_bytes(strategy, 0))


@dataclass(frozen=True)
class CatalogModel:
    """A published family without a file. `storage`: bytes per weight."""

    family: Family
    storage: float = 2.0
    compute_options: ComputeOptions = DEFAULT_COMPUTE

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.family.heads, self.family.block_count, self.family.name)

    @property
    def weight_bytes(self) -> float:
        return self.family.parameters * self.storage

    @property
    def uncompiled(self) -> CatalogModel:
        return self.with_compile("off")

    def with_compile(self, mode: str) -> CatalogModel:
        return replace(self, compute_options=replace(self.compute_options, compile=mode))

    @property
    def in_fp8(self) -> CatalogModel | None:
        return replace(self, storage=1.0) if self.storage > 1 else None

    @property
    def key(self) -> str:
        return hashed(self.family.name, str(self.storage), *map(str, asdict(self.compute_options).items()))

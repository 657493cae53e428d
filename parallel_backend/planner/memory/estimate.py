"""The memory of a rank for a model of which only the family is known, in closed form. Pure functions."""

from __future__ import annotations

from ...strategy import ParallelStrategy
from ..job import Job
from .communicators import gpu_base_bytes
from .rank_memory import RankMemory

# Live activations of a block per token, in widths: residual, norm, q, k, v, their copies, feed-forward of ratio 4.
LIVE_WIDTHS = 20
_ELEMENT = 2  # bytes of bf16


def estimate_memory(job: Job, strategy: ParallelStrategy) -> RankMemory:
    """Weights, live activations, communication buffers and the runtime of a GPU; no text encoder or VAE."""
    family = job.model.family
    rows = -(-job.rows // strategy.row_degree)
    tokens = (job.image_tokens + job.text_tokens) / strategy.sequence_degree
    weights = job.model.weight_bytes / (strategy.tensor_degree * strategy.pipefusion_degree)
    if strategy.shard_weights:
        # Its own share, and two gathered blocks: the one in use and the one on its way.
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

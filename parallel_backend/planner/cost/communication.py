"""The traffic of a strategy in one denoising step: messages, bytes and who talks to whom, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...strategy import DEGREES, ParallelStrategy
from ..job import Job
from ..machine.cards import Interconnect, LinkLoad

ACTIVATION_BYTES = 2  # bf16 activations


@dataclass(frozen=True)
class StepTraffic:
    """All messages of one kind in one step. `sent`: bytes from one rank; `calls`: collectives or hops it joins."""

    kind: str  # "ulysses", "ring", "tensor", "pipefusion", "weights" or "rows"
    calls: int
    sent: float


def exchanges(job: Job, strategy: ParallelStrategy) -> tuple[StepTraffic, ...]:
    """Everything a rank sends in one step under `strategy` (DeepSpeed-Ulysses §3.2; Megatron-LM §3; PipeFusion §4)."""
    s, f = strategy, job.model.family
    rows = -(-job.rows // s.row_degree)
    per_stage = 1 / s.pipefusion_degree
    found = []
    ulysses, ring, tensor = s.ulysses_degree, s.ring_degree, s.tensor_degree
    sent = {"ulysses": 0.0, "ring": 0.0, "tensor": 0.0}
    reduces = 0.0
    for blocks in f.blocks:
        moved = f.split_tokens(job.image_tokens, job.text_tokens, blocks)
        layer = blocks.count * per_stage * rows * f.hidden / tensor * ACTIVATION_BYTES
        local = moved / s.sequence_degree
        # q, k, v and the output: each rank keeps 1/U of what it has and sends the rest.
        sent["ulysses"] += 4 * layer * local * (ulysses - 1) / ulysses
        # k and v of 1/R of the tokens, for 1/U of the heads, passed on R - 1 times.
        sent["ring"] += 2 * layer * (moved / ring) * (ring - 1) / ulysses
        # An all-reduce sends 2 (T - 1) / T of the full width.
        tokens = (job.image_tokens + job.text_tokens) / s.sequence_degree
        sent["tensor"] += 2 * blocks.reduces * layer * tensor * tokens * (tensor - 1) / tensor
        reduces += blocks.reduces * blocks.count * per_stage
    count = f.block_count * per_stage
    if ulysses > 1:
        found.append(StepTraffic("ulysses", round(4 * count), sent["ulysses"]))
    if ring > 1:
        found.append(StepTraffic("ring", round(count * (ring - 1)), sent["ring"]))
    if tensor > 1:
        found.append(StepTraffic("tensor", round(reduces), sent["tensor"]))
    if s.pipefusion_degree > 1:
        tokens = (job.image_tokens + job.text_tokens) / s.sequence_degree
        sent_on = rows * tokens * f.hidden * ACTIVATION_BYTES
        found.append(StepTraffic("pipefusion", s.pipeline_patches, sent_on))
    if s.shard_weights and s.world_size > 1:
        share = job.model.weight_bytes / (tensor * s.pipefusion_degree) / s.world_size
        found.append(StepTraffic("weights", round(count), share * (s.world_size - 1)))
    if s.row_degree > 1:
        latent = job.image_tokens * 64 * 4 * rows  # one patch: 64 numbers in fp32
        found.append(StepTraffic("rows", 1, latent * (s.row_degree - 1)))
    return tuple(found)


def axis_groups(strategy: ParallelStrategy, axis: str) -> list[list[int]]:
    """Rank groups along one degree, in ParallelStrategy's layout (the last degree varies fastest)."""
    degrees = [getattr(strategy, name) for name in DEGREES]
    at = DEGREES.index(axis)
    stride = 1
    for degree in degrees[at + 1 :]:
        stride *= degree
    size, world = degrees[at], strategy.world_size
    starts = [r for r in range(world) if (r // stride) % size == 0]
    return [[start + i * stride for i in range(size)] for start in starts]


@lru_cache(maxsize=4096)
def unit_load(link: Interconnect, strategy: ParallelStrategy, kind: str) -> LinkLoad:
    """The load on the link when all groups of the strategy exchange one byte per rank together."""
    if kind == "ulysses":
        groups = axis_groups(strategy, "ulysses_degree")
        return link.load((a, b, 1 / (len(g) - 1)) for g in groups for a in g for b in g if a != b)
    if kind == "weights":
        groups = [list(range(strategy.world_size))]
    elif kind == "rows":
        axis = "cfg_degree" if strategy.cfg_degree > 1 else "data_degree"
        groups = axis_groups(strategy, axis)
    else:
        groups = axis_groups(strategy, f"{kind}_degree")
    # A ring: NCCL's all-reduce and all-gather, ring attention, and the stages of a pipeline.
    return link.load((a, g[(i + 1) % len(g)], 1.0) for g in groups for i, a in enumerate(g))

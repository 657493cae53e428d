"""The sheet of a strategy: FLOPs and bytes of a device in one step, and the time that no step can go below.

Pure arithmetic on the sizes of a job and on data sheets; nothing is fitted to measurements, and nothing here is a
prediction of a time. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..machine.cards import Card, Interconnect
from ..strategy import ParallelStrategy
from .job import Job

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


def compute_share(job: Job, strategy: ParallelStrategy) -> float:
    """Share of the one-GPU arithmetic that the busiest rank does, with what does not divide rounded up."""
    s, f = strategy, job.model.family
    rows = -(-job.rows // s.row_degree) / job.rows
    tokens = job.image_tokens + job.text_tokens
    sequence = -(-tokens // s.sequence_degree) / tokens
    parts = s.ulysses_degree * s.tensor_degree
    # Heads that do not divide are padded; where nobody knows how many there are, they divide.
    heads = -(-f.heads // parts) * parts / f.heads if f.heads else 1.0
    stage = -(-f.block_count // s.pipefusion_degree) / f.block_count if f.block_count else 1.0
    return rows * sequence * max(1.0, heads) / s.tensor_degree * stage


def bytes_sent(job: Job, strategy: ParallelStrategy) -> float:
    """From one device in one step."""
    return sum(exchange.sent for exchange in exchanges(job, strategy))


def lower_bound(job: Job, strategy: ParallelStrategy, card: Card, link: Interconnect | None = None) -> float:
    """Seconds below which no step can go: the busiest device computes its share at the card's peak rate, reads its
    weights, and sends its bytes over the link (where one is given) at its nominal rate, all at the same time.

    Weights of a byte each may be multiplied at twice the rate of bf16.
    """
    peak = card.tflops * 1e12 * (2 if job.model.weight_bytes <= 1.01 * job.model.family.parameters else 1)
    computing = job.flop * compute_share(job, strategy) / peak
    held = job.model.weight_bytes / (strategy.pipefusion_degree * strategy.tensor_degree)
    reading = held / (card.bandwidth * 1e9)
    sending = 0.0 if link is None else bytes_sent(job, strategy) / (link.rate * 1e9)
    return max(computing, reading, sending)

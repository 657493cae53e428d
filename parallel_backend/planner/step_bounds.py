"""Bounds of a strategy's step: the FLOPs and bytes of one device, and the time that no step can go below.

Pure arithmetic on a job's sizes and on data sheets: nothing is fitted to measurements or predicts a time. Imports no
torch.
"""

from __future__ import annotations

from ..machine.cards import Card, find_card
from ..machine.topology import Topology
from ..strategy import ParallelStrategy
from .workload.workload import Job

ACTIVATION_BYTES = 2  # bf16 activations


def ulysses_bytes(tokens: float, ranks: int, tensors: int = 4) -> float:
    """Returns what one of `ranks` ranks sends in the attention of one row, to multiply by the width of a token and the
    bytes of a number: q, k, v and the output without the part that it keeps (DeepSpeed-Ulysses §3.2)."""
    return tensors * tokens / ranks * (ranks - 1) / ranks


def bytes_sent(job: Job, strategy: ParallelStrategy) -> float:
    """Returns what one device sends in one step (DeepSpeed-Ulysses §3.2; Megatron-LM §3; PipeFusion §4)."""
    s, f = strategy, job.model.family
    rows = -(-job.rows // s.row_degree)
    ulysses, ring, tensor = s.ulysses_degree, s.ring_degree, s.tensor_degree
    tokens = (job.image_tokens + job.text_tokens) / s.sequence_degree
    sent = 0.0
    queries = s.sequence_degree > 1 and not job.model.shape.splits_tokens
    for blocks in f.blocks if not job.model.shape.band_rows else ():  # bands: not counted
        if queries:  # each device sends attention's output for its share to all others
            sent += blocks.count * rows * f.hidden * ACTIVATION_BYTES * tokens * (s.sequence_degree - 1)
            continue
        moved = job.image_tokens + (job.text_tokens if blocks.attends == "joint" else 0)  # of q, k and v
        layer = blocks.count / s.pipefusion_degree * rows * f.hidden / tensor * ACTIVATION_BYTES
        # Two ranks may send a token once instead of half its q, k and v (engine/attention/projections.py).
        sent += layer * ulysses_bytes(moved / ring, ulysses, 3 if s.sends_tokens else 4)
        # k and v of 1/R of the tokens, for 1/U of the heads, passed on R - 1 times.
        sent += 2 * layer * (moved / ring) * (ring - 1) / ulysses
        # An all-reduce sends 2 (T - 1) / T of the full width.
        sent += 2 * blocks.reduces * layer * tensor * tokens * (tensor - 1) / tensor
    if s.pipefusion_degree > 1:
        sent += rows * tokens * f.hidden * ACTIVATION_BYTES
    if s.shard_weights and s.world_size > 1:
        share = job.model.weight_bytes / (tensor * s.pipefusion_degree) / s.world_size
        sent += share * (s.world_size - 1)
    if s.row_degree > 1:
        latent = job.image_tokens * 64 * 4 * rows  # one patch: 64 numbers in fp32
        sent += latent * (s.row_degree - 1)
    return sent


def step_by_links(
    job: Job, strategy: ParallelStrategy, one_device_s: float, bytes_per_second: float, latency_s: float
) -> float:
    """Returns the seconds of a step computed from one device's step time and the links: the busiest device's share of
    the arithmetic plus all exchanges, with no overlap. For display beside measurements; no choice depends on it."""
    exchanges = 2 * job.model.family.block_count if strategy.sequence_degree > 1 else 1
    sent_s = bytes_sent(job, strategy) / bytes_per_second + exchanges * latency_s
    return one_device_s * compute_share(job, strategy) + sent_s


def compute_share(job: Job, strategy: ParallelStrategy) -> float:
    """Returns the share of one GPU's arithmetic that the busiest rank does; uneven splits are rounded up."""
    s, f = strategy, job.model.family
    rows = -(-job.rows // s.row_degree) / job.rows
    if s.sequence_degree > 1 and not job.model.shape.splits_tokens:  # only attention's queries are split
        return rows * (1 - job.attention_share * (1 - 1 / s.sequence_degree))
    tokens = int(job.most_bands) if job.model.shape.band_rows else job.image_tokens + job.text_tokens
    sequence = -(-tokens // s.sequence_degree) / tokens
    parts = s.ulysses_degree * s.tensor_degree
    # Heads that do not divide are padded; an unknown number of heads is taken to divide.
    heads = -(-f.heads // parts) * parts / f.heads if f.heads else 1.0
    stage = -(-f.block_count // s.pipefusion_degree) / f.block_count if f.block_count else 1.0
    return rows * sequence * max(1.0, heads) / s.tensor_degree * stage


def fastest_card(topology: Topology) -> Card | None:
    """Returns the fastest card, whose bounds hold on each device; None for a CPU. Raises RequestError for an unknown
    card."""
    cards = (find_card(device.name.split(" MIG ")[0]) for device in topology.devices)
    return max(cards, key=lambda card: card.tflops, default=None)


def lower_bound(job: Job, strategy: ParallelStrategy, card: Card) -> float:
    """Returns the least seconds of a step: the busiest device computes its share at the card's peak rate and reads its
    weights at the same time.

    One-byte weights may be multiplied at twice the rate of bf16.
    """
    peak = card.tflops * 1e12 * (2 if job.model.weight_bytes <= 1.01 * job.model.family.parameters else 1)
    computing = job.flop * compute_share(job, strategy) / peak
    held = job.model.weight_bytes / (strategy.pipefusion_degree * strategy.tensor_degree)
    reading = held / (card.bandwidth * 1e9)
    return max(computing, reading)

"""Closed forms of what each rank sends per model call, to check the counted bytes against."""

from __future__ import annotations

from ..shares import share
from ..strategy import ParallelStrategy
from .plan import TokenPlan


def expected_bytes(
    strategy: ParallelStrategy,
    rank: int,
    *,
    rows: int,
    text: int,
    image: int,
    layers: int,
    hidden: int,
    latent_elements: int,
    patch_channels: int = 64,
    element_size: int = 4,
) -> int:
    """Payload bytes that `rank` sends in one forward of `rows` rows with `text` + `image` tokens each.

    Per layer, with s tokens on this rank, S in its Ulysses group of U ranks, and n rows in its share:
    Ulysses sends q, k, v and the output for the other ranks' heads and tokens: (3 s (U-1) + (S - s)) / U * hidden * n;
    Ring passes every share of keys and values but the one that ends here: 2 * sum(shares) / U * hidden * n.
    After the last layer the outputs are gathered in float32: image tokens over the sequence, latents over the rows.
    """
    u, r = strategy.ulysses_degree, strategy.ring_degree
    sequence = u * r
    plan = TokenPlan.split(text, image, sequence)
    row_index, sequence_index = divmod(rank, sequence)
    row_sizes = share(rows, strategy.row_degree)
    n = row_sizes[row_index]
    ring_index = sequence_index // u
    group = [sum(plan.lengths[i * u : (i + 1) * u]) for i in range(r)]
    s, whole = plan.lengths[sequence_index], group[ring_index]

    per_layer = (3 * s * (u - 1) + (whole - s)) * hidden // u
    # This rank sends on its own share first and then all it receives, except the share that would come home.
    sent_on = [group[(ring_index - hop) % r] for hop in range(r - 1)]
    per_layer += 2 * sum(sent_on) * hidden // u
    gather = (sequence - 1) * max(plan.image) * patch_channels if n else 0
    rows_gather = (strategy.row_degree - 1) * max(row_sizes) * latent_elements
    return n * (layers * per_layer * element_size + gather * 4) + rows_gather * 4

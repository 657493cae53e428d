"""Closed forms of the bytes that each rank sends per model call. Tests compare counted bytes to them."""

from __future__ import annotations

from parallel_backend.layout import split_sizes
from parallel_backend.strategy import ParallelStrategy


def attention_elements(
    streams: tuple[tuple[tuple[int, ...], ...], ...],
    held: tuple[int, ...],
    index: int,
    strategy: ParallelStrategy,
    hidden: int,
) -> int:
    """Returns the elements that rank `index` of a sequence axis sends for one attention of one row.

    `streams`: one entry per separate projection: by kind (text, image), the token count of each rank; `held`: per rank,
    the tokens whose keys and values go round the ring. This rank has s tokens, its Ulysses group of U ranks has S.
    Ulysses sends q, k, v and the output for the other ranks' heads and tokens: (3 s (U-1) + (S - s)) / U * hidden. If
    two ranks send tokens instead, and both have tokens of each kind, the first min(s, S - s) tokens cost 1 * hidden
    each and not 3 / 2 * hidden. Ring passes on every share except the one that ends here.
    """

    ulysses, ring = strategy.ulysses_degree, strategy.ring_degree

    def groups(tokens: tuple[int, ...]) -> list[int]:
        return [sum(tokens[i * ulysses : (i + 1) * ulysses]) for i in range(ring)]

    member, exchanged = index // ulysses, 0
    for kinds in streams:
        lengths = tuple(map(sum, zip(*kinds, strict=True)))
        own, pair = lengths[index], slice(member * ulysses, (member + 1) * ulysses)
        sends_tokens = strategy.sends_tokens and all(all(kind[pair]) for kind in kinds)
        before = min(lengths[pair]) if sends_tokens else 0
        arriving = before * ulysses + 3 * (own - before) * (ulysses - 1)
        exchanged += (arriving + groups(lengths)[member] - own) * hidden // ulysses
    # This rank sends its local share first, then every share that it receives except that of the next rank.
    sent_on = [groups(held)[(member - hop) % ring] for hop in range(ring - 1)]
    return exchanged + 2 * sum(sent_on) * hidden // ulysses


def share_of_tokens_sent(hidden: int, inner: int, blocks: int, norms: int = 0) -> float:
    """Returns the bytes that two ranks send if they send tokens, as a share of the bytes if they send queries, keys and
    values. The model has one stream; its answers are gathered in the dtype of its tokens. `inner`: width of all heads;
    `norms`: number of norms over all heads; for each, the ranks add up their sums for the tokens of both."""
    before = blocks * 2 * inner + hidden
    return (blocks * (hidden + inner / 2 + 2 * norms) + hidden) / before


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
    patch_channels: int,
    apart: int = 0,
    element_size: int = 4,
) -> int:
    """Returns the payload bytes that `rank` sends in one forward of `rows` rows with `text` + `image` tokens each.

    Weights are not counted. Each layer sends `attention_elements` per row of the rank's share; the first `apart` layers
    project text and image separately.
    After the last layer the outputs are gathered in float32: image tokens over the sequence, latents over the rows.
    Under tensor parallelism a rank has 1 / T of the heads; weights_traffic.py has the bytes that its weight slices add.
    """
    rank, hidden = rank // strategy.tensor_degree, hidden // strategy.tensor_degree
    sequence = strategy.sequence_degree
    texts, images = split_sizes(text, sequence), split_sizes(image, sequence)
    lengths = tuple(t + n for t, n in zip(texts, images, strict=True))
    row_index, sequence_index = divmod(rank, sequence)
    row_sizes = split_sizes(rows, strategy.row_degree)
    n = row_sizes[row_index] or max(row_sizes)  # a rank without rows computes the first ones for nothing
    per_layer = attention_elements(((texts, images),), lengths, sequence_index, strategy, hidden)
    per_apart = attention_elements(((texts,), (images,)), lengths, sequence_index, strategy, hidden)
    gather = (sequence - 1) * max(images) * patch_channels
    rows_gather = (strategy.row_degree - 1) * max(row_sizes) * latent_elements
    elements = (layers - apart) * per_layer + apart * per_apart
    return n * (elements * element_size + gather * 4) + rows_gather * 4

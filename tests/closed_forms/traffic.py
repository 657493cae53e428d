"""Closed forms of what each rank sends per model call, to check the counted bytes against."""

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
    """What rank `index` of a sequence axis sends for one attention of one row, in elements.

    `streams`: those that are projected by themselves, each with the tokens of each rank by kind (text, image); `held`:
    of each rank those whose keys and values go round the ring. With s tokens on this rank and S in its Ulysses group of
    U ranks, Ulysses sends q, k, v and the output for the others' heads and tokens: (3 s (U-1) + (S - s)) / U * hidden;
    where two ranks send tokens, those that both have count once in place of 3 / 2, if both have some of each kind. Ring
    passes every share but the one that ends here.
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
    # This rank sends on its own share first and then all it receives, except the share that would come home.
    sent_on = [groups(held)[(member - hop) % ring] for hop in range(ring - 1)]
    return exchanged + 2 * sum(sent_on) * hidden // ulysses


def share_of_tokens_sent(hidden: int, inner: int, blocks: int, norms: int = 0) -> float:
    """Returns what two ranks send where they send tokens, as a share of what they send where they send queries, keys
    and values, with the answers of one stream gathered in the dtype of its tokens. `inner`: width of all heads;
    `norms`: over all heads, of each of which the sums of both ranks' tokens are added up."""
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
    """Payload bytes that `rank` sends in one forward of `rows` rows with `text` + `image` tokens each, weights aside.

    Per layer and row of its share what `attention_elements` says; the first `apart` layers project text and image each
    by itself.
    After the last layer the outputs are gathered in float32: image tokens over the sequence, latents over the rows.
    Under tensor parallelism a rank has a T-th of the heads; what its slices of the weights send, and shares of them, is
    in weights_traffic.py.
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

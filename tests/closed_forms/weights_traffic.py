"""Closed forms for tensor parallelism: the bytes that it adds to a forward, and the shapes of a rank's slices."""

from __future__ import annotations

from parallel_backend.layout import split_sizes
from parallel_backend.models.diffusers.keys import FluxDims, diffusers_shapes
from parallel_backend.strategy import ParallelStrategy

# Name endings of the layers in diffusers' blocks whose weights are split by rows, and by columns.
SLICED_BY_ROWS = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    *("ff.net.0.proj", "ff_context.net.0.proj", "proj_mlp"),
    *("norm1.linear", "norm1_context.linear", ".norm.linear"),
)
SLICED_BY_COLUMNS = ("attn.to_out.0", "attn.to_add_out", "ff.net.2", "ff_context.net.2", ".proj_out")


def tensor_bytes(
    strategy: ParallelStrategy,
    rank: int,
    dims: FluxDims,
    *,
    rows: int,
    text: int,
    image: int,
    element_size: int = 4,
) -> int:
    """Returns the payload bytes that `rank` sends in one forward to combine slices (`expected_bytes` has the rest).

    This rank has s tokens (text and image) and n rows; the tensor axis has T ranks. A double block all-reduces s tokens
    twice, after attention and after the feed-forward layers, a single block once. An all-reduce sends 2 (T - 1) / T of
    its numbers. The modulation is 12 (double block) or 3 (single block) times the hidden size per row. It is gathered
    from slices: a rank sends its slice, 1 / T of the whole, T - 1 times.
    """
    ranks = strategy.tensor_degree
    row_index, sequence_index = divmod(rank // ranks, strategy.sequence_degree)
    shares = [split_sizes(count, strategy.sequence_degree)[sequence_index] for count in (text, image)]
    tokens = sum(max(1, share) for share in shares)  # a rank without a token of a stream holds one stand-in
    row_sizes = split_sizes(rows, strategy.row_degree)
    n = row_sizes[row_index] or max(row_sizes)  # a rank without rows computes the first ones for nothing
    sums = 2 * dims.double_blocks + dims.single_blocks
    joined = 12 * dims.double_blocks + 3 * dims.single_blocks
    return (2 * sums * tokens + joined) * dims.hidden * (ranks - 1) // ranks * n * element_size


def sliced_shapes(dims: FluxDims, degree: int, index: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of the rank's slice of each parameter in diffusers' layout. Only the first rank has the biases
    that are added to a sum."""
    added = tuple(f"{layer}.bias" for layer in SLICED_BY_COLUMNS)
    return {
        name: _sliced(name, shape, degree)
        for name, shape in diffusers_shapes(dims).items()
        if not index or "transformer_blocks." not in name or not name.endswith(added)
    }


def _sliced(name: str, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
    layer, _, kind = name.rpartition(".")
    if layer.endswith(SLICED_BY_ROWS):
        return (shape[0] // degree, *shape[1:])
    if layer.endswith(SLICED_BY_COLUMNS) and kind == "weight":
        return (shape[0], shape[1] // degree)
    return shape

"""The memory of Flux on a rank: the weights that it holds, and the peak of one model call, in closed form.

The weights mirror models/diffusers/load.py and engine/sharding.py, which load them; tests compare the two.

Moments in diffusers' blocks and in engine/attention/sequence.py are counted: the bytes of each variable that is alive
then. The largest moment is the peak. A width is the bytes of one tensor of rows x tokens x hidden in the compute dtype.
Norms, modulation and log-sum-exps are left out: they take a hundredth of a width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from ...layout import RankCoordinates
from ...strategy import ParallelStrategy
from ..dtypes import FP8, ITEMSIZE, Dtypes
from ..footprint import FP32, HeldWeights, MemoryPeak, TokenLoad, WeightPart
from ..tokens.block_kinds import DIFFUSERS_FLUX
from .keys import FluxDims, diffusers_shapes

# The way in which tensor parallelism slices blocks, by the list of blocks at the start of a parameter's name.
_SLICED = {path.rpartition(".")[2]: kind.sliced for path, kind in DIFFUSERS_FLUX.lists.items()}
# A slice of these weights is in two places of the file (attention, feed-forward), so that it is copied.
_APART = ".proj_out.weight"


def stays_in_compute_dtype(name: str, dtypes: Dtypes) -> bool:
    """Returns True if the parameter `name` (diffusers' layout) is too small and sensitive for the storage dtype."""
    if ".norm_" in name:
        return True
    # embedders, the last layer and biases, if the file is cast to fp8
    return dtypes.storage == FP8 != dtypes.file and (
        "transformer_blocks." not in name or name.endswith(".bias")
    )


def device_dtype(name: str, dtypes: Dtypes) -> str:
    """Returns the dtype that the parameter `name` (diffusers' layout) is stored in on its device."""
    return dtypes.compute if stays_in_compute_dtype(name, dtypes) else dtypes.storage


def held_weights(
    dims: FluxDims, dtypes: Dtypes, strategy: ParallelStrategy, rank: int, *, on_cpu: bool
) -> HeldWeights:
    """Returns the weights of a model that `rank` holds under `strategy`."""
    sharded = strategy.shards and (strategy.replicas > 1 or not on_cpu)
    blocks = frozenset(RankCoordinates.of(strategy, rank).blocks(strategy, dims.blocks))
    return HeldWeights(
        parts=_parts(
            dims, dtypes, blocks, strategy.tensor_degree, strategy.replicas if sharded else 0, on_cpu
        ),
        sharded=sharded,
        offloaded=strategy.offload_weights and sharded and not on_cpu,
    )


@lru_cache(maxsize=256)  # mode auto asks for all ranks of all strategies, and most have equal parts
def _parts(
    dims: FluxDims, dtypes: Dtypes, blocks: frozenset[int], tensor_degree: int, shares: int, on_cpu: bool
) -> tuple[WeightPart, ...]:
    """Returns a rank's parts. `shares`: number of ranks that each part is sharded over, 0 for no sharding."""
    sizes = {block: [0, 0, 0] for block in (None, *blocks)}  # private, mapped, cast
    for name, block, shape in _parameters(dims):
        if block in sizes:
            kept, numbers = device_dtype(name, dtypes), _sliced_numbers(name, shape, tensor_degree)
            is_copied = bool(shares) or (tensor_degree > 1 and name.endswith(_APART))
            is_mapped = on_cpu and kept == dtypes.file and not is_copied
            sizes[block][is_mapped] += numbers * ITEMSIZE[kept]
            if kept != dtypes.compute and name.endswith(".weight"):
                sizes[block][2] = max(sizes[block][2], numbers * ITEMSIZE[dtypes.compute])
    return tuple(
        WeightPart(block, share := -(-private // (shares or 1)), mapped, share * shares, cast)
        for block, (private, mapped, cast) in sizes.items()
    )


@lru_cache(maxsize=16)
def _parameters(dims: FluxDims) -> tuple[tuple[str, int | None, tuple[int, ...]], ...]:
    """Returns (name in diffusers' layout, block or None, shape) of each parameter; doubles are numbered first."""
    found = []
    for name, shape in diffusers_shapes(dims).items():
        kind, _, rest = name.partition(".")
        block = None
        if kind in ("transformer_blocks", "single_transformer_blocks"):
            block = int(rest.partition(".")[0]) + (dims.double_blocks if kind.startswith("single") else 0)
        found.append((name, block, shape))
    return tuple(found)


def _sliced_numbers(name: str, shape: tuple[int, ...], degree: int) -> int:
    """Returns how many numbers a rank's slice of a parameter has."""
    block, _, kind = name.rpartition(".")
    listed, _, path = block.partition(".")
    layer, sliced = path.partition(".")[2], _SLICED.get(listed)
    if sliced is not None and (
        layer in sliced.joined
        or any(layer in branch.into for branch in sliced.branches)
        or (kind == "weight" and any(layer == branch.out for branch in sliced.branches))
    ):
        return math.prod(shape) // degree
    return math.prod(shape)


def moments(dims: FluxDims, block: int, call: TokenLoad, cast: int = 0) -> Iterator[MemoryPeak]:
    """Yields the moments of `block` (doubles come first). `cast`: bytes of its largest layer if layers cast on use."""
    kind = _double_block if block < dims.double_blocks else _single_block
    # Cosines and sines stay in float32 during the call: for all tokens, and again for this rank's if these are fewer.
    everyone = sum(call.keys) if len(call.keys) > 1 else max(call.group, call.tokens)
    rotary = 2 * (everyone + call.tokens * (everyone > call.tokens)) * dims.head_dim * FP32
    for moment in kind(call, dims.mlp, cast):
        yield replace(moment, alive=moment.alive + rotary)


def _single_block(call: TokenLoad, mlp: int, cast: int) -> Iterator[MemoryPeak]:
    """Yields the moments of a block with one stream."""
    width, part = call.width(call.tokens), call.width(call.tokens) // call.tensor
    wide = width * mlp // call.hidden // call.tensor
    held = 3 * width  # the input, text and image joined, and the normed tokens
    yield MemoryPeak("feed-forward", held + wide + max(wide, cast))
    yield from _attention(call, held + wide + 3 * part, part)
    joined = held + wide + part + (part + wide)  # attention, feed-forward, and both concatenated
    yield MemoryPeak("output", joined + width + max(width, cast))


def _double_block(call: TokenLoad, mlp: int, cast: int) -> Iterator[MemoryPeak]:
    """Yields the moments of a block with separate streams for text and image."""
    text, image, width = call.width(call.text), call.width(call.image), call.width(call.tokens)
    part, wider = width // call.tensor, mlp / call.hidden / call.tensor
    yield from _attention(call, 2 * width + 3 * part + 3 * (text // call.tensor), part)
    yield MemoryPeak(
        "feed-forward", 2 * width + text + 3 * image + int(wider * image) + max(int(wider * image), cast)
    )
    wide = int(wider * text)
    yield MemoryPeak("feed-forward of the text", 2 * width + 4 * image + 3 * text + wide + max(wide, cast))


def _attention(call: TokenLoad, held: int, part: int) -> Iterator[MemoryPeak]:
    """Yields the moments of attention. `held`: bytes alive, with this rank's queries, keys, values; `part`: of one."""
    in_float = FP32 // call.element  # rotation and merging of partial results compute in float32
    yield MemoryPeak("rotation", held + part + 3 * in_float * part)
    if call.ulysses == 1:
        yield MemoryPeak("attention", held + part, _ring(call, part) - part)
        return
    mine = call.width(call.group) // call.tensor // call.ulysses  # all tokens of the group, this rank's heads
    yield MemoryPeak("exchange of tokens for heads", held, 3 * part + 3 * mine)
    yield MemoryPeak("attention", held + part, 3 * mine + _ring(call, mine) - part)
    reordered = mine if call.rows > 1 else 0  # a single row is already in the order in which it is sent
    yield MemoryPeak("exchange of heads for tokens", held + part, 3 * mine + mine + reordered + part)


def _ring(call: TokenLoad, queries: int) -> int:
    """Returns the bytes of attention's output, of the keys and values in a ring, and of merging its partial results."""
    if len(call.keys) == 1:
        return queries
    shares = min(3, len(call.keys))  # its own, the one in use, the one that is arriving
    pair = 2 * call.width(max(call.keys)) // call.tensor // call.ulysses
    merging = (4 * (FP32 // call.element) + 1) * queries
    return shares * pair + merging

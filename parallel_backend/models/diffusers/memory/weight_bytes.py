"""The bytes of a Flux model's weights that each rank of a strategy holds, and where. Pure functions.

Mirrors models/diffusers/load.py and engine/sharding.py, which load the weights; tests compare the two.
"""

from __future__ import annotations

from functools import lru_cache

from ....layout import RankCoordinates
from ....strategy import ParallelStrategy
from ...dtypes import FP8, ITEMSIZE, Dtypes
from ...footprint import HeldWeights, WeightPart
from ...tokens.block_kinds import DIFFUSERS_FLUX
from ..keys import FluxDims, diffusers_shapes

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
    """Returns a rank's parts. `shares`: number of ranks that each parameter is sharded over, 0 for no sharding."""
    parts: dict[int | None, list[int]] = {None: [0, 0, 0, 0]} | {block: [0, 0, 0, 0] for block in blocks}
    for name, block, shape in _parameters(dims):
        if block not in parts:
            continue
        kept = device_dtype(name, dtypes)
        first, rest = _sliced(name, shape, tensor_degree)
        size = first * rest * ITEMSIZE[kept]
        totals = parts[block]
        if shares:
            totals[0] += -(-first // shares) * rest * ITEMSIZE[kept]
            totals[2] += -(-first // shares) * shares * rest * ITEMSIZE[kept]
        elif on_cpu and kept == dtypes.file and not (tensor_degree > 1 and name.endswith(_APART)):
            totals[1] += size
        else:
            totals[0] += size
        if kept != dtypes.compute and name.endswith(".weight"):
            totals[3] = max(totals[3], first * rest * ITEMSIZE[dtypes.compute])
    return tuple(WeightPart(block, *totals) for block, totals in parts.items())


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


def _sliced(name: str, shape: tuple[int, ...], degree: int) -> tuple[int, int]:
    """Returns (rows, elements per row) of a rank's slice of a parameter."""
    rows, rest = shape[0], shape[1] if len(shape) > 1 else 1
    block, _, kind = name.rpartition(".")
    listed, _, path = block.partition(".")
    layer, sliced = path.partition(".")[2], _SLICED.get(listed)
    if degree == 1 or sliced is None:
        return rows, rest
    if layer in sliced.joined or any(layer in branch.into for branch in sliced.branches):
        return rows // degree, rest
    if kind == "weight" and any(layer == branch.out for branch in sliced.branches):
        return rows, rest // degree
    return rows, rest

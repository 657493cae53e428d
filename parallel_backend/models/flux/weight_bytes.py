"""Which bytes of a Flux model's weights each rank of a strategy holds, and where. Pure functions of sizes and dtypes.

Mirrors models/flux.py and engine/sharding.py, which do it; the tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...layout import RankCoordinates, split_blocks, split_sizes
from ...strategy import ParallelStrategy
from .keys import FluxDims, diffusers_shapes

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}
_FP8 = "float8_e4m3fn"
# Layers that tensor parallelism splits by rows of their weights, and by columns (models/flux_slices.py).
_BY_ROWS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "ff.net.0.proj",
    "ff_context.net.0.proj",
    "proj_mlp",
    "norm1.linear",
    "norm1_context.linear",
    "norm.linear",
)
_BY_COLUMNS = ("attn.to_out.0", "attn.to_add_out", "ff.net.2", "ff_context.net.2", "proj_out")


@dataclass(frozen=True)
class Dtypes:
    """`file`: most of the file's bytes; `storage`: what large weights are kept in; `compute`: activations."""

    file: str
    storage: str
    compute: str

    @classmethod
    def of(cls, wish: str, file: str, on_cpu: bool) -> Dtypes:
        """As models/flux.py chooses them: the CPU keeps the mapped file as it is and casts on use."""
        if wish == _FP8 or (wish == "auto" and file == _FP8):
            return cls(file, _FP8, "bfloat16")
        if wish == "auto":
            return cls(file, file, "float32" if on_cpu else file)
        return cls(file, file if on_cpu else wish, wish)

    def kept(self, name: str) -> str:
        """What the parameter `name` (diffusers' layout) is kept in."""
        if ".norm_" in name:
            return self.compute
        if self.storage == _FP8 != self.file and (
            "transformer_blocks." not in name or name.endswith(".bias")
        ):
            return self.compute  # embedders, the last layer and biases are small and sensitive
        return self.storage


@dataclass(frozen=True)
class Part:
    """Parameters that are gathered and used together: the layers around the blocks (block None), or one block.

    `own`: bytes in this rank's own memory; `mapped`: bytes used in place in the mapped file; `gathered`: all of it,
    where each rank keeps a share only; `cast`: of its largest layer in the compute dtype, where layers cast on use.
    """

    block: int | None
    own: int
    mapped: int
    gathered: int
    cast: int


@dataclass(frozen=True)
class HeldWeights:
    """One rank's weights. `sharded`: it keeps its share and gathers a part when it needs it; `offloaded`: that share
    lies in host memory."""

    parts: tuple[Part, ...]
    sharded: bool
    offloaded: bool

    @property
    def own(self) -> int:
        return sum(part.own for part in self.parts)

    @property
    def mapped(self) -> int:
        return sum(part.mapped for part in self.parts)

    @property
    def around(self) -> Part:
        return self.parts[0]

    def in_flight(self, part: Part, on_cpu: bool) -> int:
        """Gathered bytes while `part` computes: around the blocks, its own, and what arrives for the next.

        On the CPU everything arrives in the same memory, as large as the largest part.
        """
        if not self.sharded:
            return 0
        arriving = max(p.gathered for p in self.parts) if on_cpu else part.gathered
        return self.around.gathered + part.gathered + arriving


def held_weights(
    dims: FluxDims, dtypes: Dtypes, strategy: ParallelStrategy, rank: int, *, on_cpu: bool
) -> HeldWeights:
    """What `rank` holds of a model under `strategy`."""
    place = RankCoordinates.of(strategy, rank)
    alike = strategy.row_degree * strategy.sequence_degree
    sharded = strategy.shards and (alike > 1 or not on_cpu)
    blocks = _blocks_of(dims, strategy, place)
    last = dims.double_blocks + dims.single_blocks - 1
    parts: dict[int | None, list[int]] = {None: [0, 0, 0, 0]} | {block: [0, 0, 0, 0] for block in blocks}
    for name, block, shape in _parameters(dims):
        if name.startswith(("x_embedder", "context_embedder")) and 0 not in blocks:
            continue
        if name.startswith(("norm_out", "proj_out")) and last not in blocks:
            continue
        if block not in parts:
            continue
        kept = dtypes.kept(name)
        first, rest = _sliced(name, shape, strategy.tensor_degree)
        size = first * rest * ITEMSIZE[kept]
        totals = parts[block]
        if sharded:
            totals[0] += -(-first // alike) * rest * ITEMSIZE[kept]
            totals[2] += -(-first // alike) * alike * rest * ITEMSIZE[kept]
        elif on_cpu and kept == dtypes.file and not _lies_apart(name, strategy.tensor_degree):
            totals[1] += size
        else:
            totals[0] += size
        if kept != dtypes.compute and name.endswith(".weight"):
            totals[3] = max(totals[3], first * rest * ITEMSIZE[dtypes.compute])
    return HeldWeights(
        parts=tuple(Part(block, *totals) for block, totals in parts.items()),
        sharded=sharded,
        offloaded=strategy.offload_weights and sharded and not on_cpu,
    )


def stage_shares(strategy: ParallelStrategy, place: RankCoordinates) -> tuple[float, ...]:
    """How much of the blocks each stage of the rank's pipeline takes."""
    return (
        tuple(sum(stage) for stage in place.pipeline_shares(strategy)) or (1.0,) * strategy.pipefusion_degree
    )


def chunks_of(dims: FluxDims, strategy: ParallelStrategy, place: RankCoordinates) -> tuple[range, ...]:
    """The rank's chunks of blocks, numbered doubles first."""
    if strategy.pipefusion_degree == 1:
        return (range(dims.double_blocks + dims.single_blocks),)
    return split_blocks(dims.double_blocks, dims.single_blocks, stage_shares(strategy, place))[place.stage]


def token_shares(strategy: ParallelStrategy, place: RankCoordinates, total: int) -> tuple[int, ...]:
    """`total` tokens over the sequence axis, by device_shares where there are any."""
    grid = place.pipeline_shares(strategy)
    weights = tuple(sum(stages) for stages in zip(*grid, strict=True))
    return split_sizes(total, strategy.sequence_degree, weights)


def _blocks_of(dims: FluxDims, strategy: ParallelStrategy, place: RankCoordinates) -> frozenset[int]:
    return frozenset(block for chunk in chunks_of(dims, strategy, place) for block in chunk)


@lru_cache(maxsize=16)
def _parameters(dims: FluxDims) -> tuple[tuple[str, int | None, tuple[int, ...]], ...]:
    """(name in diffusers' layout, block numbered doubles first or None, shape)."""
    found = []
    for name, shape in diffusers_shapes(dims).items():
        kind, _, rest = name.partition(".")
        block = None
        if kind in ("transformer_blocks", "single_transformer_blocks"):
            block = int(rest.partition(".")[0]) + (dims.double_blocks if kind.startswith("single") else 0)
        found.append((name, block, shape))
    return tuple(found)


def _sliced(name: str, shape: tuple[int, ...], degree: int) -> tuple[int, int]:
    """(rows, elements of a row) of a rank's slice of a parameter."""
    rows, rest = shape[0], shape[1] if len(shape) > 1 else 1
    layer, _, kind = name.rpartition(".")
    if degree == 1 or "transformer_blocks." not in name:
        return rows, rest
    if layer.endswith(_BY_ROWS):
        return rows // degree, rest
    if layer.endswith(_BY_COLUMNS) and kind == "weight":
        return rows, rest // degree
    return rows, rest


def _lies_apart(name: str, degree: int) -> bool:
    """Whether a rank's slice lies in two places of the file and is copied together: (attention, feed-forward)."""
    return degree > 1 and "single_transformer_blocks." in name and name.endswith(".proj_out.weight")

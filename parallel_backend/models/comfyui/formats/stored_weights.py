"""The weights of a diffusion model as its file's header lists them, and what a rank holds of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ....layout import RankCoordinates
from ....strategy import ParallelStrategy
from ...checkpoint import TensorEntry
from ...dtypes import BYTES_PER_VALUE, GGUF, Dtypes
from ...footprint import HeldWeights, WeightPart

_DTYPES = {  # torch's names of the dtypes in headers
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    **{kind: kind for kind in GGUF},
}
_BLOCK = re.compile(
    r"((?:[A-Za-z_]\w*\.)*?[A-Za-z_]\w*)\.(\d+)\."
)  # the outermost list in a key's path, and the entry
# A list of modules counts as blocks if it has this many entries and tensors in each: an embedder's two layers do not.
_FEWEST, _TENSORS = 2, 4


@dataclass(frozen=True)
class CountedBlocks:
    """A list of `count` blocks. `bytes`: average size of a block; `largest`: bytes of its largest layer; `everywhere`:
    each pipeline stage holds them all (refiners of text)."""

    name: str
    count: int
    bytes: int
    largest: int
    everywhere: bool = False


@dataclass(frozen=True)
class StoredWeights:
    """The weights in a file. `dtype`: torch's name of the dtype of most of their bytes; `around_bytes`: bytes of
    tensors outside of `blocks`; `fp8_loaded_as`: dtype to which ComfyUI casts the weights of a plain fp8 file on a GPU
    that cannot multiply fp8 and has the memory for it, else ""."""

    dtype: str
    blocks: tuple[CountedBlocks, ...]
    around_bytes: int
    fp8_loaded_as: str = ""

    @property
    def bytes(self) -> int:
        return self.around_bytes + sum(kind.count * kind.bytes for kind in self.blocks)

    @property
    def staged_blocks(self) -> int:
        """The number of blocks that pipeline stages share out, which come first in `blocks`."""
        return sum(kind.count for kind in self.blocks if not kind.everywhere)

    def held_weights(
        self, dtypes: Dtypes, strategy: ParallelStrategy, rank: int, *, on_cpu: bool, convolves: bool
    ) -> HeldWeights:
        """Returns all weights, or a shard of each block and of the layers around them. A pipeline stage holds its own
        blocks, tensor parallelism a slice of each block; both hold all layers around the blocks. `convolves`: True for
        a model of convolutions, which the CPU computes with a reordered copy of a layer's weights."""
        sharded = strategy.shards and (strategy.replicas > 1 or not on_cpu)
        storage = dtypes.storage if on_cpu else self.fp8_loaded_as or dtypes.storage
        scale = BYTES_PER_VALUE[storage] / BYTES_PER_VALUE[dtypes.file]
        is_cast = storage != dtypes.compute
        cast = BYTES_PER_VALUE[dtypes.compute] / BYTES_PER_VALUE[dtypes.file] if is_cast else 0.0
        reorders = on_cpu and convolves
        reordered = BYTES_PER_VALUE[dtypes.compute] / BYTES_PER_VALUE[dtypes.file] if reorders else 0.0
        in_place = on_cpu and dtypes.storage == dtypes.file

        def part(block: int | None, size: int, largest: int) -> WeightPart:
            kept = int(size * scale)
            layer = int(largest * (cast + reordered))
            if sharded:
                return WeightPart(block, -(-kept // strategy.replicas), 0, kept, layer)
            own, mapped = (0, kept) if in_place else (kept, 0)
            return WeightPart(block, own, mapped, 0, layer)

        kinds = [kind for kind in self.blocks for _ in range(kind.count)]
        own = RankCoordinates.of(strategy, rank).blocks(strategy, self.staged_blocks)
        held = (*own, *range(self.staged_blocks, len(kinds)))
        slices = strategy.tensor_degree
        parts = [part(block, kinds[block].bytes // slices, kinds[block].largest // slices) for block in held]
        return HeldWeights(
            parts=(part(None, self.around_bytes, 0), *parts),
            sharded=sharded,
            offloaded=strategy.offload_weights and sharded and not on_cpu,
        )


def known_weights(tensors: Mapping[str, TensorEntry], prefix: str) -> dict[str, TensorEntry]:
    """Returns the tensors whose keys begin with `prefix` and whose dtype is known, by the rest of their keys."""
    return {
        key.removeprefix(prefix): entry
        for key, entry in tensors.items()
        if key.startswith(prefix) and entry.dtype in _DTYPES
    }


def count_weights(weights: Mapping[str, TensorEntry]) -> StoredWeights:
    """Counts the known_weights() of a diffusion model, at least one."""
    dtypes: Counter[str] = Counter()
    for entry in weights.values():
        dtypes[_DTYPES[entry.dtype]] += entry.end - entry.begin
    blocks = _block_lists(weights)
    around = dtypes.total() - sum(kind.count * kind.bytes for kind in blocks)
    return StoredWeights(max(dtypes, key=dtypes.__getitem__), blocks, around)


def by_stages(blocks: Sequence[CountedBlocks], lists: Mapping[str, int]) -> tuple[CountedBlocks, ...]:
    """Returns the blocks with those that pipeline stages share out first, in the order of `lists` (name -> number of
    blocks). A list with another name in the file is found by its number of blocks; if none fits, nothing changes.
    """
    left, first = list(blocks), []
    for name, count in lists.items():
        same = [kind for kind in left if kind.name == name]
        possible = same or [kind for kind in left if kind.count == count and kind.name not in lists]
        if not possible:
            return tuple(blocks)
        first.append(max(possible, key=lambda kind: kind.bytes))  # a refiner of text may have the same number
        left.remove(first[-1])
    return (*first, *(replace(kind, everywhere=bool(lists)) for kind in left))


def _block_lists(weights: Mapping[str, TensorEntry]) -> tuple[CountedBlocks, ...]:
    """Returns the lists of blocks in the order of the file. A model without any counts as one block."""
    sizes: dict[str, Counter[int]] = {}
    tensors: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    for key, entry in weights.items():
        found = _BLOCK.match(key)
        name, number = (found[1], int(found[2])) if found else ("", 0)
        size = entry.end - entry.begin
        sizes.setdefault(name, Counter())[number] += size
        tensors[name] += 1
        largest[name] = max(largest[name], size)
    lists = tuple(
        CountedBlocks(name, len(numbers), sum(numbers.values()) // len(numbers), largest[name])
        for name, numbers in sizes.items()
        if name and len(numbers) >= _FEWEST and tensors[name] >= _TENSORS * len(numbers)
    )
    total = sum(sum(numbers.values()) for numbers in sizes.values())
    return lists or (CountedBlocks("the model", 1, total, max(largest.values())),)

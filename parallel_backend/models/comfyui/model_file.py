"""Facts about a file for ComfyUI's own modules, which the planner needs. Imports neither torch nor comfy.

The header gives bytes and lists of blocks (`inspect`). nodes/model/facts.py adds what ComfyUI's detection finds: heads,
width and patch sizes. An unknown number is 0, and rules accept it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import CheckpointError
from ...layout import RankCoordinates
from ...requests import ATTENTION, BANDS, BLOCK, ROWS, STAY, InputShapes
from ...strategy import ModelShape, ParallelStrategy
from .. import gguf_file
from ..arithmetic import BlockCounts, Family
from ..checkpoint import Header, TensorEntry, read_header
from ..dtypes import BYTES_PER_VALUE, GGUF, Dtypes
from ..footprint import HeldWeights, MemoryPeak, TokenLoad, WeightPart
from ..tokens.table import sends_tokens, slices_layers
from .formats.quantised import check_quantised

# Prefixes of the diffusion model's keys in files that also hold other models, the longest first.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.model.", "net.", "transformer.")
_DTYPES = {
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
_UNET_LIST = "input_blocks"
# A list of modules counts as blocks if it has this many entries and tensors in each: an embedder's two layers do not.
_FEWEST, _TENSORS = 2, 4
# Live activations of a block per token, in multiples of the width. Attention: input, normed input, queries, keys,
# values, rotated queries and keys, output. Feed-forward of ratio 4: input, normed input, twice the hidden channels,
# output. With sliced layers, the first two of each and the feed-forward's output stay whole.
_ATTENTION, _FEED_FORWARD, _UNSLICED = 8, 11, 2
_CONVOLUTION = 12  # a UNet's: input, norms, two convolutions, skip connections of its half
_UNET_TOKENS = 1024  # positions at which a UNet's weights are used, on average, for 1024 x 1024 pixels


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
class UNetFacts:
    """Facts about a UNet. `attention`: FLOPs of its attention for one image of 1024 x 1024 pixels; `heads`: the number
    of heads over all latent cells with as many scores as its largest attention; `band_rows`: latent rows per row of its
    lowest resolution if ranks compute bands, else 0."""

    attention: float = 0.0
    heads: float = 0.0
    band_rows: int = 0


@dataclass(frozen=True)
class ComfyUIModelFile:
    """The counted facts of a file (models/model_file.ModelFile).

    `model`: ComfyUI's name of it, to show to people; `module`: class of its diffusion model; `dtype`: torch's name of
    the dtype of most of its bytes; `around_bytes`: bytes of tensors outside of blocks; `width`: of a token between
    blocks; `context_width`, `pooled_width`: of a prompt; `channels`: of the latent; `patch`: (frames, rows, columns) of
    latent cells in a token; `pixels`: image pixels along a side of a latent cell; `mode`: the first of TOKEN_MODES that
    is proven for its class (requests.py); `why_less`: why that is less than the table has, in words, else ""
    (proof.ClassVerdict); `unet`: None for a transformer; `has_stages`: True if its blocks may be on several devices;
    `fp8_loaded_as`: dtype to which ComfyUI casts the weights of a plain fp8 file on a GPU that cannot multiply fp8 and
    has the memory for it, else "".
    """

    path: str
    model: str
    module: str
    dtype: str
    blocks: tuple[CountedBlocks, ...]
    around_bytes: int
    heads: int = 0
    width: int = 0
    context_width: int = 0
    pooled_width: int = 0
    channels: int = 0
    patch: tuple[int, int, int] = (1, 2, 2)
    pixels: int = 8
    mode: str = STAY
    why_less: str = ""
    unet: UNetFacts | None = None
    has_stages: bool = False
    fp8_loaded_as: str = ""

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def tensor_bytes(self) -> int:
        return self.around_bytes + sum(kind.count * kind.bytes for kind in self.blocks)

    @property
    def is_transformer(self) -> bool:
        return self.unet is None

    @property
    def _splits_tokens(self) -> bool:
        return self.mode in (STAY, BLOCK, BANDS)

    @property
    def _band_rows(self) -> int:
        return 0 if self.unet is None else self.unet.band_rows

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            self.heads,
            self.staged_blocks,
            self.name,
            splits_tokens=self._splits_tokens,
            splits_queries=self.mode == ATTENTION,
            splits_layers=self.is_transformer
            and self._splits_tokens
            and self.dtype not in GGUF
            and (not self.module or slices_layers(self.module)),
            splits_layers_unasked=False,  # code of nodes inside blocks needs whole layers (engine/module_forward.py)
            pipelines=self.has_stages,
            uneven_heads=True,
            sends_tokens=self._splits_tokens and sends_tokens(self.module),
            band_rows=self._band_rows,
        )

    @property
    def family(self) -> Family:
        """Counts a multiply-add per weight and token, and attention over text and image together: an upper bound."""
        size = BYTES_PER_VALUE[self.dtype]
        parameters = self.tensor_bytes / size
        frames, rows, _ = self.patch
        return Family(
            name=self.model,
            hidden=self.width,
            heads=self.heads,
            blocks=tuple(
                BlockCounts(kind.count, kind.bytes / size, kind.bytes / size) for kind in self.blocks
            ),
            parameters=parameters,
            text_tokens=512,
            spatial=self.pixels * rows,
            temporal=frames,
            latent_pixels=self.pixels,
            image_flop=0.0 if self.is_transformer else 2.0 * parameters * _UNET_TOKENS,
            image_attention=0.0 if self.unet is None else self.unet.attention,
        )

    @property
    def fingerprint(self) -> tuple[str, ...]:
        sizes = (f"{kind.name}={kind.count}x{kind.bytes}" for kind in self.blocks)
        return "comfyui", self.module, self.dtype, str(self.heads), str(self.width), str(self.patch), *sizes

    @property
    def token_channels(self) -> int:
        frames, rows, columns = self.patch
        return self.channels * frames * rows * columns

    def describe(self) -> str:
        counts = "+".join(str(kind.count) for kind in self.blocks)
        return f"{self.model}, {counts} blocks of width {self.width}"

    @property
    def staged_blocks(self) -> int:
        """The number of blocks that pipeline stages share out, which come first in `blocks`."""
        return sum(kind.count for kind in self.blocks if not kind.everywhere)

    def held_weights(
        self, dtypes: Dtypes, strategy: ParallelStrategy, rank: int, *, on_cpu: bool
    ) -> HeldWeights:
        """Returns all weights, or a shard of each block and of the layers around them. A pipeline stage holds its own
        blocks, tensor parallelism a slice of each block; both hold all layers around the blocks."""
        sharded = strategy.shards and (strategy.replicas > 1 or not on_cpu)
        storage = dtypes.storage if on_cpu else self.fp8_loaded_as or dtypes.storage
        scale = BYTES_PER_VALUE[storage] / BYTES_PER_VALUE[dtypes.file]
        is_cast = storage != dtypes.compute
        cast = BYTES_PER_VALUE[dtypes.compute] / BYTES_PER_VALUE[dtypes.file] if is_cast else 0.0
        # Convolutions on the CPU reorder their weights into a copy in each call.
        convolves = on_cpu and not self.is_transformer
        reordered = BYTES_PER_VALUE[dtypes.compute] / BYTES_PER_VALUE[dtypes.file] if convolves else 0.0
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

    def moments(self, block: int, call: TokenLoad, cast: int) -> Iterator[MemoryPeak]:
        """Estimates by multiples of the width (constants above); see models/model_file.ModelFile.moments."""
        whole = call.width(sum(call.keys))
        width = (
            call.width(call.tokens) if self._splits_tokens else whole
        )  # other modes split at most the queries of attention
        # A block may gather its outputs (engine/module_forward.py), so each rank may hold all tokens once more.
        gathered = whole if len(call.keys) > 1 or call.ulysses > 1 else 0
        if self.unet is not None:
            # Keys and values of all bands have a quarter of the positions and twice the width.
            beside = gathered if self.unet.band_rows else 0
            yield MemoryPeak("convolution", _CONVOLUTION * width + beside + cast)
            yield MemoryPeak("attention", _CONVOLUTION * width + beside + call.scores(self.unet.heads))
            return
        slices = call.tensor
        exchanged = 0 if call.ulysses == 1 else 4 * call.width(call.group) // (call.ulysses * slices)
        attention = width * _UNSLICED + width * (_ATTENTION - _UNSLICED) // slices
        feed_forward = width * (_UNSLICED + 1) + width * (_FEED_FORWARD - _UNSLICED - 1) // slices
        yield MemoryPeak("attention", attention + gathered + call.scores(self.heads / slices), exchanged)
        yield MemoryPeak("feed-forward", feed_forward + gathered + cast)

    @property
    def inputs(self) -> InputShapes:
        return InputShapes(
            model=self.name,
            context=self.context_width,
            pooled=self.pooled_width,
            channels_in=self.channels,
            channels_out=self.channels,
            text_encoders="the text encoders that ComfyUI's own loader of this model goes with",
            latents="the empty latent that ComfyUI has for this model",
        )


def inspect(path: str | os.PathLike[str]) -> ComfyUIModelFile:
    """Reads the facts in the header of `path`. Raises CheckpointError with the file's name, the reason and the remedy.

    A header has no heads and no patch sizes. Only the class of a transformer tells if its tokens or its blocks can be
    split over devices; here both count as possible.
    """
    packed = gguf_file.is_gguf(path)
    header = gguf_file.read_header(path) if packed else read_header(path)
    prefix = _prefix(header)
    if not packed:
        check_quantised(header, prefix)
    own = {k.removeprefix(prefix): e for k, e in header.tensors.items() if k.startswith(prefix)}
    weights = {key: entry for key, entry in own.items() if entry.dtype in _DTYPES}
    if not weights:
        raise CheckpointError(
            f"{header.name} is refused: it holds no weights of a dtype that is known. Choose another file."
        )
    dtypes: Counter[str] = Counter()
    for entry in weights.values():
        dtypes[_DTYPES[entry.dtype]] += entry.end - entry.begin
    blocks = _block_lists(weights)
    is_unet = any(kind.name == _UNET_LIST for kind in blocks)
    total = sum(entry.end - entry.begin for entry in weights.values())
    return ComfyUIModelFile(
        path=header.path,
        model="the model",
        module="",
        dtype=max(dtypes, key=dtypes.__getitem__),
        blocks=blocks,
        around_bytes=total - sum(kind.count * kind.bytes for kind in blocks),
        width=_width(weights.values()),
        patch=(1, 1, 1) if is_unet else (1, 2, 2),
        mode=ROWS if is_unet else STAY,
        unet=UNetFacts() if is_unet else None,
        has_stages=not is_unet,
    )


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


def _prefix(header: Header) -> str:
    """Returns the prefix of the diffusion model's keys, or ""."""
    return next((prefix for prefix in PREFIXES if any(key.startswith(prefix) for key in header.tensors)), "")


def _width(entries: Iterable[TensorEntry]) -> int:
    """Returns the most frequent side of matrices, which is the width of a token between blocks."""
    sides: Counter[int] = Counter()
    for entry in entries:
        if len(entry.shape) == 2:
            sides.update(set(entry.shape))
    return max(sides, key=lambda side: (sides[side], side), default=0)


# A stand-in if there is no file: 12 billion parameters in bf16, as wide as most models of that size.
TYPICAL = ComfyUIModelFile(
    path="a model of 12 billion parameters",
    model="a model of 12 billion parameters",
    module="",
    dtype="bfloat16",
    blocks=(CountedBlocks("blocks", 48, 480_000_000, 110_000_000),),
    around_bytes=960_000_000,
    heads=24,
    width=3072,
    context_width=4096,
    pooled_width=768,
    channels=16,
)
# Any of ComfyUI's own models, to find what none of them allows. Zero heads accept every degree.
ANY_MODEL = replace(TYPICAL, path="this model", model="this model", heads=0, has_stages=True)

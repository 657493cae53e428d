"""A file for ComfyUI's own modules, by counting: what the planner asks of any model. Imports neither torch nor comfy.

The header tells bytes and lists of blocks (`inspect`); what ComfyUI's detection makes of the file, its heads, width and
patches, the loader's side adds (nodes/model/facts.py). Where nobody knows a number it is 0, and rules let it pass.
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

# Where the diffusion model lies in a file that has other things beside it, the longest first.
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
)  # the outermost list that a key goes through
_UNET_LIST = "input_blocks"
# Entries, and tensors of each, that make a list of modules a list of blocks: an embedder's two layers are none.
_FEWEST, _TENSORS = 2, 4
# Live activations of a block per token, in widths. Attention: what comes in, the normed, queries, keys, values, their
# rotated copies, what comes out. Feed-forward of the usual ratio 4: what comes in, the normed, twice the wide, the
# output. Ranks that slice layers have the first two of them, and what the feed-forward gives, whole.
_ATTENTION, _FEED_FORWARD, _UNSLICED = 8, 11, 2
_CONVOLUTION = 12  # a UNet's: what comes in, norms, two convolutions, the skip connections of its half
_UNET_TOKENS = 1024  # positions at which a UNet's weights are used, on average, for 1024 x 1024 pixels


@dataclass(frozen=True)
class CountedBlocks:
    """`count` blocks of one kind, of `bytes` each on average; `largest`: bytes of its largest layer; `everywhere`: each
    stage of a pipeline holds them all (refiners of text)."""

    name: str
    count: int
    bytes: int
    largest: int
    everywhere: bool = False


@dataclass(frozen=True)
class UNetFacts:
    """`attention`: FLOPs of its attention for one image of 1024 x 1024 pixels; `heads`: so many heads over all cells of
    the latent have as many pairs of positions as its largest attention; `band_rows`: of its latent in a row of its
    lowest resolution, where ranks compute bands, else 0."""

    attention: float = 0.0
    heads: float = 0.0
    band_rows: int = 0


@dataclass(frozen=True)
class ComfyUIModelFile:
    """The counted facts of a file (models/model_file.ModelFile).

    `model`: for people, what ComfyUI calls it; `module`: class of its diffusion model; `dtype`: torch's name of that of
    most of its bytes; `around_bytes`: of what lies in no block; `width`: of a token between blocks; `context_width`,
    `pooled_width`: of a prompt; `channels`: of the latent; `patch`: (frames, rows, columns) of the latent in a token;
    `pixels`: of the image in a cell of the latent, along a side; `mode`: the most that tokens of one image may stay
    apart, one of requests.TOKEN_MODES; `why_less`: in words, why that is less than the table has (proof.ClassVerdict),
    else empty; `unet`: None for a transformer; `has_stages`: its blocks may lie on several devices; `fp8_loaded_as`:
    the dtype of a plain fp8 file's weights on ComfyUI's GPU, where that does not multiply fp8 and has room for it, else
    empty.
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
            splits_layers_unasked=False,  # code of nodes within blocks cannot take part (engine/module_forward.py)
            pipelines=self.has_stages,
            uneven_heads=True,
            sends_tokens=self._splits_tokens and sends_tokens(self.module),
            band_rows=self._band_rows,
        )

    @property
    def family(self) -> Family:
        """A multiply-add for each weight and token; attention over text and image together, its upper bound."""
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
        """Those that stages of a pipeline share out: the first ones."""
        return sum(kind.count for kind in self.blocks if not kind.everywhere)

    def held_weights(
        self, dtypes: Dtypes, strategy: ParallelStrategy, rank: int, *, on_cpu: bool
    ) -> HeldWeights:
        """Whole, or each rank's share of each block; what lies around the blocks is shared out with them. Of a stage of
        a pipeline its own blocks, and all around; under tensor parallelism its slice of each block, and all around."""
        sharded = strategy.shards and (strategy.replicas > 1 or not on_cpu)
        storage = dtypes.storage if on_cpu else self.fp8_loaded_as or dtypes.storage
        scale = BYTES_PER_VALUE[storage] / BYTES_PER_VALUE[dtypes.file]
        is_cast = storage != dtypes.compute
        cast = BYTES_PER_VALUE[dtypes.compute] / BYTES_PER_VALUE[dtypes.file] if is_cast else 0.0
        # The CPU's convolutions put their weights into an order of their own, for each call anew.
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
        """By widths (above), not variable by variable as for a family that the pack computes itself."""
        whole = call.width(sum(call.keys))
        width = (
            call.width(call.tokens) if self._splits_tokens else whole
        )  # else queries of attention at most are apart
        # Each block may gather what it gives (engine/module_forward.py), so all tokens lie here once more.
        gathered = whole if len(call.keys) > 1 or call.ulysses > 1 else 0
        if self.unet is not None:
            # Keys and values of all bands, at a quarter of the positions and twice the width.
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
    """What the header of `path` tells. Raises CheckpointError with the file's name, the reason and the remedy.

    Heads and patches are not in a header, and whether a transformer's tokens can be shared out, or its blocks laid out
    over devices, is known by its class.
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
    """First those that stages of a pipeline share out, in the order of `lists` (blocks of each), then those that each
    stage holds. A list that the file calls otherwise is known by its number of blocks; all stay where one is missing.
    """
    left, first = list(blocks), []
    for name, count in lists.items():
        same = [kind for kind in left if kind.name == name]
        possible = same or [kind for kind in left if kind.count == count and kind.name not in lists]
        if not possible:
            return tuple(blocks)
        first.append(max(possible, key=lambda kind: kind.bytes))  # a refiner of a text may have as many
        left.remove(first[-1])
    return (*first, *(replace(kind, everywhere=bool(lists)) for kind in left))


def _block_lists(weights: Mapping[str, TensorEntry]) -> tuple[CountedBlocks, ...]:
    """The lists of blocks in the order of the file; a model without one is a single block."""
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
    """Of the diffusion model's keys; empty where they have none."""
    return next((prefix for prefix in PREFIXES if any(key.startswith(prefix) for key in header.tensors)), "")


def _width(entries: Iterable[TensorEntry]) -> int:
    """The size that most matrices have: that of a token between blocks."""
    sides: Counter[int] = Counter()
    for entry in entries:
        if len(entry.shape) == 2:
            sides.update(set(entry.shape))
    return max(sides, key=lambda side: (sides[side], side), default=0)


# Stands for any model where no file is at hand: 12 billion parameters in bf16, as wide as most of that size.
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
# Any model of ComfyUI's own: what none of them can be split by. Zero heads divide by everything.
ANY_MODEL = replace(TYPICAL, path="this model", model="this model", heads=0, has_stages=True)

"""Facts about a file for ComfyUI's own modules, which the planner needs. Imports neither torch nor comfy.

The header gives bytes and lists of blocks (`inspect`). nodes/model/facts.py adds what ComfyUI's detection finds: heads,
width and patch sizes. An unknown number is 0, and rules accept it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ...errors import CheckpointError
from ...requests import ATTENTION, BANDS, BLOCK, ROWS, STAY, InputShapes
from ...strategy import ModelShape, ParallelStrategy
from .. import gguf_file
from ..arithmetic import BlockCounts, Family
from ..checkpoint import TensorEntry, read_header
from ..dtypes import BYTES_PER_VALUE, GGUF, Dtypes
from ..footprint import HeldWeights, MemoryPeak, TokenLoad
from ..tokens.table import has_stages, sends_tokens, slices_layers
from .formats.quantised import check_quantised
from .formats.stored_weights import CountedBlocks, StoredWeights, count_weights, known_weights

# Prefixes of the diffusion model's keys in files that also hold other models, the longest first.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.model.", "net.", "transformer.")
_UNET_LIST = "input_blocks"
# Live activations of a block per token, in multiples of the width. Attention: input, normed input, queries, keys,
# values, rotated queries and keys, output. Feed-forward of ratio 4: input, normed input, twice the hidden channels,
# output. With sliced layers, the first two of each and the feed-forward's output stay whole.
_ATTENTION, _FEED_FORWARD, _UNSLICED = 8, 11, 2
_CONVOLUTION = 12  # a UNet's: input, norms, two convolutions, skip connections of its half
_UNET_TOKENS = 1024  # positions at which a UNet's weights are used, on average, for 1024 x 1024 pixels


@dataclass(frozen=True)
class UNetFacts:
    """Facts about a UNet. `attention`: FLOPs of its attention for one image of 1024 x 1024 pixels; `heads`: the number
    of heads over all latent cells with as many scores as its largest attention; `band_rows`: latent rows per row of its
    lowest resolution if ranks compute bands, else 0."""

    attention: float = 0.0
    heads: float = 0.0
    band_rows: int = 0


@dataclass(frozen=True)
class LatentSizes:
    """The cells of a model's latent. `patch`: (frames, rows, columns) of cells in a token; `pixels`: image pixels along
    a side of a cell."""

    channels: int = 0
    patch: tuple[int, int, int] = (1, 2, 2)
    pixels: int = 8


@dataclass(frozen=True)
class ComfyUIModelFile:
    """The counted facts of a file (models/model_file.ModelFile).

    `model`: ComfyUI's name of it, to show to people; `module`: class of its diffusion model, "" if unknown; `width`: of
    a token between blocks; `context_width`, `pooled_width`: of a prompt; `mode`: the first of TOKEN_MODES that is
    proven for its class (requests.py); `why_less`: why that is less than the table has, in words, else ""
    (proof.ClassVerdict); `unet`: None for a transformer.
    """

    path: str
    model: str
    module: str
    weights: StoredWeights
    heads: int = 0
    width: int = 0
    context_width: int = 0
    pooled_width: int = 0
    latent: LatentSizes = LatentSizes()
    mode: str = STAY
    why_less: str = ""
    unet: UNetFacts | None = None

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def dtype(self) -> str:
        return self.weights.dtype

    @property
    def tensor_bytes(self) -> int:
        return self.weights.bytes

    @property
    def is_transformer(self) -> bool:
        return self.unet is None

    @property
    def _splits_tokens(self) -> bool:
        return self.mode in (STAY, BLOCK, BANDS)

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape(
            self.heads,
            self.weights.staged_blocks,
            self.name,
            splits_tokens=self._splits_tokens,
            splits_queries=self.mode == ATTENTION,
            splits_layers=self.is_transformer
            and self._splits_tokens
            and self.dtype not in GGUF
            and (not self.module or slices_layers(self.module)),
            splits_layers_unasked=False,  # code of nodes inside blocks needs whole layers (engine/module_forward.py)
            pipelines=self.mode == STAY and (not self.module or has_stages(self.module)),
            sends_tokens=self._splits_tokens and sends_tokens(self.module),
            band_rows=0 if self.unet is None else self.unet.band_rows,
        )

    @property
    def family(self) -> Family:
        """Counts a multiply-add per weight and token, and attention over text and image together: an upper bound."""
        size = BYTES_PER_VALUE[self.dtype]
        parameters = self.tensor_bytes / size
        return Family(
            name=self.model,
            hidden=self.width,
            heads=self.heads,
            blocks=tuple(
                BlockCounts(kind.count, kind.bytes / size, kind.bytes / size) for kind in self.weights.blocks
            ),
            parameters=parameters,
            text_tokens=512,
            spatial=self.latent.pixels * self.latent.patch[1],
            temporal=self.latent.patch[0],
            latent_pixels=self.latent.pixels,
            image_flop=0.0 if self.is_transformer else 2.0 * parameters * _UNET_TOKENS,
            image_attention=0.0 if self.unet is None else self.unet.attention,
        )

    @property
    def fingerprint(self) -> tuple[str, ...]:
        sizes = (f"{kind.name}={kind.count}x{kind.bytes}" for kind in self.weights.blocks)
        patch = str(self.latent.patch)
        return "comfyui", self.module, self.dtype, str(self.heads), str(self.width), patch, *sizes

    @property
    def token_channels(self) -> int:
        return self.latent.channels * math.prod(self.latent.patch)

    def describe(self) -> str:
        counts = "+".join(str(kind.count) for kind in self.weights.blocks)
        return f"{self.model}, {counts} blocks of width {self.width}"

    def held_weights(
        self, dtypes: Dtypes, strategy: ParallelStrategy, rank: int, *, on_cpu: bool
    ) -> HeldWeights:
        convolves = not self.is_transformer
        return self.weights.held_weights(dtypes, strategy, rank, on_cpu=on_cpu, convolves=convolves)

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
            channels_in=self.latent.channels,
            channels_out=self.latent.channels,
        )


def inspect(path: str | os.PathLike[str]) -> ComfyUIModelFile:
    """Reads the facts in the header of `path`. Raises CheckpointError with the file's name, the reason and the remedy.

    A header has no heads and no patch sizes. Only the class of a transformer tells if its tokens or its blocks can be
    split over devices; here both count as possible.
    """
    packed = gguf_file.is_gguf(path)
    header = gguf_file.read_header(path) if packed else read_header(path)
    prefix = next((one for one in PREFIXES if any(key.startswith(one) for key in header.tensors)), "")
    if not packed:
        check_quantised(header, prefix)
    tensors = known_weights(header.tensors, prefix)
    if not tensors:
        raise CheckpointError(
            f"{header.name} is refused: it holds no weights of a dtype that is known. Choose another file."
        )
    weights = count_weights(tensors)
    is_unet = any(kind.name == _UNET_LIST for kind in weights.blocks)
    return ComfyUIModelFile(
        path=header.path,
        model="the model",
        module="",
        weights=weights,
        width=_width(tensors.values()),
        latent=LatentSizes(patch=(1, 1, 1) if is_unet else (1, 2, 2)),
        mode=ROWS if is_unet else STAY,
        unet=UNetFacts() if is_unet else None,
    )


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
    weights=StoredWeights(
        "bfloat16", (CountedBlocks("blocks", 48, 480_000_000, 110_000_000),), around_bytes=960_000_000
    ),
    heads=24,
    width=3072,
    context_width=4096,
    pooled_width=768,
    latent=LatentSizes(channels=16),
)
# Any of ComfyUI's own models, to find what none of them allows. Zero heads accept every degree.
ANY_MODEL = replace(TYPICAL, path="this model", model="this model", heads=0)

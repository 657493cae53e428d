"""A rank's model, whatever its family: what it holds on its device, tokens in and out, its blocks, what LoRAs change.

A provider (registry.py) loads a `LoadedModel`. One whose text and image tokens stay apart from the first block to the
last is a `TokenModel`: its ranks keep their share of the tokens from block to block, and the engine does the rest. A
provider whose blocks cut and gather tokens themselves needs no more than the rows that the engine shares out
(`ParallelForward.shared_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from ..requests import Conditioning, Rows
from ..wire.weight_patches import WeightPatch

if TYPE_CHECKING:
    from .tokens.regions import Region


class Residuals(Protocol):
    """What a ControlNet adds to the image tokens after blocks, numbered through all blocks: [r, n, width]."""

    def __contains__(self, block: object) -> bool:
        """Whether anything is added after a block."""

    def begin(self, block: int) -> None:
        """Begins to move what is added after a block to the device, beside what that computes."""

    def __call__(self, block: int) -> Tensor:
        """What is added after a block that is in it."""


# Attention as ComfyUI's models call it, after ComfyUI's own function: (original, q, k, v, heads, mask=None, …).
AttentionCall = Callable[..., Tensor]


class Attention(Protocol):
    """Attention of one model call over the tokens of all ranks that share them."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, s, H, D] of this rank's tokens in and out."""


class OnTheWay(Protocol):
    """Tensors that ranks send each other while something else is computed."""


class EarlyAttention(Attention, Protocol):
    """An attention whose parts can be sent before the others are made. `sends_early`: whether that is wanted."""

    @property
    def sends_early(self) -> bool: ...

    def send(self, *tensors: Tensor) -> OnTheWay:
        """Begins to send tensors [B, s, H, D] of this rank's tokens; they may be changed or freed afterwards."""

    def attend_sent(self, values: OnTheWay, queries_and_keys: OnTheWay) -> Tensor:
        """[B, s, H, D] of this rank's tokens, from one `send(value)` and one `send(query, key)`."""


@dataclass(frozen=True)
class Slices:
    """Slice `index` of `degree` of each layer. Where ranks meet: `add_up` gives every rank the sum of what each hands
    in (in place), `join` puts [B, n] of each next to each other as [B, degree * n]."""

    degree: int
    index: int
    add_up: Callable[[Tensor], Tensor]
    join: Callable[[Tensor], Tensor]


class WeightSharding(Protocol):
    """Shares weights out over ranks, which then gather them for their calls. `blocks`: numbered through all blocks."""

    def shard(self, module: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, tuple[Tensor, slice]]:
        """Leaves each rank its share of the parameters of a module on the meta device, which has these blocks.

        Returns for each, by name, the share in memory, still to be filled, and which rows of the parameter that is.
        """

    def join_gathers(self, blocks: range | None = None) -> None:
        """Takes part in what a call, through `blocks` or all of them, gathers where only other ranks make it."""

    def only(self, blocks: range) -> AbstractContextManager[None]:
        """Inside, calls go through `blocks` alone, so no other block's weights travel ahead."""


class ByteSharding(Protocol):
    """Shares out weights over ranks as bytes, in any format; ranks that share them make the same calls together."""

    @property
    def shares(self) -> nn.Module:
        """The memory of what this rank keeps."""

    def shard(
        self, module: nn.Module, blocks: Sequence[nn.Module], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Leaves each rank its share of the parameters of a module in host memory, which the file is mapped into.

        Those of `blocks` are gathered for the turn of each, all others for a whole call. `dtypes`: which parameters are
        to have, by name, where not the file's.
        """

    def replace(self, name: str, value: Tensor) -> None:
        """Keeps this rank's share of a parameter's new value, which is made up as the one before."""

    def call(self) -> AbstractContextManager[None]:
        """Around every call of the module, of whichever method."""

    def rest(self) -> None:
        """The blocks that this call still comes to compute nothing. All ranks say so at the same block."""


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that a rank loads.

    `stage`: number of its pipeline stage; `stage_shares`: how much of the blocks each stage takes;
    `slices`: its slice of each layer, None for whole layers; `sharding`: leaves it some rows of each parameter;
    `byte_sharding`: some bytes of each block.
    """

    stage: int = 0
    stage_shares: tuple[float, ...] = (1.0,)
    slices: Slices | None = None
    sharding: WeightSharding | None = None
    byte_sharding: ByteSharding | None = None


class Weights(Protocol):
    """The weights that a rank holds, as LoRAs change them. `tensors`: the factors of changes, by their digest."""

    def check(self, patches: Sequence[WeightPatch], tensors: Mapping[str, Tensor]) -> None:
        """Raises RequestError, naming the tensor, for changes that do not fit this model. Changes nothing."""

    def apply(self, patches: Sequence[WeightPatch], tensors: Mapping[str, Tensor]) -> int:
        """Makes the weights the file's own with these changes and no others; returns how many tensors that touched."""

    def release_originals(self) -> None:
        """Gives back the device memory of the file's values beside changed ones."""


class LoadedModel(Protocol):
    """A model of any provider, or the part of it that a rank holds."""

    @property
    def chunks(self) -> tuple[nn.Module, ...]:
        """The modules on the device, each with a run of neighbouring blocks: one, or those of a pipeline stage."""

    @property
    def device(self) -> torch.device: ...

    @property
    def bytes(self) -> int:
        """All that the whole model reads from its file."""

    @property
    def stored_dtype(self) -> str:
        """torch's name of the dtype of most of the file."""

    @property
    def compute_dtype(self) -> torch.dtype: ...

    @property
    def weights(self) -> Weights: ...

    @property
    def sharding(self) -> WeightSharding | None:
        """The way to gather weights where each rank has a share of them; None where it has all it needs."""


class ModuleModel(LoadedModel, Protocol):
    """A module of ComfyUI's own, called with the arguments that ComfyUI would have handed it (models/comfyui/).

    `module`: its diffusion model; `regions`: which arguments of its blocks are tokens (models/tokens/regions.py),
    empty where nobody knows: then it can only be given fewer rows.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def regions(self) -> tuple[Region, ...]: ...

    @property
    def rows_together(self) -> bool:
        """Whether its module takes rows by their place among all, so that they cannot be apart."""

    @property
    def scales_by_largest(self) -> bool:
        """Whether quantised layers scale what they compute on by its largest value, which is another one for fewer rows
        or tokens."""

    @property
    def splits_layers(self) -> bool:
        """True if its provider can load a slice of each layer (ModelPart.slices)."""

    @property
    def byte_sharding(self) -> ByteSharding | None:
        """The way to gather weights where each rank has a share of them; None where it has them all."""

    @property
    def attention(self) -> str:
        """What its blocks call as ComfyUI's optimized attention, by ComfyUI's name for it."""

    def begin_call(self) -> None:
        """Forgets what the module keeps of its last call by where that lay in memory."""

    def attention_by(self, attend: AttentionCall) -> AbstractContextManager[None]:
        """Inside, what its blocks call as ComfyUI's optimized attention is `attend(original, q, k, v, heads, …)`."""

    def attention_kernel(self, kernel: AttentionCall) -> AbstractContextManager[None]:
        """Inside, `original` is `kernel(original, q, k, v, heads, …)`, and so is what no `attention_by` answers."""


@dataclass(frozen=True)
class ImageTokens:
    """Image tokens of a model call, those of reference latents after the image's own: [r, N, channels].

    `ids` [N, d]: where each lies; `own`: how many of them, the first ones, the image itself has.
    """

    tokens: Tensor
    ids: Tensor
    own: int

    @property
    def count(self) -> int:
        return self.tokens.shape[1]


@dataclass(frozen=True)
class TokenShare:
    """One rank's tokens of a model call, on their way into a chunk, and what blocks need beside them.

    image [r, n, channels] and text [r, t, text channels] into the first chunk, [r, n or t, width] between chunks;
    ids [n, d] of the image tokens; sigma [r] float32; of `prompt` all but its context.
    """

    image: Tensor
    text: Tensor
    ids: Tensor
    sigma: Tensor
    prompt: Conditioning
    residuals: Residuals | None = None


@dataclass(frozen=True)
class FirstBlockOutput:
    """The first block's output: text [r, t, width] and image [r, n, width]. `change`: what it added to the image."""

    text: Tensor
    image: Tensor
    change: Tensor


@dataclass(frozen=True)
class BlockKind:
    """Blocks of one class, whose forward is compiled once for all of them; its arguments by name.

    `tokens`: [r, n, width]; `per_token`: [n, …], or tuples of those; `per_row`: [r, …].
    """

    module: type[nn.Module]
    tokens: tuple[str, ...]
    per_token: tuple[str, ...]
    per_row: tuple[str, ...]


class TokenModel(LoadedModel, Protocol):
    """A model whose text and image tokens stay apart from the first block to the last. Everything but attention works
    token by token, so a rank computes its share of the tokens alone."""

    @property
    def blocks(self) -> tuple[tuple[nn.Module, ...], ...]:
        """The blocks of each chunk, in the order in which tokens pass them."""

    @property
    def block_kinds(self) -> tuple[BlockKind, ...]: ...

    @property
    def latent_channels(self) -> int:
        """Of the velocity; what a model takes in beside the latent does not come out."""

    @property
    def width(self) -> int:
        """Channels of a token between blocks."""

    @property
    def token_channels(self) -> int:
        """Of an image token that leaves the model."""

    def pack(self, latent: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, N, channels]: each element of a latent goes to one place of one token."""

    def unpack(self, tokens: Tensor, height: int, width: int) -> Tensor:
        """[B, N, channels] -> [B, C, h, w], without what `pack` added to fill the last tokens."""

    def image_tokens(self, rows: Rows) -> ImageTokens:
        """Of rows with the same references."""

    def through(self, chunk: int, share: TokenShare, attention: Attention) -> tuple[Tensor, Tensor]:
        """(image, text) [r, n or t, width] after a chunk; after the last one the image is [r, n, token_channels]."""

    def first_block(self, share: TokenShare, attention: Attention) -> FirstBlockOutput:
        """The first block's part of a call of a whole model without residuals."""

    def other_blocks(
        self, begun: FirstBlockOutput, share: TokenShare, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """All that follows the first block: (the model's output, what the blocks added to the image)."""

    def last_layer(self, begun: FirstBlockOutput, added: Tensor, share: TokenShare) -> Tensor:
        """The model's output if the other blocks added `added` [r, n, width] to the image."""

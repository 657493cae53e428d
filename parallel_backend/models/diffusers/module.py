"""Flux.1 on one rank: diffusers' own forward over any share of the tokens and any run of the blocks.

A rank that holds a stage of a pipeline has a transformer for each chunk of blocks, made of the same class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from diffusers.models.transformers.transformer_flux import (
    FluxSingleTransformerBlock,
    FluxTransformer2DModel,
    FluxTransformerBlock,
)
from torch import Tensor, nn

from ...requests import Rows
from ..base import Attention, BlockKind, FirstBlockOutput, ImageTokens, Residuals, TokenShare, WeightSharding
from ..block_list import Block, BlockList
from .checkpoint import FluxFile
from .compat_diffusers import attention_arguments
from .packing import PATCH, image_tokens, pack, text_ids, unpack
from .weights import FluxWeights

# Arguments of the forward of both kinds of blocks.
_ARGUMENTS = {
    "tokens": ("hidden_states", "encoder_hidden_states"),
    "per_token": ("image_rotary_emb",),
    "per_row": ("temb",),
}


class PooledAtTime(NamedTuple):
    """Inputs of the embedding of time and text of a call: pooled [r, pooled_dim], sigma [r] float32.

    diffusers' forward hands its `pooled_projections` on as it is, but rounds the timestep to the compute dtype first.
    """

    pooled: Tensor
    sigma: Tensor


class ExactTimestep(nn.Module):
    """Embeds the timestep unrounded, as ComfyUI does: it reads `sigma` of a PooledAtTime.

    As in ComfyUI, a guidance-distilled model that is given no guidance (FluxDisableGuidance) embeds none.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rounded: Tensor, *rest: Tensor | PooledAtTime) -> Tensor:
        *guidance, call = rest
        assert isinstance(call, PooledAtTime), "diffusers hands on what FluxModel gave it"
        exact, inner = call.sigma * 1000, self.inner
        if guidance or not hasattr(inner, "guidance_embedder"):
            return inner(exact, *guidance, call.pooled)
        time = inner.get_submodule("timestep_embedder")(
            inner.get_submodule("time_proj")(exact).to(call.pooled.dtype)
        )
        return time + inner.get_submodule("text_embedder")(call.pooled)


@dataclass(frozen=True)
class FluxModel:
    """A loaded Flux.1 on one rank: whole, as one chunk, or a stage of it (base.TokenModel).

    `numbers`: of the blocks of each chunk, doubles first.
    """

    chunks: tuple[FluxTransformer2DModel, ...]
    numbers: tuple[range, ...]
    file: FluxFile
    compute_dtype: torch.dtype
    device: torch.device
    weights: FluxWeights
    sharding: WeightSharding | None = None

    block_kinds: ClassVar[tuple[BlockKind, ...]] = (
        BlockKind(FluxTransformerBlock, **_ARGUMENTS),
        BlockKind(FluxSingleTransformerBlock, **_ARGUMENTS),
    )

    @property
    def bytes(self) -> int:
        return self.file.tensor_bytes

    @property
    def stored_dtype(self) -> str:
        return self.file.dtype

    @property
    def latent_channels(self) -> int:
        return self.token_channels // PATCH**2

    @property
    def token_channels(self) -> int:
        return self.file.dims.out_channels

    @property
    def width(self) -> int:
        return self.file.dims.hidden

    @property
    def blocks(self) -> tuple[tuple[nn.Module, ...], ...]:
        return tuple((*_doubles(chunk), *_singles(chunk)) for chunk in self.chunks)

    @property
    def transformer(self) -> FluxTransformer2DModel:
        (whole,) = self.chunks
        return whole

    def pack(self, latent: Tensor) -> Tensor:
        return pack(latent)

    def unpack(self, tokens: Tensor, height: int, width: int) -> Tensor:
        return unpack(tokens, height, width)

    def image_tokens(self, rows: Rows) -> ImageTokens:
        return image_tokens(rows)

    def through(
        self, chunk: int, share: TokenShare, attention: Attention | None = None
    ) -> tuple[Tensor, Tensor]:
        """As base.TokenModel has it; without `attention` the tokens of `share` attend to each other."""
        transformer = self.chunks[chunk]
        doubles, singles = list[Block](_doubles(transformer)), list[Block](_singles(transformer))
        last = _keep_output(doubles, singles)
        image = self._call(chunk, share, attention, doubles, singles)
        return image, last.text

    def first_block(self, share: TokenShare, attention: Attention) -> FirstBlockOutput:
        first = _KeptOutput(_doubles(self.transformer)[0])
        with self._gathering(
            range(1)
        ):  # of which only `first` is wanted; the last layer is a thousandth of a call
            self._call(0, share, attention, [first], [])
        return FirstBlockOutput(first.text, first.image, first.image - first.image_before)

    def other_blocks(
        self, begun: FirstBlockOutput, share: TokenShare, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        doubles = [_given(begun.text, begun.image), *_doubles(self.transformer)[1:]]
        singles = list[Block](_singles(self.transformer))
        last = _keep_output(doubles, singles)
        with self._gathering(range(1, self.numbers[0].stop)):
            output = self._call(0, share, attention, doubles, singles)
        return output, last.image - begun.image

    def last_layer(self, begun: FirstBlockOutput, added: Tensor, share: TokenShare) -> Tensor:
        with self._gathering(range(0)):  # nobody reads the text any more
            return self._call(0, share, None, [_given(begun.text, begun.image + added)], [])

    def _call(
        self,
        chunk: int,
        share: TokenShare,
        attention: Attention | None,
        doubles: Sequence[Block],
        singles: Sequence[Block],
    ) -> Tensor:
        """diffusers' forward through these blocks in place of a chunk's own."""
        dtype, prompt, transformer = self.compute_dtype, share.prompt, self.chunks[chunk]
        guidance = prompt.guidance if self.file.dims.guidance else None
        with self._without_grad(), _passing(transformer, doubles, singles):
            (image,) = transformer(
                hidden_states=share.image.to(dtype),
                encoder_hidden_states=share.text.to(dtype),
                pooled_projections=PooledAtTime(prompt.pooled.to(dtype), share.sigma),
                timestep=share.sigma,
                guidance=None if guidance is None else guidance.to(dtype),
                img_ids=share.ids,
                txt_ids=text_ids(share.text.shape[1], self.device),
                joint_attention_kwargs=attention_arguments(attention),
                return_dict=False,
                **self._added(chunk, share.residuals),
            )
        return image

    def _added(self, chunk: int, residuals: Residuals | None) -> dict[str, Sequence[Tensor]]:
        """`residuals` as diffusers takes them: one for each block of a kind, or none for that kind."""
        if residuals is None:
            return {}
        doubles, own = self.file.dims.double_blocks, self.numbers[chunk]
        kinds = {
            "controlnet_block_samples": range(own.start, min(own.stop, doubles)),
            "controlnet_single_block_samples": range(max(own.start, doubles), own.stop),
        }
        nothing = torch.zeros(1, 1, 1, dtype=self.compute_dtype, device=self.device)
        return {
            name: _Arriving(residuals, blocks, nothing)
            for name, blocks in kinds.items()
            if any(block in residuals for block in blocks)
        }

    @contextmanager
    def _gathering(self, blocks: range) -> Iterator[None]:
        """Has only these blocks' weights travel ahead, where weights are shared out."""
        with nullcontext() if self.sharding is None else self.sharding.only(blocks):
            yield

    @contextmanager
    def _without_grad(self) -> Iterator[None]:
        """Weights that are gathered go where an earlier call left room for them, which inference mode forbids."""
        with (
            torch.inference_mode(torch.is_inference_mode_enabled() and self.sharding is None),
            torch.no_grad(),
        ):
            yield


class _Arriving(Sequence[Tensor]):
    """What is added after the blocks of a kind, in order; each moves to the device while the block before it computes,
    the first at once."""

    def __init__(self, residuals: Residuals, blocks: range, nothing: Tensor) -> None:
        self._residuals = residuals
        self._blocks = blocks
        self._nothing = nothing
        residuals.begin(blocks[0])

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: Any) -> Any:
        block = self._blocks[index]
        added = self._residuals(block) if block in self._residuals else self._nothing
        if index + 1 < len(self):
            self._residuals.begin(self._blocks[index + 1])
        return added


class _KeptOutput:
    """A block of one call that keeps what goes in and out: diffusers' forward drops the last block's text."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def __call__(self, *, hidden_states: Tensor, **others: object) -> tuple[Tensor, Tensor]:
        self.image_before = hidden_states
        self.text, self.image = self._block(hidden_states=hidden_states, **others)
        return self.text, self.image


def _keep_output(doubles: list[Block], singles: list[Block]) -> _KeptOutput:
    """Has the last of these blocks keep its output."""
    blocks = singles or doubles
    kept = blocks[-1] = _KeptOutput(blocks[-1])
    return kept


def _given(text: Tensor, image: Tensor) -> Block:
    """A block that gives what is known already."""
    return lambda **arguments: (text, image)


@contextmanager
def _passing(
    transformer: FluxTransformer2DModel, doubles: Sequence[Block], singles: Sequence[Block]
) -> Iterator[None]:
    """Inside, calls of `transformer` pass through these blocks: it takes no lists as arguments."""
    with (
        transformer.transformer_blocks.replaced_by(doubles),
        transformer.single_transformer_blocks.replaced_by(singles),
    ):
        yield


def _doubles(transformer: FluxTransformer2DModel) -> BlockList:
    return transformer.transformer_blocks


def _singles(transformer: FluxTransformer2DModel) -> BlockList:
    return transformer.single_transformer_blocks

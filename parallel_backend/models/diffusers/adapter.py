"""Adapts diffusers' Flux.1 to ComfyUI's Flux: it takes the same call, does not round the timestep either, and gives
the same output."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn

PATCH = 2  # latent cells along a side of a token


class PooledAtTime(NamedTuple):
    """The inputs of the time and text embedding in a call with r rows: pooled [r, pooled_dim], sigma [r] float32.

    diffusers' forward passes `pooled_projections` on unchanged, but first rounds the timestep to the compute dtype.
    """

    pooled: Tensor
    sigma: Tensor


class ExactTimestep(nn.Module):
    """A replacement of diffusers' time_text_embed that embeds the unrounded `sigma` of a PooledAtTime.

    As in ComfyUI, a guidance-distilled model that gets no guidance (FluxDisableGuidance) embeds none.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rounded: Tensor, *rest: Tensor | PooledAtTime) -> Tensor:
        *guidance, call = rest
        assert isinstance(call, PooledAtTime), "diffusers hands on what DiffusersFlux gave it"
        exact, inner = call.sigma * 1000, self.inner
        if guidance or not hasattr(inner, "guidance_embedder"):
            return inner(exact, *guidance, call.pooled)
        time = inner.get_submodule("timestep_embedder")(
            inner.get_submodule("time_proj")(exact).to(call.pooled.dtype)
        )
        return time + inner.get_submodule("text_embedder")(call.pooled)


class DiffusersFlux(nn.Module):
    """A module that calls `transformer` with the arguments of ComfyUI's Flux. `dtype`: compute dtype."""

    def __init__(self, transformer: FluxTransformer2DModel, dtype: torch.dtype) -> None:
        super().__init__()
        transformer.time_text_embed = ExactTimestep(transformer.time_text_embed)
        self.transformer = transformer
        self.dtype = dtype

    def forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, y: Tensor, guidance: Tensor | None = None
    ) -> Tensor:
        """Maps x [B, C, h, w], timestep [B], context [B, t, channels], y [B, channels] to [B, C, h, w]."""
        height, width = x.shape[-2:]
        config = self.transformer.config
        distilled = config.guidance_embeds and guidance is not None
        (image,) = self.transformer(
            hidden_states=pack(x).to(self.dtype),
            encoder_hidden_states=context.to(self.dtype),
            pooled_projections=PooledAtTime(
                y[:, : config.pooled_projection_dim].to(self.dtype), timestep.float()
            ),
            timestep=timestep,
            guidance=guidance.to(self.dtype) if distilled and guidance is not None else None,
            img_ids=image_ids(height, width, x.device),
            txt_ids=torch.zeros(context.shape[1], 3, device=x.device),  # text has no position in Flux
            joint_attention_kwargs={},
            return_dict=False,
        )
        return unpack(image, height, width)


def pack(latent: Tensor) -> Tensor:
    """Packs [B, C, h, w] to [B, ceil(h/2) * ceil(w/2), C * 4], row by row; pads odd sides circularly, as ComfyUI."""
    height, width = latent.shape[-2:]
    padded = (
        F.pad(latent, (0, width % PATCH, 0, height % PATCH), mode="circular")
        if (height | width) % PATCH
        else latent
    )
    return F.pixel_unshuffle(padded, PATCH).flatten(2).transpose(1, 2).contiguous()


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Unpacks [B, ceil(h/2) * ceil(w/2), C * 4] to [B, C, h, w]; crops the padding of odd sides."""
    patches = tokens.transpose(1, 2).unflatten(2, token_grid(height, width))
    return F.pixel_shuffle(patches, PATCH)[:, :, :height, :width]


def token_grid(height: int, width: int) -> tuple[int, int]:
    """Returns (rows, columns) of tokens of a latent of [height, width]."""
    return -(-height // PATCH), -(-width // PATCH)


def image_ids(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """Returns [N, 3] float32: (0, row, column) of each token, in the order of `pack`."""
    rows, columns = token_grid(height, width)
    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] = torch.arange(rows, device=device).unsqueeze(1)
    ids[..., 2] = torch.arange(columns, device=device)
    return ids.reshape(rows * columns, 3)

"""Adapts diffusers' Flux.1 to ComfyUI's Flux: it takes the same call, does not round the timestep either, and gives
the same output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn

from .packing import image_ids, pack, text_ids, unpack


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
            txt_ids=text_ids(context.shape[1], x.device),
            joint_attention_kwargs={},
            return_dict=False,
        )
        return unpack(image, height, width)

"""Adapts diffusers' Flux.1 to the signature of ComfyUI's Flux: it takes the same call and gives the same output."""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn

from .exact_timestep import PooledAtTime
from .packing import image_ids, pack, text_ids, unpack


class DiffusersFlux(nn.Module):
    """A module that calls `transformer` with the arguments of ComfyUI's Flux. `dtype`: compute dtype. The transformer's
    time embedding must take a PooledAtTime."""

    def __init__(self, transformer: FluxTransformer2DModel, dtype: torch.dtype) -> None:
        super().__init__()
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

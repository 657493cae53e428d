"""Embeds the timestep in diffusers' Flux.1 without rounding it, as ComfyUI does."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


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
        assert isinstance(call, PooledAtTime), "diffusers hands on what FluxModel gave it"
        exact, inner = call.sigma * 1000, self.inner
        if guidance or not hasattr(inner, "guidance_embedder"):
            return inner(exact, *guidance, call.pooled)
        time = inner.get_submodule("timestep_embedder")(
            inner.get_submodule("time_proj")(exact).to(call.pooled.dtype)
        )
        return time + inner.get_submodule("text_embedder")(call.pooled)

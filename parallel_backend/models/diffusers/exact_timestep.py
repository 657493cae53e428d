"""The embedding of time in diffusers' Flux.1, unrounded as ComfyUI has it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


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

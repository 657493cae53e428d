"""Jobs for ComfyUI's sampling loop on a tiny version of ComfyUI's Flux."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from comfy_weight_files import CONTEXT, POOLED, spec, write
from shipped_jobs import LoopJob

STEPS = 4


def tiny_model(folder):
    """Writes a file with one block of each kind and returns its ModelSpec."""
    return spec(write(folder / "loop.safetensors", "fp32", blocks=1))


def loop_job(
    sampler: str = "euler",
    *,
    steps: int = STEPS,
    batch: int = 1,
    mask: bool = False,
    size: tuple[int, int] = (9, 6),
    **changes,
) -> LoopJob:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    noise, latent = random(batch, 16, *size), random(batch, 16, *size)
    kept = torch.ones_like(noise)
    kept[..., :3] = 0.25
    sigmas = torch.linspace(1, 0, steps + 1)
    sigmas = 3 * sigmas / (1 + 2 * sigmas)
    conds = {
        side: [
            {
                "model_conds": {
                    "c_crossattn": ("CONDCrossAttn", random(1, 7, CONTEXT)),
                    "y": ("CONDRegular", random(1, POOLED)),
                    "guidance": ("CONDRegular", torch.tensor([3.5])),
                }
            }
        ]
        for side in ("positive", "negative")
    }
    request = LoopJob(
        noise, latent if mask else torch.zeros_like(noise), sigmas, conds, 2.5, sampler, seed=11
    )
    return replace(request, denoise_mask=kept if mask else None, **changes)

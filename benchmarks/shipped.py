"""A benchmark's request as a job that ComfyUI ships: with its own guider and sampler, step caches and trials."""

from __future__ import annotations

from typing import Any

import torch

from parallel_backend.requests import Conditioning, SampleRequest
from shipped_jobs import LoopJob


def loop_job_of(request: SampleRequest, sampler: str = "euler", cache_threshold: float = 0.0) -> LoopJob:
    """Returns the job of a Flux whose noise, prompts and sigmas are those of `request`."""
    sides = {"positive": request.positive, "negative": request.negative or request.positive}
    return LoopJob(
        noise=request.noise,
        latent=torch.zeros_like(request.noise),
        sigmas=request.sigmas,
        conds={side: [_cond(prompt)] for side, prompt in sides.items()},
        cfg=request.cfg,
        sampler=sampler,
        seed=0,
        cache_threshold=cache_threshold,
    )


def _cond(prompt: Conditioning) -> dict[str, Any]:
    found = {"c_crossattn": ("CONDCrossAttn", prompt.context), "y": ("CONDRegular", prompt.pooled)}
    if prompt.guidance is not None:
        found["guidance"] = ("CONDRegular", prompt.guidance)
    return {"model_conds": found}

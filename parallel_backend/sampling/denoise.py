"""The denoise loop of a resident request: identical for one rank and eight, since parallelism hides in `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..engine.rows import Rows
from ..errors import Cancelled, RequestError
from ..requests import Conditioning, SampleRequest
from .guidance import Guidance, noised
from .patch_sampling import PatchSampling
from .samplers import STEPS, model_calls, run, start_history


class Forward(Protocol):
    """A model call over all ranks. `warmup_steps`: exact steps before patches flow; None where they never do."""

    device: torch.device
    warmup_steps: int | None

    def __call__(self, rows: list[Rows]) -> list[Tensor]: ...


class OnStep(Protocol):
    """What happens between two steps on every rank (step_boundary.py); a plain function where no patches flow."""

    def __call__(self, i: int, denoised: Tensor) -> None:
        """After step i (0-based); may raise Cancelled, on all ranks alike."""

    def passed(self, i: int, denoised: Tensor) -> None:
        """The same for a step of flowing patches, on ranks where samplers run; never raises."""

    def is_stopped(self, lag: int) -> bool:
        """Whether the request was cancelled, as known `lag` questions ago; the same on all ranks."""


@torch.inference_mode()
def denoise(
    forward: Forward, request: SampleRequest, on_step: OnStep | Callable[[int, Tensor], None]
) -> Tensor:
    """Runs all steps; returns the latent [B, C, H/8, W/8] float32 in the model's latent space, on the forward's device.

    The maths is ComfyUI's KSAMPLER for flow models (CONST): x0 = sigma * noise + (1 - sigma) * latent.
    """
    if request.sampler not in STEPS:
        raise RequestError(
            f"sampler {request.sampler!r} does not run on the ranks; use {', '.join(STEPS)}, or the stepwise way."
        )
    device = forward.device
    noise, latent, sigmas = (
        t.to(device, torch.float32) for t in (request.noise, request.latent, request.sigmas)
    )
    mask = None if request.denoise_mask is None else request.denoise_mask.to(device, torch.float32)
    guidance = Guidance(noise, latent, mask, request.cfg)
    prompts = [_on_device(prompt, device) for prompt in request.prompts]

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        x = guidance.model_input(x, sigma)
        return guidance.denoised(x, sigma, forward(_rows(x, sigma, prompts)))

    step, history = STEPS[request.sampler], start_history(request.seed, device)
    steps = len(sigmas) - 1
    exact = steps if forward.warmup_steps is None else min(forward.warmup_steps, steps)
    x = noised(sigmas[0], noise, latent)
    for i in range(exact):
        if i == exact - 1 < steps - 1:
            forward.remember(True)  # the last exact step leaves its keys and values to the patches
        x, denoised = run(step(x, sigmas, i, history), model)
        on_step(i, denoised)
    if exact < steps:
        try:
            calls = [sigma for i in range(exact, steps) for sigma in model_calls(step, sigmas, i)]
            patches = PatchSampling(step, x, sigmas, exact, history, guidance, on_step, lag=forward.stages)
            if not forward.by_patches(_rows(x, sigmas[exact], prompts), calls, patches):
                raise Cancelled("The request was cancelled.")
            x = forward.share_latent(patches.latent if forward.samples else None, like=x)
        finally:
            forward.remember(False)
    return x / (1 - sigmas[-1])


def _rows(x: Tensor, sigma: Tensor, prompts: list[Conditioning]) -> list[Rows]:
    return [Rows(x=x, sigma=sigma.expand(x.shape[0]), conditioning=prompt) for prompt in prompts]


def _on_device(prompt: Conditioning, device: torch.device) -> Conditioning:
    return Conditioning(
        context=prompt.context.to(device),
        pooled=prompt.pooled.to(device),
        guidance=None if prompt.guidance is None else prompt.guidance.to(device, torch.float32),
    )

"""The denoise loop of a resident request: identical for one rank and eight, since parallelism hides in `forward`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..engine.forward import ParallelForward
from ..engine.rows import Rows
from ..errors import RequestError
from ..requests import Conditioning, SampleRequest
from .samplers import STEPS, Model, start_history

OnStep = Callable[[int, Tensor], None]


@torch.inference_mode()
def denoise(forward: ParallelForward, request: SampleRequest, on_step: OnStep) -> Tensor:
    """Runs all steps; returns the latent [B, C, H/8, W/8] float32 in the model's latent space, on the forward's device.

    `on_step(i, denoised)` is called after step i (0-based) on every rank; it may raise Cancelled, on all ranks alike.
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
    model = _with_mask(_with_cfg(forward, request), noise, latent, mask)
    step = STEPS[request.sampler]
    history = start_history(request.seed, device)
    x = _noised(sigmas[0], noise, latent)
    for i in range(len(sigmas) - 1):
        x, denoised = step(model, x, sigmas, i, history)
        on_step(i, denoised)
    return x / (1 - sigmas[-1])


def _noised(sigma: Tensor, noise: Tensor, latent: Tensor) -> Tensor:
    return sigma * noise + (1 - sigma) * latent


def _with_cfg(forward: ParallelForward, request: SampleRequest) -> Model:
    """denoised = x - sigma * v per prompt, then uncond + cfg * (cond - uncond); both prompts go in one forward."""
    positive = _on_device(request.positive, forward.device)
    use_negative = request.negative is not None and request.cfg != 1.0
    prompts = [positive, _on_device(request.negative, forward.device)] if use_negative else [positive]

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        rows = [Rows(x=x, sigma=sigma.expand(x.shape[0]), conditioning=prompt) for prompt in prompts]
        denoised = [x - velocity * sigma for velocity in forward(rows)]
        if not use_negative:
            return denoised[0]
        cond, uncond = denoised
        return uncond + (cond - uncond) * request.cfg

    return model


def _with_mask(model: Model, noise: Tensor, latent: Tensor, mask: Tensor | None) -> Model:
    """Inpainting: outside the mask the input is the noised original and the output the original."""
    if mask is None:
        return model

    def masked(x: Tensor, sigma: Tensor) -> Tensor:
        x = x * mask + _noised(sigma, noise, latent) * (1 - mask)
        return model(x, sigma) * mask + latent * (1 - mask)

    return masked


def _on_device(prompt: Conditioning, device: torch.device) -> Conditioning:
    return Conditioning(
        context=prompt.context.to(device),
        pooled=prompt.pooled.to(device),
        guidance=None if prompt.guidance is None else prompt.guidance.to(device, torch.float32),
    )

"""Samplers as pure step functions: `(model, x, sigmas, i, history) -> (x, denoised)` for flow-matching models.

`model(x, sigma)` returns the denoised latent; x: [B, C, H/8, W/8] float32; sigmas: [S + 1], descending. The state
that outlives a step is `History`, so a run can be resumed between any two steps. Noise comes from a seeded
generator, so that every rank draws the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Model = Callable[[Tensor, Tensor], Tensor]


@dataclass
class History:
    """What a sampler carries from step to step: the previous denoised latent, and its source of noise."""

    generator: torch.Generator
    denoised: Tensor | None = None

    def noise_like(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=self.generator)


def start_history(seed: int, device: torch.device) -> History:
    """ComfyUI's noise source of ancestral samplers: on the CPU it offsets the seed by one, since the initial noise was
    drawn there from the seed itself (comfy/k_diffusion/sampling.py, default_noise_sampler)."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed + 1 if device.type == "cpu" else seed)
    return History(generator)


def euler(model: Model, x: Tensor, sigmas: Tensor, i: int, history: History) -> tuple[Tensor, Tensor]:
    """Algorithm 2 (Euler steps) of Karras et al. (2022), without churn."""
    denoised = model(x, sigmas[i])
    d = (x - denoised) / sigmas[i]
    return x + d * (sigmas[i + 1] - sigmas[i]), denoised


def euler_ancestral(
    model: Model, x: Tensor, sigmas: Tensor, i: int, history: History
) -> tuple[Tensor, Tensor]:
    """Euler steps with noise added back (eta = 1), in the rectified-flow form that keeps alpha = 1 - sigma."""
    denoised = model(x, sigmas[i])
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    if sigma_next == 0:
        return denoised, denoised
    sigma_down = sigma_next * (1 + (sigma_next / sigma - 1))
    alpha_next, alpha_down = 1 - sigma_next, 1 - sigma_down
    renoise = (sigma_next**2 - sigma_down**2 * alpha_next**2 / alpha_down**2) ** 0.5
    ratio = sigma_down / sigma
    x = ratio * x + (1 - ratio) * denoised
    return (alpha_next / alpha_down) * x + history.noise_like(x) * renoise, denoised


def heun(model: Model, x: Tensor, sigmas: Tensor, i: int, history: History) -> tuple[Tensor, Tensor]:
    """Algorithm 2 (Heun steps) of Karras et al. (2022), without churn; two model calls except in the last step."""
    denoised = model(x, sigmas[i])
    d = (x - denoised) / sigmas[i]
    dt = sigmas[i + 1] - sigmas[i]
    if sigmas[i + 1] == 0:
        return x + d * dt, denoised
    x_next = x + d * dt
    d_next = (x_next - model(x_next, sigmas[i + 1])) / sigmas[i + 1]
    return x + (d + d_next) / 2 * dt, denoised


def dpmpp_2m(model: Model, x: Tensor, sigmas: Tensor, i: int, history: History) -> tuple[Tensor, Tensor]:
    """DPM-Solver++(2M), Lu et al. (2022), in k-diffusion's form: t = -log(sigma)."""
    denoised = model(x, sigmas[i])
    t, t_next = -sigmas[i].log(), -sigmas[i + 1].log()
    h = t_next - t
    target = denoised
    if history.denoised is not None and sigmas[i + 1] > 0:
        r = (t + sigmas[i - 1].log()) / h
        target = (1 + 1 / (2 * r)) * denoised - (1 / (2 * r)) * history.denoised
    x = (torch.exp(-t_next) / torch.exp(-t)) * x - torch.expm1(-h) * target
    history.denoised = denoised
    return x, denoised


STEPS: dict[str, Callable[[Model, Tensor, Tensor, int, History], tuple[Tensor, Tensor]]] = {
    "euler": euler,
    "euler_ancestral": euler_ancestral,
    "heun": heun,
    "dpmpp_2m": dpmpp_2m,
}

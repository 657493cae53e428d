"""Samplers as step functions: generators `(x, sigmas, i, history)` that return (x, denoised).

They compute in sigma, like k-diffusion's samplers, so all but one are correct however a model mixes latents and noise.
That one, euler_ancestral, has a form for flow-matching models (STEPS) and one for others (USUAL_STEPS).

A step yields (x, sigma) when it needs the model's denoised latent, and the caller sends that latent back. So the caller
decides when to call the model: `run` at once, PipeFusion patch by patch. x: [B, C, H/8, W/8] float32, or any subset of
its elements, because every sampler here works element by element. The only state that outlives a step is `History`, so
a run can be resumed between any two steps. Noise comes from a seeded generator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

Model = Callable[[Tensor, Tensor], Tensor]
Step = Generator[tuple[Tensor, Tensor], Tensor, tuple[Tensor, Tensor]]


class Sigmas:
    """The noise levels of a run, [S + 1] descending: on the device for computing, on the host for decisions.

    Reading a number from the device would make the host wait until the device has finished all its work.
    """

    def __init__(self, sigmas: Tensor, device: torch.device) -> None:
        self._on_host: list[float] = sigmas.tolist()
        self._on_device = sigmas.to(device)

    def __len__(self) -> int:
        return len(self._on_host)

    def __getitem__(self, i: int) -> Tensor:
        return self._on_device[i]

    def is_zero(self, i: int) -> bool:
        return self._on_host[i] == 0


@dataclass
class History:
    """A sampler's memory from step to step: the previous denoised latent, and its source of noise. `noise_scale`: a
    factor on the noise, for models trained with noise of a variance above 1."""

    generator: torch.Generator
    denoised: Tensor | None = None
    noise_scale: float = 1.0

    def noise_like(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=self.generator)
        return noise * self.noise_scale


def start_history(seed: int, device: torch.device, noise_scale: float = 1.0) -> History:
    """Returns a History with ComfyUI's noise source for ancestral samplers. On the CPU that adds one to the seed,
    because the initial noise was drawn from the seed there (comfy/k_diffusion/sampling.py, default_noise_sampler)."""
    generator = torch.Generator(device=device)
    generator.manual_seed((seed + 1) % 2**64 if device.type == "cpu" else seed)  # 2**64 - 1 is a valid seed
    return History(generator, noise_scale=noise_scale)


def run(step: Step, model: Model) -> tuple[Tensor, Tensor]:
    """Runs one step with `model(x, sigma)` for its model calls; returns (x, denoised)."""
    try:
        wish = next(step)
        while True:
            wish = step.send(model(*wish))
    except StopIteration as end:
        return end.value


def model_calls(step: Callable[..., Step], sigmas: Sigmas, i: int) -> list[Tensor]:
    """Returns the sigmas at which step i calls the model; they depend only on `sigmas`."""
    calls = []

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        calls.append(sigma)
        return x

    nothing = sigmas[i].new_zeros(1)
    run(step(nothing, sigmas, i, start_history(0, nothing.device)), model)
    return calls


def euler(x: Tensor, sigmas: Sigmas, i: int, history: History) -> Step:
    """Algorithm 2 (Euler steps) of Karras et al. (2022), without churn."""
    denoised = yield x, sigmas[i]
    d = (x - denoised) / sigmas[i]
    return x + d * (sigmas[i + 1] - sigmas[i]), denoised


def euler_ancestral(x: Tensor, sigmas: Sigmas, i: int, history: History) -> Step:
    """Euler steps with noise added back (eta = 1), in the rectified-flow form that keeps alpha = 1 - sigma."""
    denoised = yield x, sigmas[i]
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    if sigmas.is_zero(i + 1):
        return denoised, denoised
    sigma_down = sigma_next * (1 + (sigma_next / sigma - 1))
    alpha_next, alpha_down = 1 - sigma_next, 1 - sigma_down
    renoise = (sigma_next**2 - sigma_down**2 * alpha_next**2 / alpha_down**2) ** 0.5
    ratio = sigma_down / sigma
    x = ratio * x + (1 - ratio) * denoised
    return (alpha_next / alpha_down) * x + history.noise_like(x) * renoise, denoised


def usual_euler_ancestral(x: Tensor, sigmas: Sigmas, i: int, history: History) -> Step:
    """Euler steps with noise added back (eta = 1), for models whose latent at sigma is clean + sigma * noise.
    Each step goes down to `down`, so that noise of variance up**2 brings it to sigma[i + 1]."""
    denoised = yield x, sigmas[i]
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    if sigmas.is_zero(i + 1):
        return denoised, denoised
    up = (sigma_next**2 * (sigma**2 - sigma_next**2) / sigma**2) ** 0.5
    down = (sigma_next**2 - up**2) ** 0.5
    d = (x - denoised) / sigma
    return x + d * (down - sigma) + history.noise_like(x) * up, denoised


def heun(x: Tensor, sigmas: Sigmas, i: int, history: History) -> Step:
    """Algorithm 2 (Heun steps) of Karras et al. (2022), without churn; two model calls except in the last step."""
    denoised = yield x, sigmas[i]
    d = (x - denoised) / sigmas[i]
    dt = sigmas[i + 1] - sigmas[i]
    if sigmas.is_zero(i + 1):
        return x + d * dt, denoised
    x_next = x + d * dt
    denoised_next = yield x_next, sigmas[i + 1]
    d_next = (x_next - denoised_next) / sigmas[i + 1]
    return x + (d + d_next) / 2 * dt, denoised


def dpmpp_2m(x: Tensor, sigmas: Sigmas, i: int, history: History) -> Step:
    """DPM-Solver++(2M), Lu et al. (2022), in k-diffusion's form: t = -log(sigma)."""
    denoised = yield x, sigmas[i]
    t, t_next = -sigmas[i].log(), -sigmas[i + 1].log()
    h = t_next - t
    target = denoised
    if history.denoised is not None and not sigmas.is_zero(i + 1):
        r = (t + sigmas[i - 1].log()) / h
        target = (1 + 1 / (2 * r)) * denoised - (1 / (2 * r)) * history.denoised
    x = (torch.exp(-t_next) / torch.exp(-t)) * x - torch.expm1(-h) * target
    history.denoised = denoised
    return x, denoised


STEPS: dict[str, Callable[[Tensor, Sigmas, int, History], Step]] = {
    "euler": euler,
    "euler_ancestral": euler_ancestral,
    "heun": heun,
    "dpmpp_2m": dpmpp_2m,
}
USUAL_STEPS = STEPS | {"euler_ancestral": usual_euler_ancestral}

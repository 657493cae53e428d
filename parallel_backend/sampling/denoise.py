"""The denoise loop of a plain job, which needs no ComfyUI: identical for one rank and eight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import RequestError
from ..requests import Conditioning, Rows, SampleRequest
from .guidance import Guidance, noised
from .host_copy import NumbersCheck, most_lag
from .patchwise import OnPatchStep
from .samplers import STEPS, History, Model, Sigmas, Step, run, start_history


class Forward(Protocol):
    """A model call over all ranks."""

    @property
    def device(self) -> torch.device: ...

    def __call__(self, rows: list[Rows]) -> list[Tensor]:
        """Velocities [r, C, h, w] float32 of each entry."""

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first rank's, on every rank."""

    def start_flow(self, request: SampleRequest, prompts: Sequence[Conditioning]) -> Flow | None:
        """The patches of a job under PipeFusion; None where all steps are of whole images. `prompts`: on the device."""


class Flow(Protocol):
    """Patches that flow through stages of devices once whole images have warmed them up (PipeFusion). `first`: the
    first step in which they may."""

    first: int

    def whole(self, rows: list[Rows]) -> list[Tensor]:
        """As Forward's call; leaves its keys and values to the patches."""

    def run(self, steps: FlowSteps) -> Tensor | None:
        """The latent after all steps from `steps.first` on, on every rank; None where no patches can flow. Raises
        Cancelled on all ranks."""


class OnStep(OnPatchStep, Protocol):
    """The boundary between two steps on every rank (rank/work/step_boundary.py)."""

    def __call__(self, i: int, denoised: Tensor) -> None:
        """After step i (0-based); may raise Cancelled, on all ranks alike."""


@dataclass(frozen=True)
class FlowSteps:
    """The steps that patches take: `x` [B, C, h, w] before step `first`, and what they need of the job."""

    step: Callable[..., Step]
    x: Tensor
    sigmas: Sigmas
    first: int
    history: History
    guidance: Guidance
    on_step: OnPatchStep


@torch.inference_mode()
def denoise(
    forward: Forward,
    request: SampleRequest,
    on_step: OnStep | Callable[[int, Tensor], None],
) -> Tensor:
    """Runs all steps; returns the latent [B, C, H/8, W/8] float32 in the model's latent space, on the forward's device.

    The maths is ComfyUI's KSAMPLER for flow models (CONST): x0 = sigma * noise + (1 - sigma) * latent.
    """
    if request.sampler not in STEPS:
        raise RequestError(
            f"sampler {request.sampler!r} does not run on the processes; use {', '.join(STEPS)}."
        )
    device = forward.device
    noise, latent = (t.to(device, torch.float32) for t in (request.noise, request.latent))
    sigmas = Sigmas(request.sigmas.to(torch.float32), device)
    mask = None if request.denoise_mask is None else request.denoise_mask.to(device, torch.float32)
    guidance = Guidance(noise, latent, mask, request.cfg)
    prompts = [_on_device(prompt, device) for prompt in request.prompts]

    def calling(call: Callable[[list[Rows]], list[Tensor]]) -> Model:
        def model(x: Tensor, sigma: Tensor) -> Tensor:
            x = guidance.model_input(x, sigma)
            return guidance.denoised(x, sigma, call(_rows(x, sigma, prompts)))

        return model

    step, history = STEPS[request.sampler], start_history(request.seed, device)
    history.share = lambda noise: forward.from_first(noise)
    steps = len(sigmas) - 1
    x = noised(sigmas[0], noise, latent)
    flow, whole = forward.start_flow(request, prompts), steps
    if flow is not None:
        whole = flow.first
        flow = None if whole >= steps else flow
    check_numbers = NumbersCheck(most_lag(device))
    for i in range(steps):
        if flow is not None and i == whole:
            assert isinstance(on_step, OnPatchStep), "a plain function cannot follow patches"
            flowed = flow.run(FlowSteps(step, x, sigmas, i, history, guidance, on_step))
            if flowed is not None:
                x = flowed
                check_numbers(x, f"in one of the steps {whole + 1} to {steps}")
                break
        call = flow.whole if flow is not None and i == whole - 1 else forward
        x, denoised = run(step(x, sigmas, i, history), calling(call))
        check_numbers(denoised, f"in step {i + 1} of {steps}")  # the same on every rank: all go on or none
        on_step(i, denoised)
    check_numbers.finish()
    return x / (1 - sigmas[-1])


def _rows(x: Tensor, sigma: Tensor, prompts: list[Conditioning]) -> list[Rows]:
    return [Rows(x=x, sigma=sigma.expand(x.shape[0]), conditioning=prompt) for prompt in prompts]


def _on_device(prompt: Conditioning, device: torch.device) -> Conditioning:
    return Conditioning(
        context=prompt.context.to(device),
        pooled=prompt.pooled.to(device),
        guidance=None if prompt.guidance is None else prompt.guidance.to(device, torch.float32),
    )

"""The denoise loop of a plain job, which needs no ComfyUI: identical for one rank and eight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import RequestError
from ..requests import Conditioning, Rows, SampleRequest, SamplerState
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
    first step of a new job in which they may."""

    first: int

    def whole(self, rows: list[Rows]) -> list[Tensor]:
        """As Forward's call; leaves its keys and values to the patches."""

    def run(self, steps: FlowSteps) -> Tensor | None:
        """The latent after all steps from `steps.first` on, on every rank; None where no patches can flow. Raises
        Cancelled on all ranks."""


# Is given a way to make the state after a step, to be called before the next one begins or not at all.
Keep = Callable[[Callable[[], SamplerState]], None]


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
    keep: Keep | None


@torch.inference_mode()
def denoise(
    forward: Forward,
    request: SampleRequest,
    on_step: OnStep | Callable[[int, Tensor], None],
    *,
    state: SamplerState | None = None,
    keep: Keep | None = None,
) -> Tensor:
    """Runs all steps, or those after `state`; returns the latent [B, C, H/8, W/8] float32 in the model's latent space,
    on the forward's device. `keep` is offered the sampler's state before each `on_step`.

    A resumed run gives every bit that the whole one would have given, except where patches flow: PipeFusion warms up
    again first.
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
    x, first, so_far_exact = noised(sigmas[0], noise, latent), 0, True
    if state is not None:
        x, first, so_far_exact = state.x.to(device), _first_step(state, x, steps), state.exact
        history.denoised = None if state.denoised is None else state.denoised.to(device)
        history.generator.set_state(state.generator)
    flow, whole = forward.start_flow(request, prompts), steps
    if flow is not None:  # patches want keys and values, which a new group does not have
        whole = max(flow.first, first + 1 if first else 0)
        flow = None if whole >= steps else flow
    check_numbers, i = NumbersCheck(most_lag(device)), first
    while i < steps:
        if flow is not None and i == whole:
            assert isinstance(on_step, OnPatchStep), "a plain function cannot follow patches"
            flowed = flow.run(FlowSteps(step, x, sigmas, i, history, guidance, on_step, keep))
            if flowed is not None:
                x = flowed
                check_numbers(x, f"in one of the steps {whole + 1} to {steps}")
                break
        call = flow.whole if flow is not None and i == whole - 1 else forward
        x, denoised = run(step(x, sigmas, i, history), calling(call))
        check_numbers(denoised, f"in step {i + 1} of {steps}")  # the same on every rank: all go on or none
        if keep is not None and i + 1 < steps:
            keep(_state_of(i + 1, x, history, so_far_exact))
        on_step(i, denoised)
        i += 1
    check_numbers.finish()
    return x / (1 - sigmas[-1])


def _state_of(step: int, x: Tensor, history: History, exact: bool) -> Callable[[], SamplerState]:
    return lambda: SamplerState(step, x, history.denoised, history.generator.get_state(), exact)


def _first_step(state: SamplerState, x: Tensor, steps: int) -> int:
    if state.x.shape != x.shape or not 0 < state.step < steps:
        raise RequestError(
            f"the state to resume from, after step {state.step} with a latent of {list(state.x.shape)}, does not fit "
            f"this request of {steps} steps and {list(x.shape)}."
        )
    return state.step


def _rows(x: Tensor, sigma: Tensor, prompts: list[Conditioning]) -> list[Rows]:
    return [Rows(x=x, sigma=sigma.expand(x.shape[0]), conditioning=prompt) for prompt in prompts]


def _on_device(prompt: Conditioning, device: torch.device) -> Conditioning:
    # Copied on the CPU too: in the payload a tensor lies wherever those before it end, and matrix products round by how
    # their input is aligned. A job that is resumed, with more in its payload, would lose the last bit.
    return Conditioning(
        context=prompt.context.to(device, copy=True),
        pooled=prompt.pooled.to(device, copy=True),
        guidance=None if prompt.guidance is None else prompt.guidance.to(device, torch.float32),
    )

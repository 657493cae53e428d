"""The denoise loop of a resident request: identical for one rank and eight, since parallelism hides in `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..engine.rows import Rows
from ..errors import Cancelled, RequestError
from ..requests import Conditioning, SampleRequest, SamplerState, check_numbers
from .guidance import Guidance, noised
from .patchwise import PatchSampling
from .samplers import STEPS, History, model_calls, run, start_history


class Forward(Protocol):
    """A model call over all ranks. `warmup_steps`: exact steps before patches flow; None where they never do."""

    device: torch.device
    warmup_steps: int | None

    def __call__(self, rows: list[Rows]) -> list[Tensor]: ...


# Is given a way to make the state after a step, to be called before the next one begins or not at all.
Keep = Callable[[Callable[[], SamplerState]], None]


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
    x, first, so_far_exact = noised(sigmas[0], noise, latent), 0, True
    if state is not None:
        x, first, so_far_exact = state.x.to(device), _first_step(state, x, steps), state.exact
        history.denoised = None if state.denoised is None else state.denoised.to(device)
        history.generator.set_state(state.generator)
    exact = steps
    if forward.warmup_steps is not None:  # patches want keys and values, which a new group does not have
        exact = min(first + max(forward.warmup_steps, min(first, 1)), steps)
    for i in range(first, exact):
        if i == exact - 1 < steps - 1:
            forward.remember(True)  # the last exact step leaves its keys and values to the patches
        x, denoised = run(step(x, sigmas, i, history), model)
        # The same on every rank, so all of them go on or none.
        check_numbers(denoised, f"in step {i + 1} of {steps}")
        if keep is not None and i + 1 < steps:
            keep(_state_of(i + 1, x, history, so_far_exact))
        on_step(i, denoised)
    if exact < steps:
        try:
            calls = [sigma for i in range(exact, steps) for sigma in model_calls(step, sigmas, i)]
            patches = PatchSampling(
                step, x, sigmas, exact, history, guidance, on_step, lag=forward.stages, keep=keep
            )
            if not forward.by_patches(_rows(x, sigmas[exact], prompts), calls, patches):
                raise Cancelled("The request was cancelled.")
            x = forward.share_latent(patches.latent if forward.samples else None, like=x)
            check_numbers(x, f"in one of the steps {exact + 1} to {steps}")
        finally:
            forward.remember(False)
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

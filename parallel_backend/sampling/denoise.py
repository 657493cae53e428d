"""The denoise loop of a resident request: identical for one rank and eight, since parallelism hides in `forward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..errors import Cancelled, RequestError
from ..requests import Conditioning, Rows, SampleRequest, SamplerState
from .guidance import Guidance, noised
from .host_copy import NumbersCheck, most_lag
from .patchwise import OnPatchStep, Packing, PatchSampling
from .samplers import STEPS, History, Model, Sigmas, model_calls, run, start_history


class Forward(Protocol):
    """A model call over all ranks."""

    @property
    def device(self) -> torch.device: ...

    @property
    def patchwise(self) -> PatchwiseForward | None:
        """The same as one under which patches flow; None where all steps are whole images."""

    def __call__(self, rows: list[Rows]) -> list[Tensor]:
        """Velocities [r, C, h, w] float32 of each entry."""

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first rank's, on every rank."""


class PatchwiseForward(Packing, Protocol):
    """A forward under which patches flow through `stages` of devices once whole images have warmed it up (PipeFusion).

    `samples`: whether samplers run on this rank while patches flow.
    """

    @property
    def warmup_steps(self) -> int: ...

    @property
    def stages(self) -> int: ...

    @property
    def samples(self) -> bool: ...

    def start_run(self) -> PatchRun: ...

    def from_first_sampler(self, tensor: Tensor) -> Tensor:
        """That of the first rank that samples while patches flow, on all that do."""

    def share_latent(self, latent: Tensor | None, like: Tensor) -> Tensor:
        """The latent of ranks that sample, on every rank. `like`: any tensor of its shape."""


class PatchRun(Protocol):
    """The patches of one job, and what the whole images before them leave to them."""

    def whole(self, rows: list[Rows]) -> list[Tensor]:
        """As Forward's call; leaves its keys and values to the patches."""

    def by_patches(self, rows: list[Rows], sigmas: Sequence[Tensor], sampling: PatchSampling) -> bool:
        """Runs a model call for each of `sigmas`; False when `sampling` stopped it. x of `rows` tells the shape."""


# Is given a way to make the state after a step, to be called before the next one begins or not at all.
Keep = Callable[[Callable[[], SamplerState]], None]


class OnStep(OnPatchStep, Protocol):
    """The boundary between two steps on every rank (rank/work/step_boundary.py)."""

    def __call__(self, i: int, denoised: Tensor) -> None:
        """After step i (0-based); may raise Cancelled, on all ranks alike."""


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
    patchwise, whole = forward.patchwise, steps
    if patchwise is not None:  # patches want keys and values, which a new group does not have
        whole = min(first + max(patchwise.warmup_steps, min(first, 1)), steps)
    check_numbers = NumbersCheck(most_lag(device))
    flow = None if patchwise is None or whole == steps else patchwise.start_run()
    for i in range(first, whole):
        call = forward if flow is None or i < whole - 1 else flow.whole  # whose keys and values patches need
        x, denoised = run(step(x, sigmas, i, history), calling(call))
        check_numbers(denoised, f"in step {i + 1} of {steps}")  # the same on every rank: all go on or none
        if keep is not None and i + 1 < steps:
            keep(_state_of(i + 1, x, history, so_far_exact))
        on_step(i, denoised)
    if patchwise is not None and flow is not None:
        calls = [sigma for i in range(whole, steps) for sigma in model_calls(step, sigmas, i)]
        assert isinstance(on_step, OnPatchStep), "a plain function cannot follow patches"
        history.share = patchwise.from_first_sampler
        patches = PatchSampling(
            step, x, sigmas, whole, history, guidance, on_step, patchwise, lag=patchwise.stages, keep=keep
        )
        if not flow.by_patches(_rows(x, sigmas[whole], prompts), calls, patches):
            raise Cancelled("The request was cancelled.")
        x = patchwise.share_latent(patches.latent if patchwise.samples else None, like=x)
        check_numbers(x, f"in one of the steps {whole + 1} to {steps}")
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

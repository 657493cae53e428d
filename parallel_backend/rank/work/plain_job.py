"""A plain job, which commands run without ComfyUI: Euler steps over a module that all ranks share out."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.module_forward import ModuleForward
from ...engine.plain_calls import answers_to
from ...requests import Conditioning, Rows, SampleRequest
from ...sampling.host_copy import NumbersCheck, most_lag
from ...sampling.samplers import Sigmas, euler, run, start_history
from ..pipefusion.patch_flow import NO_FLOW, FlowRequest, PatchFlow, first_flowing
from .step_boundary import StepBoundary


class PlainJob:
    """One plain job on one rank, which is also the FlowJob of its PatchFlow."""

    def __init__(self, forward: ModuleForward, job: SampleRequest) -> None:
        self._forward, self._cfg = forward, job.cfg
        self._device = forward.model.device
        self._prompts = [_on_device(prompt, self._device) for prompt in job.prompts]
        self.request = FlowRequest(
            noise=job.noise.to(self._device, torch.float32),
            sigmas=job.sigmas,
            sampler="euler",
            seed=0,
            conds=[[{}] for _ in self._prompts],
            classes=frozenset({"CONST"}),
        )
        self._steps = len(job.sigmas) - 1
        self._first = self._steps if forward.stages is None else first_flowing(forward.layout.strategy)
        self._flow = PatchFlow(forward, self) if self._first < self._steps else None

    @property
    def is_exact(self) -> bool:
        return self._flow is None or self._flow.exact

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on how the job ran, in addition to those of its forward."""
        reason = "" if self._flow is None else self._flow.flow_blocked_by
        return (NO_FLOW.format(reason=reason),) if reason else ()

    @torch.inference_mode()
    def run(self, on_step: StepBoundary) -> Tensor:
        """Runs all steps; returns the latent [B, C, H/8, W/8] float32 on every rank. Raises Cancelled on all ranks or
        on none."""
        sigmas, history = Sigmas(self.request.sigmas, self._device), start_history(0, self._device)
        x = sigmas[0] * self.request.noise
        check_numbers = NumbersCheck(most_lag(self._device))
        for i in range(self._steps):
            if self._flow is not None and i == self._first and self._flow.find_patches():
                x = self._flow.sample(self._sides, x, sigmas, i, history, on_step, self._denoise)
                check_numbers(x, f"in one of the steps {i + 1} to {self._steps}")
                break
            x, denoised = run(euler(x, sigmas, i, history), self._denoise)
            # The latent is the same on every rank, so all raise or none.
            check_numbers(denoised, f"in step {i + 1} of {self._steps}")
            on_step(i, denoised)
        check_numbers.finish()
        return x

    def answers(self, requested: tuple[bool, ...], x: Tensor, sigma: Tensor) -> list[Tensor]:
        """Returns the velocity [B, C, h, w] float32 for each prompt, on every rank."""
        rows = [Rows(x, sigma.expand(len(x)), prompt) for prompt in self._prompts]
        compute = self._forward if self._flow is None else self._flow.compute
        return answers_to(rows, self._forward.model.module, compute)

    @property
    def _sides(self) -> tuple[bool, ...]:
        return (True,) * len(self._prompts)

    def _denoise(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Returns x - sigma * v per prompt, then uncond + cfg * (cond - uncond), as ComfyUI does for flow models."""
        answers = self.answers if self._flow is None else self._flow.answers
        found = [x - velocity * sigma for velocity in answers(self._sides, x, sigma)]
        return found[0] if len(found) == 1 else found[1] + (found[0] - found[1]) * self._cfg


def _on_device(prompt: Conditioning, device: torch.device) -> Conditioning:
    return Conditioning(
        context=prompt.context.to(device),
        pooled=prompt.pooled.to(device),
        guidance=None if prompt.guidance is None else prompt.guidance.to(device, torch.float32),
    )

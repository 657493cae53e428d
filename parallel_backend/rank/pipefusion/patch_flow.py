"""PipeFusion in ComfyUI's own loop: after some steps with whole images, each patch takes its steps by itself.

Guider, guidance and masks stay ComfyUI's. For each patch the first rank calls ComfyUI's model twice: once to get the
input of the network, whose blocks the stages then compute, and again when their output has come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...engine.comm.collectives import all_gather, broadcast
from ...engine.module_forward import ModuleForward
from ...engine.stages.stages import ModuleStages
from ...engine.stages.stale_keys import StaleKeyCache
from ...engine.tokens.block_tokens import ImagePatch
from ...errors import Cancelled
from ...requests import ModuleCall
from ...sampling.image_patches import ElementPatches
from ...sampling.patchwise import OnPatchStep, PatchSampling
from ...sampling.samplers import STEPS, USUAL_STEPS, History, Sigmas, Step, model_calls, start_history
from ...strategy import ParallelStrategy

# The model of ComfyUI's sampler: (x [B, C, …], sigma []) -> denoised.
Denoise = Callable[[Tensor, Tensor], Tensor]
Sides = tuple[bool, ...]
NO_FLOW = "PipeFusion ran exactly and without its speed: {reason}"
# ComfyUI's sampling classes (how a model mixes latents and noise): that of flow-matching models, and others for which
# the latent of a job with one patch was compared with stock ComfyUI's. All of them compute element by element.
_FLOW = "CONST"
_SAMPLINGS = {_FLOW, "EPS", "V_PREDICTION", "V_PREDICTION_DDPM", "EDM", "COSMOS_RFLOW"}


@dataclass
class FlowRequest:
    """The job data that patches need. `noise`: [B, C, …]; `sampler`: ComfyUI's name of it; `conds`: the prompts of each
    side (cond, uncond); `classes`: names of the classes of the model's sampling."""

    noise: Tensor
    sigmas: Tensor
    sampler: str
    seed: int
    conds: list[list[dict[str, Any]]]
    classes: frozenset[str]
    noise_scale: float = 1.0


class FlowJob(Protocol):
    """The job that patches belong to. `answers`: returns the model's output for the prompts of each requested side."""

    request: FlowRequest

    def answers(self, requested: Sides, x: Tensor, sigma: Tensor) -> list[Tensor]: ...


def flow_blocked_by(request: FlowRequest, strategy: ParallelStrategy) -> str:
    """Returns why no patches can flow in a job under PipeFusion, in a user's words; "" if they can."""
    steps = len(request.sigmas) - 1
    if first_flowing(strategy) >= steps:
        return f"all of the {steps} steps are warm-up steps"
    if request.sampler not in STEPS:
        return (
            f"patches cannot take the steps of {request.sampler} apart; those of {', '.join(STEPS)} they can"
        )
    if _SAMPLINGS.isdisjoint(request.classes):
        return "patches do not know this model's sampling (how it mixes latents and noise)"
    prompts = [prompt for side in request.conds for prompt in side]
    if any(prompt.get(name) is not None for prompt in prompts for name in ("area", "default")):
        return "prompts for areas of an image take it apart in another way than patches do"
    if any(prompt.get(f"timestep_{end}") is not None for prompt in prompts for end in ("start", "end")):
        return "prompts for some of the steps leave no keys and values to the others"
    return ""


def first_flowing(strategy: ParallelStrategy) -> int:
    """Returns the number of steps before patches flow: at least one, which computes keys and values for them."""
    return max(1, strategy.warmup_steps)


def step_of(request: FlowRequest) -> Callable[..., Step]:
    """Returns the step function of the job's sampler, as ComfyUI computes it under the model's sampling."""
    return (STEPS if _FLOW in request.classes else USUAL_STEPS)[request.sampler]


def history_of(request: FlowRequest, device: torch.device) -> History:
    """Returns the sampler's state before the first step. Flow-matching models may scale noise (ModelNoiseScale)."""
    is_flow = _FLOW in request.classes
    return start_history(request.seed, device, request.noise_scale if is_flow else 1.0)


# A patch's part of one network answer, on its way back to the first stage: (waits for it, rows of each pipeline).
_Coming = tuple[Callable[[], Tensor], tuple[int, ...]]


class PatchFlow:
    """The state and the steps of one job's patches on one rank. `flows`: True while patches flow; `flow_blocked_by`:
    why none can, in a user's words; "" on all ranks but the first."""

    def __init__(self, forward: ModuleForward, job: FlowJob) -> None:
        assert forward.stages is not None, "PipeFusion has stages"
        self._forward = forward
        self._stages: ModuleStages = forward.stages
        self._job = job
        self._layout = forward.layout
        self._sides: Sides = ()
        self.keys, self.flows, self.flow_blocked_by = StaleKeyCache(), False, ""
        self._seen: dict[tuple[int, ...], ModuleCall] = {}  # the last whole call, by its prompts
        self._patches: ElementPatches | None = None
        # The current patch, what its call will return, and, on its second way through the model, what has come back.
        self._now: ImagePatch | None = None
        self._sent: list[_Coming] = []
        self._answers: Iterator[Tensor] | None = None

    @property
    def request(self) -> FlowRequest:
        return self._job.request

    @property
    def exact(self) -> bool:
        """True if no call used keys of an earlier step: no patches flowed, or there is only one."""
        return self._patches is None or len(self._patches) == 1

    @property
    def _patch_count(self) -> int:
        return min(self._layout.strategy.pipeline_patches, self._stages.tokens)

    def find_patches(self) -> bool:
        """Finds which patch each element of the latent belongs to, after steps with whole images. Returns False on all
        ranks if patches cannot flow. Collective."""
        layout, noise = self._layout, self.request.noise
        found = self._find_owners() if layout.everyone.index == 0 else ""
        if not isinstance(found, Tensor):
            self.flow_blocked_by = found
            found = torch.full((noise[0].numel(),), -1, device=noise.device)
        owners = broadcast(found, 0, layout.everyone)
        if int(owners.min()) < 0:
            return False
        self._patches = ElementPatches(owners, noise.shape[1:], self._patch_count)
        self.flows = True
        return True

    def _find_owners(self) -> Tensor | str:
        """Returns the patch number of each element, [elements] int64, or why patches cannot flow."""
        noise, calls = self.request.noise, list(self._seen.values())
        assert calls, "whole images went before"
        for call in calls:
            if reason := self._stages.flow_blocked_by(call, self.keys):
                return reason
        local = (self._forward.local_rows(call, self._layout.row)[0] for call in calls)
        owners, *other_prompts = (self._stages.owners(call, self._patch_count, self.keys) for call in local)
        if not all(torch.equal(owners, of_prompt) for of_prompt in other_prompts):
            return "the prompts have unlike tokens behind the image's (a reference, or text), so patches would differ"
        fits = self._stages.empty_answer(0).shape[1:] == noise.shape[1:] and int(owners.min()) >= 0
        return owners if fits else "which part of the latent a patch makes cannot be told"

    @property
    def patches(self) -> ElementPatches:
        assert self._patches is not None, "they were found"
        return self._patches

    def sample(
        self,
        sides: Sides,
        x: Tensor,
        sigmas: Sigmas,
        first: int,
        history: History,
        on_step: OnPatchStep,
        denoise: Denoise,
    ) -> Tensor:
        """Takes all steps from `first` on; returns the same latent on every rank. The first rank runs the sampler over
        `denoise`, and the others follow. `sides`: True for each side that the calls request. Raises Cancelled on all
        ranks or on none. Collective."""
        self._sides = sides
        everyone = self._layout.everyone
        if everyone.index == 0:
            step = step_of(self.request)
            sampling = PatchSampling(step, x, sigmas, first, history, on_step, self.patches)
            self._run(sigmas, first, on_step, (sampling, denoise))
            latent = sampling.latent.contiguous()
        else:
            self._run(sigmas, first, on_step, None)
            latent = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.flows = False
        return broadcast(latent, 0, everyone)

    def _run(
        self, sigmas: Sigmas, first: int, on_step: OnPatchStep, lead: tuple[PatchSampling, Denoise] | None
    ) -> None:
        """Takes all steps from `first` on. `lead`: the sampler and its model on the first rank, None on others."""
        noise = self.request.noise
        self._x = torch.zeros_like(noise)  # on the first stage: the input of each patch's last call
        self._ones = noise.new_ones(len(noise))
        self._lead = lead
        self._returning: dict[int, tuple[list[_Coming], Tensor]] = {}  # by patch, with the sigma of its call
        stopped = False
        step = step_of(self.request)
        for sigma in [one for i in range(first, len(sigmas) - 1) for one in model_calls(step, sigmas, i)]:
            for number in range(len(self.patches)):
                stopped = on_step.is_stopped(self._stages.count)
                if stopped:
                    break
                self._take_back(number)
                self._send(ImagePatch(number, len(self.patches)), sigma)
            self._stages.end_round()
            if stopped:
                break
        for number in list(self._returning):
            self._take_back(number, drop=stopped)
        self._stages.settle()
        if stopped:
            raise Cancelled("The request was cancelled.")

    def compute(self, call: ModuleCall) -> Any:
        """Answers a call of the network. For whole images it stores their keys and values for patches. It answers a
        patch's first call with a placeholder of the answer's form, and the second with the result."""
        if not self.flows:
            self._seen[call.prompts] = call
            return self._forward(call, keys=self.keys)
        answer = self._stages.empty_answer(call.rows)
        if self._answers is not None:
            self.patches.put(next(self._answers), self._patch.number, answer)
            return self._stages.in_form(answer)
        part, shares = self._forward.local_rows(call, self._layout.row)
        local, size = shares[self._layout.row.index], self.patches.span(self._patch.number)
        found = self._stages.patch(part, self._patch, self.keys)
        if found is not None and self._returns:
            self._stages.send_back(self.patches.take(found[:local], self._patch.number))
        if self._stages.is_first and self._returns:
            empty = self._stages.empty_answer(local, size.stop - size.start)
            self._sent.append((self._stages.expect_back(empty), shares))
        return self._stages.in_form(answer)

    def answers(self, requested: Sides, x: Tensor, sigma: Tensor) -> list[Tensor]:
        """Returns the model's output of each requested side to the job's loop, which only the first rank runs while
        patches flow."""
        if self.flows and self._answers is None:
            self._share_elements(self.patches.take(x, self._patch.number))
        return self._job.answers(requested, x, sigma)

    @property
    def _returns(self) -> bool:
        """True on the one rank of each stage that sends or receives results of patches: all its ranks have them."""
        return self._layout.sequence.index == 0

    def _share_elements(self, elements: Tensor) -> Tensor:
        """Returns the first rank's elements of a patch on every rank of the first stage. Collective in that stage."""
        if self._returns:
            broadcast(elements, 0, self._layout.row)
        return broadcast(elements, 0, self._layout.sequence)

    @property
    def _patch(self) -> ImagePatch:
        assert self._now is not None, "a patch is on its way"
        return self._now

    def _has_elements(self, number: int) -> bool:
        """Returns False for a patch of a reference's tokens, which only refreshes its keys and values in each step."""
        span = self.patches.span(number)
        return span.start < span.stop

    def _send(self, patch: ImagePatch, sigma: Tensor) -> None:
        """Computes this stage's part of the next model call of a patch."""
        self._now, self._sent = patch, []
        if self._lead is not None:
            sampling, denoise = self._lead
            if self._has_elements(patch.number):
                elements = sampling.enter(self.patches.span(patch.number))
                self.patches.put(elements, patch.number, self._x)
            denoise(self._x, sigma)
        else:
            if self._stages.is_first:
                empty = torch.empty_like(self.patches.take(self._x, patch.number))
                self.patches.put(self._share_elements(empty), patch.number, self._x)
            self._job.answers(self._sides, self._x, sigma * self._ones)
        if self._stages.is_first:
            self._returning[patch.number] = self._sent, sigma

    def _take_back(self, number: int, *, drop: bool = False) -> None:
        """Waits for the result of a patch's last call, if any, and passes it to the sampler unless `drop`."""
        coming, sigma = self._returning.pop(number, ([], None))
        arrived = [(arrive(), shares) for arrive, shares in coming]
        if drop or sigma is None or not self._has_elements(number):
            return
        found = [all_gather(answer, shares, self._layout.row) for answer, shares in arrived]
        if self._lead is None:
            return
        sampling, denoise = self._lead
        self._now, self._answers = ImagePatch(number, len(self.patches)), iter(found)
        denoised = self.patches.take(denoise(self._x, sigma), number)
        self._answers = None
        sampling.leave(self.patches.span(number), denoised)

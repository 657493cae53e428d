"""PipeFusion in a shipped job: every rank runs ComfyUI's guider. While patches flow, the first rank's sampler leads,
the others follow it, and its latent goes to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ...engine.module_forward import ModuleForward
from ...job.changes import NetworkChange
from ...job.payload import SamplerRun
from ...job.restore import Replaced
from ...models.comfyui.jobs.samplers import (
    answer_prompts,
    has_usual_guidance,
    in_words,
    name_of,
    sampling_classes,
)
from ...sampling.patchwise import OnPatchStep
from ...sampling.samplers import STEPS, Sigmas, run
from .patch_flow import FlowRequest, PatchFlow, first_flowing, flow_blocked_by, history_of, step_of

_HOOK = "sampler_calc_cond_batch_function"
# Functions that ComfyUI calls in each step. While patches flow, only one patch of what they get is current.
_FUNCTIONS = (
    _HOOK,
    "context_handler",
    "denoise_mask_function",
    "model_function_wrapper",
    "sampler_cfg_function",
    "sampler_post_cfg_function",
    "sampler_pre_cfg_function",
)
_WRAPPERS = ("apply_model", "calc_cond_batch", "predict_noise")
_CODE = ("comfy.k_diffusion", "comfy.model_base", "comfy.model_sampling", "comfy.samplers")


class FlowMeeting(Protocol):
    """The part of a job's meeting (rank/work/meeting.py) that a flow uses."""

    def alone(self) -> AbstractContextManager[None]: ...
    def end_round(self) -> None: ...


class JobFlow:
    """PipeFusion of one job on one rank, as PatchFlow's FlowJob. `steps_done`: steps before a failure, whose answers
    are replayed."""

    def __init__(
        self,
        forward: ModuleForward,
        meeting: FlowMeeting,
        work: SamplerRun,
        end_step: Callable[[Tensor], None],
        on_step: OnPatchStep,
        steps_done: int,
    ) -> None:
        self._forward, self._meeting, self._guider = forward, meeting, work.guider
        self._end_step, self._on_step, self._steps_done = end_step, on_step, steps_done
        self._conds: list[Any] = []
        self._options: dict[str, Any] = {}
        self._sides: tuple[bool, ...] = ()
        noise, _, sampler, sigmas, _, seed = work.arguments
        patcher = self._guider.model_patcher
        sampling = patcher.object_patches.get("model_sampling", patcher.model.model_sampling)
        self.request = FlowRequest(
            noise=noise.to(patcher.load_device),
            sigmas=sigmas,
            sampler=name_of(sampler, STEPS) or in_words(sampler),
            seed=seed or 0,
            conds=[list(side) for side in self._guider.conds.values()],
            classes=sampling_classes(sampling),
            noise_scale=getattr(sampling, "noise_scale", 1.0),
        )
        self.patch_flow = PatchFlow(forward, self)

    def why_not(self, replaced: Iterable[Replaced], changes: Iterable[NetworkChange]) -> str:
        """Returns why no patches can flow in this job, in a user's words; "" if they can. `replaced`: what packs have
        replaced in modules; `changes`: what nodes have changed in the model."""
        if any(one.module.startswith(_CODE) and one.name != "calculate_sigmas" for one in replaced):
            return "a pack has replaced code by which ComfyUI samples"
        options = self._guider.model_options
        wrappers = options.get("transformer_options", {}).get("wrappers", {})
        functions = [options.get(name) for name in _FUNCTIONS] + [wrappers.get(name) for name in _WRAPPERS]
        has_method = any(not one.path and one.kind != "child" and callable(one.value) for one in changes)
        if any(functions) or has_method or not has_usual_guidance(self._guider):
            return "code of a node takes part in each step and may look at the whole image"
        return flow_blocked_by(self.request, self._forward.layout.strategy)

    def answers(self, requested: tuple[bool, ...], x: Tensor, sigma: Tensor) -> list[Tensor]:
        self._meeting.end_round()
        sides = [
            side if is_requested else None for side, is_requested in zip(self._conds, requested, strict=True)
        ]
        options = {**self._options, "transformer_options": dict(self._options.get("transformer_options", {}))}
        return answer_prompts(self._guider.inner_model, sides, x, sigma, options)

    def sample(self, model: Any, x: Tensor, sigmas: Tensor, *, extra_args: Any, **unused: Any) -> Tensor:
        """Samples with the arithmetic of the ComfyUI sampler that the job names (sampling/samplers.py)."""
        options = {**extra_args["model_options"], _HOOK: self._ask}
        extra_args = {**extra_args, "model_options": options}
        first = first_flowing(self._forward.layout.strategy)
        if self._steps_done:  # their keys and values are lost: one more step of whole images makes new ones
            first = max(first, self._steps_done + 1)
        self.request.noise = torch.empty_like(x)
        step, levels, ones = step_of(self.request), Sigmas(sigmas, x.device), x.new_ones(len(x))
        history = history_of(self.request, x.device)

        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            denoised: Tensor = model(x, sigma * ones, **extra_args)
            return denoised

        for i in range(len(sigmas) - 1):
            if i == first:
                with self._meeting.alone():  # only the first rank calls the module here
                    flows = self.patch_flow.find_patches()
                if flows:
                    return self.patch_flow.sample(self._sides, x, levels, i, history, self._on_step, denoise)
            x, denoised = run(step(x, levels, i, history), denoise)
            self._end_step(denoised)
        return x

    def _ask(self, asked: dict[str, Any]) -> list[Tensor]:
        """Computes the prompts of a step; ComfyUI's guider calls it as a hook."""
        conds = asked["conds"]
        requested = tuple(side is not None for side in conds)
        before = self._conds or [None] * len(conds)
        self._conds = [new if new is not None else old for new, old in zip(conds, before, strict=True)]
        self._options = {name: value for name, value in asked["model_options"].items() if name != _HOOK}
        if not self.patch_flow.flows:
            self._sides = requested
        return self.patch_flow.answers(requested, asked["input"], asked["sigma"])

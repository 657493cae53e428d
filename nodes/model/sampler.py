"""A ComfyUI sampler whose whole loop runs on the ranks where the request is data; else the stock one, saying so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import comfy.samplers
import torch
from torch import Tensor

from ...parallel_backend.models.tokens.cached_outputs import why_not_reused
from ...parallel_backend.options import DEFAULT_COMPUTE
from ...parallel_backend.planner.history import record_run
from ...parallel_backend.planner.plan import job_from_request
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from ...parallel_backend.requests import LoopRequest, SampleRequest
from ..host.calls import RunRecord, interrupted, plan_job, ranks_for, report_progress
from .loop import loop_job, loop_request
from .options import COMPUTE_OPTIONS, SETTINGS, patches_of
from .own_loop import own_request
from .unsupported import RunsStepwise

# (step from 0, the estimate of the clean latent, the latent, all steps), as ComfyUI's samplers call it.
StepCallback = Callable[[int, Tensor, Tensor, int], None]


class ResidentSampler(comfy.samplers.Sampler):
    """Handed to a ComfyUI guider, which has prepared noise, sigmas, masks and conditioning by then."""

    def __init__(self, sampler_name: str, record: RunRecord) -> None:
        self._name = sampler_name
        self._record = record
        self._not_reused = ""  # why a step cache that is wanted can do nothing

    def sample(
        self,
        model_wrap: comfy.samplers.CFGGuider,
        sigmas: Tensor,
        extra_args: dict,
        callback: StepCallback | None,
        noise: Tensor,
        latent_image: Tensor | None = None,
        denoise_mask: Tensor | None = None,
        disable_pbar: bool = False,
    ) -> Tensor:
        prepared = (
            sigmas,
            extra_args,
            noise,
            torch.zeros_like(noise) if latent_image is None else latent_image,
        )
        try:
            request = self._request(model_wrap, *prepared, denoise_mask)
        except RunsStepwise as reason:
            self._record.stepwise_because = str(reason)
            report_progress(f"stepwise: {reason}")
            stock = comfy.samplers.sampler_object(self._name)
            return stock.sample(
                model_wrap, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar
            )
        return self._resident(
            request, model_wrap, extra_args["model_options"]["transformer_options"], callback, noise
        )

    def _request(
        self,
        guider: comfy.samplers.CFGGuider,
        sigmas: Tensor,
        extra_args: dict,
        noise: Tensor,
        latent: Tensor,
        denoise_mask: Tensor | None,
    ) -> SampleRequest | LoopRequest:
        """For the loop that the ranks run for this model. Raises RunsStepwise where they cannot."""
        network, threshold = guider.inner_model.diffusion_model, self._record.cache_threshold or 0.0
        prepared = (self._name, guider, sigmas, extra_args, noise, latent, denoise_mask)
        if network.own_loop:
            return own_request(*prepared, threshold)
        request = loop_request(*prepared)
        if not threshold:
            return request
        mode = network.verdict_on_blocks().mode
        self._not_reused = why_not_reused(network.class_name, mode)
        return request if self._not_reused else replace(request, mode=mode, cache_threshold=threshold)

    def _resident(
        self,
        request: SampleRequest | LoopRequest,
        guider: comfy.samplers.CFGGuider,
        options: dict,
        callback: StepCallback | None,
        noise: Tensor,
    ) -> Tensor:
        network = guider.inner_model.diffusion_model
        settings = options.get(SETTINGS, StrategySettings())
        if request.cache_threshold > 0:  # which PipeFusion, the other approximation, does not go with
            settings = replace(settings, approximation="never")
        compute_options = options.get(COMPUTE_OPTIONS, DEFAULT_COMPUTE)
        model = CheckpointModel(network.file, network.spec.weight_dtype, compute_options)
        in_comfyuis_loop = isinstance(request, LoopRequest)
        job = loop_job(model, request) if in_comfyuis_loop else job_from_request(model, request)
        plan = plan_job(settings, job)
        network.plans.latest = plan

        def on_step(step: int, steps: int, denoised: Tensor | None) -> None:
            if callback is not None:
                callback(step - 1, noise[:1] if denoised is None else denoised.to(noise.device), noise, steps)

        with ranks_for(plan) as (sidecar, placement):
            result = sidecar.sample(
                network.spec,
                request,
                placement,
                on_step=on_step,
                on_phase=report_progress,
                should_cancel=interrupted,
                patches=patches_of(options),
                trials=plan.trials,
                file=network.run_file.identity,
            )
        record_run(plan.devices, plan.job, result.info)
        said = list(result.info.notes)
        if in_comfyuis_loop:
            said += [network.verdict.words] if network.verdict.words else []
            if self._not_reused:
                said.append(f"step_cache did nothing, so the result is exact: {self._not_reused}")
                self._record.cache_threshold = None
        self._record.add_run(plan, replace(result.info, notes=tuple(said)))
        return result.latent.to(noise.device)

"""A ComfyUI sampler whose whole loop runs on the ranks when the request is plain; else the stock one, saying so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import comfy.model_sampling
import comfy.samplers
import torch
from torch import Tensor

from ...parallel_backend.options import DEFAULT_COMPUTE
from ...parallel_backend.planner.decide import job_from_request
from ...parallel_backend.planner.history.measurement_history import record_run
from ...parallel_backend.planner.job_models import CheckpointModel
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.requests import RESIDENT_SAMPLERS, Conditioning, SampleRequest
from ...parallel_backend.wire.payloads import check_inputs
from ...parallel_backend.wire.weight_patches import NO_PATCHES
from ..host.calls import RunRecord, interrupted, plan_job, ranks_for, report_progress
from .options import COMPUTE_OPTIONS, OWN_OPTIONS, PATCHES, SETTINGS
from .unsupported import has_entries

# What the conditioning of a plain request may hold; anything else is ComfyUI's to interpret.
_PLAIN_COND = {
    "cross_attn",
    "pooled_output",
    "guidance",
    "model_conds",
    "uuid",
    "prompt_type",
    "width",
    "height",
}
_PLAIN_MODEL_CONDS = {"c_crossattn", "y", "guidance"}
_KNOWN_OPTIONS = OWN_OPTIONS | {"sample_sigmas"}


# (step from 0, the estimate of the clean latent, the latent, all steps), as ComfyUI's samplers call it.
StepCallback = Callable[[int, Tensor, Tensor, int], None]


class ResidentSampler(comfy.samplers.Sampler):
    """Handed to a ComfyUI guider, which has prepared noise, sigmas, masks and conditioning by then."""

    def __init__(self, sampler_name: str, record: RunRecord) -> None:
        self._name = sampler_name
        self._record = record

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
        reason = why_stepwise(self._name, model_wrap, extra_args["model_options"], noise)
        if reason is not None:
            self._record.stepwise_because = reason
            report_progress(f"stepwise: {reason}")
            stock = comfy.samplers.sampler_object(self._name)
            return stock.sample(
                model_wrap, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar
            )
        return self._resident(model_wrap, sigmas, extra_args, callback, noise, latent_image, denoise_mask)

    def _resident(
        self,
        guider: comfy.samplers.CFGGuider,
        sigmas: Tensor,
        extra_args: dict,
        callback: StepCallback | None,
        noise: Tensor,
        latent_image: Tensor | None,
        denoise_mask: Tensor | None,
    ) -> Tensor:
        batch = len(noise)
        has_cfg = _has_cfg(guider)
        network = guider.inner_model.diffusion_model
        options = extra_args["model_options"]["transformer_options"]
        request = SampleRequest(
            noise=noise.float().cpu(),
            latent=torch.zeros_like(noise).cpu() if latent_image is None else latent_image.float().cpu(),
            sigmas=sigmas.float().cpu(),
            positive=_conditioning(guider.conds["positive"][0], batch, network.file.pooled_dim),
            negative=_conditioning(guider.conds["negative"][0], batch, network.file.pooled_dim)
            if has_cfg
            else None,
            cfg=float(guider.cfg) if has_cfg else 1.0,
            sampler=self._name,
            seed=extra_args["seed"] or 0,
            denoise_mask=None if denoise_mask is None else denoise_mask.float().cpu(),
            cache_threshold=self._record.cache_threshold or 0.0,
        )
        check_inputs(request, network.file.inputs)
        settings = options.get(SETTINGS, StrategySettings())
        if request.cache_threshold > 0:  # which PipeFusion, the other approximation, does not go with
            settings = replace(settings, approximation="never")
        compute_options = options.get(COMPUTE_OPTIONS, DEFAULT_COMPUTE)
        model = CheckpointModel(network.file, network.spec.weight_dtype, compute_options)
        job = job_from_request(model, request)
        plan = plan_job(settings, job)
        network.plans.latest = plan

        def on_step(step: int, steps: int, denoised: Tensor | None) -> None:
            if callback is not None:
                callback(step - 1, noise[:1] if denoised is None else denoised.to(noise.device), noise, steps)

        patches = options.get(PATCHES, NO_PATCHES)
        with ranks_for(plan.decision, plan.devices, plan.job.model.compute_options) as (sidecar, placement):
            result = sidecar.sample(
                network.spec,
                request,
                placement,
                on_step=on_step,
                on_phase=report_progress,
                should_cancel=interrupted,
                patches=patches,
                trials=plan.trials,
            )
        record_run(plan.devices, plan.job, result.info)
        self._record.add_run(plan, result.info)
        return result.latent.to(noise.device)


def _has_cfg(guider: comfy.samplers.CFGGuider) -> bool:
    return not math.isclose(guider.cfg, 1.0) and bool(guider.conds.get("negative"))


def why_stepwise(
    sampler_name: str, guider: comfy.samplers.CFGGuider, model_options: dict, noise: Tensor
) -> str | None:
    """The reason why the loop must stay with ComfyUI, in a user's words; None when the ranks can run all of it."""
    if not guider.inner_model.diffusion_model.resident:
        return "the loop of this model runs in ComfyUI"
    if sampler_name not in RESIDENT_SAMPLERS:
        return f"the sampler {sampler_name} runs in ComfyUI"
    if noise.ndim != 4:
        return "the latent is not an image"
    sampling = guider.inner_model.model_sampling
    half = torch.tensor(0.5)
    if (
        not isinstance(sampling, comfy.model_sampling.CONST)
        or getattr(sampling, "noise_scale", 1.0) != 1.0
        or float(sampling.timestep(half)) != 0.5
    ):
        return "the model's sampling was replaced by one that only ComfyUI knows"
    functions = sorted(
        k for k, value in model_options.items() if k != "transformer_options" and has_entries(value)
    )
    if functions:
        return f"the model carries {', '.join(functions)}"
    options = model_options.get("transformer_options", {})
    changed = sorted(
        key for key, value in options.items() if key not in _KNOWN_OPTIONS and has_entries(value)
    )
    if changed:
        return f"the model carries {', '.join(changed)}"
    for side in ("positive", "negative") if _has_cfg(guider) else ("positive",):
        if (reason := _why_not_plain(guider.conds[side], side)) is not None:
            return reason
    return None


def _why_not_plain(conds: list[dict], side: str) -> str | None:
    if len(conds) != 1:
        return f"the {side} conditioning combines {len(conds)} prompts"
    cond = conds[0]
    if "c_crossattn" not in cond.get("model_conds", {}):
        return f"the {side} conditioning holds no text"
    unusual = [key for key, value in cond.items() if key not in _PLAIN_COND and value is not None]
    unusual = [key for key in unusual if not (key == "strength" and cond[key] == 1.0)]
    unusual += [key for key in cond["model_conds"] if key not in _PLAIN_MODEL_CONDS]
    return f"the {side} conditioning carries {', '.join(sorted(unusual))}" if unusual else None


def _conditioning(cond: dict, batch: int, pooled_dim: int) -> Conditioning:
    """The tensors that ComfyUI would hand the network, for `batch` images."""
    found = {
        name: entry.process_cond(batch_size=batch, area=None).cond.float().cpu()
        for name, entry in cond["model_conds"].items()
    }
    context = found["c_crossattn"]
    return Conditioning(
        context=context,
        pooled=found["y"] if "y" in found else torch.zeros(len(context), pooled_dim),
        guidance=found.get("guidance"),
    )

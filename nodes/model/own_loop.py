"""What a ComfyUI guider has prepared, as a job for the pack's own loop over diffusers' Flux.1."""

from __future__ import annotations

import math

import comfy.model_sampling
import comfy.samplers
import torch
from torch import Tensor

from ...parallel_backend.requests import RESIDENT_SAMPLERS, Conditioning, SampleRequest
from ...parallel_backend.wire.payloads import check_inputs
from .options import OWN_OPTIONS
from .unsupported import RunsStepwise, carried, has_entries

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


def own_request(
    name: str,
    guider: comfy.samplers.CFGGuider,
    sigmas: Tensor,
    extra_args: dict,
    noise: Tensor,
    latent: Tensor,
    denoise_mask: Tensor | None,
    cache_threshold: float,
) -> SampleRequest:
    """The whole job. Raises RunsStepwise for one that only ComfyUI's process can run, RequestError for bad input."""
    reason = _why_stepwise(name, guider, extra_args["model_options"], noise)
    if reason is not None:
        raise RunsStepwise(reason)
    batch, has_cfg = len(noise), _has_cfg(guider)
    file = guider.inner_model.diffusion_model.file
    request = SampleRequest(
        noise=noise.float().cpu(),
        latent=latent.float().cpu(),
        sigmas=sigmas.float().cpu(),
        positive=_conditioning(guider.conds["positive"][0], batch, file.pooled_dim),
        negative=_conditioning(guider.conds["negative"][0], batch, file.pooled_dim) if has_cfg else None,
        cfg=float(guider.cfg) if has_cfg else 1.0,
        sampler=name,
        seed=extra_args["seed"] or 0,
        denoise_mask=None if denoise_mask is None else denoise_mask.float().cpu(),
        cache_threshold=cache_threshold,
    )
    check_inputs(request, file.inputs)
    return request


def _has_cfg(guider: comfy.samplers.CFGGuider) -> bool:
    return not math.isclose(guider.cfg, 1.0) and bool(guider.conds.get("negative"))


def _why_stepwise(
    sampler_name: str, guider: comfy.samplers.CFGGuider, model_options: dict, noise: Tensor
) -> str | None:
    """The reason why the loop must stay with ComfyUI, in a user's words; None when the ranks can run all of it."""
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
    functions = [k for k, value in model_options.items() if k != "transformer_options" and has_entries(value)]
    if functions:
        return carried(functions)
    options = model_options.get("transformer_options", {})
    changed = [key for key, value in options.items() if key not in _KNOWN_OPTIONS and has_entries(value)]
    if changed:
        return carried(changed)
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

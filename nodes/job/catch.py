"""The two places where work leaves for the ranks: a guider's sampling, and calls of a network outside of it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.samplers
import torch
from torch import Tensor

from ...parallel_backend.job import reducers
from ...parallel_backend.job.payload import NetworkCall, SamplerRun, unpack_step
from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.models.tokens.cached_outputs import why_not_reused
from ...parallel_backend.planner.history import record_run
from ...parallel_backend.planner.plan import job_from_latent
from ...parallel_backend.planner.rules import Plan, StrategySettings
from ...parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from ...parallel_backend.requests import SEVERAL_CALLS
from ...parallel_backend.wire.payloads import Tensors
from ..host.calls import COMPUTE_OPTIONS, RECORD, SETTINGS, STEP_CACHE, RunRecord, plan_by_rule, plan_job
from .model import JobPatcher, ShippedModel
from .ship import ShippedJob

if TYPE_CHECKING:
    from comfy.patcher_extension import WrapperExecutor

RecordRun = Callable[[StrategySettings, ModelFile], AbstractContextManager[RunRecord]]
_REFERENCES = "reference_latents"  # key of a prompt: latents that the model attends to in addition to its own


class Catch:
    """The outermost wrapper around a guider's `outer_sample`, which samples on the ranks instead. `record_run`: makes
    the record of a run for which no node of the pack made one."""

    def __init__(self, record_run: RecordRun) -> None:
        self._record_run = record_run

    def __reduce__(self) -> tuple[Any, ...]:
        return (reducers.make_passing, ())

    def __call__(
        self,
        executor: WrapperExecutor,
        noise: Tensor,
        latent_image: Tensor,
        sampler: comfy.samplers.Sampler,
        sigmas: Tensor,
        denoise_mask: Tensor | None = None,
        callback: Callable[..., None] | None = None,
        disable_pbar: bool = False,
        seed: int | None = None,
        latent_shapes: Any = None,
    ) -> Tensor:
        guider = executor.class_obj
        patcher: JobPatcher = guider.model_patcher
        options = patcher.model_options["transformer_options"]
        settings = options.get(SETTINGS, StrategySettings())
        known: RunRecord | None = options.get(RECORD)
        new = self._record_run(settings, patcher.job_model.file) if known is None else nullcontext(known)
        with new as record:
            record.cache_threshold = options.get(STEP_CACHE)
            _load(patcher)
            arguments = (noise, latent_image, sampler, sigmas, denoise_mask, seed)
            wrappers = [one for one in executor.wrappers if one is not self]
            threshold = record.cache_threshold or 0.0
            work = SamplerRun(guider, wrappers, arguments, latent_shapes)
            follows = callback is not None and not _only_shows(callback)
            on_latents = functools.partial(_call_back, callback, patcher.load_device) if follows else None
            job = ShippedJob(patcher, work, threshold, on_latents)
            plan = _plan_sampling(patcher, guider, arguments, latent_shapes, threshold)

            def on_step(step: int, steps: int, denoised: Tensor | None) -> None:
                nonlocal last
                last = step, steps
                if callback is not None and step < steps and not follows:
                    shown = latent_image[:1] if denoised is None else denoised.to(latent_image.device)
                    callback(step - 1, shown, latent_image, steps)

            last = 0, 0
            result = job.run(plan, noise, _step_count(sigmas), on_step)
            # Some sampler nodes output it, for all images.
            if callback is not None and result.denoised is not None and not follows:
                callback(last[0] - 1, result.denoised.to(latent_image.device), latent_image, last[1])
            record.patched = len(patcher.patches)
            if threshold > 0:
                record.notes += _why_not_cached(patcher)
            if result.info.step_seconds:  # empty if no step ran, as with a single sigma
                record_run(plan.devices, plan.job, result.info)
                record.add_run(plan, result.info)
            return result.latent.to(latent_image.device)


def _only_shows(callback: Callable[..., None]) -> bool:
    """Returns True for ComfyUI's own callback, which shows the first image and keeps the last step's latent."""
    names = callback.__code__.co_freevars if isinstance(callback, FunctionType) else ()
    cells = dict(zip(names, getattr(callback, "__closure__", None) or (), strict=True))
    if "packed_callback" in cells:  # ComfyUI's wrapper for video with sound
        callback = cells["packed_callback"].cell_contents
    return getattr(callback, "__module__", "") == "latent_preview"


def _call_back(callback: Callable[..., None], device: torch.device, tensors: Tensors) -> None:
    callback(*unpack_step(tensors, device))


def _load(patcher: JobPatcher) -> None:
    """Has ComfyUI make room for the model and note that it is loaded, as it does before it samples. Other models such
    as ControlNets are loaded only in the ranks."""
    model = patcher.job_model
    model.patches_here = False
    try:
        comfy.model_management.load_models_gpu([patcher])
    finally:
        model.patches_here = True


def _why_not_cached(patcher: JobPatcher) -> list[str]:
    model = patcher.job_model
    why = why_not_reused(type(patcher.model.diffusion_model).__name__, model.verdict.mode)
    return [f"step_cache did nothing, so the result is exact: {why}"] if why else []


def catch_calls(patcher: JobPatcher) -> None:
    """Sends each call of the network of `patcher` outside of samplers to the ranks as a job."""
    network = patcher.model.diffusion_model
    model = weakref.ref(patcher.job_model)  # a cycle would keep a dropped model alive

    def call(*args: Any, **kwargs: Any) -> Any:
        return _call_network(model(), args, kwargs)

    network._compiled_call_impl = call  # torch calls this instead of hooks and `forward`


def _call_network(model: ShippedModel | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    patcher = None if model is None else model.loaded
    assert model is not None and patcher is not None, "its network lives no longer than they do"
    parts = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
    options = kwargs.get("transformer_options") or patcher.model_options["transformer_options"]
    rows = len(options.get("cond_or_uncond") or [0])
    context = kwargs.get("context", args[2] if len(args) > 2 else None)
    job = job_from_latent(
        _planned_model(patcher),
        (max(1, len(parts[0]) // rows), *parts[0].shape[1:]),
        text=context.shape[-2] if isinstance(context, Tensor) and context.ndim > 1 else 0,
        has_cfg=rows > 1,
        steps=1,
    )
    plan = plan_by_rule(options.get(SETTINGS, StrategySettings()), job)
    result = ShippedJob(patcher, NetworkCall(patcher, args, kwargs)).run(plan, parts[0], 0)
    answers = [answer.to(part) for answer, part in zip(result.parts, parts, strict=True)]
    return answers[0] if isinstance(args[0], Tensor) else answers


def _plan_sampling(
    patcher: JobPatcher,
    guider: comfy.samplers.CFGGuider,
    arguments: tuple[Any, ...],
    latent_shapes: Any,
    threshold: float,
) -> Plan:
    noise, _, sampler, sigmas, _, _ = arguments
    settings = patcher.model_options["transformer_options"].get(SETTINGS, StrategySettings())
    name = getattr(getattr(sampler, "sampler_function", None), "__name__", "").removeprefix("sample_")
    prompts = [prompt for side in guider.conds.values() for prompt in side or ()]
    job = job_from_latent(
        _planned_model(patcher),
        (noise.shape[0], *tuple(latent_shapes[0] if latent_shapes else noise.shape)[1:]),
        text=next(_token_counts(prompts), 0),
        # Samplers with such a name compute the negative prompt at cfg 1 as well.
        has_cfg=float(getattr(guider, "cfg", 2.0)) != 1.0 or name.endswith("cfg_pp"),
        steps=_step_count(sigmas),
        references=[tuple(one.shape) for one in (prompts[0].get(_REFERENCES) or () if prompts else ())],
    )
    job = replace(
        job,
        model_calls=SEVERAL_CALLS.get(name, 1),
        patch_bytes=_second_models_bytes(patcher, prompts),
        step_cache=threshold > 0,
    )
    if threshold > 0:  # PipeFusion, the other approximation, does not work with it
        settings = replace(settings, approximation="never")
    return plan_job(settings, job)


def _planned_model(patcher: JobPatcher) -> CheckpointModel:
    computing = patcher.model_options["transformer_options"][COMPUTE_OPTIONS]
    return CheckpointModel(patcher.job_model.file, patcher.job_model.spec.weight_dtype, computing)


def _step_count(sigmas: Tensor) -> int:
    return max(len(sigmas) - 1, 1)


def _token_counts(prompts: Iterable[dict[str, Any]]) -> Iterable[int]:
    contexts = (prompt.get("cross_attn") for prompt in prompts)
    return (int(one.shape[-2]) for one in contexts if isinstance(one, Tensor) and one.ndim > 1)


def _second_models_bytes(patcher: JobPatcher, prompts: Iterable[dict[str, Any]]) -> int:
    """Returns the bytes of other models that each device gets with the job: ControlNets, models of patches."""
    controls = {id(one): one for one in (prompt.get("control") for prompt in prompts) if one is not None}
    others = [model for control in controls.values() for model in control.get_models()]
    others += patcher.get_nested_additional_models()
    return sum({id(other): other.model_size() for other in others}.values())

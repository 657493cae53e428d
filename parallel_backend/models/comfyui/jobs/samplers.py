"""Runs ComfyUI's guiders, samplers and text encoders in a rank for a job."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

_SAMPLING = "comfy.model_sampling"


def run_guider(
    guider: Any,
    wrappers: Sequence[Any],
    arguments: tuple[Any, ...],
    callback: Callable[..., None],
    latent_shapes: Any,
) -> Tensor:
    """Returns the latent that `guider` samples, inside `wrappers`. `arguments`: noise, latent, sampler, sigmas, mask,
    seed; `callback(step, denoised, x, steps)`: called after each step."""
    from comfy.patcher_extension import WrapperExecutor

    noise, latent, sampler, sigmas, mask, seed = arguments
    executor = WrapperExecutor.new_class_executor(guider.outer_sample, guider, wrappers)
    found: Tensor = executor.execute(
        noise, latent, sampler, sigmas, mask, callback, True, seed, latent_shapes=latent_shapes
    )
    return found


def call_network(patcher: Any, network: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls `network` with its weights patched by `patcher`."""
    from comfy.model_management import load_models_gpu

    load_models_gpu([patcher])
    return network(*args, **kwargs)


def call_encoder(patcher: Any, path: str, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls `method` of the encoder's module at `path`, or the module itself if `method` is "". The weights are patched
    by `patcher`, with the LoRAs of the prompt's hooks."""
    from comfy.model_management import load_models_gpu

    estimate = getattr(patcher.model, "memory_estimation_function", None)
    memory = 0 if estimate is None or path or not args else estimate(args[0], device=patcher.load_device)
    hooks, patcher.current_hooks = patcher.current_hooks, None  # loading applies all forced hooks
    load_models_gpu([patcher], memory_required=memory)
    patcher.patch_hooks(hooks)
    try:
        module = patcher.model.get_submodule(path)
        return (getattr(module, method) if method else module)(*args, **kwargs)
    finally:
        patcher.unpatch_hooks()


def sampler_of(function: Callable[..., Tensor]) -> Any:
    """Returns a ComfyUI sampler around a function with the signature of ComfyUI's sampler functions."""
    from comfy.samplers import KSAMPLER

    return KSAMPLER(function)


def name_of(sampler: Any, names: Iterable[str]) -> str:
    """Returns the name in `names` of this ComfyUI sampler, "" for others: with options, or with code of a pack around
    ComfyUI's. Compares files, since a pack may have loaded ComfyUI's module a second time."""
    from comfy.k_diffusion import sampling
    from comfy.samplers import KSAMPLER

    if type(sampler) is not KSAMPLER or vars(sampler).keys() - vars(KSAMPLER(None)).keys():
        return ""
    # torch.no_grad is around each of them.
    function = inspect.unwrap(sampler.sampler_function, stop=lambda one: not _is_torchs(one))
    code = getattr(function, "__code__", None)
    if (
        code is None
        or code.co_filename != sampling.__file__
        or sampler.extra_options
        or sampler.inpaint_options
    ):
        return ""
    return next((name for name in names if code.co_name == f"sample_{name}"), "")


def _is_torchs(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and Path(torch.__file__).parent in Path(code.co_filename).parents


def in_words(sampler: Any) -> str:
    """Returns a sampler's name, to show to people."""
    function = getattr(sampler, "sampler_function", None)
    return getattr(function, "__name__", type(sampler).__name__).removeprefix("sample_")


def fits_in_one_call(model: Any, parts: Sequence[Tensor]) -> bool:
    """Returns True if ComfyUI would give all these rows to its BaseModel `model` in one call, by its own estimate of
    memory; otherwise it calls for one prompt after the other. `parts`: of the latent [B, C, ...]."""
    from comfy.model_management import get_free_memory

    device = parts[0].device
    needed = sum(model.memory_required(list(part.shape)) for part in parts)
    return bool(device.type == "cpu" or needed * 1.5 < get_free_memory(device))


def has_usual_guidance(guider: Any) -> bool:
    """Returns True if ComfyUI's own code for a positive and a negative prompt joins the model's answers."""
    from comfy.samplers import CFGGuider

    own = CFGGuider.predict_noise
    return type(guider).predict_noise is own and "predict_noise" not in vars(guider)


def sampling_classes(sampling: Any) -> frozenset[str]:
    """Returns the names of the classes in comfy.model_sampling that a model's sampling consists of; none if a node has
    added code to it."""
    kind = type(sampling)
    kinds = (kind,) if kind.__module__ == _SAMPLING else kind.__bases__
    own = [] if kinds == (kind,) else [value for value in vars(kind).values() if callable(value)]
    own += [value for value in vars(sampling).values() if isinstance(value, (FunctionType, MethodType))]
    if own or any(one.__module__ != _SAMPLING for one in kinds):
        return frozenset()
    return frozenset(one.__name__ for one in kinds)


def answer_prompts(
    model: Any, prompts: Sequence[Any], x: Tensor, sigma: Tensor, options: dict[str, Any]
) -> list[Tensor]:
    """Returns the model's output for each of `prompts`, batched into as few calls as ComfyUI makes."""
    from comfy.samplers import calc_cond_batch

    found: list[Tensor] = calc_cond_batch(model, list(prompts), x, sigma, options)
    return found

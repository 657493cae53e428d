"""ComfyUI's guiders and samplers, as a job has them run in a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor


def run_guider(
    guider: Any,
    wrappers: Sequence[Any],
    arguments: tuple[Any, ...],
    callback: Callable[..., None],
    latent_shapes: Any,
) -> Tensor:
    """The latent that `guider` samples inside of `wrappers`. `arguments`: noise, latent, sampler, sigmas, mask, seed;
    `callback(step, denoised, x, steps)`: after each step."""
    from comfy.patcher_extension import WrapperExecutor

    noise, latent, sampler, sigmas, mask, seed = arguments
    executor = WrapperExecutor.new_class_executor(guider.outer_sample, guider, wrappers)
    found: Tensor = executor.execute(
        noise, latent, sampler, sigmas, mask, callback, True, seed, latent_shapes=latent_shapes
    )
    return found


def sampler_of(function: Callable[..., Tensor]) -> Any:
    """ComfyUI's sampler around a function of the form of its own."""
    from comfy.samplers import KSAMPLER

    return KSAMPLER(function)


def name_of(sampler: Any, names: Iterable[str]) -> str:
    """The one of `names` that ComfyUI calls this sampler by, or "". Its function is another object where a pack has
    loaded ComfyUI's module anew."""
    from comfy.samplers import KSAMPLER, sampler_object

    if type(sampler) is not KSAMPLER or sampler.extra_options or sampler.inpaint_options:
        return ""
    theirs = sampler.sampler_function
    for name in names:
        own = getattr(sampler_object(name), "sampler_function", None)
        if own is not None and (own.__module__, own.__qualname__) == (theirs.__module__, theirs.__qualname__):
            return name
    return ""


def answer_prompts(
    model: Any, prompts: Sequence[Any], x: Tensor, sigma: Tensor, options: dict[str, Any]
) -> list[Tensor]:
    """What the model gives for each of `prompts`, by as few calls as ComfyUI makes."""
    from comfy.samplers import calc_cond_batch

    found: list[Tensor] = calc_cond_batch(model, list(prompts), x, sigma, options)
    return found

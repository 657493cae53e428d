"""ComfyUI's guiders, samplers and text encoders, as a job has them run in a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

_SAMPLING = "comfy.model_sampling"


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


def call_network(patcher: Any, network: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The answer of `network` to one call, its weights as `patcher` has patched them."""
    from comfy.model_management import load_models_gpu

    load_models_gpu([patcher])
    return network(*args, **kwargs)


def call_encoder(patcher: Any, path: str, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the answer of `method` of the encoder's module at `path`, or of the module itself where it is "". Its
    weights are as `patcher` has patched them, with the LoRAs of the prompt's hooks."""
    from comfy.model_management import load_models_gpu

    estimate = getattr(patcher.model, "memory_estimation_function", None)
    memory = 0 if estimate is None or path or not args else estimate(args[0], device=patcher.load_device)
    hooks, patcher.current_hooks = patcher.current_hooks, None  # loading puts in all that were forced
    load_models_gpu([patcher], memory_required=memory)
    patcher.patch_hooks(hooks)
    try:
        module = patcher.model.get_submodule(path)
        return (getattr(module, method) if method else module)(*args, **kwargs)
    finally:
        patcher.unpatch_hooks()


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


def in_words(sampler: Any) -> str:
    """A sampler's name for a person."""
    function = getattr(sampler, "sampler_function", None)
    return getattr(function, "__name__", type(sampler).__name__).removeprefix("sample_")


def sampling_classes(sampling: Any) -> frozenset[str]:
    """The names of the classes in comfy.model_sampling that a model's sampling is made of; none where a node has given
    it anything of its own."""
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
    """What the model gives for each of `prompts`, by as few calls as ComfyUI makes."""
    from comfy.samplers import calc_cond_batch

    found: list[Tensor] = calc_cond_batch(model, list(prompts), x, sigma, options)
    return found

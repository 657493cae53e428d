"""The pack's own link types, inputs and outputs that several nodes have, and checks of what links bring.

Links never carry running ranks. ComfyUI's validation refuses literals before anything runs. `check_links` refuses
unsuitable values that links brought. Both name the input.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable

import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ..parallel_backend.errors import RequestError
from ..parallel_backend.options import AUTO, COMPILE_MODES, DEFAULT_THRESHOLD, EXCHANGE_DTYPES, SAME
from ..parallel_backend.planner.rules import StrategySettings
from .job.model import JobPatcher

CATEGORY = "parallel"

StrategyLink = io.Custom("PARALLEL_STRATEGY")  # carries StrategySettings
ModelLink = io.Custom("PARALLEL_MODEL")  # carries JobPatcher, as MODEL does


# What the strategy does at a node that names a model, at one that uses ranks without a model, and at a sampler.
OF_A_MODEL = (
    "From Strategy Selector. Without it: the devices of the setting Default devices (all if it is not set), split "
    "automatically."
)
OF_RANKS = (
    "From Strategy Selector: the devices. If the processes of some hold a model or sleep, only those are used. Without "
    "it: those of the setting Default devices (all if it is not set)."
)
OF_A_SAMPLER = "From Strategy Selector; replaces the loader's."


def strategy_input(tooltip: str = OF_A_MODEL) -> io.Custom.Input:
    return StrategyLink.Input("strategy", optional=True, tooltip=tooltip)


def threshold_input(*, optional: bool = False) -> io.Float.Input:
    """Returns the threshold input of nodes that have a step cache."""
    return io.Float.Input(
        "cache_threshold",
        default=DEFAULT_THRESHOLD,
        min=0.0,
        max=1.0,
        step=0.01,
        round=0.001,
        optional=optional,
        tooltip="By how much, relatively, the first block may have changed for a step to skip the others. "
        "Lower stays closer to the exact image, 0 is exact; 0.08 to 0.12 is usual for Flux dev.",
    )


def compile_input() -> io.Combo.Input:
    """Returns the input for ComputeOptions.compile of nodes that name a model."""
    return io.Combo.Input(
        "compile",
        options=list(COMPILE_MODES),
        default=AUTO,
        optional=True,
        tooltip="blocks: torch.compile for the transformer's blocks. Steps get faster, but the first step of a new "
        "image size can take longer. Needs a C compiler. auto does it where it pays, never on a CPU.",
    )


def exchange_input() -> io.Combo.Input:
    """Returns the input for ComputeOptions.exchange_dtype of nodes that name a model."""
    return io.Combo.Input(
        "exchange_dtype",
        options=list(EXCHANGE_DTYPES),
        default=SAME,
        optional=True,
        advanced=True,
        tooltip="What devices send each other for attention under Ulysses and Ring. fp8 rounds it to 8 bits: half the "
        "bytes, for devices that are linked slowly, and approximate. same is exact.",
    )


def model_output() -> io.Model.Output:
    return io.Model.Output("model", tooltip="An ordinary MODEL for KSampler and all other stock nodes.")


def parallel_model_output() -> io.Custom.Output:
    return ModelLink.Output(
        "parallel_model", tooltip="For Parallel Sampler, or first for Parallel LoRA Loader."
    )


def _is_conditioning(value: object) -> bool:
    """Returns True for [[tensor or None, dict], …], the form that CLIPTextEncode gives."""
    return isinstance(value, list) and all(
        isinstance(entry, (list, tuple))
        and len(entry) == 2
        and (entry[0] is None or isinstance(entry[0], torch.Tensor))
        and isinstance(entry[1], dict)
        for entry in value
    )


def _is_latent(value: object) -> bool:
    """Returns True for {"samples": tensor, …}. ComfyUI nests the tensors of models that have several latents."""
    samples = value.get("samples") if isinstance(value, dict) else None
    return isinstance(samples, torch.Tensor) or bool(getattr(samples, "is_nested", False))


_MODEL = "Parallel Model, Parallel Model Loader, Parallel Flux Loader, Parallel Demo Loader or Parallel LoRA Loader"
_TEXT = "a CONDITIONING, such as CLIP Text Encode gives"
_LATENT = "a LATENT, such as Empty Latent Image gives"
# By input name: what the input takes, in a user's words, and a function that gives True for such a value.
LINKS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "parallel_model": (f"a PARALLEL_MODEL, from {_MODEL}", lambda value: isinstance(value, JobPatcher)),
    "model": ("a MODEL, such as Load Diffusion Model gives", lambda value: isinstance(value, ModelPatcher)),
    "strategy": (
        "a PARALLEL_STRATEGY, from Strategy Selector",
        lambda value: value is None or isinstance(value, StrategySettings),
    ),
    "positive": (_TEXT, _is_conditioning),
    "negative": (_TEXT, _is_conditioning),
    "latent_image": (_LATENT, _is_latent),
    "samples": (_LATENT, _is_latent),
    "pixels": (
        "an IMAGE, such as Load Image gives",
        lambda value: isinstance(value, torch.Tensor) and value.ndim >= 4,
    ),
    "clip": (
        "a CLIP, such as Load CLIP gives, or a CLIP_VISION or AUDIO_ENCODER",
        lambda value: (
            isinstance(getattr(value, "patcher", None), ModelPatcher)
            and not hasattr(value, "first_stage_model")
        ),
    ),
    "vae": ("a VAE, such as Load VAE gives", lambda value: callable(getattr(value, "decode", None))),
}


def refuse_literals(*inputs: str) -> classmethod:
    """Returns a V3 node's `validate_inputs` for its link inputs, which gives True or the problems in words.

    ComfyUI reads from the signature which inputs to pass. A linked input is None, because its value is not there yet.
    """

    def validate(cls: type[io.ComfyNode], **values: object) -> bool | str:
        problems = [_problem(name, value) for name, value in values.items() if value is not None]
        return " ".join(problems) or True

    named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("cls", *inputs)]
    validate.__signature__ = inspect.Signature(named)
    return classmethod(validate)


def check_links(**values: object) -> None:
    """Raises RequestError for values that the inputs of these names do not take. `execute` calls it first."""
    problems = [_problem(name, value) for name, value in values.items() if not LINKS[name][1](value)]
    if problems:
        raise RequestError(" ".join(problems))


def _problem(name: str, value: object) -> str:
    return f"The input {name} takes {LINKS[name][0]}; {_shown(value)} came instead. Connect it to such an output."


def _shown(value: object) -> str:
    """Describes a value in a word or two; a tensor by its type only."""
    if value is None:
        return "nothing"
    kind = type(value).__name__
    plain = isinstance(value, (bool, int, float, str, list, dict, tuple))
    return f"{reprlib.repr(value)} ({kind})" if plain else f"an object of the type {kind}"

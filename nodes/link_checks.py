"""Checks the values of link inputs. Errors name the input that got a literal or an unsuitable output of a node.

ComfyUI's validation refuses literals before anything runs. `check_links` refuses unsuitable values that links brought.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable

import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ..parallel_backend.errors import RequestError
from ..parallel_backend.planner.rules import StrategySettings
from .job.model import JobPatcher


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

"""A sampling job for ComfyUI's own loop as named tensors and back, and the rules that it must keep on both sides."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch

from ..errors import RequestError, TransportError
from ..options import check_threshold
from ..requests import TOKEN_MODES, LoopRequest
from .arguments import Tree, pack_arguments, unpack_arguments
from .payloads import Tensors, check_finite

_FIELDS = tuple(field.name for field in fields(LoopRequest))
_SIDES = {"positive", "negative"}


def loop_tensors(request: LoopRequest) -> Tensors:
    """Raises RequestError, by name, for what cannot be sent or sampled."""
    check_loop(request)
    return pack_arguments({name: getattr(request, name) for name in _FIELDS}, "the request")


def loop_request(tensors: Tensors) -> LoopRequest:
    """The job that `loop_tensors` took apart. Raises TransportError for another payload."""
    tree = unpack_arguments(tensors)
    if not isinstance(tree, dict) or set(tree) != set(_FIELDS):
        raise TransportError("a payload is no job for ComfyUI's own loop")
    request = LoopRequest(**tree)
    try:
        check_loop(request)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TransportError(f"a payload is no job for ComfyUI's own loop: {error}") from None
    return request


def check_loop(request: LoopRequest) -> None:
    """Raises RequestError, naming what is wrong."""
    for name in ("noise", "latent", "sigmas"):
        _check_tensor(name, getattr(request, name))
    for name, mask in (("latent", request.latent), ("denoise_mask", request.denoise_mask)):
        if mask is not None and tuple(mask.shape[2:]) != tuple(request.noise.shape[2:]):
            raise RequestError(
                f"{name} has shape {list(mask.shape)}, and the noise {list(request.noise.shape)}; their sizes must be "
                f"equal."
            )
    if request.noise.ndim < 3 or request.sigmas.ndim != 1 or len(request.sigmas) < 2:
        raise RequestError(
            f"noise has shape {list(request.noise.shape)} and sigmas {list(request.sigmas.shape)}; expected [batch, "
            f"channels, …] and [steps + 1]."
        )
    if not math.isfinite(request.cfg):
        raise RequestError(f"cfg is {request.cfg}; it must be a finite number.")
    check_threshold(request.cache_threshold)
    if request.mode not in TOKEN_MODES:
        raise RequestError(f"tokens {request.mode!r} is unknown; choose one of {', '.join(TOKEN_MODES)}.")
    if "positive" not in request.conds or not set(request.conds) <= _SIDES:
        raise RequestError("a job needs a positive prompt, may have a negative one, and has no others.")
    for side, prompts in request.conds.items():
        for prompt in prompts:
            for name, (_, value) in prompt["model_conds"].items():
                _check_tree(f"{side}: {name}", value)


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        raise RequestError(f"{name} must be a tensor of numbers.")
    check_finite(name, value)


def _check_tree(name: str, value: Tree) -> None:
    if isinstance(value, torch.Tensor):
        check_finite(name, value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_tree(name, item)

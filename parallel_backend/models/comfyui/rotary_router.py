"""Routes the rotation (RoPE) of queries and keys in ComfyUI's models, so that another function can answer it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..base import Rotate

_FREQUENCIES = "freqs_cis"  # the argument of Comfy Kitchen's functions with the rotation
_TENSORS = ("x", "xq", "xk", "q", "k")  # their arguments that are rotated


@functools.cache
def can_route() -> bool:
    """Returns True if this version of ComfyUI rotates by functions of Comfy Kitchen; finds out by a small call."""
    if not _functions():
        return False
    from comfy.ldm.flux.math import apply_rope, apply_rope1

    came: list[int] = []

    def note(apply: Any, tensors: list[Tensor], by: Tensor, dim: int) -> list[Tensor]:
        came.append(dim)
        return tensors

    with rotary_by(note):
        tokens, by = torch.zeros(1, 2, 1, 2), torch.zeros(1, 1, 1, 1, 2, 2)
        apply_rope1(tokens, by)
        apply_rope(tokens, tokens, by)
    return came == [1, 1]


@contextmanager
def rotary_by(rotate: Rotate) -> Iterator[None]:
    """Makes `rotate` answer the calls of Comfy Kitchen's rotation functions in the `with` block."""
    with ExitStack() as restore:
        for name, signature in _functions().items():
            original = getattr(_kitchen(), name)
            setattr(_kitchen(), name, functools.partial(_routed, rotate, original, signature))
            restore.callback(setattr, _kitchen(), name, original)
        yield


@functools.cache
def _functions() -> dict[str, inspect.Signature]:
    kitchen = _kitchen()
    names = [name for name in dir(kitchen) if "rope" in name and callable(getattr(kitchen, name))]
    signatures = {name: inspect.signature(getattr(kitchen, name)) for name in names}
    return {name: found for name, found in signatures.items() if _FREQUENCIES in found.parameters}


def _kitchen() -> Any:
    from comfy import quant_ops

    return getattr(quant_ops, "ck", None)


def _routed(
    rotate: Rotate, original: Callable[..., Any], signature: inspect.Signature, *args: Any, **kwargs: Any
) -> Any:
    given = signature.bind(*args, **kwargs).arguments
    names = [name for name in _TENSORS if name in given]
    in_place = original.__name__.endswith("_")

    def apply(tensors: list[Tensor], by: Any) -> list[Tensor]:
        found = original(**given | dict(zip(names, tensors, strict=True)) | {_FREQUENCIES: by})
        if in_place:
            return []
        return [found] if isinstance(found, Tensor) else list(found)

    tensors, by = [given[name] for name in names], given[_FREQUENCIES]
    # Tensors are [B, H, S, D] or [B, S, H, D], and `by` has size 1 in the dim of the heads.
    dim = 1 if by.shape[1] == 1 and by.shape[2] == tensors[0].shape[2] else 2
    rotated = rotate(apply, tensors, by, dim)
    if in_place:
        rotated = tensors
    return rotated[0] if len(names) == 1 else tuple(rotated)

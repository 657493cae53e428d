"""LoRAs that do not fit a model, refused as they are loaded: ComfyUI would note that in its log and leave them out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import comfy.lora
import torch
from torch import Tensor

from ...parallel_backend.errors import RequestError
from .mapped import is_mapped


def check_patches(patches: Mapping[Any, Any], parameters: Mapping[str, Tensor]) -> None:
    """`patches`: of ComfyUI, by a parameter's name or by (name, part of it). Computes nothing: what ComfyUI would say
    of tensors without memory decides. Raises RequestError that names the parameter."""
    for key, patch in patches.items():
        name, offset, function = (*key, None, None)[:3] if isinstance(key, tuple) else (key, None, None)
        weight = parameters.get(name)
        short = str(name).removeprefix("diffusion_model.")
        is_adapter = hasattr(patch, "weights") or (isinstance(patch, tuple) and len(patch) == 1)
        factors = list(_tensors(getattr(patch, "weights", patch)))
        # Those of a mapped model are not read for this: a step without numbers is refused.
        read = (factor for factor in factors if not is_mapped(factor))
        if any(not factor.float().isfinite().all() for factor in read):
            raise RequestError(
                f"The LoRA's change of {short} holds NaN or infinite values: the file is damaged, or its training "
                f"failed. Choose another one."
            )
        if weight is None or not factors or not is_adapter:
            continue  # others are whole weights, of which a merge is made
        outline = torch.empty(weight.shape, dtype=torch.float32, device="meta")
        with _errors() as errors:
            try:
                changed = comfy.lora.calculate_weight([(1.0, patch, 1.0, offset, function)], outline, name)
            except (RuntimeError, ValueError, TypeError, KeyError, NotImplementedError) as error:
                errors.append(str(error))
                changed = outline
        if errors:
            sizes = " and ".join(str(list(factor.shape)) for factor in factors if factor.ndim > 1)
            raise RequestError(
                f"The LoRA does not fit this model: {short} has the shape {list(weight.shape)}, and the LoRA's factors "
                f"for it have {sizes}. It was made for another model; choose one for this model."
            )
        if changed.shape != weight.shape:
            raise RequestError(
                f"The LoRA makes {short} larger (as those that add an input do), which the devices cannot yet; use the "
                f"full model that it was taken from, or stock loaders for this graph."
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and not value.is_meta:
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


@contextmanager
def _errors() -> Iterator[list[str]]:
    """What ComfyUI logs as errors inside, which then is not shown."""
    found: list[str] = []

    def take(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            found.append(record.getMessage())
        return record.levelno < logging.WARNING

    log = logging.getLogger()
    log.addFilter(take)
    try:
        yield found
    finally:
        log.removeFilter(take)

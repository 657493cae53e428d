"""Checks that refuse a LoRA that does not fit its model: ComfyUI would only log that and leave it out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import comfy.lora
import torch
from torch import Tensor

from ...parallel_backend.errors import RequestError
from ..model.mapped import is_mapped


def check_patches(
    patches: Mapping[Any, Any], parameters: Mapping[str, Tensor], *, may_enlarge: bool = False
) -> None:
    """Raises RequestError, with the parameter's name, for a patch that does not fit or is not finite. `patches`:
    ComfyUI's, by name or (name, part of it); `may_enlarge`: True if a patch may make a weight larger, as ComfyUI allows
    for those of a whole run. Has ComfyUI apply them to zeros, mostly on the meta device, which computes nothing."""
    for key, patch in patches.items():
        name, offset, function = (*key, None, None)[:3] if isinstance(key, tuple) else (key, None, None)
        weight = parameters.get(name)
        short = str(name).removeprefix("diffusion_model.")
        is_adapter = hasattr(patch, "weights") or (isinstance(patch, tuple) and len(patch) == 1)
        factors = list(_tensors(getattr(patch, "weights", patch)))
        # Factors in a mapped model are not read just for this: a step that gives NaN is refused anyway.
        read = (factor for factor in factors if not is_mapped(factor))
        if any(not factor.float().isfinite().all() for factor in read):
            raise RequestError(
                f"The LoRA's change of {short} holds NaN or infinite values: the file is damaged, or its training "
                f"failed. Choose another one."
            )
        if weight is None or not factors or not is_adapter:
            continue  # other patches are whole weights, as in a merge
        entry = (1.0, patch, 1.0, offset, function)
        # OFT with a constraint asks for numbers, which meta tensors do not have.
        for device in ("meta", "cpu"):
            changed, errors = _apply(entry, torch.zeros(weight.shape, device=device), name)
            if not errors:
                break
        if errors:
            sizes = " and ".join(str(list(factor.shape)) for factor in factors if factor.ndim > 1)
            raise RequestError(
                f"The LoRA does not fit this model: {short} has the shape {list(weight.shape)}, and the LoRA's factors "
                f"for it have {sizes}. It was made for another model; choose one for this model."
            )
        if changed.shape != weight.shape and not may_enlarge:
            raise RequestError(
                f"The LoRA makes {short} larger (as those that add an input do), which a prompt's hook cannot; load it "
                f"for the whole run instead."
            )


def _apply(patch: tuple[Any, ...], weight: Tensor, name: str) -> tuple[Tensor, list[str]]:
    """Returns the patched weight, and the errors that ComfyUI raised or logged."""
    with _errors() as errors:
        try:
            return comfy.lora.calculate_weight([patch], weight, name), errors
        except (RuntimeError, ValueError, TypeError, KeyError, NotImplementedError) as error:
            return weight, [*errors, str(error)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and not value.is_meta:
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


@contextmanager
def _errors() -> Iterator[list[str]]:
    """Collects the errors that ComfyUI logs inside, and keeps them and warnings out of the log."""
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

"""The extras of a model call beside latent, sigma and prompt: from ComfyUI's arguments to requests.Extras."""

from __future__ import annotations

import torch
from torch import Tensor

from ...parallel_backend.requests import Extras
from .unsupported import refusal

_PATCH = 2  # latent pixels of a token, each way


def take_extras(
    x: Tensor,
    ref_latents: list[Tensor] | None,
    control: dict | None,
    others: dict,
    block_counts: tuple[int, ...],
    dtype: torch.dtype,
    rope: dict | None = None,
) -> Extras:
    """Takes what it knows out of `others` (the arguments that ComfyUI's model does not name). `dtype`: what the ranks
    compute in, to which a ControlNet's residuals are rounded here, where that halves what leaves the GPU; all of it
    stays on its device until it is sent. `rope`: what
    ScaleROPE wishes."""
    method = others.pop("ref_latents_method", None)
    mask = others.pop("attention_mask", None)
    references = tuple(latent.float() for latent in ref_latents or ())
    return Extras(
        references=references,
        places=_places(x, references, method or "offset", rope or {}) if references or rope else None,
        mask=None if mask is None else _as_batch(mask),
        residuals={} if control is None else _residuals(control, block_counts, dtype),
    )


def _places(x: Tensor, references: tuple[Tensor, ...], method: str, rope: dict) -> Tensor:
    """Places of the image and each reference: (index, row, column) of its first token and how far rows and columns are
    apart, as comfy/ldm/flux/model.py places them (process_img)."""
    first = [(0, 0, 0), *_first_tokens(x, references, method)]
    shift = [rope.get(f"shift_{axis}", 0.0) for axis in "tyx"]
    apart = [rope.get(f"scale_{axis}", 1.0) for axis in "yx"]
    return torch.tensor([[*map(sum, zip(at, shift, strict=True)), *apart] for at in first])


def _first_tokens(x: Tensor, references: tuple[Tensor, ...], method: str) -> list[tuple[int, int, int]]:
    places = []
    height = width = 0
    for number, latent in enumerate(references):
        own_height, own_width = latent.shape[-2:]
        index, row, column = 1, 0, 0
        if method == "index":
            index = number + 1
        elif method == "uxo":
            index = 0
            row = _in_tokens(x.shape[-2]) * _PATCH + height
            column = _in_tokens(x.shape[-1]) * _PATCH + width
            height, width = height + own_height, width + own_width
        elif method == "offset":  # beside or below those before it, so that they stay near a square
            if own_height + height > own_width + width:
                column = width
            else:
                row = height
            height, width = max(height, own_height + row), max(width, own_width + column)
        else:
            raise refusal(f"the reference latents method {method!r}", "choose offset, index or uxo")
        places.append((index, _in_tokens(row), _in_tokens(column)))
    return places


def _in_tokens(pixels: int) -> int:
    return (pixels + _PATCH // 2) // _PATCH


def _as_batch(mask: Tensor) -> Tensor:
    """[S, S] or [rows, S, S], as ComfyUI's attention takes it."""
    return mask.unsqueeze(0) if mask.ndim == 2 else mask


def _alike(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and torch.equal(one, other))


def _residuals(control: dict, block_counts: tuple[int, ...], dtype: torch.dtype) -> dict[int, Tensor]:
    """By block, doubles first. A ControlNet may have some for more blocks than there are, which ComfyUI leaves out.

    It has one for several blocks in a row, which ComfyUI hands over once for each: those are one again here.
    """
    doubles, singles = block_counts
    kinds = (("input", 0, doubles), ("output", doubles, singles))
    residuals: dict[int, Tensor] = {}
    before = moved = None
    for kind, first, count in kinds:
        for block, residual in enumerate((control.get(kind) or ())[:count], start=first):
            if residual is None:
                continue
            if before is None or not _alike(residual, before):
                moved = residual.to(dtype)
            before, residuals[block] = residual, moved
    return residuals

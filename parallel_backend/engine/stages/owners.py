"""Packing of a module's answer of several tensors (video and sound) into one, the form in ComfyUI's samplers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pack(answer: Any) -> Tensor | None:
    """Returns a tensor unchanged, and a list or tuple of tensors with B rows as [B, 1, elements]; otherwise None."""
    if isinstance(answer, Tensor):
        return answer
    if not isinstance(answer, (list, tuple)) or not answer:
        return None
    if not all(isinstance(one, Tensor) and one.ndim and len(one) == len(answer[0]) for one in answer):
        return None
    return torch.cat([one.flatten(1).unsqueeze(1) for one in answer], 2)


def unpack(packed: Tensor, like: Any) -> Any:
    """Reverses `pack`: returns `packed`, with its number of rows, in the form of the answer `like`."""
    if isinstance(like, Tensor):
        return packed
    sizes = [one.shape[1:].numel() for one in like]
    parts = packed.split(sizes, 2)
    return type(like)(
        part.reshape(len(packed), *one.shape[1:]) for part, one in zip(parts, like, strict=True)
    )

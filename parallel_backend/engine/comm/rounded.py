"""Exchanges with vectors rounded to 8 bits: e4m3 (Micikevicius et al. 2022), with one scale per vector."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max
SCALE_BYTES = 4  # per vector: a float32
# With fewer numbers per vector, the scales would cost what rounding saves.
LEAST_CHANNELS = 8


def pack(vectors: Tensor) -> Tensor:
    """Packs […, D] into uint8 […, D + SCALE_BYTES]: each vector divided by its scale, then the scale. The scale maps
    the vector's largest number to e4m3's largest."""
    wide = vectors.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    rounded = (wide / scales).to(_E4M3).view(torch.uint8)
    return torch.cat([rounded, scales.view(torch.uint8)], -1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpacks uint8 […, D + SCALE_BYTES] to […, D] in `dtype`."""
    rounded, scales = packed.split([packed.shape[-1] - SCALE_BYTES, SCALE_BYTES], -1)
    return (rounded.view(_E4M3).float() * scales.contiguous().view(torch.float32)).to(dtype)


def exchange(
    all_to_all: Callable[[Tensor, tuple[int, ...], tuple[int, ...]], Callable[[], Tensor]],
    send: Tensor,
    send_sizes: tuple[int, ...],
    receive_sizes: tuple[int, ...],
    channels: int,
) -> Callable[[], Tensor]:
    """Starts an exchange of rounded vectors by `all_to_all`. `channels`: the length of a vector, which divides all
    sizes. Returns a function that waits for the received numbers, in the dtype of `send`."""
    counts = [tuple(size // channels for size in sizes) for sizes in (send_sizes, receive_sizes)]
    received = all_to_all(pack(send.view(-1, channels)), *counts)
    return lambda: unpack(received(), send.dtype).flatten()

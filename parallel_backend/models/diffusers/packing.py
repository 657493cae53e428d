"""Flux's token layout: latents to tokens and back, and the ids for the rotary embedding. Pure functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH = 2


def pack(latent: Tensor) -> Tensor:
    """Packs [B, C, h, w] to [B, ceil(h/2) * ceil(w/2), C * 4], row by row; pads odd sides circularly, as ComfyUI."""
    batch, channels, height, width = latent.shape
    padded = (
        F.pad(latent, (0, width % PATCH, 0, height % PATCH), mode="circular")
        if (height | width) % PATCH
        else latent
    )
    rows, columns = token_grid(height, width)
    patches = padded.reshape(batch, channels, rows, PATCH, columns, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * PATCH * PATCH)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Unpacks [B, ceil(h/2) * ceil(w/2), C * 4] to [B, C, h, w]; crops the padding of odd sides."""
    batch, _, patch_channels = tokens.shape
    channels = patch_channels // PATCH**2
    rows, columns = token_grid(height, width)
    patches = tokens.reshape(batch, rows, columns, channels, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels, rows * PATCH, columns * PATCH)[:, :, :height, :width]


def token_grid(height: int, width: int) -> tuple[int, int]:
    """Returns (rows, columns) of tokens of a latent of [height, width]."""
    return -(-height // PATCH), -(-width // PATCH)


def image_ids(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """Returns [N, 3] float32: (0, row, column) of each token, in the order of `pack`."""
    rows, columns = token_grid(height, width)
    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] = torch.arange(rows, device=device).unsqueeze(1)
    ids[..., 2] = torch.arange(columns, device=device)
    return ids.reshape(rows * columns, 3)


def text_ids(tokens: int, device: torch.device | None = None) -> Tensor:
    """Returns [T, 3] float32 zeros: text has no position in Flux."""
    return torch.zeros(tokens, 3, device=device)

"""Flux's token layout: latents to tokens and back, and the ids for the rotary embedding. Pure functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH = 2


def pack(latent: Tensor) -> Tensor:
    """Packs [B, C, h, w] to [B, ceil(h/2) * ceil(w/2), C * 4], row by row; pads odd sides circularly, as ComfyUI."""
    height, width = latent.shape[-2:]
    padded = (
        F.pad(latent, (0, width % PATCH, 0, height % PATCH), mode="circular")
        if (height | width) % PATCH
        else latent
    )
    return F.pixel_unshuffle(padded, PATCH).flatten(2).transpose(1, 2).contiguous()


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Unpacks [B, ceil(h/2) * ceil(w/2), C * 4] to [B, C, h, w]; crops the padding of odd sides."""
    patches = tokens.transpose(1, 2).unflatten(2, token_grid(height, width))
    return F.pixel_shuffle(patches, PATCH)[:, :, :height, :width]


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

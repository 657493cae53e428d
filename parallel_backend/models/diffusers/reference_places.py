"""Positions of the tokens of reference latents relative to an image, by ComfyUI's methods. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...errors import RequestError
from .packing import token_grid

_AT_TIMESTEP_ZERO = "index_timestep_zero"  # two timesteps in one call, which diffusers' blocks do not support

# (index, row, column) of the first token of a reference.
Place = tuple[float, float, float]


def reference_places(latents: Sequence[Tensor], size: tuple[int, int], method: str | None) -> list[Place]:
    """Returns the place of each reference [B, C, h, w] of an image of `size`, (height, width) in latent pixels.

    `method`: "index" puts all at (0, 0) with a rising index, "uxo" continues after the image's last row and column, any
    other puts them next to each other. Raises RequestError for references at timestep zero.
    """
    if method == _AT_TIMESTEP_ZERO and latents:
        raise RequestError(
            f"ref_latents_method {method} is known to ComfyUI's own Flux alone, and this model runs by diffusers. Load "
            f"it with implementation comfyui, or choose another method."
        )
    if method == "index":
        return [(float(number), 0.0, 0.0) for number in range(1, len(latents) + 1)]
    return _continued(latents, size) if method == "uxo" else _side_by_side(latents)


def _continued(latents: Sequence[Tensor], size: tuple[int, int]) -> list[Place]:
    rows, columns = (2 * side for side in token_grid(*size))
    places = []
    for latent in latents:
        places.append(_place(0, rows, columns))
        rows, columns = rows + latent.shape[-2], columns + latent.shape[-1]
    return places


def _side_by_side(latents: Sequence[Tensor]) -> list[Place]:
    """Puts each reference below or right of the earlier ones, where the total stays smaller."""
    places, height, width = [], 0, 0
    for latent in latents:
        tall = latent.shape[-2] + height > latent.shape[-1] + width
        row, column = (0, width) if tall else (height, 0)
        places.append(_place(1, row, column))
        height, width = max(height, latent.shape[-2] + row), max(width, latent.shape[-1] + column)
    return places


def _place(index: int, row: int, column: int) -> Place:
    """Returns the place of a token from its first row and column in latent pixels."""
    token_row, token_column = token_grid(row, column)
    return float(index), float(token_row), float(token_column)

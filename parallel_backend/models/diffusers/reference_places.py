"""Where the tokens of reference latents lie among those of an image, by ComfyUI's methods. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...errors import RequestError
from .packing import token_grid

_AT_TIMESTEP_ZERO = "index_timestep_zero"  # two times in one call, which diffusers' blocks do not take

# (index, row, column) of the first token of a reference.
Place = tuple[float, float, float]


def reference_places(latents: Sequence[Tensor], size: tuple[int, int], method: str | None) -> list[Place]:
    """The place of each reference [B, C, h, w] of an image of `size`. `method`: "index" counts references up at the
    same place, "uxo" continues behind the image's last row and column, everything else puts them one beside the other.

    Raises RequestError for references at timestep zero.
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
    """Each one below or right of those before, so that the whole stays the smaller."""
    places, height, width = [], 0, 0
    for latent in latents:
        tall = latent.shape[-2] + height > latent.shape[-1] + width
        row, column = (0, width) if tall else (height, 0)
        places.append(_place(1, row, column))
        height, width = max(height, latent.shape[-2] + row), max(width, latent.shape[-1] + column)
    return places


def _place(index: int, row: int, column: int) -> Place:
    """The place of a token from its first row and column in latent pixels."""
    token_row, token_column = token_grid(row, column)
    return float(index), float(token_row), float(token_column)

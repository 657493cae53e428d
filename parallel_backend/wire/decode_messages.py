"""Decoding and encoding on the ranks: the messages, and the records, per rank over the link and as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import RequestError
from ..requests import ComfyUISource, LoadInfo


@dataclass(frozen=True)
class VaeWeights:
    """A VAE whose tensors the ranks may need. `identity`: equal only for equal weights.

    `tensors()`: what decoding needs, in the dtype to compute in and under the names of ComfyUI's own network, which the
    ranks build; called when they lack them. `metadata`: what ComfyUI read in the header of its file, or of the numbers
    as they lay there, and tensors do not tell; a JSON object, "" for nothing. `encodes`: they are what encoding needs.
    """

    identity: str
    tensors: Callable[[], dict[str, torch.Tensor]]
    comfyui: ComfyUISource
    metadata: str = ""
    encodes: bool = False


@dataclass(frozen=True)
class Decode:
    """Parent to all ranks: decode the latents in the payload with the VAE sent as `identity`.

    `shares`: how much of each image every rank takes, empty for equal shares.
    """

    identity: str
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Encode:
    """Parent to all ranks: encode the pixels in the payload with the VAE sent as `identity`; `shares` as of Decode."""

    identity: str
    shares: tuple[float, ...]


@dataclass(frozen=True)
class RankDecode:
    """The record of a decode or encode on one rank. `seconds`: from what came in to its end; `rows`: of each latent,
    computed here; tiles where the network cuts them by itself.

    `bytes_sent`: collective payload; `peak_bytes`: device memory beyond what was in use before, 0 on the CPU.
    """

    seconds: float
    rows: int
    bytes_sent: int
    peak_bytes: int
    compute_dtype: str


@dataclass(frozen=True)
class DecodeInfo:
    """The record of a whole decode or encode; tuples have one entry per rank, as in RankDecode.

    `load`: of the weights.
    """

    load: LoadInfo
    seconds: float
    rows: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    compute_dtype: str


@dataclass(frozen=True)
class DecodeResult:
    """image: [B, H, W, 3] on the CPU in the compute dtype, about -1..1; of videos the frames, one after the other."""

    image: torch.Tensor
    info: DecodeInfo


@dataclass(frozen=True)
class EncodeResult:
    """latent: [B, C, h, w], or [B, C, t, h, w] of videos, on the CPU in the compute dtype."""

    latent: torch.Tensor
    info: DecodeInfo


def check_decode(latent: torch.Tensor, shares: tuple[float, ...], ranks: int) -> None:
    """Raises RequestError for a latent that is no [B, C, h, w] or [B, C, t, h, w], or shares that are not one positive
    number per rank."""
    if latent.ndim not in (4, 5) or latent.numel() == 0:
        raise RequestError(
            f"the latent has shape {list(latent.shape)}; expected [batch, channels, height/8, width/8], or "
            "[batch, channels, frames, height/8, width/8] of videos."
        )
    _check_shares(shares, ranks)


def check_encode(pixels: torch.Tensor, shares: tuple[float, ...], ranks: int) -> None:
    """Raises RequestError for pixels that are no [B, 3, H, W] or [B, 3, T, H, W], or shares as in check_decode."""
    if pixels.ndim not in (4, 5) or pixels.numel() == 0:
        raise RequestError(
            f"the pixels have shape {list(pixels.shape)}; expected [batch, 3, height, width], or [batch, 3, frames, "
            "height, width] of videos, with sides no smaller than one position of the latent (8 or more pixels)."
        )
    _check_shares(shares, ranks)


def _check_shares(shares: tuple[float, ...], ranks: int) -> None:
    if shares and (len(shares) != ranks or min(shares) <= 0):
        raise RequestError(f"shares is {list(shares)}; expected {ranks} numbers above 0, one per process.")

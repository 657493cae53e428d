"""What a VAE is to the ranks that decode or encode with it together, whoever built its network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A decode or encode of one picture or video is counted in as many steps, whatever its length: enough to be interrupted
# within a second or two.
STEPS = 32
OTHER_VERSION = "this version of ComfyUI computes its VAE in another way than the pack knows"


class VaeHalf(Protocol):
    """A VAE's decoder or encoder on one rank's device.

    `latent_dims`: 2 for images [B, C, h, w], 3 for videos [B, C, t, h, w]. `steps`: into which a decode or encode is
    counted.
    """

    compute_dtype: torch.dtype
    device: torch.device

    @property
    def latent_channels(self) -> int: ...

    @property
    def latent_dims(self) -> int: ...

    @property
    def steps(self) -> int: ...


class BandedHalf(VaeHalf, Protocol):
    """One that is exact in bands of rows. A step ends each time `layers_per_step(what comes in)` of `step_layers` have
    computed."""

    @property
    def step_layers(self) -> Sequence[nn.Module]: ...

    def layers_per_step(self, given: Tensor) -> int: ...


class DecodingHalf(VaeHalf, Protocol):
    """A decoder. `min_side`: rows and columns that a latent has at least."""

    @property
    def min_side(self) -> int: ...


class BandedVae(BandedHalf, DecodingHalf, Protocol):
    """A decoder that is exact in bands."""

    @property
    def decoder(self) -> nn.Module: ...

    def decode(self, latent: Tensor) -> Tensor:
        """[1, C, rows, w] -> [1, 3, scale * rows, scale * w], or frames: [1, C, t, rows, w] -> [1, 3, T, …, …]."""
        ...


class BandedVaeEncoder(BandedHalf, Protocol):
    """An encoder. `scale`: pixels per position of the latent along each side; `in_channels`: of a pixel.

    `few_frames`: of a short video that it takes.
    """

    scale: int
    in_channels: int
    few_frames: int

    @property
    def encoder(self) -> nn.Module: ...

    def encode(self, pixels: Tensor) -> Tensor:
        """[1, 3, rows, W] -> [1, C, rows / scale, W / scale], or of frames: [1, 3, T, rows, W] -> [1, C, t, …, …]."""
        ...


class TiledVae(DecodingHalf, Protocol):
    """A decoder that cuts latents into tiles by itself."""

    def tiles(self, latent: Tensor) -> list[Tensor]:
        """What the network would compute one by one of a latent [1, C, (t,) h, w] on its device, in order."""
        ...

    def tile_shape(self, tile: Tensor) -> tuple[int, ...]:
        """Of what is computed of it."""
        ...

    def compute(self, tile: Tensor) -> Tensor: ...

    def join(self, latent: Tensor, computed: Iterable[Tensor]) -> Tensor:
        """What the network makes of the tiles that were computed, in order: [1, 3, T, H, W]."""
        ...


class RowSpan(nn.Module):
    """Tells a network which of an image's rows it computes. `span`: of its own count of rows, those of each rank and
    its own place among them."""

    span: Callable[[int], tuple[tuple[int, ...], int]]

    def __init__(self) -> None:
        super().__init__()
        self.span = lambda mine: ((mine,), 0)


class RowAttention(nn.Module):
    """Attention of each position of this rank's rows to those of all rows. `gather`: [..., rows, W] -> [..., H, W]."""

    gather: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.gather = lambda mine: mine

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each [B, C, ..., rows, W], one head; the same shape."""
        q, k, v = (
            x.flatten(2).transpose(1, 2)[:, None] for x in (query, self.gather(key), self.gather(value))
        )
        return F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(query.shape)

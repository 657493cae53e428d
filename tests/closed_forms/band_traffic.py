"""Closed form of the bytes that each rank sends when an image is decoded in bands. Counted bytes are compared to it."""

from __future__ import annotations

from .vae_sizes import VaeSizes

_GROUPS = 32  # in each group norm
_COLOURS = 3


def expected_decode_bytes(
    sizes: VaeSizes, rows: tuple[int, ...], rank: int, *, width: int, element_size: int = 4
) -> int:
    """Returns the payload bytes that `rank` sends for one image of sum(rows) x `width` latent positions.

    `rows`: latent rows of each rank.
    - Halo: at each 3x3 convolution one row of its input goes to each neighbour.
    - Norms: two float32 numbers per group go to every other rank that has rows.
    - Attention: keys and values of the rank's tokens, padded to the largest band, go to every other rank with rows.
    - Image: the band's pixels go to rank 0.
    """
    if not rows[rank]:
        return 0
    active = [index for index, count in enumerate(rows) if count]
    position, others = active.index(rank), len(active) - 1
    neighbours = (position > 0) + (position < others)
    wide, n = sizes.widths[-1], sizes.resnets
    # Input channels of each convolution, times the width of its input relative to the latent.
    halo = sizes.channels + 4 * wide  # conv_in and the two resnets in the middle
    norms = 5  # of those two resnets and the attention
    before = wide
    for level, channels in reversed(list(enumerate(sizes.widths))):
        scale = 2 ** (len(sizes.widths) - 1 - level)
        halo += scale * (before + (2 * n - 1) * channels)
        halo += 2 * scale * channels if level else 0  # the convolution after upsampling
        norms += 2 * n
        before = channels
    halo += sizes.scale * sizes.widths[0]  # conv_out
    norms += 1
    elements = neighbours * halo * width
    elements += others * 2 * max(rows) * width * wide if others else 0
    elements += rows[rank] * width * sizes.scale**2 * _COLOURS if rank else 0
    return elements * element_size + norms * others * 2 * _GROUPS * 4

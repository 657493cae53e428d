"""One image decoded by all ranks: each computes a band of rows, exactly as if one rank had computed the whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from ...layout import slice_of, split_sizes
from ...models.vae.keys import VaeDims
from ...models.vae.module import VaeModel
from ..collectives import all_to_all
from ..groups import Axis, World
from ..traffic_counter import Traffic
from .row_bands import Bands, split_rows

RankGroups = dict[tuple[int, ...], dist.ProcessGroup | None]  # by ranks


class BandedDecoder:
    """Splits the rows of `vae`'s decoder over `world`. Collective: all ranks decode the same latents in the same order.

    `parts`: how often `on_part` is called per image, on every rank alike: after each of the decoder's residual blocks.
    `groups`: those laid over the world so far, which the next decoder takes over: torch never gives one's threads and
    descriptors back.
    """

    def __init__(self, vae: VaeModel, world: World, groups: RankGroups | None = None) -> None:
        self._vae = vae
        self._world = world
        self._traffic = Traffic()
        self._bands = Bands(self._traffic)
        self._groups: RankGroups = {} if groups is None else groups
        self._on_part: Callable[[], None] = _nothing
        split_rows(vae.decoder, self._bands)
        blocks = [layer for layer in vae.decoder.modules() if isinstance(layer, ResnetBlock2D)]
        self.parts = len(blocks)
        for block in blocks:
            block.register_forward_hook(lambda *_: self._on_part())

    @property
    def dims(self) -> VaeDims:
        return self._vae.dims

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._vae.compute_dtype

    @property
    def bytes_sent(self) -> int:
        return self._traffic.bytes_sent

    def rows(self, height: int, shares: tuple[float, ...] = ()) -> tuple[int, ...]:
        """Latent rows that each rank computes of an image with `height` of them."""
        return split_sizes(height, self._world.world_size, shares)

    @torch.inference_mode()
    def __call__(
        self, latent: Tensor, shares: tuple[float, ...] = (), on_part: Callable[[], None] | None = None
    ) -> Tensor | None:
        """latent [C, h, w] -> the image [scale * h, scale * w, 3], about -1..1, on rank 0; None on the others.

        `shares`: how much of the image each rank takes, empty for equal shares. A rank may have no row at all.
        """
        world, scale = self._world, self._vae.dims.scale
        rows = self.rows(latent.shape[1], shares)
        active = tuple(rank for rank, count in enumerate(rows) if count)
        group = self._group(active)
        self._on_part = on_part or _nothing
        try:
            if rows[world.rank]:
                axis = Axis(active, active.index(world.rank), group)
                self._bands.share_out(axis, tuple(rows[rank] for rank in active), world.device)
                band = latent[None, :, slice_of(rows, world.rank)].to(world.device, self._vae.compute_dtype)
                image = self._vae.decoder(band)[0].permute(1, 2, 0).contiguous()
            else:
                for _ in range(self.parts):
                    self._on_part()
                shape = 0, scale * latent.shape[2], self._vae.dims.out_channels
                image = torch.empty(shape, device=world.device, dtype=self._vae.compute_dtype)
        finally:
            self._on_part = _nothing
        return self._on_rank_0(image, tuple(scale * count for count in rows))

    def _on_rank_0(self, image: Tensor, sizes: tuple[int, ...]) -> Tensor | None:
        world = self._world
        if world.world_size == 1:
            return image
        others = (0,) * (world.world_size - 1)
        axis = Axis(tuple(range(world.world_size)), world.rank, world.group)
        receive = sizes if world.rank == 0 else (0, *others)
        whole = all_to_all(image, (len(image), *others), receive, axis, self._traffic)
        return whole if world.rank == 0 else None

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks; every rank asks for it, member or not, because new_group is collective."""
        if len(ranks) == self._world.world_size:
            return self._world.group
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        return self._groups[ranks]


def _nothing() -> None:
    pass

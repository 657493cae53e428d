"""One image or video whose network cuts it into tiles by itself: ranks share out the tiles, rank 0 joins them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import PlatformError
from ...layout import slice_of, split_sizes
from ...models.comfyui.rows.banded import OTHER_VERSION
from ...models.comfyui.rows.vae_halves import TiledComfyUIVae
from ..comm.collectives import gather_on_first
from ..comm.groups import Layouts
from .vae import check_limit, frames_of

_MAX_SIDE = 1024  # rows of a latent that every network cuts into tiles


class TiledDecoder:
    """A decoder like BandedNetwork, for a network whose tiles are independent of each other. Collective like that one.

    Tiles travel to rank 0 one by one and wait in host memory until the network's own code joins them.
    """

    def __init__(self, vae: TiledComfyUIVae, layouts: Layouts) -> None:
        self.vae = vae
        self._layouts, self._world = layouts, layouts.world

    @torch.inference_mode()
    def parts(self, latent: Tensor, shares: tuple[float, ...] = ()) -> tuple[int, ...]:
        """Returns the number of tiles of the latent [C, (t,) h, w] on each rank."""
        return split_sizes(len(self.vae.tiles(self._placed(latent))), self._world.world_size, shares)

    @torch.inference_mode()
    def __call__(
        self, latent: Tensor, shares: tuple[float, ...] = (), on_step: Callable[[], None] | None = None
    ) -> Tensor | None:
        """Decodes latent [C, (t,) h, w] to frames [T, H, W, 3], about -1..1, on the CPU of rank 0; None on others.

        `shares`, `on_step`: see BandedNetwork.__call__.
        """
        world, vae = self._world, self.vae
        placed = self._placed(latent)
        tiles = vae.tiles(placed)
        counts = split_sizes(len(tiles), world.world_size, shares)
        slices = [slice_of(counts, rank) for rank in range(world.world_size)]
        computed: list[Tensor | None] = [None] * len(tiles)
        turns = max(counts)
        for turn in range(turns):
            numbers = [part.start + turn if turn < part.stop - part.start else None for part in slices]
            self._compute(tiles, numbers, computed)
            if on_step is not None:
                for _ in range(vae.steps * (turn + 1) // turns - vae.steps * turn // turns):
                    on_step()
        if world.rank != 0:
            return None
        return frames_of(vae.join(placed, (tile for tile in computed if tile is not None))).cpu()

    @torch.inference_mode()
    def check(self) -> None:
        """Raises PlatformError on rank 0 if shared tiles do not give what one rank computes. Collective."""
        vae, world = self.vae, self._world
        if world.world_size == 1:
            return
        frames = (2,) if vae.latent_dims == 3 else ()
        height = 2
        while len(vae.tiles(self._placed(torch.zeros(vae.latent_channels, *frames, height, 2)))) < 2:
            height *= 2
            if height > _MAX_SIDE:
                raise PlatformError(f"{OTHER_VERSION}: it cuts no tiles")
        latent = torch.randn(
            vae.latent_channels, *frames, height, 2, generator=torch.Generator().manual_seed(0)
        )
        shared = self(latent)
        if shared is None:
            return
        placed = self._placed(latent)
        whole = frames_of(vae.join(placed, map(vae.compute, vae.tiles(placed)))).cpu()
        check_limit(shared, whole, vae.compute_dtype, "tiles shared out are")

    def _placed(self, latent: Tensor) -> Tensor:
        return latent[None].to(self._world.device, self.vae.compute_dtype)

    def _compute(self, tiles: list[Tensor], numbers: list[int | None], computed: list[Tensor | None]) -> None:
        """Computes one tile per rank; rank 0 stores all of them. `numbers`: the tile of each rank, None for no tile."""
        vae, world = self.vae, self._world
        shapes = [None if number is None else vae.tile_shape(tiles[number]) for number in numbers]
        sizes = tuple(0 if shape is None else math.prod(shape) for shape in shapes)
        mine = numbers[world.rank]
        tile = (
            torch.empty(0, device=world.device, dtype=vae.compute_dtype)
            if mine is None
            else vae.compute(tiles[mine]).flatten()
        )
        tile = gather_on_first(tile, sizes, self._layouts.everyone)
        if world.rank != 0:
            return
        for number, shape, part in zip(numbers, shapes, tile.split(sizes), strict=True):
            if number is not None and shape is not None:
                computed[number] = part.reshape(shape).cpu()

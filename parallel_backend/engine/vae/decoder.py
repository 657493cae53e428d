"""One image or video decoded by all ranks: each computes a band of rows, exactly as if one rank had computed it all."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PlatformError
from ...layout import slice_of, split_sizes
from ...models.vae.base import BandedVae
from ..collectives import all_gather, all_to_all
from ..groups import Axis, World
from ..traffic_counter import Traffic
from .row_bands import Bands, split_rows

RankGroups = dict[tuple[int, ...], dist.ProcessGroup | None]  # by ranks

# How far a decode in bands may be from the whole, of the largest pixel, in check(). Measured on random networks of 7
# kinds: float32 rounds to 8e-6, bfloat16 to 1.4e-2, and a rank that goes without its neighbours is off by 0.5 or more.
_CHECK_LIMIT, _CHECK_LIMIT_HALF = 1e-3, 0.1


class BandedDecoder:
    """Splits the rows of `vae`'s decoder over `world`. Collective: all ranks decode the same latents in the same order.

    `groups`: those laid over the world so far, which the next decoder takes over: torch never gives one's threads and
    descriptors back.
    """

    def __init__(self, vae: BandedVae, world: World, groups: RankGroups | None = None) -> None:
        self.vae = vae
        self._world = world
        self._traffic = Traffic()
        self._bands = Bands(self._traffic)
        self._groups: RankGroups = {} if groups is None else groups
        self._steps = _Steps(0, 1, _nothing)
        split_rows(vae.decoder, self._bands)
        for layer in vae.step_layers:
            layer.register_forward_hook(lambda *_: self._steps.count())

    @property
    def bytes_sent(self) -> int:
        return self._traffic.bytes_sent

    def rows(self, height: int, shares: tuple[float, ...] = ()) -> tuple[int, ...]:
        """Latent rows that each rank computes of an image with `height` of them."""
        return split_sizes(height, self._world.world_size, shares)

    def parts(self, latent: Tensor, shares: tuple[float, ...] = ()) -> tuple[int, ...]:
        """Rows of the latent [C, (t,) h, w] on each rank."""
        return self.rows(latent.shape[-2], shares)

    @torch.inference_mode()
    def __call__(
        self, latent: Tensor, shares: tuple[float, ...] = (), on_step: Callable[[], None] | None = None
    ) -> Tensor | None:
        """latent [C, h, w], or [C, t, h, w] of a video -> its frames [T, H, W, 3], about -1..1, on the CPU of rank 0;
        one frame of an image. None on the others.

        `shares`: how much of the rows each rank takes, empty for equal shares. A rank may have no row at all.
        `on_step`: called `vae.steps` times, on every rank alike.
        """
        world, vae = self._world, self.vae
        rows = self.rows(latent.shape[-2], shares)
        active = tuple(rank for rank, count in enumerate(rows) if count)
        group = self._group(active)
        self._steps = _Steps(vae.steps, vae.layers_per_step(latent), on_step or _nothing)
        band: Tensor | None = None
        try:
            if rows[world.rank]:
                axis = Axis(active, active.index(world.rank), group)
                self._bands.share_out(axis, tuple(rows[rank] for rank in active), world.device)
                band = self._decode(latent[..., slice_of(rows, world.rank), :])
            self._steps.end()
        finally:
            self._steps = _Steps(0, 1, _nothing)
        return self._on_rank_0(band)

    @torch.inference_mode()
    def check(self) -> None:
        """Raises PlatformError on rank 0 when bands of a small random latent do not give what one rank computes of the
        whole: another version of a network may look at rows in a way not known here. Collective."""
        vae, world = self.vae, self._world
        if world.world_size == 1:
            return
        frames = (2,) if vae.latent_dims == 3 else ()
        shape = vae.latent_channels, *frames, world.world_size, 2
        latent = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        banded = self(latent)
        if banded is None:
            return
        self._bands.share_out(Axis((0,), 0, None), (1,), world.device)
        whole = self._decode(latent).cpu()
        check_limit(banded, whole, vae.compute_dtype, "a decode in bands is")

    def _decode(self, rows: Tensor) -> Tensor:
        """[C, (t,) rows, w] -> frames [T, scale * rows, scale * w, 3] on the device."""
        vae = self.vae
        pixels = vae.decode(rows[None].to(self._world.device, vae.compute_dtype))[0]
        return (pixels if pixels.ndim == 4 else pixels[:, None]).permute(1, 2, 3, 0)

    def _on_rank_0(self, band: Tensor | None) -> Tensor | None:
        """Frame by frame, so that no device holds more of the whole than one frame. band: [T, rows, W, 3] or None."""
        world, ranks = self._world, self._world.world_size
        if world.group is None:
            return None if band is None else band.cpu()
        everyone = tuple(range(ranks))
        shape = torch.tensor([(0, 0, 0, 0) if band is None else tuple(band.shape)])
        shapes = all_gather(
            shape, (1,) * ranks, Axis(everyone, world.rank, world.control), Traffic()
        ).tolist()
        sizes = tuple(rows for _, rows, *_ in shapes)
        frames, _, width, channels = max(shapes)
        if band is None:
            band = torch.empty(frames, 0, width, channels, device=world.device, dtype=self.vae.compute_dtype)
        whole = (
            torch.empty(frames, sum(sizes), width, channels, dtype=band.dtype) if world.rank == 0 else None
        )
        others = (0,) * (ranks - 1)
        receive = sizes if world.rank == 0 else (0, *others)
        axis = Axis(everyone, world.rank, world.group)
        for number, frame in enumerate(band):
            frame = frame.to(world.device).contiguous()  # some networks leave their frames in host memory
            arrived = all_to_all(frame, (len(frame), *others), receive, axis, self._traffic)
            if whole is not None:
                whole[number] = arrived
        return whole

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks; every rank asks for it, member or not, because new_group is collective."""
        if len(ranks) == self._world.world_size:
            return self._world.group
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        return self._groups[ranks]


def check_limit(found: Tensor, whole: Tensor, dtype: torch.dtype, what: str) -> None:
    """Raises PlatformError when `found` is further from `whole` than rounding in `dtype` explains."""
    same_shape = found.shape == whole.shape
    difference = ((found - whole).abs().max() / whole.abs().max()).item() if same_shape else math.inf
    limit = _CHECK_LIMIT if dtype == torch.float32 else _CHECK_LIMIT_HALF
    if not difference <= limit:
        raise PlatformError(
            f"this version of ComfyUI computes its VAE in another way than the pack knows: {what} off by "
            f"{difference:.1e} of the largest pixel, over {limit:g}"
        )


class _Steps:
    """Calls `on_step` after every `layers` layers, `steps` times in all: what a network leaves is called at the end."""

    def __init__(self, steps: int, layers: int, on_step: Callable[[], None]) -> None:
        self._left = steps
        self._layers = layers
        self._counted = 0
        self._on_step = on_step

    def count(self) -> None:
        self._counted += 1
        if self._left and self._counted % self._layers == 0:
            self._step()

    def end(self) -> None:
        while self._left:
            self._step()

    def _step(self) -> None:
        self._left -= 1
        self._on_step()


def _nothing() -> None:
    pass

"""One image or video decoded or encoded by all ranks: each computes a band of rows, as exactly as one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import PlatformError
from ...layout import slice_of, split_sizes
from ...models.comfyui.rows.banded import OTHER_VERSION
from ...models.comfyui.rows.vae_halves import ComfyUIVae, ComfyUIVaeEncoder
from ..comm.collectives import all_gather, gather_on_first
from ..comm.groups import ALONE, Axis, Layouts, Traffic
from .row_bands import Bands, split_rows

# The largest difference that check() allows between bands and the whole, relative to the largest pixel. Measured on
# random networks of 7 kinds: float32 differs by 8e-6, bfloat16 by 1.4e-2, float32 with convolutions in NVIDIA's TF32 by
# 2.2e-3. A rank without its neighbours' rows is off by 0.5 or more.
_CHECK_LIMIT, _CHECK_LIMIT_HALF, _CHECK_LIMIT_TF32 = 1e-3, 0.1, 2e-2


class BandedNetwork:
    """Half a VAE, whose rows are split over all ranks. Collective: all give it the same inputs in the same order."""

    def __init__(self, vae: ComfyUIVae | ComfyUIVaeEncoder, layouts: Layouts) -> None:
        self.vae = vae
        self._layouts, self._world = layouts, layouts.world
        self._bands = Bands()
        self._steps: Iterator[None] = iter(())
        split_rows(vae.network, self._bands)
        for layer in vae.step_layers:
            layer.register_forward_hook(lambda *_: next(self._steps, None))

    def parts(self, given: Tensor, shares: tuple[float, ...] = ()) -> tuple[int, ...]:
        """Returns how many rows of the latent each rank computes of an input [C, (t,) rows, w]."""
        return split_sizes(given.shape[-2] // self.vae.unit, self._world.world_size, shares)

    @torch.inference_mode()
    def __call__(
        self, latent: Tensor, shares: tuple[float, ...] = (), on_step: Callable[[], None] | None = None
    ) -> Tensor | None:
        """Decodes a latent [C, h, w], or [C, t, h, w] for a video, to frames [T, H, W, 3], about -1..1; an image gives
        one frame. Returns them on the CPU of rank 0, None on the others. An encoder takes pixels and gives a latent.

        `shares`: how much of the rows each rank takes, empty for equal shares; a rank may have no row.
        `on_step`: called `vae.steps` times on every rank.
        """
        world, vae = self._world, self.vae
        rows = self.parts(latent, shares)
        active = tuple(rank for rank, count in enumerate(rows) if count)
        group = self._layouts.group(active)
        in_rows = tuple(count * vae.unit for count in rows)
        self._steps = _step_by_layers(vae.steps, vae.layers_per_step(latent), on_step or (lambda: None))
        next(self._steps)
        band: Tensor | None = None
        try:
            if rows[world.rank]:
                axis = Axis(active, active.index(world.rank), group, self._layouts.traffic)
                self._bands.share_out(axis, tuple(rows[rank] for rank in active), world.device)
                band = self._decode(latent[..., slice_of(in_rows, world.rank), :])
            for _ in self._steps:
                pass
        finally:
            self._steps = iter(())
        return self._on_rank_0(band)

    @torch.inference_mode()
    def check(self) -> None:
        """Raises PlatformError on rank 0 if bands of a small random input do not give what one rank computes: another
        version of a network may read rows in an unknown way. Collective."""
        vae, world = self.vae, self._world
        if world.world_size == 1:
            return
        latent = torch.randn(vae.small_shape(world.world_size), generator=torch.Generator().manual_seed(0))
        banded = self(latent)
        if banded is None:
            return
        self._bands.share_out(ALONE, (1,), world.device)
        whole = self._decode(latent).cpu()
        check_limit(banded, whole, vae.compute_dtype, "bands of rows are")

    def _decode(self, rows: Tensor) -> Tensor:
        """Decodes [C, (t,) rows, w] to [T, scale * rows, scale * w, 3] on the device; an encoder, pixels to latent."""
        return frames_of(self.vae(rows[None].to(self._world.device, self.vae.compute_dtype)))

    def _on_rank_0(self, band: Tensor | None) -> Tensor | None:
        """Joins the bands ([T, rows, W, 3] or None) on rank 0, frame by frame: no device holds two whole frames."""
        world, ranks, axis = self._world, self._world.world_size, self._layouts.everyone
        if world.group is None:
            return None if band is None else band.cpu()
        shape = torch.tensor([(0, 0, 0, 0) if band is None else tuple(band.shape)])
        uncounted = replace(axis, group=world.control, traffic=Traffic())
        shapes = all_gather(shape, (1,) * ranks, uncounted).tolist()
        sizes = tuple(rows for _, rows, *_ in shapes)
        frames, _, width, channels = max(shapes)
        if band is None:
            band = torch.empty(frames, 0, width, channels, device=world.device, dtype=self.vae.compute_dtype)
        whole = (
            torch.empty(frames, sum(sizes), width, channels, dtype=band.dtype) if world.rank == 0 else None
        )
        for number, frame in enumerate(band):
            # Some networks return frames in host memory.
            arrived = gather_on_first(frame.to(world.device).contiguous(), sizes, axis)
            if whole is not None:
                whole[number] = arrived
        return whole


def frames_of(pixels: Tensor) -> Tensor:
    """Rearranges [1, 3, (T,) H, W] to [T, H, W, 3]."""
    whole = pixels[0]
    return (whole if whole.ndim == 4 else whole[:, None]).permute(1, 2, 3, 0)


def check_limit(found: Tensor, whole: Tensor, dtype: torch.dtype, what: str) -> None:
    """Raises PlatformError if `found` differs from `whole` by more than rounding in `dtype` explains."""
    same_shape = found.shape == whole.shape
    difference = ((found - whole).abs().max() / whole.abs().max()).item() if same_shape else math.inf
    limit = _rounding(dtype, found.device)
    if not difference <= limit:
        raise PlatformError(
            f"{OTHER_VERSION}: {what} off by {difference:.1e} of the largest value, over {limit:g}"
        )


def _rounding(dtype: torch.dtype, device: torch.device) -> float:
    if dtype != torch.float32:
        return _CHECK_LIMIT_HALF
    is_coarse = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return _CHECK_LIMIT_TF32 if is_coarse else _CHECK_LIMIT


def _step_by_layers(steps: int, layers: int, on_step: Callable[[], None]) -> Iterator[None]:
    """Yields before each layer, and calls `on_step` after every `layers` of them; ends after `steps` calls."""
    for _ in range(steps):
        for _ in range(layers):
            yield
        on_step()

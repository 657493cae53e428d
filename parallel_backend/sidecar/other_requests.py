"""The requests to the ranks of a sidecar that need no model but a VAE."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ..errors import OutOfMemory, RequestError
from ..wire.decode_messages import DecodeResult, EncodeResult, VaeWeights, check_decode, check_encode
from ..wire.transport import MOST_BYTES
from .group.group import RankGroupRunner
from .group.lease import Lease, ShouldCancel
from .group.phases import Phase, PhaseKind, ShowPhase
from .holdings import RankHoldings

Result = TypeVar("Result", DecodeResult, EncodeResult)


class VaeRequests:
    """Of a Sidecar."""

    devices: tuple[str, ...]
    _ranks: RankGroupRunner
    _holdings: RankHoldings

    def decode(
        self,
        vae: VaeWeights,
        latent: Tensor,
        shares: tuple[float, ...] = (),
        on_step: Callable[[int, int], None] | None = None,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
    ) -> DecodeResult:
        """The images of `latent` [B, C, h, w], or the frames of videos [B, C, t, h, w], rows shared out over all ranks.

        The models they hold stay loaded, unless memory ends beside them. Raises PlatformError for a network of
        ComfyUI's that is not exact in bands.
        """
        check_decode(latent, shares, len(self.devices))
        with self._ranks.lease("decode", should_cancel, on_phase) as lease:
            return self._ask(self._holdings.vae.decode, lease, vae, latent, shares, on_step)

    def encode(
        self,
        vae: VaeWeights,
        pixels: Tensor,
        shares: tuple[float, ...] = (),
        on_step: Callable[[int, int], None] | None = None,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
    ) -> EncodeResult:
        """The latents of `pixels` [B, 3, H, W], or of videos [B, 3, T, H, W], as the VAE's network takes them; as
        decode()."""
        check_encode(pixels, shares, len(self.devices))
        if pixels.nbytes > MOST_BYTES:
            raise RequestError(
                f"the pixels take {pixels.nbytes / 2**30:.1f} GiB, and at most {MOST_BYTES / 2**30:.1f} GiB can be "
                f"sent to the devices at once. Encode fewer images or frames at a time, or use VAE Encode."
            )
        with self._ranks.lease("encode", should_cancel, on_phase) as lease:
            return self._ask(self._holdings.vae_encoder.encode, lease, vae, pixels, shares, on_step)

    def _ask(
        self,
        work: Callable[..., Result],
        lease: Lease,
        vae: VaeWeights,
        tensor: Tensor,
        shares: tuple[float, ...],
        on_step: Callable[[int, int], None] | None,
    ) -> Result:
        """What `work` of VaeOnRanks makes of the tensor, once more where ranks die on the way, or where memory ends
        beside the models that they hold: those come back with the next request for them."""
        lease.images = len(tensor)

        def attempt() -> Result:
            self._holdings.ensure_started(lease)
            self._ranks.working()
            return work(self._ranks.epoch, lease.exchange, vae, tensor, shares, on_step, lease.on_phase)

        models = self._holdings.models
        try:
            return self._ranks.through_a_crash(attempt, lease)
        except OutOfMemory:
            if not models:
                raise
        lease.on_phase(Phase(PhaseKind.MAKING_ROOM))
        for spec in models:
            self._holdings.drop(spec, lease)  # of ranks that still run: not all survive an end of memory
        return self._ranks.through_a_crash(attempt, lease)

"""The requests to the ranks of a sidecar that need no diffusion model: halves of VAEs, and text encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ..devices import is_cpu
from ..errors import RequestError
from ..job.answer_tree import unpack_tree
from ..requests import ComfyUISource
from ..wire import deadlines
from ..wire.decode_messages import DecodeResult, EncodeResult, VaeWeights, check_decode, check_encode
from ..wire.payloads import Tensors
from ..wire.protocol import ALL_RANKS, CallEncoder
from ..wire.transport import MOST_BYTES
from .group.exchange import AGREED_ERRORS, reports
from .group.group import RankGroupRunner
from .group.lease import Lease, ShouldCancel
from .group.phases import Phase, PhaseKind, ShowPhase
from .holdings import RankHoldings

Result = TypeVar("Result", DecodeResult, EncodeResult)

# Where a text encoder is computed: on one device, or its layers on all of them; auto goes by memory.
AUTO, ONE_DEVICE, ALL_DEVICES = PLACEMENTS = ("auto", "one device", "all devices")


@dataclass(frozen=True)
class EncoderRequest:
    """A call of a text encoder. `number`: of the encoder in ComfyUI's process; `keep`: the numbers of all that it has;
    `bytes`: of its weights; `placement`: one of PLACEMENTS; `tensors(holdings, is_new)`: the payload for the ranks of
    these RankHoldings, with the encoder itself where it is new to them."""

    number: int
    keep: tuple[int, ...]
    bytes: int
    placement: str
    comfyui: ComfyUISource
    tensors: Callable[[RankHoldings, bool], Tensors]


@dataclass(frozen=True)
class EncoderAnswer:
    """`value`: what the call gave, tensors on the CPU; `devices`: those that computed; `bytes`: of the weights that
    each of the ranks computed with; `bytes_sent`: collective payload of each."""

    value: Any
    devices: tuple[str, ...]
    seconds: float
    bytes: tuple[int, ...]
    bytes_sent: tuple[int, ...]


class VaeRequests:
    """The requests of a Sidecar that need a VAE."""

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
        """Returns what `work` of VaeOnRanks makes of the tensor."""
        lease.images = len(tensor)

        def attempt() -> Result:
            return work(self._ranks.epoch, lease.exchange, vae, tensor, shares, on_step, lease.on_phase)

        return self._holdings.beside_models(attempt, lease)


class EncoderRequests:
    """The requests of a Sidecar that call a text encoder."""

    devices: tuple[str, ...]
    _ranks: RankGroupRunner
    _holdings: RankHoldings

    def call_encoder(
        self,
        request: EncoderRequest,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
    ) -> EncoderAnswer:
        """Makes a call of an encoder. It is sent to the ranks with its first one, and to those that were started anew.

        The models they hold stay loaded, unless memory ends beside them.
        """
        if request.placement not in PLACEMENTS:
            raise RequestError(f"placement is {request.placement}; choose one of {', '.join(PLACEMENTS)}.")
        with self._ranks.lease("text", should_cancel, on_phase) as lease:
            return self._holdings.beside_models(lambda: self._attempt(request, lease), lease)

    def _attempt(self, request: EncoderRequest, lease: Lease) -> EncoderAnswer:
        holdings = self._holdings
        placed = holdings.encoders.pop(request.number, None)  # until all goes well, nobody knows
        is_new = placed is None
        rank = self._choose_rank(request, lease) if placed is None else placed
        where = self.devices if rank == ALL_RANKS else (self.devices[rank],)
        lease.on_phase(Phase(PhaseKind.SENDING_ENCODER if is_new else PhaseKind.ENCODING_TEXT))
        tensors = request.tensors(holdings, is_new)
        wanted = sum(tensor.nbytes for tensor in tensors.values())
        if wanted > MOST_BYTES:
            raise RequestError(
                f"The text encoder has {wanted / 2**30:.1f} GiB of weights that lie in no .safetensors file of its "
                f"loader, and at most {MOST_BYTES / 2**30:.1f} GiB can be sent to the devices at once. Load it from "
                f".safetensors files, or connect its CLIP without Parallel CLIP."
            )
        exchange = lease.exchange(AGREED_ERRORS)
        exchange.listener = max(rank, 0)
        message = CallEncoder(request.number, request.keep, rank, request.comfyui)
        holdings.has_encoders_on_devices = not is_cpu(self.devices)  # also where the call fails
        exchange.send(message, tensors)
        budget = deadlines.FIRST_STEP + (deadlines.load_budget(request.bytes) if is_new else 0.0)
        calls = reports(exchange.wait(lambda: budget), lambda done: done.call)
        holdings.encoders = {
            number: place for number, place in holdings.encoders.items() if number in request.keep
        } | {request.number: rank}
        return EncoderAnswer(
            unpack_tree(exchange.result),
            where,
            seconds=max(call.seconds for call in calls),
            bytes=tuple(call.bytes for call in calls),
            bytes_sent=tuple(call.bytes_sent for call in calls),
        )

    def _choose_rank(self, request: EncoderRequest, lease: Lease) -> int:
        """Returns the rank that computes, or ALL_RANKS by hand or where no device has the room."""
        if len(self.devices) == 1:
            return 0
        if request.placement == ALL_DEVICES:
            return ALL_RANKS
        if is_cpu(self.devices):
            return 0
        free = self._holdings.free_devices(lease)
        roomiest = max(range(len(free)), key=free.__getitem__)
        return roomiest if request.placement == ONE_DEVICE or free[roomiest] >= request.bytes else ALL_RANKS

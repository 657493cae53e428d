"""Calls of what ranks hold beside their models: text encoders, and halves of VAEs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..devices import is_cpu
from ..errors import RequestError
from ..job.answer_tree import unpack_tree
from ..requests import ComfyUISource, ModelSpec
from ..wire import deadlines
from ..wire.payloads import Tensors
from ..wire.protocol import ALL_RANKS, CallModule, Message, Progress
from ..wire.transport import MOST_BYTES
from .group.exchange import AGREED_ERRORS, USER_ERRORS, expect, reports
from .group.group import RankGroupRunner
from .group.lease import Lease, ShouldCancel
from .group.phases import Phase, PhaseKind, ShowPhase
from .holdings import RankHoldings
from .model_room import absolute

# Where a text encoder is computed: on one device, or its layers on all of them; auto goes by memory.
AUTO, ONE_DEVICE, ALL_DEVICES = PLACEMENTS = ("auto", "one device", "all devices")


class ModuleKind(Enum):
    """The kind of a module. `request`: its name in events; `sending`, `calling`: the phases of its first call and of
    others; `survivable`: the errors that leave the ranks usable. Ranks do not agree on each layer of a VAE."""

    TEXT = ("text", PhaseKind.SENDING_ENCODER, PhaseKind.ENCODING_TEXT, AGREED_ERRORS)
    VAE_DECODER = ("decode", PhaseKind.SENDING_VAE, PhaseKind.DECODING, USER_ERRORS)
    VAE_ENCODER = ("encode", PhaseKind.SENDING_VAE, PhaseKind.ENCODING, USER_ERRORS)

    def __init__(
        self, request: str, sending: PhaseKind, calling: PhaseKind, survivable: frozenset[str]
    ) -> None:
        self.request, self.sending, self.calling, self.survivable = request, sending, calling, survivable


@dataclass(frozen=True)
class ModuleRequest:
    """A call of a module. `number`: of the module in ComfyUI's process; `keep`: the numbers of all that it has;
    `bytes`: of its weights; `placement`: one of PLACEMENTS; `tensors(holdings, is_new)`: the payload for the ranks of
    these RankHoldings, with the module itself where it is new to them. Of a VAE, `images`: how many; `steps`: in
    which its progress is told; `positions`: of the latent of each image, by which the time limit of a step goes."""

    kind: ModuleKind
    number: int
    keep: tuple[int, ...]
    bytes: int
    comfyui: ComfyUISource
    tensors: Callable[[RankHoldings, bool], Tensors]
    placement: str = ALL_DEVICES
    images: int = 0
    steps: int = 0
    positions: int = 0


@dataclass(frozen=True)
class ModuleAnswer:
    """`value`: what the call gave, tensors on the CPU; `devices`: those that computed; `bytes`: of the weights that
    each of the ranks computed with; `bytes_sent`: collective payload of each; `is_new`: True if the module was sent
    with this call, which took `load_seconds` of its own; `parts`, `peak_bytes`, `compute_dtype`: as in RankCall."""

    value: Any
    devices: tuple[str, ...]
    seconds: float
    bytes: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    is_new: bool = False
    load_seconds: float = 0.0
    parts: tuple[int, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    compute_dtype: str = ""


class ModuleRequests:
    """The requests of a Sidecar that call a module."""

    devices: tuple[str, ...]
    _ranks: RankGroupRunner
    _holdings: RankHoldings
    _awaited: tuple[ModelSpec, int] | None = None

    def leave_room_for(self, spec: ModelSpec, size: int) -> None:
        """Has text encoders that are sent from now on leave `size` bytes of each device to this model, which a prompt
        has named and not asked for yet."""
        self._awaited = absolute(spec), size

    def call_module(
        self,
        request: ModuleRequest,
        on_step: Callable[[int, int], None] | None = None,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
        waits: bool = True,
    ) -> ModuleAnswer:
        """Makes a call of a module. It is sent to the ranks with its first one, and to those that were started anew.
        `waits`: False for a call that is not worth it: it raises Cancelled where another request has the ranks.

        The models they hold stay loaded, unless memory ends beside them. Raises PlatformError for a VAE's network that
        is not exact in bands.
        """
        if request.placement not in PLACEMENTS:
            raise RequestError(f"placement is {request.placement}; choose one of {', '.join(PLACEMENTS)}.")
        is_waiting = not waits

        def cancelled() -> bool:
            return is_waiting or (should_cancel is not None and should_cancel())

        with self._ranks.lease(request.kind.request, cancelled, on_phase) as lease:
            is_waiting = False
            lease.images = request.images
            return self._holdings.beside_models(lambda: self._attempt(request, lease, on_step), lease)

    def _attempt(
        self, request: ModuleRequest, lease: Lease, on_step: Callable[[int, int], None] | None
    ) -> ModuleAnswer:
        holdings, kind = self._holdings, request.kind
        placed = holdings.modules.take_rank(request.number)
        is_new = placed is None
        rank = self._choose_rank(request, lease) if placed is None else placed
        where = self.devices if rank == ALL_RANKS else (self.devices[rank],)
        lease.on_phase(Phase(kind.sending if is_new else kind.calling))
        tensors = request.tensors(holdings, is_new)
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > MOST_BYTES:
            raise RequestError(_too_large(size, kind))

        def show(rank: int, message: Message, tensors: Tensors | None) -> None:
            step = expect(rank, message, Progress)
            if is_new and step.step == 1:
                lease.on_phase(Phase(kind.calling))
            if on_step is not None:
                on_step(step.step, step.steps)

        exchange = lease.exchange(kind.survivable)
        exchange.listener = max(rank, 0)
        # Also where the call fails.
        holdings.modules.add(request.number, None, (request.bytes,) * len(self.devices))
        exchange.send(CallModule(request.number, request.keep, rank, request.comfyui, request.steps), tensors)
        budget = deadlines.decode_budget(request.positions, is_cpu(self.devices))
        budget += deadlines.load_budget(request.bytes) if is_new else 0.0
        calls = reports(exchange.wait(lambda: budget, show), lambda done: done.call)
        sizes = tuple(call.bytes for call in calls)
        holdings.modules.keep(request.keep)
        holdings.modules.add(request.number, rank, sizes)
        return ModuleAnswer(
            unpack_tree(exchange.result),
            where,
            seconds=max(call.seconds for call in calls),
            bytes=sizes,
            bytes_sent=tuple(call.bytes_sent for call in calls),
            is_new=is_new,
            load_seconds=max(call.load_seconds for call in calls),
            parts=tuple(call.parts for call in calls),
            peak_bytes=tuple(call.peak_bytes for call in calls),
            compute_dtype=calls[0].compute_dtype,
        )

    def _choose_rank(self, request: ModuleRequest, lease: Lease) -> int:
        """Returns the rank that computes, or ALL_RANKS by hand or where no device has the room."""
        if len(self.devices) == 1:
            return 0
        if request.placement == ALL_DEVICES:
            return ALL_RANKS
        if is_cpu(self.devices):
            return 0
        free = self._holdings.free_devices(request.bytes, self._awaited_bytes(), lease)
        roomiest = max(range(len(free)), key=free.__getitem__)
        return roomiest if request.placement == ONE_DEVICE or free[roomiest] >= request.bytes else ALL_RANKS

    def _awaited_bytes(self) -> int:
        """Returns the bytes of each device that the awaited model will take, 0 once the ranks hold it."""
        if self._awaited is None or self._awaited[0] in self._holdings.models:
            return 0
        return self._awaited[1]


def _too_large(size: int, kind: ModuleKind) -> str:
    """Says what cannot be sent at once, and what to do."""
    limit = f"at most {MOST_BYTES / 2**30:.1f} GiB can be sent to the devices at once"
    if kind is ModuleKind.TEXT:
        return (
            f"The text encoder has {size / 2**30:.1f} GiB of weights that lie in no .safetensors file of its loader, "
            f"and {limit}. Load it from .safetensors files, or connect its CLIP without Parallel CLIP."
        )
    return (
        f"The VAE and its pictures take {size / 2**30:.1f} GiB, and {limit}. Take fewer images or frames at a time, or "
        f"use VAE Encode and VAE Decode."
    )

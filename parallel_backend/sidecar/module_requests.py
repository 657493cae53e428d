"""Calls of the text encoders and VAE halves (encoder or decoder) that ranks hold beside their models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..devices import is_cpu
from ..errors import OutOfMemory, RequestError
from ..job.answer_tree import unpack_tree
from ..job.state_changes import take_changes
from ..requests import ComfyUISource, ModelSpec
from ..strategy import ParallelStrategy
from ..wire import deadlines
from ..wire.payloads import Tensors, within_limit
from ..wire.protocol import ALL_RANKS, Load, Message, Progress, RunJob
from .group.exchange import AGREED_ERRORS, USER_ERRORS, expect, reports
from .group.group import RankGroupRunner
from .group.lease import Lease, Phase, PhaseKind, ShouldCancel, ShowPhase
from .holdings import RankHoldings
from .model_room import absolute

# Where a text encoder is computed: on one device, or its layers on all of them; auto decides by free memory.
AUTO, ONE_DEVICE, ALL_DEVICES = PLACEMENTS = ("auto", "one device", "all devices")


class ModuleKind(Enum):
    """The kind of a module. `request`: its name in events; `sending`, `calling`: the phases of its load and of its
    calls; `survivable`: the errors that leave the ranks usable, not out-of-memory in a VAE, since the ranks do not
    agree on each layer's outcome; `noun`: for errors; `without`: how to have ComfyUI's process compute it."""

    TEXT = ("text", PhaseKind.SENDING_ENCODER, PhaseKind.ENCODING_TEXT, AGREED_ERRORS)
    VAE_DECODER = ("decode", PhaseKind.SENDING_VAE, PhaseKind.DECODING, USER_ERRORS)
    VAE_ENCODER = ("encode", PhaseKind.SENDING_VAE, PhaseKind.ENCODING, USER_ERRORS)

    def __init__(
        self, request: str, sending: PhaseKind, calling: PhaseKind, survivable: frozenset[str]
    ) -> None:
        self.request, self.sending, self.calling, self.survivable = request, sending, calling, survivable
        is_text = request == "text"
        self.noun = "text encoder" if is_text else "VAE"
        self.without = (
            "connect its CLIP without Parallel CLIP" if is_text else "use VAE Encode and VAE Decode"
        )


@dataclass(frozen=True)
class ModuleRequest:
    """A call of a module. `number`: the ranks' number of it (model_room.new_number); `keep`: the numbers of all modules
    in use in ComfyUI's process; `bytes`: size of its weights; `placement`: one of PLACEMENTS; `module(holdings)`: the
    payload from which the ranks of these RankHoldings load it; `tensors(holdings, is_new)`: the payload of the call,
    `is_new` if they have just loaded the module. For a VAE, `images`: their number; `steps`: the number of progress
    steps; `positions`: latent positions of each image, which set the time limit of a step."""

    kind: ModuleKind
    number: int
    keep: tuple[int, ...]
    bytes: int
    comfyui: ComfyUISource
    module: Callable[[RankHoldings], Tensors]
    tensors: Callable[[RankHoldings, bool], Tensors]
    placement: str = ALL_DEVICES
    images: int = 0
    steps: int = 0
    positions: int = 0


@dataclass(frozen=True)
class ModuleAnswer:
    """The answer to a call. `value`: its result, tensors on the CPU; `devices`: the ones that computed; `bytes`: of the
    weights that each rank computed with; `bytes_sent`: each rank's collective payload; `is_new`: True if the module
    was loaded for this call, which took `load_seconds` more; `parts`, `peak_bytes`: as in RankCall; `compute_dtype`:
    of a VAE, as torch names it; `changes`: what the call has changed for later ones (state_changes.store_changes);
    `notes`: on what it could not send back."""

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
    changes: Tensors = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class ModuleRequests:
    """The requests of a Sidecar that call a module."""

    devices: tuple[str, ...]
    _ranks: RankGroupRunner
    _holdings: RankHoldings
    _awaited: tuple[ModelSpec, int] | None = None

    def leave_room_for(self, spec: ModelSpec, size: int) -> None:
        """Reserves `size` bytes of each device for a model that a prompt names but has not used yet: text encoders that
        are sent from now on leave them free."""
        self._awaited = absolute(spec), size

    def call_module(
        self,
        request: ModuleRequest,
        on_step: Callable[[int, int], None] | None = None,
        on_phase: ShowPhase | None = None,
        should_cancel: ShouldCancel | None = None,
        waits: bool = True,
    ) -> ModuleAnswer:
        """Calls a module. The ranks load it before its first call, and again after a restart. `waits`: False to
        raise Cancelled if another request has the ranks.

        The models that the ranks hold stay loaded unless memory runs out. Raises PlatformError if a VAE's network is
        not exact when it is split into bands of rows.
        """
        if request.placement not in PLACEMENTS:
            raise RequestError(f"placement is {request.placement}; choose one of {', '.join(PLACEMENTS)}.")
        with self._ranks.lease(request.kind.request, should_cancel, on_phase, waits) as lease:
            lease.images = request.images
            return self._beside_models(request, lease, on_step)

    def _beside_models(
        self, request: ModuleRequest, lease: Lease, on_step: Callable[[int, int], None] | None
    ) -> ModuleAnswer:
        """Makes the call; once more if a rank crashes. If memory runs out, drops the held models and makes it again:
        the next request for those loads them."""
        holdings = self._holdings

        def attempt() -> ModuleAnswer:
            holdings.ensure_started(lease)
            self._ranks.working()
            return self._attempt(request, lease, on_step)

        models = holdings.models
        try:
            return self._ranks.retry_after_crash(attempt, lease)
        except OutOfMemory:
            if not models:
                raise
        lease.on_phase(Phase(PhaseKind.MAKING_ROOM))
        for spec in models:
            holdings.drop(spec, lease)  # no effect if the ranks have ended: not all survive an out-of-memory
        return self._ranks.retry_after_crash(attempt, lease)

    def _attempt(
        self, request: ModuleRequest, lease: Lease, on_step: Callable[[int, int], None] | None
    ) -> ModuleAnswer:
        kind = request.kind
        self._holdings.keep_modules(request.keep, lease)
        held = self._holdings.held.modules.get(request.number)
        is_new = held is None
        if held is None:
            rank = self._choose_rank(request, lease)
            lease.on_phase(Phase(kind.sending))
            what = f"The weights of the {kind.noun} that lie in no .safetensors file of its loader take"
            remedy = f"Load it from .safetensors files, or {kind.without}"
            tensors = within_limit(request.module(self._holdings), what, remedy)
            exchange = lease.exchange(kind.survivable)
            message = Load(
                None,
                ParallelStrategy(),
                request.number,
                self._holdings.held.numbers,
                rank=rank,
                comfyui=request.comfyui,
            )
            held = self._holdings.load_module(message, tensors, request.bytes, exchange)
        lease.on_phase(Phase(kind.calling))
        what, remedy = f"What the {kind.noun} is given takes", f"Give it less at a time, or {kind.without}"
        tensors = within_limit(request.tensors(self._holdings, is_new), what, remedy)

        def show(rank: int, message: Message, tensors: Tensors | None) -> None:
            step = expect(rank, message, Progress)
            if on_step is not None:
                on_step(step.step, step.steps)

        exchange = lease.exchange(kind.survivable)
        exchange.listener = max(held.rank, 0)
        exchange.send(RunJob(None, request.steps, model=request.number), tensors)
        budget = deadlines.decode_budget(request.positions, is_cpu(self.devices))
        # The first call moves a text encoder's weights to the device, and checks a VAE.
        budget += deadlines.load_budget(request.bytes) if is_new else 0.0
        calls = reports(exchange.wait(lambda: budget, show), lambda done: done.call)
        changes = take_changes(exchange.result)
        return ModuleAnswer(
            unpack_tree(exchange.result),
            self.devices if held.rank == ALL_RANKS else (self.devices[held.rank],),
            seconds=max(call.seconds for call in calls),
            bytes=tuple(info.bytes for info in held.infos),
            bytes_sent=tuple(call.bytes_sent for call in calls),
            is_new=is_new,
            load_seconds=max(info.seconds for info in held.infos) if is_new else 0.0,
            parts=tuple(call.parts for call in calls),
            peak_bytes=tuple(call.peak_bytes for call in calls),
            compute_dtype=held.infos[0].compute_dtype,
            changes=changes,
            notes=calls[exchange.listener].notes,
        )

    def _choose_rank(self, request: ModuleRequest, lease: Lease) -> int:
        """Returns the rank that computes; ALL_RANKS if that was requested or no single device has the room."""
        if len(self.devices) == 1:
            return 0
        if request.placement == ALL_DEVICES:
            return ALL_RANKS
        if is_cpu(self.devices):
            return 0
        free = self._free_devices(request.bytes, lease)
        roomiest = max(range(len(free)), key=free.__getitem__)
        return roomiest if request.placement == ONE_DEVICE or free[roomiest] >= request.bytes else ALL_RANKS

    def _free_devices(self, needed: int, lease: Lease) -> tuple[int, ...]:
        """Returns the bytes of each device that weights may take beside the awaited model. Drops the held text encoders
        and VAEs if `needed` bytes fit on one device only without them, or do not even fit in equal parts."""
        holdings, held = self._holdings, self._holdings.held
        model, size = self._awaited or (None, 0)
        awaited = size if size and model not in holdings.models else 0  # else the ranks hold it already
        free = [size - awaited for size in holdings.free_room(lease).devices]
        without = [size + held.module_bytes(device) for size, device in zip(free, self.devices, strict=True)]
        fits_without = max(free) < needed <= max(without)
        if held.has_modules_on_devices and (fits_without or min(free) < needed // len(free)):
            free = [size - awaited for size in holdings.drop_modules(lease).devices]
        return tuple(free)

"""The messages of a rank while a request runs: cancels from ComfyUI's process, and progress to it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ...errors import TransportError
from ...job.payload import STEP
from ...requests import LoopState
from ...sampling.host_copy import HostCopy
from ...wire.deadlines import SEND
from ...wire.payloads import ANSWERS, state_tensors
from ...wire.protocol import Cancel, Compiling, Envelope, Progress
from ...wire.transport import Link, LinkClosed, LinkFull, close_all, pack_tensors

_PAUSE = 0.01  # s, before another try to send what must arrive
STATES_COST = 0.01  # the share of a request's time that sending the sampler's states may take


@dataclass(frozen=True)
class RequestLink:
    """A rank's link to ComfyUI's process while one request runs."""

    link: Link
    epoch: int
    request: int
    rank: int

    def is_cancelled(self) -> bool:
        """Returns True if a cancel of this request has arrived; only one rank is sent one. Raises TransportError."""
        while (received := self.link.receive(0.0)) is not None:
            envelope, descriptors = received
            close_all(descriptors)
            if envelope.epoch != self.epoch or not isinstance(envelope.message, Cancel):
                raise TransportError(f"{type(envelope.message).__name__} came in the middle of a request")
            if envelope.request == self.request:
                return True
        return False

    def report_compiling(self) -> None:
        """Tells ComfyUI's process that this rank starts to compile a part of the model."""
        self.link.send(Envelope(self.epoch, self.request, Compiling()), timeout=SEND)

    def send(self, message: Progress, tensors: dict[str, Tensor], *, waits: bool = False) -> None:
        """Sends a message. If the link is full, drops it, or `waits` until ComfyUI's process has read others."""
        descriptors = (pack_tensors(tensors),) if tensors else ()
        try:
            while not self._has_sent(message, descriptors) and waits:
                time.sleep(_PAUSE)
        except LinkClosed:
            os._exit(0)  # ComfyUI is gone, so no process waits for this request
        finally:
            close_all(descriptors)

    def _has_sent(self, message: Progress, descriptors: tuple[int, ...]) -> bool:
        with contextlib.suppress(LinkFull):
            self.link.send(Envelope(self.epoch, self.request, message), descriptors)
            return True
        return False


class ProgressSender:
    """Sends the progress of rank 0; other ranks send none. `previews`: include the first image of each step;
    `is_first`: True on rank 0; `beside`: a node's callback on steps gets these tensors (payload.pack_step) with the
    next one."""

    def __init__(self, to: RequestLink, steps: int, *, previews: bool) -> None:
        self._to, self.steps, self._previews = to, steps, previews
        self.is_first = to.rank == 0
        self._state: Callable[[], LoopState] | None = None
        self._states_seconds = self._last_state_seconds = 0.0
        self._started = time.perf_counter()
        self.beside: dict[str, Tensor] = {}

    def keep(self, state: Callable[[], LoopState]) -> None:
        """Makes the next step boundary send the loop's state, unless that would exceed STATES_COST."""
        allowed = STATES_COST * (time.perf_counter() - self._started)
        if self.is_first and self._states_seconds + self._last_state_seconds <= allowed:
            self._state = state

    def copy(self, denoised: Tensor) -> dict[str, HostCopy]:
        """Starts to copy the first image, and the loop's state, to the host."""
        if not self.is_first:
            return {}
        tensors = {"denoised": denoised[:1].float()} if self._previews else {}
        tensors, self.beside = tensors | self.beside, {}
        started, state, self._state = time.perf_counter(), self._state, None
        if state is not None:
            tensors |= state_tensors(state())
        copies = {name: HostCopy(tensor) for name, tensor in tensors.items()}
        if state is not None:
            self._last_state_seconds = time.perf_counter() - started
            self._states_seconds += self._last_state_seconds
        return copies

    def send(self, step: int, seconds: float, strategy: int, copies: Mapping[str, HostCopy]) -> None:
        """Sends the `copies` that `copy` started. `strategy`: see Progress."""
        if not self.is_first:
            return
        started = time.perf_counter()
        tensors = {name: copy.taken() for name, copy in copies.items()}
        self._to.send(Progress(step, self.steps, seconds, strategy), tensors, waits=STEP in tensors)
        if ANSWERS in tensors:
            spent = time.perf_counter() - started
            self._last_state_seconds += spent
            self._states_seconds += spent

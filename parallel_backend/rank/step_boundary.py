"""The boundary between two steps on every rank: agree on a cancel, take the time, show the preview."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import Cancelled, TransportError
from ..requests import SamplerState
from ..wire.heartbeat import heartbeat
from ..wire.payloads import state_tensors
from ..wire.protocol import Cancel, Envelope, Progress
from ..wire.transport import Link, LinkClosed, LinkFull, close_all, pack_tensors
from .memory_meter import MemoryMeter

STATES_COST = 0.01  # of a request's time that sending the sampler's states may take


@dataclass
class _CancelVote:
    """Whether to stop, on its way to all ranks. `event`: where the device was when it was asked."""

    flag: Tensor
    work: dist.Work | None
    event: torch.cuda.Event | None
    ranks: range

    def answer(self) -> bool:
        if self.event is not None:
            self.event.synchronize()
        if self.work is not None:
            with heartbeat.inside("the agreement after a step", self.ranks):
                self.work.wait()
        return bool(self.flag.item())


class StepBoundary:
    """The `on_step(i, denoised)` of one request on one rank; raises Cancelled on all ranks at the same step.

    Only rank 0 hears a cancel, so all ranks learn it together: a sum over the control group, which also keeps a fast
    rank from leaving the request while a slow one is a step behind. `denoised`: [B, C, H/8, W/8], same on all ranks.
    """

    def __init__(
        self,
        link: Link,
        epoch: int,
        request: int,
        *,
        rank: int,
        control: dist.ProcessGroup | None,
        device: torch.device,
        steps: int,
        previews: bool,
        states: bool = False,
        meter: MemoryMeter | None = None,
    ) -> None:
        self._link = link
        self._epoch = epoch
        self._request = request
        self._rank = rank
        self._control = control
        self._ranks = range(1 if control is None else control.size())
        self._device = device
        self._steps = steps
        self._previews = previews
        self._states = states
        self._meter = meter
        self._state: Callable[[], SamplerState] | None = None
        self._states_seconds = self._last_state_seconds = 0.0
        self._request_begun = self._begun = time.perf_counter()
        self._asked: deque[_CancelVote] = deque()
        self._stopped = False
        self.seconds: list[float] = []

    def __call__(self, i: int, denoised: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(
                self._device
            )  # else the host runs ahead, and neither time nor cancel is true
        self._take_time()
        flag = self._flag()
        if self._control is not None:
            with heartbeat.inside("the agreement after a step", self._ranks):
                dist.all_reduce(flag, group=self._control)
        if self._rank == 0:
            self._show(i + 1, denoised)
        self._publish(i + 1)
        if flag.item():
            raise Cancelled(f"The request was cancelled after step {i + 1} of {self._steps}.")

    def keep(self, state: Callable[[], SamplerState]) -> None:
        """Has the coming step boundary send the sampler's state, unless that costs too much of the request's time."""
        if not (self._states and self._rank == 0):
            return
        allowed = STATES_COST * (time.perf_counter() - self._request_begun)
        if self._states_seconds + self._last_state_seconds <= allowed:
            self._state = state

    def passed(self, i: int, denoised: Tensor) -> None:
        """The same for a step of patches that flow on: nobody waits for the other ranks. Ranks without a sampler have
        no latent and do not call it."""
        self._take_time()
        if self._rank == 0:
            self._show(i + 1, denoised)
        self._publish(i + 1)

    def is_stopped(self, lag: int) -> bool:
        """Whether the request was cancelled, as known `lag` questions ago, the same on all ranks.

        Ranks of a pipeline are `lag` questions apart, so none has to wait for another here. The host may not run
        further ahead of its device than that either.
        """
        flag = self._flag()
        work = None if self._control is None else dist.all_reduce(flag, group=self._control, async_op=True)
        event = torch.cuda.Event() if self._device.type == "cuda" else None
        if event is not None:
            event.record()
        self._asked.append(_CancelVote(flag, work, event, self._ranks))
        if len(self._asked) > lag:
            self._stopped |= self._asked.popleft().answer()
        return self._stopped

    def _publish(self, steps: int) -> None:
        heartbeat.steps_done(steps)
        if self._meter is not None:
            self._meter.publish()

    def _take_time(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._begun)
        self._begun = now

    def _flag(self) -> Tensor:
        return torch.tensor([int(self._rank == 0 and self._is_cancelled())], dtype=torch.int32)

    def _is_cancelled(self) -> bool:
        while (received := self._link.receive(0.0)) is not None:
            envelope, descriptors = received
            close_all(descriptors)
            if envelope.epoch != self._epoch or not isinstance(envelope.message, Cancel):
                raise TransportError(f"{type(envelope.message).__name__} came in the middle of a request")
            if envelope.request == self._request:
                return True
        return False

    def _show(self, step: int, denoised: Tensor) -> None:
        """Sends progress, with the first image as preview and the sampler's state. Never waits: what does not fit is
        dropped."""
        tensors = {"denoised": denoised[:1].float()} if self._previews else {}
        begun, state, self._state = time.perf_counter(), self._state, None
        if state is not None:
            tensors |= state_tensors(state())
        descriptors = (pack_tensors(tensors),) if tensors else ()
        message = Progress(step=step, steps=self._steps, seconds=self.seconds[-1])
        try:
            self._link.send(Envelope(self._epoch, self._request, message), descriptors)
        except LinkFull:
            pass
        except LinkClosed:
            os._exit(0)  # ComfyUI is gone; nobody waits for this request
        finally:
            close_all(descriptors)
        if state is not None:
            self._last_state_seconds = time.perf_counter() - begun
            self._states_seconds += self._last_state_seconds

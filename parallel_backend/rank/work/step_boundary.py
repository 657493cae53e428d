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

from ...errors import Cancelled, TransportError
from ...requests import LoopState
from ...sampling.host_copy import HostCopy, most_lag
from ...wire.heartbeat import heartbeat
from ...wire.payloads import state_tensors
from ...wire.protocol import Cancel, Envelope, Progress
from ...wire.transport import Link, LinkClosed, LinkFull, close_all, pack_tensors
from .device import MemoryMeter

STATES_COST = 0.01  # of a request's time that sending the sampler's states may take
# s; after a longer step the host waits for its device, so that a cancel need not wait for one step more.
LONGEST_LAG = 1.0
MOST_TIMES = 200  # steps whose times a message to ComfyUI's process has room for, beside all else


class _Moment:
    """The moment at which a device has done what it was given so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: _Moment) -> float:
        """Of two that have passed."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return earlier._event.elapsed_time(self._event) / 1000


@dataclass
class _Vote:
    """What rank 0 knows, on its way to all ranks: whether to stop, and whether steps are too long for a lag."""

    flags: Tensor
    work: dist.Work | None
    ranks: range

    def answer(self) -> tuple[bool, bool]:
        if self.work is not None:
            with heartbeat.inside("the agreement after a step", self.ranks):
                self.work.wait()
        stop, slow = self.flags.tolist()
        return bool(stop), bool(slow)


@dataclass
class _Boundary:
    """The end of a step that the host has given to its device. `vote` is None where patches flow on; `tensors`: what to
    show of it."""

    step: int
    strategy: int  # Progress.strategy
    passed: _Moment
    vote: _Vote | None
    tensors: dict[str, HostCopy]


class StepBoundary:
    """The `on_step(i, denoised)` of one request on one rank; raises Cancelled on all ranks at the same step.

    Only rank 0 hears a cancel, so all ranks learn it together: a sum over the control group, which also keeps a fast
    rank from leaving the request while a slow one is a step behind. `denoised`: [B, C, H/8, W/8], same on all ranks.

    While a GPU computes a step, the host gives it the next one and only then looks at what became of the first: `lag`
    steps late, unless steps are long. `finish` ends the request.
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
        lag: int | None = None,
    ) -> None:
        """`lag`: the most steps; as many as the device wants (host_copy.most_lag) unless told otherwise."""
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
        self._state: Callable[[], LoopState] | None = None
        self._states_seconds = self._last_state_seconds = 0.0
        self._request_begun = time.perf_counter()
        self._begun = _Moment(device)
        self._most_lag = most_lag(device) if lag is None else lag
        self._lag = 0  # what all ranks have agreed on so far: the first step may be a long one
        self._given: deque[_Boundary] = deque()
        self._asked: deque[tuple[_Moment, _Vote]] = deque()
        self._stopped = False
        self.strategy = 0  # the number of the one that the step ran under (Progress)
        self.seconds: list[float] = []
        self._flows = False

    def __call__(self, i: int, denoised: Tensor) -> None:
        tensors = self._tensors(denoised)
        self._given.append(_Boundary(i + 1, self.strategy, _Moment(self._device), self._vote(), tensors))
        self._raise_if_cancelled()
        heartbeat.step_given()

    def finish(self) -> None:
        """Waits for the last steps; raises Cancelled on all ranks, or on none."""
        self._most_lag = self._lag = 0
        self._raise_if_cancelled()

    @property
    def inside_seconds(self) -> tuple[float, ...]:
        """Of the last steps of a request that has finished, as in RankRun."""
        if self._flows:
            return ()
        every = heartbeat.inside_seconds(len(self.seconds))
        return tuple(round(seconds, 6) for seconds in every[-MOST_TIMES:])

    def _raise_if_cancelled(self) -> None:
        cancelled_after = self._settle()
        if cancelled_after:
            raise Cancelled(f"The request was cancelled after step {cancelled_after} of {self._steps}.")

    def _settle(self) -> int:
        """Looks at the boundaries that are further back than the lag; the step after which all stop, or 0."""
        while len(self._given) > self._lag:
            boundary = self._given.popleft()
            boundary.passed.wait()
            self._take_time(boundary.passed)
            stop = False
            if boundary.vote is not None:
                stop, slow = boundary.vote.answer()
                self._lag = 0 if slow else self._most_lag
            self._show(boundary)
            self._publish(boundary.step)
            if stop:
                return boundary.step
        return 0

    @property
    def sends_states(self) -> bool:
        """Whether anybody wants the loop's state of this rank."""
        return self._states and self._rank == 0

    def keep(self, state: Callable[[], LoopState]) -> None:
        """Has the coming step boundary send the loop's state, unless that costs too much of the request's time."""
        if not self.sends_states:
            return
        allowed = STATES_COST * (time.perf_counter() - self._request_begun)
        if self._states_seconds + self._last_state_seconds <= allowed:
            self._state = state

    def passed(self, i: int, denoised: Tensor) -> None:
        """The same for a step of patches that flow on: nobody waits for the other ranks. Ranks without a sampler have
        no latent and do not call it."""
        self._given.append(
            _Boundary(i + 1, self.strategy, _Moment(self._device), None, self._tensors(denoised))
        )
        self._flows = True
        self._lag = self._most_lag  # here a rank waits for itself alone
        self._settle()

    def is_stopped(self, lag: int) -> bool:
        """Whether the request was cancelled, as known `lag` questions ago, the same on all ranks.

        Ranks of a pipeline are `lag` questions apart, so none has to wait for another here. The host may not run
        further ahead of its device than that either.
        """
        if any(boundary.vote is not None for boundary in self._given):  # of the last whole step, on all ranks
            self._lag = 0
            self._stopped |= self._settle() > 0
        self._asked.append((_Moment(self._device), self._vote()))
        if len(self._asked) > lag:
            passed, vote = self._asked.popleft()
            passed.wait()
            self._stopped |= vote.answer()[0]
        return self._stopped

    def _publish(self, steps: int) -> None:
        heartbeat.steps_done(steps)
        if self._meter is not None:
            self._meter.publish()

    def _take_time(self, passed: _Moment) -> None:
        self.seconds.append(passed.seconds_since(self._begun))
        self._begun = passed

    def _vote(self) -> _Vote:
        """Begins to tell all ranks what rank 0 knows now."""
        flags = torch.zeros(2, dtype=torch.int32)
        if self._rank == 0:
            slow = not self.seconds or self.seconds[-1] > LONGEST_LAG
            flags = torch.tensor([self.is_cancelled(), slow], dtype=torch.int32)
        work = None if self._control is None else dist.all_reduce(flags, group=self._control, async_op=True)
        return _Vote(flags, work, self._ranks)

    def is_cancelled(self) -> bool:
        """Whether a cancel of this request has come, on a rank that is sent one."""
        while (received := self._link.receive(0.0)) is not None:
            envelope, descriptors = received
            close_all(descriptors)
            if envelope.epoch != self._epoch or not isinstance(envelope.message, Cancel):
                raise TransportError(f"{type(envelope.message).__name__} came in the middle of a request")
            if envelope.request == self._request:
                return True
        return False

    def _tensors(self, denoised: Tensor) -> dict[str, HostCopy]:
        """The first image as preview, and the loop's state, on their way to the host."""
        if self._rank != 0:
            return {}
        tensors = {"denoised": denoised[:1].float()} if self._previews else {}
        begun, state, self._state = time.perf_counter(), self._state, None
        if state is not None:
            tensors |= state_tensors(state())
        copies = {name: HostCopy(tensor) for name, tensor in tensors.items()}
        if state is not None:
            self._last_state_seconds = time.perf_counter() - begun
            self._states_seconds += self._last_state_seconds
        return copies

    def _show(self, boundary: _Boundary) -> None:
        """Sends progress. Never waits: what does not fit is dropped."""
        if self._rank != 0:
            return
        begun = time.perf_counter()
        tensors = {name: copy.taken() for name, copy in boundary.tensors.items()}
        descriptors = (pack_tensors(tensors),) if tensors else ()
        message = Progress(boundary.step, self._steps, self.seconds[-1], boundary.strategy)
        try:
            self._link.send(Envelope(self._epoch, self._request, message), descriptors)
        except LinkFull:
            pass
        except LinkClosed:
            os._exit(0)  # ComfyUI is gone; nobody waits for this request
        finally:
            close_all(descriptors)
        if len(tensors) > 1:
            seconds = time.perf_counter() - begun
            self._last_state_seconds += seconds
            self._states_seconds += seconds

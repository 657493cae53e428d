"""The boundary between two steps on every rank: agree on a cancel, take the time, show the preview."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import Cancelled
from ...sampling.host_copy import HostCopy, most_lag
from ...wire.heartbeat import heartbeat
from ..outcome.progress import ProgressSender, RequestLink
from .device import MemoryMeter

# s; after a longer step the host waits for its device, so that a cancel does not take one step more.
LONGEST_LAG = 1.0
_STOP, _SLOW = 1, 2  # flags of rank 0
MOST_TIMES = 200  # steps whose times fit into a message to ComfyUI's process


class _Moment:
    """The moment at which a device has finished all work submitted so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: _Moment) -> float:
        """Returns the seconds from `earlier` to this moment; both must have passed."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return earlier._event.elapsed_time(self._event) / 1000


@dataclass
class _Vote:
    """Rank 0's flags (StepBoundary.flags) on their way to all ranks."""

    flags: Tensor
    work: dist.Work | None
    ranks: range

    def answer(self) -> int:
        if self.work is not None:
            with heartbeat.inside("the agreement after a step", self.ranks):
                self.work.wait()
        return int(self.flags)


@dataclass
class _Boundary:
    """The end of a step that the host has submitted to its device. `vote`: None while patches flow; `copies`: the
    tensors to send with the step's progress."""

    step: int
    strategy: int  # Progress.strategy
    passed: _Moment
    vote: _Vote | None
    copies: dict[str, HostCopy]


class StepBoundary:
    """The `on_step(i, denoised)` of one request on one rank; raises Cancelled on all ranks at the same step.

    Only rank 0 receives a cancel. It tells all ranks by a sum over the control group, or with the job's agreement that
    a step has ended. Both also keep a fast rank from leaving the request while a slow one is a step behind. `denoised`:
    [B, C, H/8, W/8], the same on all ranks.

    While a GPU computes a step, the host submits the next one, and only then looks at the outcome of the first: it is
    `lag` steps late, unless steps are long. `finish` ends the request.
    """

    def __init__(
        self,
        request: RequestLink,
        *,
        control: dist.ProcessGroup | None,
        device: torch.device,
        steps: int,
        previews: bool,
        meter: MemoryMeter | None = None,
        lag: int | None = None,
    ) -> None:
        """`lag`: the most steps that the host may be late; by default host_copy.most_lag of the device."""
        self._request = request
        self.progress = ProgressSender(request, steps, previews=previews)
        self._control = control
        self._device = device
        self._meter = meter
        self._step_started = _Moment(device)
        self._most_lag = most_lag(device) if lag is None else lag
        self._lag = 0  # the lag that all ranks have agreed on: none yet, as the first step may be long
        self._given: deque[_Boundary] = deque()
        self._asked: deque[tuple[_Moment, _Vote]] = deque()
        self._stopped = self._flows = False
        self.strategy = 0  # number of the strategy that the step ran under (see Progress)
        self.seconds: list[float] = []

    def __call__(self, i: int, denoised: Tensor, flags: int | None = None) -> None:
        """Ends step `i`. `flags`: rank 0's `flags()` if the ranks have agreed on them; by default they do so now."""
        copies = self.progress.copy(denoised)
        vote = self._vote() if flags is None else _Vote(torch.tensor([flags]), None, range(1))
        self._given.append(_Boundary(i + 1, self.strategy, _Moment(self._device), vote, copies))
        self._raise_if_cancelled()
        heartbeat.step_given()

    def flags(self) -> int:
        """Returns what rank 0 tells the others at the end of a step: _STOP, and _SLOW if steps are too long for a lag;
        on other ranks 0."""
        if self._request.rank:
            return 0
        is_slow = not self.seconds or self.seconds[-1] > LONGEST_LAG
        return (_STOP if self.is_cancelled() else 0) | (_SLOW if is_slow else 0)

    def finish(self) -> None:
        """Waits for the last steps. Raises Cancelled on all ranks or on none."""
        self._most_lag = self._lag = 0
        self._raise_if_cancelled()

    @property
    def inside_seconds(self) -> tuple[float, ...]:
        """Seconds in collectives of each of the last steps, after `finish`; () if patches flowed."""
        if self._flows:
            return ()
        every = heartbeat.inside_seconds(len(self.seconds))
        return tuple(round(seconds, 6) for seconds in every[-MOST_TIMES:])

    def _raise_if_cancelled(self) -> None:
        cancelled_after = self._settle()
        if cancelled_after:
            raise Cancelled(
                f"The request was cancelled after step {cancelled_after} of {self.progress.steps}."
            )

    def _settle(self) -> int:
        """Handles the boundaries that are older than the lag. Returns the step after which all ranks stop, or 0."""
        while len(self._given) > self._lag:
            boundary = self._given.popleft()
            boundary.passed.wait()
            self.seconds.append(boundary.passed.seconds_since(self._step_started))
            self._step_started = boundary.passed
            flags = 0
            if boundary.vote is not None:
                flags = boundary.vote.answer()
                self._lag = 0 if flags & _SLOW else self._most_lag
            self.progress.send(boundary.step, self.seconds[-1], boundary.strategy, boundary.copies)
            heartbeat.steps_done(boundary.step)
            if self._meter is not None:
                self._meter.publish()
            if flags & _STOP:
                return boundary.step
        return 0

    def passed(self, i: int, denoised: Tensor) -> None:
        """Ends a step of patches that flow on, without waiting for the other ranks. Ranks without a sampler have no
        latent and do not call it."""
        copies = self.progress.copy(denoised)
        self._given.append(_Boundary(i + 1, self.strategy, _Moment(self._device), None, copies))
        self._flows = True
        self._lag = self._most_lag  # here a rank waits only for its own device
        self._settle()

    def is_stopped(self, lag: int) -> bool:
        """Returns True if the request was cancelled, as known `lag` calls ago; the same on all ranks.

        Ranks of a pipeline are `lag` calls apart, so none waits for another here. The host does not run further ahead
        of its device than that either.
        """
        if any(boundary.vote is not None for boundary in self._given):  # of the last whole step, on all ranks
            self._lag = 0
            self._stopped |= self._settle() > 0
        self._asked.append((_Moment(self._device), self._vote()))
        if len(self._asked) > lag:
            passed, vote = self._asked.popleft()
            passed.wait()
            self._stopped |= bool(vote.answer() & _STOP)
        return self._stopped

    def is_cancelled(self) -> bool:
        """Returns True if this rank has received a cancel of the request."""
        return self._request.is_cancelled()

    def _vote(self) -> _Vote:
        """Starts to send rank 0's flags to all ranks."""
        flags = torch.tensor([self.flags()])
        if self._control is None:
            return _Vote(flags, None, range(1))
        work = dist.all_reduce(flags, group=self._control, async_op=True)
        return _Vote(flags, work, range(self._control.size()))

"""The ranks of one device set from start to end: one caller at a time, failures counted, a new start after a crash."""

from __future__ import annotations

import enum
import itertools
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import (
    Cancelled,
    DeviceError,
    OutOfMemory,
    ParallelError,
    RankFailed,
    RequestError,
    TransportError,
)
from ..requests import RunInfo
from ..strategy import ParallelStrategy
from ..wire import deadlines
from ..wire.protocol import NO_REQUEST, VERSION, Hello, Ready, Setup
from .device_health import FAILING, FAILURES_UNTIL_LEFT_OUT
from .events import Changed, Ended, RequestFailed, Started, tell
from .exchange import USER_ERRORS, Exchange
from .restart_policy import CrashHistory
from .supervisor import RankGroup, get_supervisor, require_linux

OnPhase = Callable[[str], None]
ShouldCancel = Callable[[], bool]

T = TypeVar("T")

log = logging.getLogger(__name__)


class State(enum.Enum):
    """DOWN -> STARTING -> READY <-> RUNNING; READY <-> ASLEEP; any -> FAILED -> STARTING; after three failures in ten
    minutes BROKEN, until those are past or somebody resets it."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    ASLEEP = "asleep"
    FAILED = "failed"
    BROKEN = "broken"


class Lease:
    """One caller's use of the ranks. `info`: how its request ran, once that is known; `strategy`: asked for, None where
    it has none; `images`: that it makes."""

    def __init__(
        self,
        request: str,
        cancel: threading.Event,
        should_cancel: ShouldCancel | None,
        on_phase: Callable[[str], None],
    ) -> None:
        self.request = request
        self.info: RunInfo | None = None
        self.strategy: ParallelStrategy | None = None
        self.images = 0
        self.begun = time.monotonic()
        self.cancelled_at: float | None = None
        self.phase = on_phase
        self._cancel = cancel
        self._should_cancel = should_cancel

    def cancelled(self) -> bool:
        """Whether the caller wants it ended."""
        if not (self._cancel.is_set() or (self._should_cancel is not None and self._should_cancel())):
            return False
        if self.cancelled_at is None:
            self.cancelled_at = time.monotonic()
        return True

    def wait(self, until: float) -> None:
        """Until time.monotonic() is `until`, or it is cancelled."""
        while time.monotonic() < until and not self.cancelled():
            time.sleep(deadlines.POLL)


class RankGroupRunner:
    """Ranks that live from one request to the next, with one caller at a time.

    `forget` is called when they are gone, and what was known of their memory with them.
    """

    def __init__(
        self, devices: tuple[str, ...], rank_module: str, *, resumes: bool, forget: Callable[[], None]
    ) -> None:
        if not devices:
            raise RequestError("A sidecar needs at least one device.")
        twice = [name for name in devices if devices.count(name) > 1]
        if twice:
            raise DeviceError(f"{twice[0]} is named twice; each rank needs a device of its own.")
        self.devices = tuple(devices)
        self.crashes = CrashHistory()
        self.group: RankGroup | None = None
        self.phase = ""  # what the request that runs is at, in words
        self._rank_module = rank_module
        self._resumes = resumes
        self._forget = forget
        self._lock = threading.Lock()
        self._owner: int | None = None  # thread that serves a request
        self._cancel = threading.Event()
        self._activity = State.READY
        self._requests = itertools.count(1)
        self._last_failure: RankFailed | None = None
        self._told = False  # listeners know how these ranks failed

    @property
    def state(self) -> State:
        """Any but ASLEEP, of which these know nothing."""
        group = self.group
        if self.crashes.is_broken:
            return State.BROKEN
        if group is None:
            return State.DOWN if self._last_failure is None else State.FAILED
        if group.ended.is_set():
            return State.FAILED
        return self._activity

    @property
    def running(self) -> bool:
        """Whether there are ranks, as far as anyone knows."""
        return self.group is not None and not self.group.ended.is_set()

    @property
    def last_failure(self) -> str:
        """Why there are no ranks, in a line; "" where nothing failed."""
        group, failure = self.group, self._last_failure
        if failure is None and group is not None and group.death is not None:
            failure = group.death.error()
        return "" if failure is None else str(failure).split("\n", 1)[0]

    @property
    def pids(self) -> tuple[int, ...]:
        """In rank order; empty when there are none."""
        group = self.group
        return () if group is None else group.pids

    def cancel(self) -> None:
        self._cancel.set()

    def stop(self) -> None:
        """Ends the ranks and blocks until every one is gone. Any thread; a running request raises Cancelled."""
        if self._owner == threading.get_ident():  # from a callback: the request cleans up as it ends
            self._cancel.set()
            if self.group is None:
                return
            get_supervisor().stop(self.group)
            return
        while not self._lock.acquire(timeout=deadlines.POLL):
            self._cancel.set()  # for a request that has not started the ranks yet
            if (group := self.group) is not None:
                get_supervisor().stop(group)
        self._end_and_release()

    def stop_if_idle(self) -> bool:
        """As `stop`, but leaves ranks alone that serve a request; whether it ended them."""
        if not self._lock.acquire(blocking=False):
            return False
        self._end_and_release()
        return True

    def _end_and_release(self) -> None:
        try:
            self.discard()
            self.crashes.clear()
            self._last_failure = None
        finally:
            self._lock.release()
            tell(Changed(self.devices))

    @contextmanager
    def turn(
        self, request: str, should_cancel: ShouldCancel | None = None, on_phase: OnPhase | None = None
    ) -> Iterator[Lease]:
        """Waits for this caller's turn; keeps count of failures. Which kind of `request` it is goes into Ended."""
        require_linux()
        if self._owner == threading.get_ident():
            raise RequestError("A callback of a request may not send another request to the same ranks.")
        while not self._lock.acquire(timeout=deadlines.POLL):
            if should_cancel is not None and should_cancel():
                raise Cancelled("The request was cancelled while it waited for its turn.")
        self._owner = threading.get_ident()
        self._cancel.clear()

        def phase(text: str) -> None:
            self.phase = text
            tell(Changed(self.devices))
            if on_phase is not None:
                on_phase(text)

        turn, result = Lease(request, self._cancel, should_cancel, phase), "failed"
        try:
            if self.crashes.is_broken:
                result = "refused"
                raise self.crashes.refusal()
            yield turn
            result = "done"
            self._last_failure = None
        except RankFailed as error:
            self._count_failure(error)
            raise
        except Cancelled:
            result = "cancelled"
            raise
        except OutOfMemory:
            result = "out_of_memory"
            raise
        except TransportError:
            raise
        except ParallelError:
            result = "refused"
            raise
        finally:
            self._activity, self.phase = State.READY, ""
            if self.group is not None and self.group.ended.is_set():
                self.discard()
            self._owner = None
            self._lock.release()
            self._tell_end(turn, result)

    def _tell_end(self, turn: Lease, result: str) -> None:
        now = time.monotonic()
        cancel_s = None if turn.cancelled_at is None else now - turn.cancelled_at
        seconds = now - turn.begun
        tell(
            Ended(
                self.devices, turn.request, result, seconds, cancel_s, turn.info, turn.strategy, turn.images
            )
        )
        tell(Changed(self.devices))

    def working(self) -> None:
        """A request that computes has begun."""
        self._activity = State.RUNNING
        tell(Changed(self.devices))

    def _count_failure(self, error: RankFailed) -> None:
        if not self.crashes.is_broken:  # else it is the refusal, or counted already
            self.crashes.add(error, self.devices[error.rank])
            FAILING.add(self.devices[error.rank])
            self._tell_failure(error)
        self._last_failure = error

    def _tell_failure(self, error: RankFailed) -> None:
        self._told = True
        cause = error.cause.split("\n", 1)[0]
        broken = self.crashes.is_broken
        tell(RequestFailed(self.devices, error.rank, cause, error.crashed, broken, error.reason))

    def through_a_crash(
        self,
        attempt: Callable[[], T],
        turn: Lease,
        survive: Callable[[RankFailed, str], str] | None = None,
    ) -> T:
        """`attempt()`, once more when the ranks crash; `survive(error, device)` is told first and says so in words.

        An error that the code raised would come again, and so would an out-of-memory: those are not tried again.
        """
        try:
            return attempt()
        except RankFailed as error:
            if not (error.crashed and self._resumes):
                raise
            self._count_failure(error)
            if self.crashes.is_broken:
                raise
            device = self.devices[error.rank]
            text = survive(error, device) if survive is not None else f"rank {error.rank} on {device} failed"
            log.warning("%s: %s", text, error.cause)
            self.discard()
            turn.phase(text)
            self._rest(turn)
            return attempt()

    def _rest(self, turn: Lease) -> None:
        """Gives a driver time to recover when this is not the first crash lately, twice as long each time."""
        earlier = self.crashes.count - 1
        if earlier > 0:
            turn.wait(time.monotonic() + deadlines.BACK_OFF * 2 ** (earlier - 1))

    def start(self, turn: Lease) -> float:
        """Starts the ranks, whether or not any were left; returns the seconds it took."""
        self.discard()
        begun = time.monotonic()
        self._activity, self._told = State.STARTING, False
        count = len(self.devices)
        turn.phase(f"starting {count} rank{'s' if count > 1 else ''}")
        self.group = group = get_supervisor().spawn(self.devices, self._rank_module)
        exchange = Exchange(group, NO_REQUEST, turn.cancelled, terminal=Ready, survivable=frozenset())

        def answer(rank: int, message, tensors: dict[str, Tensor] | None) -> None:
            self.expect(message, Hello, rank)
            _check_versions(rank, message)
            setup = Setup(
                rank=rank,
                world_size=count,
                devices=self.devices,
                rendezvous=group.rendezvous,
                backend=_backend(self.devices),
            )
            exchange.send_to(rank, setup)

        limit = begun + deadlines.START
        try:
            exchange.wait(lambda: max(0.0, limit - time.monotonic()), answer)
        except RankFailed as error:
            error.crashed = False  # ranks that do not even start are no better off for starting again
            raise
        except DeviceError as error:
            for device in self.devices:
                if str(error).startswith(f"{device} "):  # a rank names its device first (rank_jobs.py)
                    FAILING.add(device, FAILURES_UNTIL_LEFT_OUT)
            raise
        self._activity = State.READY
        seconds = time.monotonic() - begun
        tell(Started(self.devices, seconds, self.last_failure))
        return seconds

    def discard(self) -> None:
        """Ends the ranks, if there are any, and gives back what belonged to them."""
        group, self.group = self.group, None
        if group is None:
            return
        get_supervisor().stop(group)
        if group.death is not None:
            if not self._told:  # it died while it was idle, or while a request was cancelled
                self._tell_failure(group.death.error())
            if self._last_failure is None:
                self._last_failure = group.death.error()
        group.close()
        self._forget()

    # Messages.

    def exchange(self, turn: Lease, survivable: frozenset[str] = USER_ERRORS) -> Exchange:
        """A new one with all ranks, which ends with `turn`."""
        if turn.cancelled():
            raise Cancelled("The request was cancelled before it reached the ranks.")
        return Exchange(self.group, next(self._requests), turn.cancelled, survivable=survivable)

    def refuse(self, text: str) -> TransportError:
        """The error for ranks that do not keep to the protocol; ends them."""
        get_supervisor().kill(self.group)
        return TransportError(text)

    def expect(self, message, kind: type, rank: int) -> None:
        if not isinstance(message, kind):
            raise self.refuse(f"rank {rank} sent {type(message).__name__} where {kind.__name__} was due")


def _backend(devices: tuple[str, ...]) -> str:
    return "nccl" if all(device.startswith("cuda") for device in devices) else "gloo"


def _check_versions(rank: int, hello: Hello) -> None:
    ours = (VERSION, platform.python_version(), str(torch.__version__))
    theirs = (hello.protocol, hello.python, hello.torch)
    if ours != theirs:
        raise RankFailed(
            rank,
            f"it runs protocol {theirs[0]}, Python {theirs[1]}, torch {theirs[2]}, but ComfyUI runs protocol "
            f"{ours[0]}, Python {ours[1]}, torch {ours[2]}; restart ComfyUI after an update.",
            reason="version",
        )

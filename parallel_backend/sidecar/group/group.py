"""The ranks of one device set from start to end: one caller at a time, counted failures, a restart after a crash."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from ...cluster.handshake import versions
from ...errors import (
    Cancelled,
    DeviceError,
    OutOfMemory,
    ParallelError,
    RankFailed,
    RequestError,
    TransportError,
)
from ...wire import deadlines
from ...wire.payloads import Tensors
from ...wire.protocol import NO_REQUEST, Hello, Message, Setup
from ..cluster import head as clusters
from ..process.device_lock import lock_devices
from .events import Changed, Recovering, Released, RequestEnded, RequestFailed, Started, emit
from .exchange import AFTER_UPDATE, Exchange, expect
from .failures import FAILING, FAILURES_UNTIL_LEFT_OUT, CrashHistory
from .lease import PROMPT_ID, Lease, Phase, PhaseKind, ShouldCancel, State
from .supervisor import RankGroup, get_supervisor, require_linux

T = TypeVar("T")

log = logging.getLogger(__name__)

# RequestEnded.result of a request that raised one of these; other errors of the pack but a failure are "refused".
_RESULTS = {Cancelled: "cancelled", OutOfMemory: "out_of_memory"}


class RankGroupRunner:
    """Ranks that stay alive between requests and are leased to one caller at a time.

    `exclusive`: True to lock the GPUs against ranks of other processes. `forget` is called when the ranks are gone:
    records of what they held must be cleared.
    """

    def __init__(
        self,
        devices: tuple[str, ...],
        rank_module: str,
        *,
        exclusive: bool,
        forget: Callable[[], None],
    ) -> None:
        if not devices:
            raise RequestError("A sidecar needs at least one device.")
        twice = [name for name in devices if devices.count(name) > 1]
        if twice:
            raise DeviceError(f"{twice[0]} is named twice; each process needs a device of its own.")
        self.devices = tuple(devices)
        self.crashes = CrashHistory()
        self.group: RankGroup | None = None
        self.phase: Phase | None = None  # of the running request
        self._rank_module = rank_module
        self._exclusive = exclusive
        self._forget = forget
        self._lock = threading.Lock()
        self._owner: int | None = None  # id of the thread whose request runs
        self._cancel = threading.Event()
        self._activity = State.READY
        self._requests = itertools.count(1)
        self._last_failure = ""  # one line of text: the error itself would keep its job's model alive
        self._failure_known = False  # True if listeners know that these ranks failed
        self._idle_since: float | None = None  # time.monotonic(); None if there are no idle ranks

    @property
    def state(self) -> State:
        """The state of the ranks, but never ASLEEP: Sidecar.state adds that."""
        group = self.group
        if self.crashes.is_broken:
            return State.BROKEN
        if group is None:
            return State.FAILED if self._last_failure else State.DOWN
        if group.ended.is_set():
            return State.FAILED
        return self._activity

    @property
    def running(self) -> bool:
        """True if there are ranks and none is known to have ended."""
        return self.group is not None and not self.group.ended.is_set()

    @property
    def last_failure(self) -> str:
        """The failure that ended the ranks, in one line; "" if nothing failed."""
        group = self.group
        if not self._last_failure and group is not None and group.death is not None:
            return _line(group.death.error())
        return self._last_failure

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids in rank order; empty if there are no ranks."""
        group = self.group
        return () if group is None else group.pids

    def stop(self) -> None:
        """Ends the ranks and waits until all are gone. Any thread may call; a running request raises Cancelled."""
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
        """Ends the ranks, see `stop`, unless they serve a request; returns False in that case. Waits while a caller has
        them who computes nothing, as ComfyUI does when it frees memory after a prompt."""
        while not self._lock.acquire(timeout=deadlines.POLL):
            if self._activity is not State.READY or self._owner == threading.get_ident():
                return False
        self._end_and_release()
        return True

    def _end_and_release(self) -> None:
        had_ranks, idle_s = self.group is not None, self._end_of_idling()
        try:
            self.discard()
            self.crashes.clear()
            self._last_failure = ""
        finally:
            self._lock.release()
            if had_ranks:
                emit(Released(self.devices, idle_s))
            emit(Changed(self.devices))

    def _end_of_idling(self) -> float:
        """Returns the seconds for which the ranks have been idle, and stops that clock."""
        since, self._idle_since = self._idle_since, None
        return 0.0 if since is None else time.monotonic() - since

    @contextmanager
    def lease(
        self,
        request: str,
        should_cancel: ShouldCancel | None = None,
        on_phase: Callable[[str], None] | None = None,
        waits: bool = True,
    ) -> Iterator[Lease]:
        """Waits until no other caller has the ranks, then leases them; counts crashes. `request`: its kind, for
        RequestEnded; `waits`: False to raise Cancelled if another caller has them."""
        require_linux()
        if self._owner == threading.get_ident():
            raise RequestError("A callback of a request may not send another request to the same processes.")
        while not self._lock.acquire(timeout=deadlines.POLL):
            if not waits or (should_cancel is not None and should_cancel()):
                raise Cancelled("The request was cancelled while it waited for its turn.")
        self._owner = threading.get_ident()
        self._cancel.clear()

        def report_progress(phase: Phase) -> None:
            self.phase = phase
            emit(Changed(self.devices))
            if on_phase is not None:
                on_phase(phase.text)

        lease = Lease(request, self._cancel, should_cancel, report_progress, self._exchange)
        lease.idle_s = self._end_of_idling()
        result = "failed"
        try:
            if self.crashes.is_broken:
                result = "refused"
                raise self.crashes.refusal()
            yield lease
            result = "done"
            self._last_failure = ""
        except RankFailed as error:
            self._record_failure(error)
            raise
        except TransportError:
            raise
        except ParallelError as error:
            result = _RESULTS.get(type(error), "refused")
            raise
        finally:
            self._activity, self.phase = State.READY, None
            if self.group is not None and self.group.ended.is_set():
                self.discard()
            self._idle_since = None if self.group is None else time.monotonic()
            self._owner = None
            self._lock.release()
            self._emit_end(lease, result)

    def _emit_end(self, lease: Lease, result: str) -> None:
        now = time.monotonic()
        emit(
            RequestEnded(
                self.devices,
                lease.request,
                result,
                seconds=now - lease.started,
                cancel_s=None if lease.cancelled_at is None else now - lease.cancelled_at,
                info=lease.info,
                strategy=lease.strategy,
                images=lease.images,
                spec=lease.spec,
                prompt_id=PROMPT_ID.get(),
                idle_s=lease.idle_s,
            )
        )
        emit(Changed(self.devices))

    def working(self) -> None:
        """Notes that a request has begun to compute."""
        self._activity = State.RUNNING
        emit(Changed(self.devices))

    def _record_failure(self, error: RankFailed) -> None:
        """Records a failure. Only a crash is counted: an error that code raised would recur on any device."""
        if not self.crashes.is_broken:  # else this is the refusal, or already recorded
            if error.crashed:
                device = error.device_of(self.devices)
                self.crashes.add(error, device)
                if device is not None:
                    FAILING.add(device)
            self._emit_failure(error)
        self._last_failure = _line(error)

    def _emit_failure(self, error: RankFailed) -> None:
        self._failure_known = True
        broken = self.crashes.is_broken
        emit(RequestFailed(self.devices, error.rank, error.summary, error.crashed, broken, error.reason))

    def retry_after_crash(
        self,
        attempt: Callable[[], T],
        lease: Lease,
        survive: Callable[[RankFailed, str | None], str] | None = None,
    ) -> T:
        """Returns `attempt()`, tried once more if the ranks crash. Before that, `survive(error, device)` returns the
        message for the user.

        Errors that code raised and out-of-memory are not retried: they would recur. Nor is a crash during the start.
        """
        try:
            return attempt()
        except RankFailed as error:
            if not error.crashed or self._activity is State.STARTING:
                raise
            self._record_failure(error)
            if self.crashes.is_broken:
                raise
            device = error.device_of(self.devices)
            text = survive(error, device) if survive is not None else f"{error.who(device)} failed"
            log.warning("%s: %s", text, error.cause)
            self.discard()
            lease.on_phase(Phase(PhaseKind.RECOVERING, text))
            emit(Recovering(self.devices, text))
            if (earlier := self.crashes.count - 1) > 0:  # a driver may need time to recover
                lease.wait(time.monotonic() + deadlines.BACK_OFF * 2 ** (earlier - 1))
            return attempt()

    def start(self, lease: Lease) -> float:
        """Starts the ranks, after it has ended any that were left; returns the seconds it took."""
        self.discard()
        started = time.monotonic()
        self._activity, self._failure_known = State.STARTING, False
        count = len(self.devices)
        lease.on_phase(Phase(PhaseKind.STARTING, f"{count} process{'es' if count > 1 else ''}"))
        if (head := clusters.head_of(self.devices)) is not None:
            head.wait_for(self.devices, lease.cancelled)
        locks = lock_devices(self.devices) if self._exclusive else None
        self.group = get_supervisor().spawn(self.devices, self._rank_module, locks)
        try:
            join_ranks(self.group, lease.cancelled)
        except DeviceError as error:
            if error.device is not None:
                FAILING.add(error.device, FAILURES_UNTIL_LEFT_OUT)
            raise
        self._activity = State.READY
        seconds = time.monotonic() - started
        emit(Started(self.devices, seconds, self.last_failure))
        return seconds

    def discard(self) -> None:
        """Ends the ranks, if there are any, and frees their resources."""
        group, self.group = self.group, None
        if group is None:
            return
        get_supervisor().stop(group)
        if group.death is not None:
            if not self._failure_known:  # it died while it was idle, or while a request was cancelled
                self._emit_failure(group.death.error())
            if not self._last_failure:
                self._last_failure = _line(group.death.error())
        group.close()
        self._forget()

    def _exchange(self, lease: Lease, survivable: frozenset[str]) -> Exchange:
        if lease.cancelled():
            raise Cancelled("The request was cancelled before it reached the processes.")
        assert self.group is not None, "processes start before a request is sent to them"
        return Exchange(self.group, next(self._requests), lease.cancelled, survivable)


def _line(error: RankFailed) -> str:
    return str(error).split("\n", 1)[0]


def join_ranks(group: RankGroup, cancelled: Callable[[], bool]) -> None:
    """Sends every rank its Setup and waits until the process group is ready. Raises the error of a rank that fails."""
    exchange = Exchange(group, NO_REQUEST, cancelled, frozenset())

    def greet(rank: int, message: Message, tensors: Tensors | None) -> None:
        _check_versions(rank, expect(rank, message, Hello))
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        exchange.send_to(rank, Setup(rank, group.devices, group.rendezvous, is_deterministic))

    exchange.wait(lambda: deadlines.START, greet)


def _check_versions(rank: int, hello: Hello) -> None:
    (_, *ours), theirs = versions(), [hello.python, hello.torch]
    if ours != theirs:
        raise RankFailed(
            rank,
            f"it runs Python {theirs[0]}, torch {theirs[1]}, but ComfyUI runs Python {ours[0]}, torch {ours[1]}; "
            f"{AFTER_UPDATE}",
            reason="version",
        )

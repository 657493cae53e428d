"""One request to all ranks of a group: sends it, waits for every rank's terminal message, and returns one outcome.

The calling thread reads the links itself, so a request costs no thread switch. The rules:
- every rank ends a request with one terminal message, Done or Failed. If one does not after another one failed, it is
  stuck in a collective, and the group is killed;
- a cancel, or any exception from a callback, is sent to one rank, usually the first. The terminal messages are still
  awaited, so that the group stays warm. An unexpected message ends the group;
- the error raised is the first failure, not one that followed from it.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ...errors import RANK_CRASHED, Cancelled, ParallelError, RankFailed, TransportError, from_wire
from ...wire import deadlines
from ...wire.heartbeat import find_laggard, in_words
from ...wire.payloads import Tensors
from ...wire.protocol import (
    NO_REQUEST,
    PEER_FAILED,
    Cancel,
    Done,
    Envelope,
    Failed,
    Message,
    OtherVersion,
    encode,
)
from ...wire.transport import LinkClosed, LinkFull, close_all, pack_tensors, unpack_tensors
from .liveness import MOST_EXTENSIONS, is_computing, is_stopped, last_beat
from .supervisor import RankGroup, get_supervisor

AFTER_UPDATE = "restart ComfyUI after an update."
# Errors that all ranks raise at the same point, so that no collective is left unfinished.
USER_ERRORS = frozenset(
    {"PlatformError", "DeviceError", "StrategyError", "CheckpointError", "RequestError", "Cancelled"}
    | {"TransportError", PEER_FAILED}
)
# For requests whose ranks agree on the outcome before they report: an out-of-memory leaves no collective unfinished.
AGREED_ERRORS = USER_ERRORS | {"OutOfMemory"}

# The arguments: rank, message, payload tensors or None.
OnMessage = Callable[[int, Message, "Tensors | None"], None]
M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

log = logging.getLogger(__name__)


def expect(rank: int, message: Message, kind: type[M]) -> M:
    """Returns `message` if it is a `kind`. Raises TransportError otherwise."""
    if not isinstance(message, kind):
        raise TransportError(f"process {rank} sent {type(message).__name__} where {kind.__name__} was due")
    return message


def reports(done: Sequence[Done], of: Callable[[Done], T | None]) -> list[T]:
    """Returns `of(answer)` for each rank's answer, in rank order. Raises TransportError if one is None."""
    found: list[T] = []
    for rank, answer in enumerate(done):
        part = of(answer)
        if part is None:
            raise TransportError(f"process {rank} ended the request without saying how it ran")
        found.append(part)
    return found


@dataclass(eq=False)
class Exchange:
    """One request, from send to outcome. `cancelled()` is called at least every 50 ms and may raise; `survivable`: the
    names of errors that leave the group usable; `listener`: the rank that is sent a cancel, and whose terminal
    message's payload is the `result`."""

    _group: RankGroup
    _request: int
    _cancelled: Callable[[], bool]
    _survivable: frozenset[str]
    listener: int = 0
    result: Tensors = field(default_factory=dict)
    _done: dict[int, Done] = field(default_factory=dict)
    _failed: dict[int, Failed] = field(default_factory=dict)  # in the order of arrival
    _interrupt: BaseException | None = None
    _deadline: float = float("inf")
    _alive: float = 0.0  # time.monotonic() of the last sign of life
    _extensions: int = 0  # how often the deadline was extended since then
    _looked: float = 0.0  # time.monotonic() when this thread last checked its links

    def __post_init__(self) -> None:
        self._pending = set(range(self._group.world_size))

    def send(self, message: Message, tensors: Tensors | None = None) -> None:
        """Sends `message` to every rank, with `tensors` as the payload."""
        payload = () if tensors is None else (pack_tensors(tensors),)
        try:
            data = encode(self._envelope(message))
            for rank in range(self._group.world_size):
                self._send(rank, data, payload)
        finally:
            close_all(payload)

    def send_to(self, rank: int, message: Message) -> None:
        """Sends `message` to one rank."""
        self._send(rank, encode(self._envelope(message)), ())

    def _send(self, rank: int, data: bytes, payload: tuple[int, ...]) -> None:
        try:
            self._group.links[rank].send_encoded(data, payload, deadlines.SEND)
        except LinkClosed:
            raise self._group_ended(rank) from None
        except LinkFull:
            cause = f"took no request for {deadlines.SEND:g} s"
            raise self._kill(RankFailed(rank, cause, crashed=True, reason="hang")) from None

    def wait(self, budget: Callable[[], float], on_message: OnMessage | None = None) -> list[Done]:
        """Waits for every rank's terminal message; returns them in rank order. `budget()`: seconds allowed until the
        next sign of life; `on_message`: called with every other message, None if none may come.

        Raises the first failure, Cancelled, or a callback's own exception once the ranks have ended the request.
        """
        with selectors.PollSelector() as selector:
            for rank, link in enumerate(self._group.links):
                selector.register(link, selectors.EVENT_READ, rank)
            selector.register(self._group.alarm, selectors.EVENT_READ, None)
            self._set_deadline(time.monotonic(), budget())
            self._looked = time.monotonic()
            while self._pending:
                try:
                    self.guard(self._look_for_cancel)
                    self._turn(selector, budget, on_message)
                except KeyboardInterrupt as error:
                    self._cancel(error)
        return self._outcome()

    def _turn(
        self, selector: selectors.PollSelector, budget: Callable[[], float], on_message: OnMessage | None
    ) -> None:
        now, before = time.monotonic(), self._looked
        self._looked = now
        if now - before > deadlines.PAUSE:  # a paused container or laptop: the ranks likely paused too
            self._deadline += now - before
        left = self._deadline - now
        if left <= 0:
            if not self._still_working(budget()):
                raise self._expired(budget())
            left = 0.0
        events = selector.select(min(left, deadlines.POLL))
        # Messages first: if a rank reports and then dies, its report is the better explanation.
        for key, _ in sorted(events, key=lambda event: event[0].data is None):
            if key.data is None:
                if not self._pending:
                    return  # all had reported before one died; the next request will see it
                raise self._group_ended(None)
            received = self._receive(key.data)
            if received is None:
                continue
            message, tensors = received
            if self._take_terminal(key.data, message, tensors):
                continue
            if self._interrupt is None:
                self._pass_on(on_message, key.data, message, tensors)
                if self._interrupt is None and not self._failed:
                    self._set_deadline(time.monotonic(), budget())

    def _still_working(self, allowed: float) -> bool:
        """Returns True, and extends the deadline, if the ranks are slow but not stuck."""
        if self._interrupt is not None or self._failed:
            return False
        if self._has_gone_on(allowed):
            return True
        if self._extensions < MOST_EXTENSIONS and is_computing(self._group, self._pending):
            self._extensions += 1
            self._deadline = time.monotonic() + allowed
            return True
        return self._has_gone_on(allowed)  # a beat may have come during is_computing, which takes 0.5 s

    def _has_gone_on(self, allowed: float) -> bool:
        """Returns True if a pending rank wrote a heartbeat that moves the deadline into the future."""
        beat = last_beat(self._group, self._pending)
        if beat <= self._alive:
            return False
        self._set_deadline(beat, allowed)
        return self._deadline > time.monotonic()

    def _set_deadline(self, alive: float, allowed: float) -> None:
        """Expects the next sign of life within `allowed` seconds after the last one, at time.monotonic() `alive`."""
        self._alive, self._extensions = alive, 0
        self._deadline = alive + allowed

    def _pass_on(
        self, on_message: OnMessage | None, rank: int, message: Message, tensors: Tensors | None
    ) -> None:
        def call() -> None:
            if on_message is None:
                expect(rank, message, Done)
            else:
                on_message(rank, message, tensors)

        self.guard(call)
        if isinstance(self._interrupt, TransportError):
            raise self._kill(self._interrupt)

    def guard(self, call: Callable[[], None]) -> None:
        """Runs code of the caller. An exception from it cancels the request and is raised after the request's end."""
        try:
            call()
        except BaseException as error:
            self._cancel(error)

    def refuse(self, text: str) -> TransportError:
        """Ends ranks that broke the protocol and returns the error to raise."""
        return self._kill(TransportError(text))

    def _look_for_cancel(self) -> None:
        if self._interrupt is None and self._cancelled():
            raise Cancelled("The request was cancelled.")

    def _cancel(self, reason: BaseException) -> None:
        if self._interrupt is not None:
            return
        self._interrupt = reason
        if self._request == NO_REQUEST:  # a group that is starting has no step boundary
            self._deadline = 0.0
            return
        self._deadline = min(self._deadline, time.monotonic() + deadlines.CANCEL)
        with contextlib.suppress(LinkClosed, LinkFull):  # `wait` notices a closed link and the deadline
            self._group.links[self.listener].send(self._envelope(Cancel()))

    def _receive(self, rank: int) -> tuple[Message, Tensors | None] | None:
        try:
            received = self._group.links[rank].receive(0.0)
            if received is None:
                return None
            envelope, descriptors = received
            try:
                self._check(envelope)
                tensors = unpack_tensors(descriptors[0]) if descriptors else None
            finally:
                close_all(descriptors)
        except LinkClosed:
            raise self._group_ended(rank) from None
        except OtherVersion as error:
            raise self._kill(RankFailed(rank, f"{error}; {AFTER_UPDATE}", reason="version")) from None
        except TransportError as error:
            raise self.refuse(f"process {rank} sent what the protocol does not allow: {error}") from None
        return envelope.message, tensors

    def _check(self, envelope: Envelope) -> None:
        if envelope.epoch != self._group.epoch or envelope.request != self._request:
            raise TransportError(
                f"a message of epoch {envelope.epoch}, request {envelope.request} came in epoch "
                f"{self._group.epoch}, request {self._request}"
            )

    def _take_terminal(self, rank: int, message: Message, tensors: Tensors | None) -> bool:
        """Returns True if `message` ends the request on `rank`."""
        if not isinstance(message, (Done, Failed)):
            return False
        if rank not in self._pending:
            raise self.refuse(f"process {rank} ended request {self._request} twice")
        self._pending.discard(rank)
        if isinstance(message, Failed):
            log.debug("process %d: %s: %s\n%s", rank, message.kind, message.message, message.detail)
            self._failed[rank] = message
            self._deadline = min(self._deadline, time.monotonic() + deadlines.REPORT)
        else:
            self._done[rank] = message
            if tensors is not None and rank == self.listener:
                self.result = tensors
        return True

    def _outcome(self) -> list[Done]:
        """Returns the answers or raises the error, once all ranks have reported."""
        if any(failed.kind not in self._survivable for failed in self._failed.values()):
            get_supervisor().kill(self._group)
        if self._interrupt is not None:
            raise self._interrupt
        if self._failed:
            raise self._first_failure()
        return [self._done[rank] for rank in sorted(self._done)]

    def _first_failure(self) -> ParallelError:
        reported = list(self._failed.items())
        causes = [(rank, failed) for rank, failed in reported if failed.kind != PEER_FAILED] or reported
        rank, failed = causes[0]
        detail = f"\n{failed.detail}" if failed.kind in ("RankFailed", RANK_CRASHED) and failed.detail else ""
        return from_wire(failed.kind, failed.message + detail, rank, failed.device)

    def _group_ended(self, rank: int | None) -> BaseException:
        """Returns the error for a group that died or was stopped. `rank`: the one whose link closed, if known."""
        if not self._group.ended.wait(deadlines.DEATH_NOTICE):
            cause = "closed its control link"
            return self._kill(RankFailed(rank or 0, cause, crashed=True, reason="link"))
        death = self._group.death
        self._collect_reports()
        get_supervisor().kill(self._group)
        if self._interrupt is not None:
            return self._interrupt
        if death is None:
            return Cancelled("The processes were stopped while they worked on the request.")
        # The rank's report explains its end best; without one, its death explains the others' failures.
        return self._first_failure() if death.rank in self._failed else death.error()

    def _collect_reports(self) -> None:
        for rank, link in enumerate(self._group.links):
            try:
                while (received := link.receive(0.0)) is not None:
                    envelope, descriptors = received
                    close_all(descriptors)
                    if isinstance(envelope.message, Failed):
                        self._failed.setdefault(rank, envelope.message)
            except TransportError:  # end of file, or a frame that no longer matters
                continue

    def _expired(self, allowed: float) -> BaseException:
        if self._failed:
            return self._kill(self._interrupt or self._first_failure())
        if self._interrupt is not None:
            return self._kill(self._interrupt)
        beats = [self._group.heartbeat.read(rank) for rank in range(self._group.world_size)]
        stopped = [rank for rank in sorted(self._pending) if is_stopped(self._group, rank)]
        rank = stopped[0] if stopped else find_laggard(beats, self._pending)
        how = "was stopped by a signal" if stopped else "gave no sign of life"
        if rank is None:  # all wait for each other: no device is to blame, so none should be left out
            how = f"{how}, none of them behind the others"
        shown = min(self._pending) if rank is None else rank
        where = in_words(beats, shown)
        cause = f"{how}; the limit here is {allowed:.3g} s" + (f" ({where})" if where else "")
        stack = "" if stopped else get_supervisor().stack_of(self._group, shown)
        cause = f"{cause}\n{stack}" if stack else cause
        return self._kill(RankFailed(rank, cause, crashed=True, reason="hang"))

    def _kill(self, error: E) -> E:
        """Kills the group and returns `error`."""
        get_supervisor().kill(self._group)
        return error

    def _envelope(self, message: Message) -> Envelope:
        return Envelope(self._group.epoch, self._request, message)

"""Forwards messages of ranks between their local links and the channel of their machine: at the head, between the
links of a group and a machine; on a machine, between the head and the ranks that torchrun started.

Both ends run the same loop in a thread of its own, so code at either side of a local link need not know of clusters.
"""

from __future__ import annotations

import collections
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import TransportError
from ..wire import deadlines
from ..wire.protocol import encode
from ..wire.transport import Link, LinkClosed, LinkFull, close_all
from .channel import DATAGRAMS, Channel, Frame, Kind

_MOST_WAITING = 4  # unsent frames; with this many, no more messages are taken from the ranks

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Relay:
    """The relay of one machine. `links`: this end's link of each rank; `on_frame` gets frames that are no rank's
    datagram, `on_left` a rank whose link ended, `make_beat` returns a sign of life. They run in the relay's thread."""

    channel: Channel
    _on_frame: Callable[[Frame], None]
    _on_left: Callable[[int], None]
    _make_beat: Callable[[], bytes]
    links: dict[int, Link] = field(default_factory=dict)
    _commands: collections.deque[Callable[[], None]] = field(default_factory=collections.deque)
    _sent: tuple[bytes, int] | None = None  # the last datagram sent with a payload, and the payload
    _came: int | None = None  # the last received payload

    def __post_init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # guards `_wake`, which the thread closes at its end

    def submit(self, command: Callable[[], None]) -> bool:
        """Runs `command` in the relay's thread; returns False if that has ended. May be called from any thread."""
        with self._lock:
            if self._wake < 0:
                return False
            self._commands.append(command)
            os.eventfd_write(self._wake, 1)
            return True

    def run(self) -> TransportError:
        """Forwards messages until the channel ends or breaks the rules. Closes everything and returns the reason."""
        try:
            next_beat = 0.0
            while True:
                if (now := time.monotonic()) >= next_beat:
                    next_beat = now + deadlines.BEAT
                    self.channel.send(Kind.BEAT, text=self._make_beat())
                self.channel.flush()
                self._turn(max(0.0, next_beat - time.monotonic()))
        except TransportError as error:
            return error
        except OSError as error:
            return LinkClosed(f"the connection ended ({error})")
        except Exception as error:  # callers that wait for these ranks must learn that it ended
            log.exception("a relay met an error and ends")
            return TransportError(f"{type(error).__name__}: {error}")
        finally:
            self._close()

    def _turn(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        backlog = self.channel.backlog
        poller.register(self.channel, select.POLLIN | (select.POLLOUT if backlog else 0))
        if backlog < _MOST_WAITING:
            for link in self.links.values():
                poller.register(link, select.POLLIN)
        events = dict(poller.poll(0 if self.channel.waiting else seconds * 1000))
        if self._wake in events:
            os.eventfd_read(self._wake)
            while self._commands:
                self._commands.popleft()()
        if self.channel.waiting or events.get(self.channel.fileno(), 0) & ~select.POLLOUT:
            for frame in self.channel.read():
                self._take(frame)
        if time.monotonic() - self.channel.heard > deadlines.SILENCE:
            raise LinkClosed(f"no word for {deadlines.SILENCE:g} s", silent=True)
        for rank, link in list(self.links.items()):
            if link.fileno() in events:
                self._forward(rank, link)

    def _take(self, frame: Frame) -> None:
        """Passes a datagram to its rank's link, and any other frame to `on_frame`."""
        if frame.kind not in DATAGRAMS:
            self._on_frame(frame)
            return
        if frame.kind is Kind.CARRYING:
            self._forget()
            self._came = frame.payload
        if frame.kind is Kind.AGAIN and self._came is None:
            raise TransportError("a frame wants a payload again that never came")
        if (link := self.links.get(frame.rank)) is None:
            return  # the rank has just ended
        payload = () if frame.kind is Kind.MESSAGE or self._came is None else (self._came,)
        try:
            link.send_encoded(frame.text, payload, deadlines.SEND / 2)
        except LinkClosed:
            self._leave(frame.rank)
        except LinkFull:
            raise TransportError(f"process {frame.rank} takes no messages") from None

    def _forward(self, rank: int, link: Link) -> None:
        """Forwards one datagram of a local link to the channel."""
        try:
            received = link.receive(0.0)
        except TransportError as error:
            if not isinstance(error, LinkClosed):
                log.warning("process %d: %s", rank, error)
            self._leave(rank)
            return
        if received is None:
            return
        envelope, descriptors = received
        text = encode(envelope)
        try:
            if not descriptors:
                self.channel.send(Kind.MESSAGE, rank, text)
                return
            # A payload for all ranks of a machine is sent only once.
            if self._sent is not None and self._sent[0] == text and _same(self._sent[1], descriptors[0]):
                self.channel.send(Kind.AGAIN, rank, text)
                return
            self._forget()
            self.channel.send(Kind.CARRYING, rank, text, descriptors[0])
            self._sent = (text, os.dup(descriptors[0]))
        finally:
            close_all(descriptors)

    def _leave(self, rank: int) -> None:
        self.links.pop(rank).close()
        self._on_left(rank)

    def _forget(self) -> None:
        """Closes the payloads that were kept for AGAIN frames."""
        if self._sent is not None:
            os.close(self._sent[1])
        if self._came is not None:
            os.close(self._came)
        self._sent = self._came = None

    def _close(self) -> None:
        with self._lock:
            os.close(self._wake)
            self._wake = -1
        self._forget()
        for link in self.links.values():
            link.close()
        self.links.clear()
        self.channel.close()


def _same(one: int, other: int) -> bool:
    return os.path.samestat(os.fstat(one), os.fstat(other))

"""One machine of a cluster as the head sees it: processes on one connection, and the group that they serve."""

from __future__ import annotations

import logging
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...cluster.channel import DATAGRAMS, Channel, Frame, Kind
from ...cluster.handshake import Join, Start, pack
from ...cluster.relay import Relay
from ...errors import TransportError
from ...wire import deadlines
from ...wire.heartbeat import BEAT_BYTES, Page
from ...wire.transport import Link, LinkClosed, link_pair

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Departure:
    """The end of a machine's connection. `rank`: the rank that ended first, else the machine's first one, None if it
    served no group; `words`: the reason; `silent`: True if it went silent, False if the connection closed."""

    rank: int | None
    words: str
    silent: bool


OnDeparture = Callable[[Departure], None]


class RemoteMachine:
    """A machine that has joined. `begin` starts its thread, which calls `on_gone(machine, departure)` at its end;
    `on_departure`: then called for the group that it serves, None if it serves none."""

    def __init__(
        self,
        connection: ssl.SSLSocket,
        join: Join,
        cluster: str,
        on_gone: Callable[[RemoteMachine, Departure], None],
    ) -> None:
        self.name = join.machine
        self.address = connection.getpeername()[0]
        self.devices = tuple(f"{device}@{cluster}/{join.machine}" for device in join.devices)
        self.memory = dict(zip(self.devices, join.memory, strict=True))
        self.on_departure: OnDeparture | None = None
        self._on_gone = on_gone
        self._page: Page | None = None
        self._ranks: tuple[int, ...] = ()
        channel = Channel(connection, DATAGRAMS | {Kind.BEAT, Kind.LEFT})
        self._relay = Relay(channel, self._on_frame, lambda rank: None, lambda: b"")
        self._thread = threading.Thread(target=self._run, name=f"cluster-{join.machine}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    @property
    def was_heard_lately(self) -> bool:
        return time.monotonic() - self._relay.channel.heard < 4 * deadlines.BEAT

    def start(self, epoch: int, ranks: dict[str, int], page: Page) -> dict[int, Link]:
        """Starts a group on its processes; returns the group's end of each rank's link. `ranks`: by device name."""
        numbers = tuple(ranks.get(device, -1) for device in self.devices)
        pairs = {rank: link_pair() for rank in numbers if rank >= 0}

        def begin() -> None:
            self._page, self._ranks = page, numbers
            self._relay.channel.send(Kind.START, text=pack(Start(epoch, numbers)))
            self._relay.links.update({rank: theirs for rank, (_, theirs) in pairs.items()})

        if not self._relay.submit(begin):  # it has left, and `on_gone` will end the group
            for _, theirs in pairs.values():
                theirs.close()
        return {rank: ours for rank, (ours, _) in pairs.items()}

    def end(self, words: str) -> None:
        """Closes the connection, which makes its processes end; blocks until this side is closed."""

        def close() -> None:
            raise TransportError(words)

        self._relay.submit(close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        error = self._relay.run()
        self._page = None
        rank = next((rank for rank in self._ranks if rank >= 0), None)
        silent = isinstance(error, LinkClosed) and error.silent
        self._on_gone(self, Departure(rank, str(error), silent))

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is Kind.LEFT:
            self._ranks = (frame.rank, *self._ranks) if frame.rank in self._ranks else self._ranks
            raise LinkClosed("its process ended; torchrun's output on that machine may say why")
        self._take_beats(frame.text)

    def _take_beats(self, text: bytes) -> None:
        size = BEAT_BYTES + 1
        if len(text) % size:
            raise TransportError(f"a sign of life has {len(text)} bytes")
        for first in range(0, len(text), size):
            rank, beat = text[first], text[first + 1 : first + size]
            if rank not in self._ranks or self._page is None:
                raise TransportError(f"a sign of life came for process {rank}, which is not there")
            try:
                self._page.copy_in(rank, beat)
            except (ValueError, struct.error):  # the page was closed meanwhile
                return

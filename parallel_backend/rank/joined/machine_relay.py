"""A machine's connection to the head, in a thread of its first process, shared by all processes of the machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import ssl
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ...cluster.channel import DATAGRAMS, Channel, Frame, Kind
from ...cluster.endpoint import Endpoint
from ...cluster.handshake import Join, Start, pack, receive_first, send_first, unpack, versions
from ...cluster.relay import Relay
from ...cluster.tls import make_context, secure
from ...errors import PlatformError, TransportError
from ...wire import deadlines
from ...wire.heartbeat import Page
from ...wire.transport import Link

_SIZE = 4096
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_ADDRESS_OF = 0x8915  # SIOCGIFADDR, <linux/sockios.h>


@dataclass(frozen=True)
class LocalHello:
    """The first message of a process to the first process of its machine. `memory`: of its device, in bytes."""

    local: int
    device: str
    memory: int


@dataclass(frozen=True)
class LocalStart:
    """The answer of the first process, with the descriptor of the heartbeat page. `interface`: the network interface
    that reaches the head, and probably the other machines."""

    epoch: int
    interface: str


@dataclass(frozen=True)
class _Neighbour:
    """A process of this machine, including this one."""

    hello: LocalHello
    socket: socket.socket
    pidfd: int


class MachineRelay:
    """A machine's relay. `head`: its address; `listener`: accepts the `count` processes of this machine."""

    def __init__(
        self, endpoint: Endpoint, head: tuple[str, int], machine: str, listener: socket.socket, count: int
    ) -> None:
        self._endpoint, self._head, self._machine = endpoint, head, machine
        self._context = make_context(endpoint)
        self._listener, self._count = listener, count
        self._neighbours: list[_Neighbour] = []
        self._page: Page | None = None
        self._ranks: tuple[int, ...] = ()
        self._relay: Relay
        self._interface = ""
        self._latest_words = ""

    def run(self) -> None:
        """Serves until the head or a rank is gone, then ends all processes of this machine; torchrun restarts them."""
        try:
            self._gather()
            connection = self._dial()
            self._interface = interface_of(connection.getsockname()[0])
            channel = Channel(connection, DATAGRAMS | {Kind.BEAT, Kind.START})
            self._relay = Relay(channel, self._on_frame, self._on_left, self._make_beat)
            self._say(f"machine {self._machine} joined the cluster {self._endpoint.cluster}")
            self._say(f"left the cluster {self._endpoint.cluster}: {self._relay.run()}")
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}")
        finally:
            for neighbour in self._neighbours:  # only this ends a process that is stuck in a collective
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(neighbour.pidfd, signal.SIGKILL)
            os._exit(1)

    def _gather(self) -> None:
        """Accepts all processes of this machine, and rejects those of another user."""
        self._listener.settimeout(deadlines.START)
        while len(self._neighbours) < self._count:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise PlatformError(
                    f"{len(self._neighbours)} of {self._count} processes of this machine came within "
                    f"{deadlines.START:g} s."
                ) from None
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, user, _ = _CREDENTIALS.unpack(credentials)
            connection.settimeout(deadlines.ADMIT)
            hello = unpack(connection.recv(_SIZE), LocalHello) if user == os.getuid() else None
            if hello is None:
                connection.close()
                continue
            self._neighbours.append(_Neighbour(hello, connection, os.pidfd_open(pid)))
        Path(self._listener.getsockname()).unlink(missing_ok=True)  # no other process connects
        self._neighbours.sort(key=lambda neighbour: neighbour.hello.local)

    def _dial(self) -> ssl.SSLSocket:
        """Retries until the head accepts this machine; returns the connection."""
        hellos = [neighbour.hello for neighbour in self._neighbours]
        join = pack(
            Join(
                self._machine,
                tuple(hello.device for hello in hellos),
                tuple(hello.memory for hello in hellos),
                *versions(),
            )
        )
        while True:
            try:
                plain = socket.create_connection(self._head, deadlines.ADMIT)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = secure(plain, self._endpoint, self._context, deadlines.ADMIT)
                try:
                    send_first(connection, Kind.JOIN, join)
                    kind, text = receive_first(connection, deadlines.ADMIT)
                    if kind is Kind.WELCOME:
                        return connection
                    self._say(f"the head refuses this machine: {text.decode(errors='replace')}")
                except BaseException:
                    connection.close()
                    raise
                connection.close()
            except ssl.SSLError as error:
                self._say(
                    f"the head at {self._head[0]}:{self._head[1]} and this machine do not accept each other's "
                    f"certificates ({error.reason}); take the secret file that `cluster init` made last."
                )
            except (OSError, TransportError) as error:
                self._say(f"no connection to the head at {self._head[0]}:{self._head[1]} yet ({error})")
            time.sleep(deadlines.REDIAL)

    def _say(self, words: str) -> None:
        """Writes to stderr, which torchrun logs; skips words that repeat the last ones."""
        if words != self._latest_words:
            self._latest_words = words
            sys.stderr.write(f"parallel sampling: {words}\n")
            sys.stderr.flush()

    # Called by the relay, in its thread.

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is not Kind.START:
            return
        start = unpack(frame.text, Start)
        if self._ranks or len(start.ranks) != len(self._neighbours):
            raise TransportError("the head begins a group that this machine cannot serve")
        self._ranks, self._page = start.ranks, Page()
        text = pack(LocalStart(start.epoch, self._interface))
        for rank, neighbour in zip(start.ranks, self._neighbours, strict=True):
            if rank >= 0:
                socket.send_fds(neighbour.socket, [text], [self._page.descriptor])
                self._relay.links[rank] = Link(neighbour.socket)

    def _on_left(self, rank: int) -> None:
        self._relay.channel.send(Kind.LEFT, rank)

    def _make_beat(self) -> bytes:
        page = self._page
        if page is None:
            return b""
        return b"".join(bytes([rank]) + page.copy_out(rank) for rank in self._ranks if rank >= 0)


def interface_of(address: str) -> str:
    """Returns the name of the network interface with this IPv4 address, or "" if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(sock, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""

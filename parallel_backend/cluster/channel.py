"""Frames over the encrypted connection of one machine: messages of its ranks with their tensors, and signs of life.

A frame is a header, a text (a rank's datagram as on a local link, or what the kind says) and a payload (the tensors
that a local link would pass as a descriptor). What comes is checked before anyone acts on it, and a frame that is not
allowed ends the connection. Nothing here blocks; one thread uses a channel.
"""

from __future__ import annotations

import collections
import enum
import os
import ssl
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import TransportError
from ..wire.protocol import MAX_MESSAGE_BYTES, Envelope, decode
from ..wire.transport import MAX_PAYLOAD_BYTES, LinkClosed, seal

HEADER = struct.Struct("!BBIQ")  # kind, rank, bytes of the text, bytes of the payload
_CHUNK = 64 * 1024  # bytes given to TLS at once
_MOST_READS = 64  # in one turn, so that a flood does not keep the other way waiting


class Kind(enum.IntEnum):
    """Of a frame. Datagrams and BEAT go both ways, JOIN and LEFT to the head, the others to a machine."""

    JOIN = 1  # the machine and its devices (handshake.Join)
    WELCOME = 2
    REFUSED = 3  # the reason in words
    BEAT = 4  # a sign of life, of a machine with the heartbeats of its ranks
    START = 5  # which ranks this machine's processes are (handshake.Start)
    MESSAGE = 6  # a datagram, from or to the rank in the header
    CARRYING = 7  # a datagram with a payload
    AGAIN = 8  # a datagram with the payload of the one before
    LEFT = 9  # the rank in the header closed its link


@dataclass(frozen=True)
class Frame:
    """`envelope`: the text of a datagram, read; `payload`: the tensors' descriptor, which the taker closes."""

    kind: Kind
    rank: int
    text: bytes
    envelope: Envelope | None = None
    payload: int | None = None


@dataclass
class _Outgoing:
    """What is left to send of a frame. `descriptor`: of the payload, -1 for none, of which the bytes from `offset` to
    `size` are left; closed once it is sent."""

    head: memoryview
    descriptor: int
    size: int
    offset: int = 0


class IncomingPayload:
    """A memfd that takes what comes, and is sealed against any change once all has, as readers want it."""

    def __init__(self, size: int) -> None:
        self._size, self._written = size, 0
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.descriptor = os.memfd_create("parallel-backend-remote", flags)
        try:
            os.ftruncate(self.descriptor, max(1, size))
        except BaseException:
            self.close()
            raise

    @property
    def missing(self) -> bool:
        return self._written < self._size

    def write(self, view: memoryview) -> int:
        """Takes from `view`; returns how many bytes."""
        taken = 0
        while self.missing and taken < len(view):
            part = view[taken : taken + self._size - self._written]
            written = os.pwrite(self.descriptor, part, self._written)
            taken += written
            self._written += written
        return taken

    def finish(self) -> int:
        """Returns the descriptor, sealed; the taker closes it."""
        seal(self.descriptor)
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


DATAGRAMS = frozenset({Kind.MESSAGE, Kind.CARRYING, Kind.AGAIN})


class Channel:
    """One end of a machine's connection, `accepts` the kinds that may come. It owns its socket."""

    def __init__(self, sock: ssl.SSLSocket, accepts: frozenset[Kind]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._accepts = accepts
        self._outgoing: collections.deque[_Outgoing] = collections.deque()
        self._buffer = bytearray(_CHUNK)
        self._held = bytearray()  # of a header and text that is not whole yet
        self._incoming: IncomingPayload | None = None
        self._frame: Frame | None = None  # whose payload comes
        self.heard = time.monotonic()  # when anything came last
        self.waiting = False  # more has come than one turn reads

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def backlog(self) -> int:
        """Frames that are not sent yet."""
        return len(self._outgoing)

    def send(self, kind: Kind, rank: int = 0, text: bytes = b"", descriptor: int = -1) -> None:
        """Puts a frame behind those that wait; `flush` sends them. `descriptor`: of its payload, which stays the
        caller's."""
        size = os.fstat(descriptor).st_size if descriptor >= 0 else 0
        head = memoryview(HEADER.pack(kind, rank, len(text), size) + text)
        self._outgoing.append(_Outgoing(head, os.dup(descriptor) if size else -1, size))

    def flush(self) -> None:
        """Sends as much as the connection takes. Raises LinkClosed."""
        while self._outgoing:
            first = self._outgoing[0]
            if not first.head and first.offset < first.size:
                count = min(first.size - first.offset, _CHUNK)
                first.head = memoryview(os.pread(first.descriptor, count, first.offset))
                first.offset += count
            if first.head:
                try:
                    sent = self._socket.send(first.head)
                except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    return
                except OSError as error:
                    raise LinkClosed(f"the connection ended ({error})") from None
                first.head = first.head[sent:]
            if not first.head and first.offset == first.size:
                self._drop_first()

    def _drop_first(self) -> None:
        done = self._outgoing.popleft()
        if done.descriptor >= 0:
            os.close(done.descriptor)

    def read(self) -> Iterator[Frame]:
        """The frames that have come whole. Raises LinkClosed, TransportError for what is not allowed."""
        self.waiting = False
        for _ in range(_MOST_READS):
            try:
                size = self._socket.recv_into(self._buffer)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as error:
                raise LinkClosed(f"the connection ended ({error})") from None
            if not size:
                raise LinkClosed("the connection was closed")
            self.heard = time.monotonic()
            yield from self._parse(memoryview(bytes(self._buffer[:size])))
        self.waiting = True

    def _parse(self, view: memoryview) -> Iterator[Frame]:
        while view:
            if self._incoming is not None:
                view = view[self._incoming.write(view) :]
            else:
                view = view[self._take_head(view) :]
            if self._frame is None or (self._incoming is not None and self._incoming.missing):
                continue
            frame, self._frame = self._frame, None
            if self._incoming is not None:
                incoming, self._incoming = self._incoming, None
                yield Frame(frame.kind, frame.rank, frame.text, frame.envelope, incoming.finish())
            else:
                yield frame

    def _take_head(self, view: memoryview) -> int:
        """Adds to the header and text that come; how much of `view` belonged to them."""
        needed = HEADER.size
        if len(self._held) >= needed:
            needed += _read_header(self._held, self._accepts)[2]
        taken = min(needed - len(self._held), len(view))
        self._held += view[:taken]
        if len(self._held) < HEADER.size:
            return taken
        kind, rank, length, size = _read_header(self._held, self._accepts)
        if len(self._held) < HEADER.size + length:
            return taken
        text = bytes(self._held[HEADER.size :])
        self._held.clear()
        envelope = None
        if kind in DATAGRAMS:
            envelope = decode(text, int(kind is not Kind.MESSAGE))
        self._frame = Frame(kind, rank, text, envelope)
        if kind is Kind.CARRYING and envelope is not None:
            self._incoming = IncomingPayload(size)
        return taken

    def close(self) -> None:
        """Gives up what was not sent or has not come whole."""
        while self._outgoing:
            self._drop_first()
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        self._socket.close()


def _read_header(data: bytearray, accepts: frozenset[Kind]) -> tuple[Kind, int, int, int]:
    kind, rank, length, size = HEADER.unpack_from(data)
    if kind not in accepts:
        raise TransportError(f"a frame of the unknown or here forbidden kind {kind} came")
    if length > MAX_MESSAGE_BYTES:
        raise TransportError(f"a frame has {length} bytes of text; the limit is {MAX_MESSAGE_BYTES}")
    if size > (MAX_PAYLOAD_BYTES if kind == Kind.CARRYING else 0):
        raise TransportError(f"a frame of kind {kind} has a payload of {size} bytes, which is not allowed")
    return Kind(kind), rank, length, size

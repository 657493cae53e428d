"""Frames on the encrypted connection of one machine: messages of its ranks with their tensors, and signs of life.

A frame is a header, a text and a payload. The text is a rank's datagram, the same as on a local link, or what the kind
of frame defines. The payload holds the tensors that a local link would pass as a file descriptor. Received data is
checked before use; a forbidden frame ends the connection. No call blocks, and only one thread may use a channel.
"""

from __future__ import annotations

import collections
import enum
import os
import ssl
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import TransportError
from ..wire.protocol import MAX_MESSAGE_BYTES, decode
from ..wire.transport import MAX_PAYLOAD_BYTES, LinkClosed, seal, write_all

HEADER = struct.Struct("!BBIQ")  # kind, rank, bytes of the text, bytes of the payload
_CHUNK = 64 * 1024  # bytes passed to TLS at once
_MOST_READS = 64  # per call of `read`: a flood of incoming data must not delay sending


class Kind(enum.IntEnum):
    """The kind of a frame. Datagrams and BEAT go both ways, JOIN and LEFT to the head, the others to a machine."""

    JOIN = 1  # the machine and its devices (handshake.Join)
    WELCOME = 2
    REFUSED = 3  # the reason in words
    BEAT = 4  # a sign of life; from a machine it carries the heartbeats of its ranks
    START = 5  # the ranks of this machine's processes (handshake.Start)
    MESSAGE = 6  # a datagram, from or to the rank in the header
    CARRYING = 7  # a datagram with a payload
    AGAIN = 8  # a datagram with the payload of the last CARRYING frame
    LEFT = 9  # the rank in the header closed its link


@dataclass(frozen=True)
class Frame:
    """A received frame, whose datagram decodes. `payload`: a memfd of tensors, which the caller closes."""

    kind: Kind
    rank: int
    text: bytes
    payload: int | None = None


@dataclass
class _Outgoing:
    """The part of a frame that is not sent yet. `head`: the bytes to send next; `descriptor`: the payload, -1 for none.
    The payload's bytes from `offset` to `size` are sent after `head`; then the descriptor is closed."""

    head: memoryview
    descriptor: int
    size: int
    offset: int = 0


DATAGRAMS = frozenset({Kind.MESSAGE, Kind.CARRYING, Kind.AGAIN})


class Channel:
    """One end of a machine's connection; owns its socket. `accepts`: the kinds of frames that it may receive."""

    def __init__(self, sock: ssl.SSLSocket, accepts: frozenset[Kind]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._accepts = accepts
        self._outgoing: collections.deque[_Outgoing] = collections.deque()
        self._held = bytearray()  # bytes of an incomplete header and text
        self._frame: Frame | None = None  # the frame whose payload is being received
        self._payload = -1  # the memfd that collects it
        self._missing = HEADER.size  # bytes of the header, the text or the payload that is being received
        self.heard = time.monotonic()  # time.monotonic() of the last received bytes
        self.waiting = False  # True if more data may have arrived than one `read` takes

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def backlog(self) -> int:
        """The number of frames that are not sent yet."""
        return len(self._outgoing)

    def send(self, kind: Kind, rank: int = 0, text: bytes = b"", descriptor: int = -1) -> None:
        """Queues a frame for `flush`. `descriptor`: a memfd with its payload, -1 for none; the caller closes it."""
        size = os.fstat(descriptor).st_size if descriptor >= 0 else 0
        head = memoryview(HEADER.pack(kind, rank, len(text), size) + text)
        self._outgoing.append(_Outgoing(head, os.dup(descriptor) if size else -1, size))

    def flush(self) -> None:
        """Sends as much as the connection accepts now. Raises LinkClosed if it has ended."""
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
        """Yields each frame that has arrived completely. Raises LinkClosed, or TransportError if one is forbidden."""
        self.waiting = False
        for _ in range(_MOST_READS):
            try:
                data = self._socket.recv(min(self._missing, _CHUNK))
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as error:
                raise LinkClosed(f"the connection ended ({error})") from None
            if not data:
                raise LinkClosed("the connection was closed")
            self.heard = time.monotonic()
            if (frame := self._take(data)) is not None:
                yield frame
        self.waiting = True

    def _take(self, data: bytes) -> Frame | None:
        """Takes received bytes; returns the frame that they complete, None if it is incomplete."""
        self._missing -= len(data)
        if self._frame is None:
            self._held += data
            if self._missing:
                return None
            kind, rank, length, size = _read_header(self._held, self._accepts)
            if len(self._held) < HEADER.size + length:
                self._missing = length
                return None
            text = bytes(self._held[HEADER.size :])
            self._held.clear()
            if kind in DATAGRAMS:
                decode(text, int(kind is not Kind.MESSAGE))  # raises if the message is not allowed
            if kind is not Kind.CARRYING:
                self._missing = HEADER.size
                return Frame(kind, rank, text)
            self._payload = os.memfd_create("parallel-backend-remote", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._frame, self._missing = Frame(kind, rank, text), size
        else:
            write_all(self._payload, memoryview(data))
        if self._missing:
            return None
        seal(self._payload)  # unpack_tensors requires that
        frame = replace(self._frame, payload=self._payload)
        self._frame, self._payload, self._missing = None, -1, HEADER.size
        return frame

    def close(self) -> None:
        """Closes the socket; drops unsent frames and an incomplete payload."""
        while self._outgoing:
            self._drop_first()
        if self._payload >= 0:
            os.close(self._payload)
            self._payload = -1
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

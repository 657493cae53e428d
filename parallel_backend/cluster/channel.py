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
from dataclasses import dataclass

from ..errors import TransportError
from ..wire.protocol import MAX_MESSAGE_BYTES, decode
from ..wire.transport import MAX_PAYLOAD_BYTES, LinkClosed, seal

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


class IncomingPayload:
    """A memfd that collects a payload as it arrives. It is sealed once complete: unpack_tensors requires that."""

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
        """Writes the missing bytes from the start of `view`; returns how many it took."""
        taken = 0
        while self.missing and taken < len(view):
            part = view[taken : taken + self._size - self._written]
            written = os.pwrite(self.descriptor, part, self._written)
            taken += written
            self._written += written
        return taken

    def finish(self) -> int:
        """Seals the memfd and returns its descriptor, which the caller closes."""
        seal(self.descriptor)
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


DATAGRAMS = frozenset({Kind.MESSAGE, Kind.CARRYING, Kind.AGAIN})


class Channel:
    """One end of a machine's connection; owns its socket. `accepts`: the kinds of frames that it may receive."""

    def __init__(self, sock: ssl.SSLSocket, accepts: frozenset[Kind]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._accepts = accepts
        self._outgoing: collections.deque[_Outgoing] = collections.deque()
        self._buffer = bytearray(_CHUNK)
        self._held = bytearray()  # bytes of an incomplete header and text
        self._incoming: IncomingPayload | None = None
        self._frame: Frame | None = None  # the frame whose payload is being received
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
                yield Frame(frame.kind, frame.rank, frame.text, incoming.finish())
            else:
                yield frame

    def _take_head(self, view: memoryview) -> int:
        """Collects header and text from the start of `view`; returns how many bytes it took."""
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
        if kind in DATAGRAMS:
            decode(text, int(kind is not Kind.MESSAGE))  # raises if the message is not allowed
        self._frame = Frame(kind, rank, text)
        if kind is Kind.CARRYING:
            self._incoming = IncomingPayload(size)
        return taken

    def close(self) -> None:
        """Closes the socket; drops unsent frames and an incomplete payload."""
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

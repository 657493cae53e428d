"""How a machine joins: its first frame, and the head's word which ranks its processes are."""

from __future__ import annotations

import json
import platform
import ssl
import time
from dataclasses import dataclass
from typing import TypeVar

from ..errors import TransportError
from ..wire.protocol import MAX_MESSAGE_BYTES, VERSION
from ..wire.strict_json import from_json, parse, to_json
from .channel import HEADER, Kind

T = TypeVar("T")


@dataclass(frozen=True)
class Join:
    """Machine to head, its first frame. `devices`: of its processes by local rank, such as cuda:0; `memory`: bytes of
    each, 0 where ranks share the computer's; others as in protocol.Hello."""

    machine: str
    devices: tuple[str, ...]
    memory: tuple[int, ...]
    protocol: int
    python: str
    torch: str


@dataclass(frozen=True)
class Start:
    """Head to machine: a group begins. `ranks`: of its processes by local rank, -1 for one that is not needed."""

    epoch: int
    ranks: tuple[int, ...]


def versions() -> tuple[int, str, str]:
    """(protocol, Python, torch) of this end."""
    import torch

    return VERSION, platform.python_version(), str(torch.__version__)


def pack(value: object) -> bytes:
    return json.dumps(to_json(value), separators=(",", ":")).encode()


def unpack(text: bytes, kind: type[T]) -> T:
    """Raises TransportError."""
    try:
        return from_json(parse(text.decode()), kind, kind.__name__)
    except (ValueError, RecursionError) as error:
        raise TransportError(f"a {kind.__name__} is not valid JSON: {error}") from None


def send_first(sock: ssl.SSLSocket, kind: Kind, text: bytes = b"") -> None:
    """One frame on a connection that is no channel yet."""
    sock.sendall(HEADER.pack(kind, 0, len(text), 0) + text)


def receive_first(sock: ssl.SSLSocket, seconds: float) -> tuple[Kind, bytes]:
    """The first frame, within so many seconds however slowly it comes. Raises TransportError, OSError."""
    until = time.monotonic() + seconds
    kind, _, length, size = HEADER.unpack(_read(sock, HEADER.size, until))
    if kind not in (Kind.JOIN, Kind.WELCOME, Kind.REFUSED) or length > MAX_MESSAGE_BYTES or size:
        raise TransportError("the first frame is none that begins a connection")
    return Kind(kind), _read(sock, length, until)


def _read(sock: ssl.SSLSocket, size: int, until: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        left = until - time.monotonic()
        if left <= 0:
            raise TransportError("the first frame did not come in time")
        sock.settimeout(left)
        data = sock.recv(size - len(found))
        if not data:
            raise TransportError("the connection was closed before its first frame")
        found += data
    return bytes(found)

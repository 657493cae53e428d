"""The first frames of a connection, by which a machine joins, and the frame that assigns ranks to its processes."""

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
    """A machine's first frame to the head. `devices`: one per process in the order of local ranks, such as cuda:0;
    `memory`: bytes of each device, 0 for a CPU, whose ranks share the host's; for the others see protocol.Hello."""

    machine: str
    devices: tuple[str, ...]
    memory: tuple[int, ...]
    protocol: int
    python: str
    torch: str


@dataclass(frozen=True)
class Start:
    """The head's order to serve a group. `ranks`: one per process in the order of local ranks, -1 for an unused one."""

    epoch: int
    ranks: tuple[int, ...]


def versions() -> tuple[int, str, str]:
    """Returns this process's versions of the protocol, Python and torch."""
    import torch

    return VERSION, platform.python_version(), str(torch.__version__)


def pack(value: object) -> bytes:
    return json.dumps(to_json(value), separators=(",", ":")).encode()


def unpack(text: bytes, kind: type[T]) -> T:
    """Reads a `kind` from its JSON. Raises TransportError if it is not valid."""
    try:
        return from_json(parse(text.decode()), kind, kind.__name__)
    except (ValueError, RecursionError) as error:
        raise TransportError(f"a {kind.__name__} is not valid JSON: {error}") from None


def send_first(sock: ssl.SSLSocket, kind: Kind, text: bytes = b"") -> None:
    """Sends one frame on a connection that has no Channel yet."""
    sock.sendall(HEADER.pack(kind, 0, len(text), 0) + text)


def receive_first(sock: ssl.SSLSocket, seconds: float) -> tuple[Kind, bytes]:
    """Receives the whole first frame within `seconds`. Raises TransportError or OSError if it is late or invalid."""
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

"""The control link of one rank, and the tensor payloads that are sent with its messages.

A `Link` is one end of a socketpair(AF_UNIX, SOCK_SEQPACKET): datagrams with file descriptors, no path, no port.
A payload is a memfd that contains a safetensors file, sealed so that nothing can change it after it is sent.
The side that creates or receives a descriptor closes it: `receive` hands over descriptors, `send` leaves them open.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence

import torch
from safetensors import SafetensorError, safe_open

from ..errors import TransportError
from .protocol import MAX_MESSAGE_BYTES, Envelope, decode, encode
from .strict_json import without_repeats

MAX_DESCRIPTORS = 4  # more than any message may carry, so that an excess is seen and refused
MAX_PAYLOAD_BYTES = 8 * 1024**3  # many times a video latent with its text
MAX_HEADER_BYTES = 16 * 1024**2
MOST_BYTES = MAX_PAYLOAD_BYTES - MAX_HEADER_BYTES  # of the tensors in a payload
_SEAL_TRIES, _SEAL_PAUSE = 30, 0.02  # s; each try may itself wait 0.15 s (mm/memfd.c, memfd_wait_for_pins)
# A LoRA of all layers of a large model has some thousands of tensors, and so has a second model without a file.
MAX_TENSORS = 2**16
DTYPES = {  # safetensors' name -> torch's, for all dtypes that may cross the link
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 64  # bytes, for the first tensor in a payload, as in torch's own allocations

with contextlib.suppress(ImportError):  # on Windows, where this module must still import
    import fcntl

    _SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_INT = array.array("i").itemsize
# Too many descriptors in flight, or no kernel memory for the datagram: as transient as a full buffer.
_NO_ROOM = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)


class LinkClosed(TransportError):
    """The other end has closed. `silent`: True if it may still exist but cannot be reached."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


class LinkFull(TransportError):
    """The other end does not read; the message was not sent."""


def link_pair() -> tuple[Link, Link]:
    """Returns two connected links: the parent's and the rank's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Link(ours), Link(theirs)


class Link:
    """One end of a control link. It owns its socket; `send` is thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setblocking(False)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Link:
        """Returns the link with an inherited file descriptor."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, envelope: Envelope, descriptors: Sequence[int] = (), timeout: float = 0.0) -> None:
        """Sends one message. Raises LinkFull if it does not fit within `timeout` seconds, LinkClosed at the end."""
        self.send_encoded(encode(envelope), descriptors, timeout)

    def send_encoded(self, data: bytes, descriptors: Sequence[int] = (), timeout: float = 0.0) -> None:
        """Sends a message that is encoded once for several links, see `send`."""
        if self._try_send(data, descriptors):
            return
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            poller.poll(left * 1000)
            if self._try_send(data, descriptors):
                return
        raise LinkFull("the other end of the link does not read its messages")

    def _try_send(self, data: bytes, descriptors: Sequence[int]) -> bool:
        try:
            socket.send_fds(self._socket, [data], list(descriptors), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_ROOM:
                return False
            raise LinkClosed(f"the link is closed: {error.strerror or error}") from None
        return True

    def receive(self, timeout: float | None = None) -> tuple[Envelope, tuple[int, ...]] | None:
        """Returns the next message and its descriptors, which the caller must close; None after `timeout` seconds.

        Raises LinkClosed at end of file, TransportError for a frame that the protocol does not allow.
        """
        if not self._wait(timeout):
            return None
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                MAX_MESSAGE_BYTES + 1, socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise LinkClosed(f"the link is closed: {error.strerror or error}") from None
        descriptors = _descriptors(ancillary)
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise TransportError("a message was longer, or had more descriptors, than the link allows")
            if not data:
                raise LinkClosed("the other end closed the link")
            return decode(data, len(descriptors)), tuple(descriptors)
        except BaseException:
            close_all(descriptors)
            raise

    def _wait(self, timeout: float | None) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(None if timeout is None else timeout * 1000))

    def shut_down(self) -> None:
        """Makes both ends read end of file; the descriptor stays valid until `close`."""
        with contextlib.suppress(OSError):  # already shut down
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    # Not socket.recv_fds: up to Python 3.12 it drops its flags, so descriptors would leak into other children.
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % _INT])
    return found.tolist()


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def pack_tensors(tensors: dict[str, torch.Tensor]) -> int:
    """Returns a sealed memfd with `tensors` (any device, DTYPES) as a safetensors file; the caller closes it."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    descriptor = os.memfd_create("parallel-backend", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write_all(descriptor, memoryview(_header(on_host)))
        for tensor in on_host.values():
            write_all(descriptor, tensor.reshape(-1).view(torch.uint8).numpy().data)
        seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int) -> None:
    """Seals a memfd against all changes.

    The kernel refuses with EBUSY while it uses a page itself (swapping, moving memory), which passes: so this retries.
    """
    for tries_left in reversed(range(_SEAL_TRIES)):
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or not tries_left:
                raise
        time.sleep(_SEAL_PAUSE)


def unpack_tensors(descriptor: int, max_bytes: int = MAX_PAYLOAD_BYTES) -> dict[str, torch.Tensor]:
    """Returns the tensors in a payload, on the CPU, mapped copy-on-write; they outlive `descriptor`.

    Raises TransportError if the memfd is not sealed, is over `max_bytes`, or is no plain safetensors file.
    """
    _check_sealed(descriptor)
    _check_header(descriptor, max_bytes)
    try:
        with safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, OSError, ValueError) as error:
        raise TransportError(f"a tensor payload is not a valid safetensors file: {error}") from None


def _header(tensors: dict[str, torch.Tensor]) -> bytes:
    """Returns the header of a safetensors file with these tensors, in this order.

    safetensors' own `save` first copies all of them: 30 of 36 ms for the latent and prompt of a video (measured).
    """
    entries, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _check_sealed(descriptor: int) -> None:
    """Raises TransportError for an unsealed file: while mapped it could change, or shrink and kill us with SIGBUS."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise TransportError("a tensor payload is not a memfd") from None
    if seals & _SEALS != _SEALS:
        raise TransportError("a tensor payload is not sealed against changes")


def _check_header(descriptor: int, max_bytes: int) -> None:
    size = os.fstat(descriptor).st_size
    if not 8 <= size <= max_bytes:
        raise TransportError(f"a tensor payload has {size} bytes; 8 to {max_bytes} are allowed")
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise TransportError(f"a tensor payload of {size} bytes claims a header of {length}")
    try:
        header = json.loads(os.pread(descriptor, length, 8), object_pairs_hook=without_repeats)
        entries = [(name, entry["dtype"]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise TransportError("the header of a tensor payload is not valid") from None
    if len(entries) > MAX_TENSORS:
        raise TransportError(f"a tensor payload has {len(entries)} tensors; the limit is {MAX_TENSORS}")
    for name, dtype in entries:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise TransportError(f"tensor {name!r} in a payload has dtype {dtype!r}, which is not allowed")

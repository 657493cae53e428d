"""The link and its tensor payloads: round trips, and every kind of hostile frame."""

import errno
import json
import os
import socket
import struct
import time

import pytest
import torch
from safetensors.torch import save

from parallel_backend.errors import TransportError
from parallel_backend.wire import transport
from parallel_backend.wire.protocol import Cancel, Envelope, Failed, Progress, encode
from parallel_backend.wire.transport import (
    DTYPES,
    Link,
    LinkClosed,
    LinkFull,
    link_pair,
    pack_tensors,
    unpack_tensors,
)

fcntl = pytest.importorskip("fcntl")
pytestmark = pytest.mark.usefixtures("no_leaks")

HELLO = Envelope(1, 0, Progress(step=1, steps=2, seconds=0.5))


@pytest.fixture
def links():
    pair = link_pair()
    yield pair
    for link in pair:
        link.close()


@pytest.fixture
def raw():
    """Yields a raw socket and the link at its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(theirs)
    yield ours, link
    ours.close()
    link.close()


@pytest.fixture
def descriptors():
    opened = []
    yield opened
    for descriptor in opened:
        os.close(descriptor)


def memfd(data, seals=None):
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    if seals is None:
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def file_with_header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_payload_keeps_every_bit_of_every_dtype(dtype, descriptors):
    values = torch.arange(256, dtype=torch.uint8)
    tensor = values.bool() if dtype == torch.bool else values.view(dtype)
    descriptors.append(pack_tensors({"a": tensor, "scalar": tensor[0], "empty": tensor[:0]}))
    received = unpack_tensors(descriptors[0])
    assert received["a"].dtype == dtype
    assert received["a"].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()
    assert received["scalar"].shape == () and received["empty"].shape == (0,)


def test_a_payload_takes_tensors_that_are_strided_or_share_memory(descriptors):
    base = torch.arange(12.0).reshape(3, 4)
    descriptors.append(pack_tensors({"turned": base.T, "part": base[:, 1:3], "again": base}))
    received = unpack_tensors(descriptors[0])
    assert torch.equal(received["turned"], base.T)
    assert torch.equal(received["part"], base[:, 1:3])
    assert torch.equal(received["again"], base)


def test_tensors_outlive_the_descriptor_and_do_not_share_writes():
    descriptor = pack_tensors({"a": torch.zeros(5)})
    first, second = unpack_tensors(descriptor)["a"], unpack_tensors(descriptor)["a"]
    os.close(descriptor)
    first += 1
    assert first.tolist() == [1] * 5
    assert second.tolist() == [0] * 5


def test_a_payload_crosses_the_link(links, descriptors):
    descriptors.append(pack_tensors({"a": torch.ones(3)}))
    links[0].send(HELLO, descriptors)
    envelope, received = links[1].receive(1.0)
    descriptors.extend(received)
    assert envelope == HELLO
    assert unpack_tensors(received[0])["a"].tolist() == [1, 1, 1]
    assert not os.get_inheritable(received[0])


@pytest.mark.parametrize(
    "seals",
    [0, fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE],
    ids=["none", "write", "may-be-unsealed"],
)
def test_a_payload_that_could_still_change_is_refused(seals, descriptors):
    descriptors.append(memfd(save({"a": torch.ones(3)}), seals))
    with pytest.raises(TransportError, match="sealed"):
        unpack_tensors(descriptors[0])


def test_a_descriptor_that_is_no_memfd_is_refused(descriptors):
    descriptors.extend(os.pipe())
    with pytest.raises(TransportError, match="memfd"):
        unpack_tensors(descriptors[0])


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "bytes"),
        (b"\x00" * 7, "bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "header of"),
        (struct.pack("<Q", 3) + b"{}", "header of"),
        pytest.param(struct.pack("<Q", 2) + b"{}" * 50_000, "valid safetensors", id="rest"),
        (file_with_header(b"x" * 100), "not valid"),
        pytest.param(file_with_header(b"[" * 50_000), "not valid", id="depth"),
        (file_with_header({"a": F32}), "valid safetensors"),
        (file_with_header({"a": F32}, bytes(9)), "valid safetensors"),
        (file_with_header({"a": {**F32, "shape": [3]}}, bytes(8)), "valid safetensors"),
        (file_with_header({"a": {**F32, "shape": [2**62, 8]}}, bytes(8)), "valid safetensors"),
        (file_with_header({"a": {**F32, "data_offsets": [0, 2**40]}}, bytes(8)), "valid safetensors"),
        (file_with_header({"a": F32, "b": F32}, bytes(8)), "valid safetensors"),
        (
            file_with_header({"a": {"dtype": "U64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
            "not allowed",
        ),
        (file_with_header({"a": {**F32, "dtype": ["F32"]}}, bytes(8)), "not allowed"),
        pytest.param(
            file_with_header(
                {str(i): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(2**16 + 1)}
            ),
            "65537 tensors",
            id="tensors",  # the default id would have four megabytes
        ),
        (file_with_header({"a": 3}), "not valid"),
        (
            file_with_header(
                b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
                b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
            ),
            "not valid",
        ),
    ],
)
def test_a_payload_whose_header_lies_is_refused(data, reason, descriptors):
    descriptors.append(memfd(data))
    with pytest.raises(TransportError, match=reason):
        unpack_tensors(descriptors[0])


def test_a_payload_over_the_limit_is_refused_before_it_is_read(descriptors):
    descriptors.append(pack_tensors({"a": torch.zeros(1000)}))
    with pytest.raises(TransportError, match="2000 are allowed"):
        unpack_tensors(descriptors[0], max_bytes=2000)


def test_a_datagram_that_is_too_long_is_refused_and_the_link_goes_on(raw):
    ours, link = raw
    ours.send(b" " * (transport.MAX_MESSAGE_BYTES + 100))
    ours.send(encode(HELLO))
    with pytest.raises(TransportError, match="longer"):
        link.receive(1.0)
    assert link.receive(1.0) == (HELLO, ())


def test_descriptors_of_a_refused_message_are_closed(raw, descriptors):
    ours, link = raw
    descriptors.append(pack_tensors({"a": torch.zeros(1)}))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for count in (1, 3, 10):  # a Cancel takes none; the link has no room for ten
        socket.send_fds(ours, [encode(Envelope(1, 1, Cancel()))], descriptors * count)
        with pytest.raises(TransportError):
            link.receive(1.0)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_waiting_ends_after_the_time_allowed(links):
    begun = time.monotonic()
    assert links[0].receive(0.05) is None
    assert 0.05 <= time.monotonic() - begun < 30.0


def test_the_end_of_the_other_side_is_told_apart_from_silence(links):
    links[0].send(HELLO)
    links[0].close()
    assert links[1].receive(1.0) == (HELLO, ())
    with pytest.raises(LinkClosed):
        links[1].receive(1.0)
    with pytest.raises(LinkClosed):
        links[1].send(HELLO)


def test_what_was_sent_is_still_read_after_shut_down(links):
    links[0].send(HELLO)
    links[1].shut_down()
    assert links[1].receive(1.0) == (HELLO, ())
    with pytest.raises(LinkClosed):
        links[1].receive(1.0)


def test_a_full_link_refuses_at_once_and_waits_only_as_long_as_told(links):
    message = Envelope(1, 1, Failed(kind="RequestError", message="x" * 30_000, detail=""))
    with pytest.raises(LinkFull):
        for _ in range(100):
            links[0].send(message)
    begun = time.monotonic()
    with pytest.raises(LinkFull):
        links[0].send(message, timeout=0.1)
    assert 0.1 <= time.monotonic() - begun < 30.0
    assert links[1].receive(1.0) is not None
    links[0].send(message, timeout=0.1)


@pytest.mark.parametrize(("refusals", "code"), [(2, errno.EBUSY), (1000, errno.EBUSY), (1, errno.EPERM)])
def test_a_page_that_the_kernel_has_hold_of_for_a_moment_costs_no_payload(monkeypatch, refusals, code):
    real, asked = fcntl.fcntl, []

    def refuses(descriptor, command, *argument):
        if command == fcntl.F_ADD_SEALS:
            asked.append(descriptor)
            if len(asked) <= refusals:
                raise OSError(code, os.strerror(code))
        return real(descriptor, command, *argument)

    monkeypatch.setattr(fcntl, "fcntl", refuses)
    monkeypatch.setattr(transport, "_SEAL_PAUSE", 0.0)
    if refusals == 2:
        descriptor = pack_tensors({"x": torch.arange(3)})
        assert unpack_tensors(descriptor)["x"].tolist() == [0, 1, 2] and len(asked) == 3
        os.close(descriptor)
        return
    with pytest.raises(OSError, match=os.strerror(code)):  # `no_leaks` checks for a descriptor left open
        pack_tensors({"x": torch.arange(3)})
    assert len(asked) == (1 if code == errno.EPERM else transport._SEAL_TRIES)

"""Inputs that try to break the parsers of frames and files. A parser may only return a result or raise a refusal.

tests/wire/test_hostile_bytes.py tries a few hundred of each, benchmarks/faults.py as many thousands as requested.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from parallel_backend.errors import CheckpointError, ParallelError, RequestError, TransportError
from parallel_backend.models.checkpoint import read_header
from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.requests import LoopState
from parallel_backend.wire.heartbeat import MOST_RANKS, PAGE_BYTES, Page, find_laggard, in_words
from parallel_backend.wire.payloads import sample_request, sample_tensors, state_tensors, take_state
from parallel_backend.wire.protocol import Envelope, Failed, Progress, RunJob, decode, encode
from parallel_backend.wire.transport import seal, unpack_tensors
from scripted import scripted_request, two_ranks

MESSAGE = RunJob(two_ranks(), 1, previews=True, cfg=1.0)
FRAMES = [
    encode(Envelope(1, 2, MESSAGE)),
    encode(Envelope(1, 2, Progress(step=1, steps=2, seconds=0.5))),
    encode(Envelope(1, 2, Failed(kind="RequestError", message="no", detail="none"))),
]
STATE = LoopState(2, 0, torch.zeros(2, 1, 1, 4, 6, 6))
PAYLOADS = [
    save(sample_tensors(scripted_request()) | state_tensors(STATE)),
    save({"x": torch.zeros(1, 4, 6, 6), "sigma": torch.zeros(1)}),
]
# Wrong values for lengths, shapes and offsets.
_LIES = [0, 1, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
_WORDS = [b"NaN", b"Infinity", b"-1", b"1e999", b"null", b"{}", b"[]", b'"', b"\\u0000", b"\xff", b"[" * 500]


class Touches:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def damaged(originals: list[bytes]) -> st.SearchStrategy[bytes]:
    """Returns a strategy for one of `originals` with bytes changed, cut, doubled or replaced, or for random bytes."""
    change = st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 2**16), st.integers(0, 255)),
        st.tuples(st.just("cut"), st.integers(0, 2**16), st.integers(1, 64)),
        st.tuples(st.just("double"), st.integers(0, 2**16), st.integers(1, 64)),
        st.tuples(st.just("word"), st.integers(0, 2**16), st.sampled_from(_WORDS)),
        st.tuples(st.just("number"), st.integers(0, 2**16), st.sampled_from(_LIES)),
        st.tuples(st.just("length"), st.just(0), st.sampled_from(_LIES)),
    )
    changed = st.builds(_change, st.sampled_from(originals), st.lists(change, min_size=1, max_size=4))
    return st.one_of(changed, st.binary(max_size=200))


def _change(data: bytes, changes: list[tuple]) -> bytes:
    for kind, place, value in changes:
        at = place % max(len(data), 1)
        if kind == "flip":
            data = data[:at] + bytes([value]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + value :]
        elif kind == "double":
            data = data[: at + value] + data[at : at + value] + data[at + value :]
        elif kind == "word":
            data = data[:at] + value + data[at + 1 :]
        elif kind == "number":  # replaces the digits at this place
            end = at
            while end < len(data) and data[end : end + 1].isdigit():
                end += 1
            data = data[:at] + str(value).encode() + data[end:]
        elif kind == "length":
            data = struct.pack("<Q", value) + data[8:]
    return data


def parse_frame(data: bytes) -> None:
    for payloads in (0, 1):
        _allowing(TransportError, decode, data, payloads)


def parse_payload(data: bytes) -> None:
    """Reads the bytes as a rank and ComfyUI's process read the tensors of a message."""
    descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, data)
        seal(descriptor)
        tensors = _allowing(TransportError, unpack_tensors, descriptor)
    finally:
        os.close(descriptor)
    if tensors is not None:
        _allowing((TransportError, RequestError), lambda: (take_state(tensors), sample_request(1.0, tensors)))


def parse_file(data: bytes, path: Path) -> None:
    """Reads the bytes as a checkpoint file."""
    path.write_bytes(data)
    _allowing(CheckpointError, read_header, path)
    _allowing(CheckpointError, inspect_flux, path)


def parse_heartbeat(data: bytes) -> None:
    page = Page()
    try:
        os.pwrite(page.descriptor, data[:PAGE_BYTES], 0)
        notes = [page.read(rank) for rank in range(MOST_RANKS)]
        in_words(notes, find_laggard(notes) or 0)
    finally:
        page.close()


def _allowing(refusals: type[ParallelError] | tuple, call: Callable, *arguments):
    try:
        return call(*arguments)
    except refusals as error:
        assert len(str(error)) < 2000, "a refusal is a sentence"
        json.dumps(str(error))
        return None

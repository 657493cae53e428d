"""A GGUF header is never read beyond the file's bytes; a damaged or hostile one is refused by name and reason."""

from __future__ import annotations

import os
import struct
import tempfile
import tracemalloc
from pathlib import Path

import gguf
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_files import finish
from parallel_backend.errors import CheckpointError
from parallel_backend.models.gguf_file import read_header, read_tensors

_SHAPE = "comfy.gguf.orig_shape."


def file_bytes(shape: list[int] | None = None, alignment: int | None = None) -> bytes:
    """Returns a file of two plain tensors, a packed one and various metadata. `shape`: the first one's true shape."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "valid.gguf"
        writer = gguf.GGUFWriter(str(path), "flux")
        if alignment:
            writer.add_custom_alignment(alignment)
        writer.add_bool("a.flag", True)
        writer.add_float64("a.number", 0.5)
        writer.add_array("a.list", [1.0, 2.0])
        writer.add_array("a.words", ["one", "two"])
        if shape is not None:
            writer.add_array(_SHAPE + "first", shape)
        writer.add_tensor("first", numpy.arange(12, dtype=numpy.float32).reshape(3, 4))
        writer.add_tensor("second", numpy.ones((2, 2), numpy.float16))
        packed = gguf.quants.quantize(numpy.ones((2, 64), numpy.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        return finish(writer, path).read_bytes()


VALID = file_bytes()


def header(tensors: int = 0, fields: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def field(key: str, kind: int, rest: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + rest


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name.encode() + sizes + struct.pack("<IQ", kind, offset)


def holding(*tensors: bytes) -> bytes:
    return header(len(tensors), 0, b"".join(tensors) + bytes(99))


def noting(key: str, kind: int, rest: bytes) -> bytes:
    """Returns a file with one field of metadata."""
    return header(0, 1, field(key, kind, rest))


def aligned(kind: int, rest: bytes) -> bytes:
    return header(1, 1, field("general.alignment", kind, rest) + tensor("w", (4,)))


@pytest.mark.parametrize("alignment", [None, 64])
def test_the_header_says_what_the_packages_reader_finds(tmp_path, alignment):
    path = tmp_path / "valid.gguf"
    path.write_bytes(file_bytes(alignment=alignment))
    expected = {found.name: found for found in gguf.GGUFReader(path).tensors}
    found = read_tensors(path)
    assert {one.name for one in found} == set(expected)
    for one in found:
        theirs = expected[one.name]
        assert (one.kind, one.shape) == (theirs.tensor_type.name, tuple(map(int, reversed(theirs.shape))))
        assert one.data.tobytes() == theirs.data.tobytes()


def test_a_noted_shape_is_the_true_one(tmp_path):
    path = tmp_path / "valid.gguf"
    path.write_bytes(file_bytes(shape=[2, 2, 3]))
    assert read_header(path).tensors["first"].shape == (2, 2, 3)


_HUGE = 2**40
HOSTILE = {
    "an array of 2^40 numbers": (noting("a", 9, struct.pack("<IQ", 0, _HUGE) + bytes(4096)), "announced"),
    "an array of 2^64 - 1": (noting("a", 9, struct.pack("<IQ", 12, 2**64 - 1)), "announced"),
    "an array of 2^40 texts": (noting("a", 9, struct.pack("<IQ", 8, _HUGE)), "announced"),
    "a text of 2^40 bytes": (noting("a", 8, struct.pack("<Q", _HUGE)), "announced"),
    "2^40 fields": (header(0, _HUGE), "announced"),
    "2^40 tensors": (header(_HUGE, 0), "announced"),
    "an array of arrays": (noting("a", 9, struct.pack("<IQ", 9, 1) + bytes(99)), "unknown type 9"),
    "an unknown type": (noting("a", 99, bytes(99)), "unknown type 99"),
    "an alignment of 0": (aligned(4, bytes(4)), "its alignment"),
    "an alignment of 3": (aligned(4, struct.pack("<I", 3)), "its alignment"),
    "an alignment in words": (aligned(8, struct.pack("<Q", 0)), "is no number"),
    "2^31 dimensions": (header(1, 0, struct.pack("<Q", 1) + b"w" + struct.pack("<I", 2**31)), "announced"),
    "nine dimensions": (holding(tensor("w", (1,) * 9)), "9 dimensions"),
    "a tensor without rows": (holding(tensor("w", (4, 0))), "impossible shape"),
    "half a block": (holding(tensor("w", (33,), kind=8)), "impossible shape"),
    "a tensor of 2^60": (holding(tensor("w", (2**30, 2**30))), "beyond the end"),
    "an offset of 2^63": (holding(tensor("w", (1,), offset=2**63)), "beyond the end"),
    "tensors over each other": (holding(tensor("v", (4,)), tensor("w", (4,), offset=8)), "lies over another"),
    "one name twice": (holding(tensor("w", (4,)), tensor("w", (4,), offset=32)), "occurs twice"),
    "a name that is no text": (holding(struct.pack("<Q", 2) + b"\xff\xfe"), "not valid UTF-8"),
    "a negative true shape": (file_bytes(shape=[-3, -4]), "impossible shape"),
    "a true shape of another size": (file_bytes(shape=[5]), "impossible shape"),
    "a true shape of nine": (file_bytes(shape=[12] + [1] * 8), "is no number"),
    "an unknown format": (holding(tensor("w", (4,), kind=77)), "in the format number 77"),
    "another version": (header(version=9), "its version is 9"),
    "no tensors": (header(), "holds no tensors"),
    "nothing": (b"", "it is empty"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_is_refused_at_once(tmp_path, what):
    content, reason = HOSTILE[what]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as refusal:
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(refusal.value)
    assert message.startswith("model.gguf is refused: ")
    assert reason in message
    assert str(tmp_path) not in message
    assert len(message) < 500
    assert peak < 4 * 2**20


def test_a_path_that_holds_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")  # opening it would wait for a writer
    (tmp_path / "folder.gguf").mkdir()
    for name, reason in (
        ("absent.gguf", "No such file"),
        ("pipe.gguf", "not a regular file"),
        ("folder.gguf", "not a regular file"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            read_header(tmp_path / name)


def judge(content: bytes) -> None:
    """Checks that `content` raises CheckpointError, or gives tensors that lie within the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.gguf"
        path.write_bytes(content)
        try:
            tensors = read_tensors(path)
        except CheckpointError as error:
            assert "fuzzed.gguf" in str(error)
            assert folder not in str(error)
            return
        assert 0 < sum(one.data.nbytes for one in tensors) <= len(content)


@settings(max_examples=300)
@given(st.binary(max_size=300), st.integers(0, 4), st.integers(0, 4))
def test_random_bytes_never_raise_anything_else(content, tensors, fields):
    judge(content)
    judge(header(tensors, fields, content))


_CHANGE = st.tuples(st.integers(0, len(VALID) - 1), st.binary(min_size=1, max_size=9))


@settings(max_examples=500)
@given(st.lists(_CHANGE, min_size=1, max_size=4))
def test_a_file_with_bytes_changed_never_raises_anything_else(changes):
    content = bytearray(VALID)
    for position, new in changes:
        content[position : position + len(new)] = new
    judge(bytes(content))

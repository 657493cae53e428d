"""Reads GGUF files: tensors in the formats of llama.cpp, under the names of the original model.

The header is parsed here because the reader of the package `gguf` trusts a file's counts: an array that claims 2^40
elements keeps it busy for hours. The sizes of formats come from that package.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Imports no torch.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .checkpoint import MAX_HEADER_BYTES, Header, TensorEntry, check_name, open_regular, refused
from .dtypes import GGUF

if TYPE_CHECKING:
    import numpy

SUFFIX = ".gguf"
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # formats without packing, by torch's names
# Metadata with the shape of a tensor before it was flattened to ggml's four dimensions.
_TRUE_SHAPE = "comfy.gguf.orig_shape."
_ALIGNMENT, _DEFAULT_ALIGNMENT = "general.alignment", 32  # bytes
_MAX_DIMENSIONS = 8
_VERSIONS = (2, 3)
# Metadata types by number, as format characters of `struct`; a bool is a byte.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Texts of an array must be skipped one by one. The largest vocabularies have 262,144; diffusion models have none.
_MAX_TEXTS = 1_000_000


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor. `kind`: its format in ggml's spelling (Q4_K, F16, …); `data`: its mapped bytes, uint8."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: numpy.ndarray[Any, Any]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix.lower() == SUFFIX


def read_tensors(path: str | os.PathLike[str]) -> list[GGUFTensor]:
    """Lists all tensors without reading their values. Raises CheckpointError with the file's name, the reason and the
    remedy."""
    name = Path(path).name
    check_name(path)
    try:
        import gguf  # noqa: F401  (sizes of formats)
    except ImportError:
        raise CheckpointError(
            f"{name} is a GGUF file, which needs the Python package gguf, and that is not installed. Install it where "
            f"ComfyUI's Python has its packages (pip install gguf) and restart ComfyUI."
        ) from None
    import numpy

    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise refused(name, "it is empty")
            data = numpy.memmap(file, mode="r")
    except OSError as error:
        raise refused(name, f"it cannot be read ({error.strerror or error})") from None
    try:
        return list(_tensors(data, name))
    except _Damaged as error:
        raise refused(name, f"it is no whole GGUF file ({error})") from None


def read_header(path: str | os.PathLike[str]) -> Header:
    """Returns the header, with packed formats in ggml's spelling; see checkpoint.read_header."""
    entries, end = {}, 0
    for tensor in read_tensors(path):
        size = int(tensor.data.nbytes)
        entries[tensor.name] = TensorEntry(tensor.kind, tensor.shape, end, end + size)
        end += size
    return Header(path=os.fspath(path), tensors=entries, file_bytes=Path(path).stat().st_size)


class _Damaged(Exception):
    """The header contradicts itself or the size of the file."""


class _Cursor:
    """Reads a header from its start, up to `limit` bytes. Rejects counts that need more bytes than are left."""

    def __init__(self, data: numpy.ndarray[Any, Any], limit: int) -> None:
        self._data, self._limit = data, limit
        self.position = 0

    def take(self, size: int) -> bytes:
        """Returns the next `size` bytes."""
        begin = self.position
        self.skip(size)
        return bytes(self._data[begin : self.position])

    def skip(self, size: int) -> None:
        left = self._limit - self.position
        if size > left:
            raise _Damaged(f"{size} bytes are announced where {left} are left of the header")
        self.position += size

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def count(self, form: str, least: int) -> int:
        """Reads the number of entries that follow; each has `least` bytes or more."""
        found: int = self.number(form)
        left = self._limit - self.position
        if found > left // least:
            raise _Damaged(f"{found} entries are announced where {left} bytes are left of the header")
        return found

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise _Damaged("a name is not valid UTF-8") from None


def _tensors(data: numpy.ndarray[Any, Any], name: str) -> Iterator[GGUFTensor]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    cursor = _Cursor(data, min(len(data), MAX_HEADER_BYTES))
    if cursor.take(4) != b"GGUF":
        raise _Damaged("it does not begin with GGUF")
    if (version := cursor.number("I")) not in _VERSIONS:
        raise _Damaged(f"its version is {version}, and {_VERSIONS[0]} and {_VERSIONS[1]} are known")
    tensors = cursor.count("Q", least=24)
    fields = dict(_fields(cursor, cursor.count("Q", least=13)))
    places = [_place(cursor) for _ in range(tensors)]
    if not places:
        raise refused(name, "it holds no tensors")
    alignment = fields.get(_ALIGNMENT, (_DEFAULT_ALIGNMENT,))[0]
    if alignment < 1 or alignment & (alignment - 1):
        raise _Damaged(f"its alignment is {alignment}, which is no power of two")
    begin = -(-cursor.position // alignment) * alignment
    sizes = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    seen: set[str] = set()
    end = begin
    for key, stored, number, offset in sorted(places, key=lambda place: place[3]):
        kind, values, size = sizes.get(number, (f"number {number}", 1, 1))
        if kind not in PLAIN and kind not in GGUF:
            raise CheckpointError(
                f"{name} is refused: {key[:80]} is in the format {kind}, which the devices do not compute "
                f"with. Choose a file in one of {', '.join(GGUF)}."
            )
        shape = fields.get(_TRUE_SHAPE + key, stored)
        if (
            len(shape) > _MAX_DIMENSIONS
            or min((*stored, *shape), default=1) < 1
            or math.prod(shape) != math.prod(stored)
            or (stored[-1] if stored else 1) % values
        ):
            raise refused(name, f"tensor {key[:80]!r} has an impossible shape")
        if key in seen:
            raise _Damaged(f"{key[:80]!r} occurs twice")
        seen.add(key)
        nbytes = math.prod(stored) // values * size
        if begin + offset < end or begin + offset + nbytes > len(data):
            raise _Damaged(f"tensor {key[:80]!r} lies over another or beyond the end of the file")
        end = begin + offset + nbytes
        yield GGUFTensor(key, kind, shape, data[begin + offset : end])


def _fields(cursor: _Cursor, count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the metadata that is used here and skips the rest."""
    for _ in range(count):
        key, kind = cursor.text(), cursor.number("I")
        is_used = key == _ALIGNMENT or key.startswith(_TRUE_SHAPE)
        found = tuple(_values(cursor, kind, keep=is_used))
        if is_used:
            if not found or not all(type(value) is int for value in found):
                raise _Damaged(f"{key[:80]!r} is no number")
            yield key, found


def _values(cursor: _Cursor, kind: int, *, keep: bool) -> Iterator[Any]:
    """Yields the numbers of one value if `keep`, else skips it."""
    count = 1
    if kind == _ARRAY:
        kind = cursor.number("I")
        form = _SCALARS.get(kind)
        count = cursor.count("Q", least=8 if form is None else struct.calcsize("<" + form))
    if kind == _STRING:
        if count > _MAX_TEXTS:
            raise _Damaged(f"a list of {count} texts, and at most {_MAX_TEXTS} are read")
        for _ in range(count):
            cursor.skip(cursor.number("Q"))
    elif kind not in _SCALARS:
        raise _Damaged(f"metadata of an unknown type {kind}")
    elif keep and count <= _MAX_DIMENSIONS:
        yield from (cursor.number(_SCALARS[kind]) for _ in range(count))
    else:
        cursor.skip(count * struct.calcsize("<" + _SCALARS[kind]))


def _place(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Reads (name, shape, number of its format, offset in bytes) of one tensor."""
    name, dimensions = cursor.text(), cursor.count("I", least=8)
    if dimensions > _MAX_DIMENSIONS:
        raise _Damaged(f"{name[:80]!r} has {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))
    return name, tuple(reversed(shape)), cursor.number("I"), cursor.number("Q")

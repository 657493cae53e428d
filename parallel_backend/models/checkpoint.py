"""Reads and checks the header of a safetensors file, so that a hostile or damaged file is refused before it is used.

The format: 8 bytes header length (little endian), a JSON object `name -> {dtype, shape, data_offsets}`, then the data
without holes (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..errors import CheckpointError
from ..wire.strict_json import without_repeats

# The limit of the safetensors library itself.
MAX_HEADER_BYTES = 100_000_000
_DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `dtype` in the format's spelling (BF16, F8_E4M3, …); `begin`, `end` in bytes of data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """All tensors of a file by name, and its metadata. `file_bytes`: size of the whole file."""

    path: str
    tensors: dict[str, TensorEntry]
    file_bytes: int
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return Path(self.path).name


def read_header(path: str | os.PathLike[str]) -> Header:
    """Returns the checked header of `path`. Raises CheckpointError with the file's name, the reason and the remedy."""
    name = Path(path).name
    check_name(path)
    try:
        with open_regular(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            start = file.read(8)
            header_bytes = int.from_bytes(start, "little")
            if len(start) < 8 or header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise refused(name, _what_it_is(start, file_bytes))
            text = file.read(header_bytes)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise refused(name, f"it cannot be read ({reason})") from None
    entries, metadata = _parse(name, text)
    _check_layout(name, entries, data_bytes=file_bytes - 8 - header_bytes)
    return Header(os.fspath(path), entries, file_bytes, metadata)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file of weights to read. Raises CheckpointError for a folder, pipe or device, which could block for ever.
    Raises OSError if it cannot be opened."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise refused(Path(path).name, "it is not a regular file")


def check_name(path: str | os.PathLike[str]) -> None:
    """Raises CheckpointError for a path that is not valid UTF-8: the libraries that read weights need it."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        name = Path(path).name.encode(errors="backslashreplace").decode()
        raise CheckpointError(
            f"{name} is refused: the name of the file or of a folder around it is not valid UTF-8. Rename it."
        ) from None


def refused(name: str, reason: str) -> CheckpointError:
    """Returns the error for a file that is damaged or of an unsupported kind."""
    return CheckpointError(f"{name} is refused: {reason}. Download the file again, or choose another one.")


def _what_it_is(start: bytes, file_bytes: int) -> str:
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return "it is a PyTorch pickle (.ckpt, .pt), which can run code, renamed to .safetensors"
    if start[:4] == b"GGUF":
        return "it is a GGUF file, which needs another loader"
    if file_bytes < 8:
        return f"it is truncated ({file_bytes} bytes)"
    return (
        f"its header claims {int.from_bytes(start, 'little')} bytes and the file has {file_bytes}: it is truncated or "
        f"not a safetensors file"
    )


def _parse(name: str, text: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise refused(name, f"its header is not valid JSON ({str(error)[:80]})") from None
    if not isinstance(content, dict):
        raise refused(name, "its header is not a JSON object")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refused(name, "its metadata is not a table of text")
    if not content:
        raise refused(name, "it holds no tensors")
    return {key: _entry(name, key, value) for key, value in content.items()}, metadata


def _entry(name: str, key: str, value: object) -> TensorEntry:
    """Checks one tensor: fields, dtype, whole non-negative numbers, and size = shape x dtype."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise refused(name, f"the entry of tensor {key[:80]!r} is malformed")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise refused(name, f"tensor {key[:80]!r} has the unsupported dtype {str(dtype)[:20]!r}")
    whole = all(
        isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
        for numbers in (shape, offsets)
    )
    if not whole or len(offsets) != 2 or len(shape) > 8:
        raise refused(name, f"tensor {key[:80]!r} has an impossible shape or position")
    begin, end = offsets
    if end - begin != math.prod(shape) * _DTYPE_BYTES[dtype]:
        raise refused(
            name, f"tensor {key[:80]!r} of shape {shape} does not fit the {end - begin} bytes it is given"
        )
    return TensorEntry(dtype, tuple(shape), begin, end)


def _check_layout(name: str, entries: dict[str, TensorEntry], data_bytes: int) -> None:
    """Raises CheckpointError unless the tensors fill the data without holes and overlaps."""
    position = 0
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise refused(name, f"tensor {key[:80]!r} overlaps another or leaves a hole")
        position = entry.end
    if position > data_bytes:
        raise refused(
            name, f"it is truncated: {position} bytes of tensors are announced, {data_bytes} are there"
        )
    if position < data_bytes:
        raise refused(name, f"{data_bytes - position} bytes follow its last tensor")

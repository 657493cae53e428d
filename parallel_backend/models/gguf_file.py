"""GGUF files as what they hold: tensors in the formats of llama.cpp, named as the original model names them.

The package `gguf` reads them (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Imports no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .checkpoint import Header, TensorEntry, check_name
from .dtypes import GGUF

if TYPE_CHECKING:
    import numpy

SUFFIX = ".gguf"
# Formats of whole numbers of bytes per value, by torch's spelling of them in a safetensors file.
PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
# Where a file notes the shape that a tensor had before it was flattened for ggml's four dimensions.
_TRUE_SHAPE = "comfy.gguf.orig_shape."
_MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: `kind`, its format in ggml's spelling (Q4_K, F16, …); `data`: the bytes, mapped; uint8."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: numpy.ndarray[Any, Any]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix.lower() == SUFFIX


def read_tensors(path: str | os.PathLike[str]) -> list[GGUFTensor]:
    """All tensors, none of which is read. Raises CheckpointError with the file's name, the reason and the remedy."""
    name = Path(path).name
    check_name(path)
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CheckpointError(
            f"{name} is a GGUF file, which the Python package gguf reads, and that is not installed. Install it where "
            f"ComfyUI's Python has its packages (pip install gguf) and restart ComfyUI."
        ) from None
    try:
        return list(_tensors(GGUFReader(os.fspath(path)), name))
    except CheckpointError:
        raise
    except OSError as error:
        raise _refused(name, f"it cannot be read ({error.strerror or error})") from None
    except Exception as error:  # the reader checks little: whatever a damaged header makes of it
        raise _refused(
            name, f"it is no whole GGUF file ({type(error).__name__}: {str(error)[:80]})"
        ) from None


def _tensors(reader: Any, name: str) -> Iterator[GGUFTensor]:
    if not reader.tensors:
        raise _refused(name, "it holds no tensors")
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind not in PLAIN and kind not in GGUF:
            raise CheckpointError(
                f"{name} is refused: {tensor.name[:80]} is in the format {kind}, which the devices do not compute "
                f"with. Choose a file in one of {', '.join(GGUF)}."
            )
        stored = tuple(int(size) for size in reversed(tensor.shape))
        noted = reader.fields.get(_TRUE_SHAPE + tensor.name)
        shape = stored if noted is None else tuple(int(noted.parts[index][0]) for index in noted.data)
        if len(shape) > _MOST_DIMENSIONS or math.prod(shape) != math.prod(stored):
            raise _refused(name, f"tensor {tensor.name[:80]!r} has an impossible shape")
        data = tensor.data.reshape(-1).view("uint8")
        if data.nbytes != tensor.n_bytes:
            raise _refused(name, f"tensor {tensor.name[:80]!r} does not fit the bytes it is given")
        yield GGUFTensor(tensor.name, kind, shape, data)


def read_header(path: str | os.PathLike[str]) -> Header:
    """As checkpoint.read_header: packed formats are in ggml's spelling."""
    entries, end = {}, 0
    for tensor in read_tensors(path):
        size = int(tensor.data.nbytes)
        entries[tensor.name] = TensorEntry(tensor.kind, tensor.shape, end, end + size)
        end += size
    return Header(path=os.fspath(path), tensors=entries, file_bytes=Path(path).stat().st_size)


def _refused(name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{name} is refused: {reason}. Download the file again, or choose another one.")

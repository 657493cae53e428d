"""Safetensors files made by hand: any header over any data, and true shapes over a hole that takes no disk."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}


def file_bytes(header: object, data: bytes = b"") -> bytes:
    """Returns a file's bytes: `header` (bytes unchanged, anything else as JSON) and `data`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_sparse(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16", dtypes: dict[str, str] | None = None
) -> Path:
    """Writes a valid file of zeros with these tensors. `dtypes`: exceptions from `dtype`, by tensor name."""
    header, position = {}, 0
    for key, shape in shapes.items():
        stored = (dtypes or {}).get(key, dtype)
        end = position + math.prod(shape) * _BYTES[stored]
        header[key] = {"dtype": stored, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    path.write_bytes(file_bytes(header))
    os.truncate(path, path.stat().st_size + position)
    return path

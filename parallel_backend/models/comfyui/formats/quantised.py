"""Checks the quantised layers that a safetensors file declares, so that a damaged file is refused before ranks read it.

ComfyUI stores a layer's format as JSON next to its weight (`NAME.comfy_quant`), or for all layers in the metadata
(comfy/utils.convert_old_quants). Scales are separate tensors. Imports neither torch nor comfy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from ...checkpoint import Header, TensorEntry, open_regular, refused

_NOTE = ".comfy_quant"
METADATA = "_quantization_metadata"
# Files from before ComfyUI 0.4: one marker tensor, and a scale for each fp8 weight.
_OLD_MARK, _OLD_SCALE = "scaled_fp8", ".scale_weight"
_MAX_NOTE_BYTES = 65_536  # real ones have 20 to 100
_INTEGERS = {"BOOL", "I16", "U16", "I32", "U32", "I64", "U64"}
_FP8 = ("float8_e4m3fn", "float8_e5m2")


def check_quantised(header: Header, prefix: str) -> None:
    """Raises CheckpointError for a layer whose format, weight and scales do not match. `prefix`: of the keys of the
    diffusion model."""
    tensors = {key: entry for key, entry in header.tensors.items() if key.startswith(prefix)}
    for key, entry in tensors.items():
        if key.endswith(".weight") and len(entry.shape) > 1 and entry.dtype in _INTEGERS:
            raise refused(header.name, f"the weight {key[:80]!r} is of whole numbers ({entry.dtype})")
    for layer, note in _notes(header, tensors):
        _check_layer(header, layer, note)
    if prefix + _OLD_MARK in tensors:
        for key in tensors:
            if key.endswith(_OLD_SCALE):
                _check_layer(header, key.removesuffix(_OLD_SCALE), {"format": "float8_e4m3fn"})


def _notes(header: Header, tensors: dict[str, TensorEntry]) -> Iterator[tuple[str, Any]]:
    """Yields (name of a layer, its JSON note)."""
    if METADATA in header.metadata:
        noted = _parse(header, METADATA, header.metadata[METADATA])
        layers = noted.get("layers")
        if not isinstance(layers, dict):
            raise refused(header.name, f"its metadata {METADATA} names no layers")
        yield from layers.items()
    data_begin = header.file_bytes - max(entry.end for entry in header.tensors.values())
    with open_regular(header.path) as file:
        for key, entry in tensors.items():
            if key.endswith(_NOTE):
                if entry.dtype != "U8" or entry.end - entry.begin > _MAX_NOTE_BYTES:
                    raise refused(header.name, f"{key[:80]!r} is no text of at most {_MAX_NOTE_BYTES} bytes")
                file.seek(data_begin + entry.begin)
                yield key.removesuffix(_NOTE), _parse(header, key, file.read(entry.end - entry.begin))


def _parse(header: Header, key: str, text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(header.name, f"{key[:80]!r} is not valid JSON ({str(error)[:80]})") from None
    if not isinstance(found, dict):
        raise refused(header.name, f"{key[:80]!r} is not a JSON object")
    return found


def _check_layer(header: Header, layer: str, note: Any) -> None:
    kind = note.get("format") if isinstance(note, dict) else None
    if not isinstance(kind, str):
        raise refused(header.name, f"the quantised layer {layer[:80]!r} names no format")
    weight = _tensor(header, layer, kind, "weight")
    if min(weight.shape, default=1) < 1:
        raise refused(
            header.name,
            f"the weight of the quantised layer {layer[:80]!r} has the shape {list(weight.shape)}",
        )
    for name, sizes in _scales(kind, weight.shape):
        found = math.prod(_tensor(header, layer, kind, name).shape)
        if len(weight.shape) == 2 and found not in sizes:  # ComfyUI's banks of experts have three dims
            raise refused(
                header.name,
                f"{name} of the {kind} layer {layer[:80]!r} has {found} values where its weight of shape "
                f"{list(weight.shape)} needs {' or '.join(map(str, sizes))}",
            )


def _scales(kind: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name of a scale, the allowed numbers of values) for the formats known here."""
    rows, columns = shape[0], shape[-1]
    if kind in _FP8 or kind == "int8_tensorwise":
        yield "weight_scale", (1, rows)
    elif kind == "convrot_w4a4":
        yield "weight_scale", (rows,)
    elif kind == "mxfp8":
        yield "weight_scale", (_tiles(rows, columns, 32),)
    elif kind == "nvfp4":  # two values to a byte
        yield "weight_scale", (_tiles(rows, 2 * columns, 16),)
        yield "weight_scale_2", (1,)


def _tiles(rows: int, columns: int, group: int) -> int:
    """Returns the scales of column groups, padded to tiles of 128 x 4 (cuBLAS, "1D block scaling factors layout")."""
    return -(-rows // 128) * 128 * -(-columns // (4 * group)) * 4


def _tensor(header: Header, layer: str, kind: str, name: str) -> TensorEntry:
    for key in (f"{layer}.{name}", layer + _OLD_SCALE if name == "weight_scale" else ""):
        if key in header.tensors:
            return header.tensors[key]
    raise refused(header.name, f"the {kind} layer {layer[:80]!r} has no {name}")

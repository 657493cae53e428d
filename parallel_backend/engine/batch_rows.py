"""Pure functions that cut a module call to some of its rows.

A tensor whose first dimension equals the number of rows has one entry per row. This holds for every argument that
ComfyUI gives a module, with two exceptions: values in `transformer_options`, and values that ComfyUI passes unchanged
for any number of rows (models/comfyui/calls.py). If such a value may depend on the rows, they are not split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..layout import split_sizes
from ..requests import ModuleCall

_OPTIONS = "transformer_options"
# The number of frames of each video in a call. Their rows are not split.
_FRAMES = "num_video_frames"


def split_rows(call: ModuleCall, ranks: int, inseparable: bool) -> tuple[int, ...]:
    """Returns the number of consecutive rows for each rank. `inseparable`: the first rank takes them all."""
    rows = call.rows
    frames = rows if inseparable else call.kwargs.get(_FRAMES)
    unit = frames if isinstance(frames, int) and frames > 0 and rows % frames == 0 else 1
    if not inseparable and call.unit > unit and rows % call.unit == 0:
        unit = call.unit
    return tuple(share * unit for share in split_sizes(rows // unit, ranks))


def take_rows(call: ModuleCall, requested: slice) -> ModuleCall:
    """Returns the call with only the rows `requested`."""
    if requested == slice(0, call.rows):
        return call
    kwargs = {
        name: _taken(value, requested, call.rows) for name, value in call.kwargs.items() if name != _OPTIONS
    }
    if isinstance(options := call.kwargs.get(_OPTIONS), dict):
        kwargs[_OPTIONS] = _options(options, requested, call.rows)
    args = _taken(call.args, requested, call.rows)
    return replace(call, args=args, kwargs=kwargs, rows=requested.stop - requested.start)


def _taken(value: Any, requested: slice, rows: int) -> Any:
    if isinstance(value, Tensor):
        return value[requested] if value.ndim and value.shape[0] == rows else value
    if isinstance(value, (list, tuple)):
        return type(value)(_taken(item, requested, rows) for item in value)
    if isinstance(value, dict):
        return {name: _taken(item, requested, rows) for name, item in value.items()}
    return value


def _options(options: dict[str, Any], requested: slice, rows: int) -> dict[str, Any]:
    """Cuts the two options that depend on rows: "sigmas" per row, "cond_or_uncond" per run of rows."""
    options = dict(options)
    if "sigmas" in options:
        options["sigmas"] = _taken(options["sigmas"], requested, rows)
    runs = options.get("cond_or_uncond")
    if isinstance(runs, list) and runs and rows % len(runs) == 0:
        size = rows // len(runs)
        if requested.start % size or requested.stop % size:  # runs are of equal length
            runs, size = [run for run in runs for _ in range(size)], 1
        options["cond_or_uncond"] = runs[requested.start // size : requested.stop // size]
    return options

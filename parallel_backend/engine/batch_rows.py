"""The rows of a module call, cut to a few of them. Pure functions.

A tensor whose first dimension is the number of rows has one line for each row: that holds for every argument that
ComfyUI hands a module, but for what stands in `transformer_options`, and for what it hands to any number of rows as it
is (models/comfyui/calls.py): where that may be about rows, the call's rows stay together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..layout import split_sizes
from ..requests import ModuleCall

_OPTIONS = "transformer_options"
# Rows that are the frames of one video belong together; so many does a call have of each.
_FRAMES = "num_video_frames"


def split_rows(call: ModuleCall, ranks: int, inseparable: bool) -> tuple[int, ...]:
    """The number of rows, one after the other, that each rank takes. `together`: the first takes them all."""
    rows = call.rows
    frames = rows if inseparable else call.kwargs.get(_FRAMES)
    unit = frames if isinstance(frames, int) and frames > 0 and rows % frames == 0 else 1
    if not inseparable and call.unit > unit and rows % call.unit == 0:
        unit = call.unit
    return tuple(share * unit for share in split_sizes(rows // unit, ranks))


def take_rows(call: ModuleCall, requested: slice) -> ModuleCall:
    """The call with the rows numbered `requested` alone."""
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
    """Two of them go by rows: the sigma of each, and of each run of rows whether it is the negative prompt's."""
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

"""Tiny models of each class in the table, with every kind of call in which its tokens may stay sharded between blocks.

cases.json has the configurations of models and the inputs of calls; special_cases.py has the cases that need code.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..model import ComfyUIModel
from . import special_cases
from .weights import Call, operations, random

# inputs(batch, height, width), in latent pixels. Some round odd sizes up, as ComfyUI does before it calls those models.
Inputs = Callable[[int, int, int], Call]
Case = tuple[Callable[[], nn.Module], Inputs]

_DATA = json.loads(Path(__file__).with_name("cases.json").read_text())
_SIZE = re.compile(r"(\d*)(b|hw|h|w)?(?:/(\d+))?")  # 16, b, 2h, hw/5 (rounded up)


def _entry(kind: str, name: str, inner: str) -> dict[str, Any]:
    """Returns an entry of cases.json over the entry that it is `like`; so its dict `inner`."""
    entry = _DATA[kind][name]
    like = _DATA[kind].get(entry.get("like"), {})
    return {**like, **entry, inner: {**like.get(inner, {}), **entry.get(inner, {})}}


def config_of(name: str) -> dict[str, Any]:
    """Returns the configuration of a model in cases.json."""
    return {key: _dtype_or(value) for key, value in _entry("models", name, "config")["config"].items()}


def build_tiny(name: str, **changes: Any) -> nn.Module:
    """Builds a model of cases.json on the CPU with uninitialised weights. `changes`: changes of its configuration."""
    entry = _entry("models", name, "config")
    module, _, kind = entry["class"].rpartition(".")
    comfyui = importlib.import_module(module)
    config = config_of(name) | changes
    params = entry.get("params")
    if params:  # older ComfyUIs have fewer parameters
        config = {
            key: config[key] for key in config.keys() & {one.name for one in fields(getattr(comfyui, params))}
        }
    model = getattr(comfyui, kind)(**config, **operations())
    change = special_cases.MODELS.get(name)
    return model if change is None else change(model)


def _call(name: str, b: int, h: int, w: int) -> Call:
    if name in special_cases.CALLS:
        return special_cases.CALLS[name](b, h, w, _call)
    entry = _entry("calls", name, "kwargs")
    sides = entry.get("sides", {})
    multiple, plus = sides.get("multiple", 1), sides.get("plus", 0)
    sizes = {"b": b, **{side: plus + -(-of // multiple) * multiple for side, of in (("h", h), ("w", w))}}
    x, times = (_value(value, sizes) for value in entry["args"])
    return (x, times), {key: _value(value, sizes) for key, value in entry["kwargs"].items()}


def _value(spec: Any, sizes: Mapping[str, int]) -> Any:
    """Makes an argument of a call: random numbers for a shape such as "b,16,h,w@5" (seed 5), numbers for a dict (see
    _numbers), or the value itself."""
    if isinstance(spec, str):
        shape, _, seed = spec.partition("@")
        return random(*_shape(shape, sizes), seed=int(seed or 0))
    if isinstance(spec, list):
        return [_value(one, sizes) for one in spec]
    return _numbers(spec, sizes) if isinstance(spec, dict) else spec


def _numbers(spec: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    match spec:
        case {"from": first, "to": last}:
            return torch.linspace(first, last, sizes["b"])
        case {"full": value}:
            return torch.full(_shape(spec.get("shape", "b"), sizes), value)
        case {"count": count}:
            return torch.arange(*_shape(str(count), sizes)).repeat(sizes["b"], 1)
        case {"ones": shape}:
            ones = torch.ones(_shape(shape, sizes), dtype=getattr(torch, spec.get("dtype", "long")))
            ones[:, slice(*spec.get("zero", (0, 0)))] = 0
            return ones
        case {"tensor": value}:
            return torch.tensor(value)
        case _:
            return spec["text"]


def _shape(text: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    known: Mapping[str | None, int] = {None: 1, "b": sizes["b"], "h": sizes["h"], "w": sizes["w"]}
    known = {**known, "hw": sizes["h"] * sizes["w"]}

    def size(part: str) -> int:
        found = _SIZE.fullmatch(part)
        assert found, f"{part} is no size"
        times, side, divisor = found.groups()
        return -(-int(times or 1) * known[side] // int(divisor or 1))

    return tuple(map(size, text.split(",")))


def _dtype_or(value: Any) -> Any:
    return getattr(torch, value.removeprefix("torch.")) if str(value).startswith("torch.") else value


@functools.cache
def tiny_builder(name: str) -> Callable[[], nn.Module]:
    """Returns a function that builds a model of cases.json; the same function for the same name."""
    return partial(build_tiny, name)


def tiny_inputs(name: str) -> Inputs:
    """Returns a function that makes the inputs of a call of cases.json or special_cases.CALLS."""
    return partial(_call, name)


CASES: Mapping[str, Mapping[str, Case]] = {  # by class, by name
    kind: {name: (tiny_builder(model), tiny_inputs(one)) for name, (model, one) in cases.items()}
    for kind, cases in _DATA["cases"].items()
}


class TinyModel(ComfyUIModel):
    """A model without a file: a whole module on the CPU."""

    def __init__(self, module: nn.Module) -> None:
        cpu = torch.device("cpu")
        # Stands in for ComfyUI's patcher: all that is used of it if weights do not change.
        base = SimpleNamespace(
            diffusion_model=module, manual_cast_dtype=None, get_dtype=lambda: torch.float32
        )
        patcher = SimpleNamespace(model=base, load_device=cpu)
        super().__init__(patcher, cpu, 0, "float32", {}, None, None, {})

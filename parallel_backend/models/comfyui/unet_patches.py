"""Functions by which ComfyUI's own nodes patch a UNet, as data: which ones they are, and the functions made again.

Such a function is code that every ComfyUI of the version has, and a few numbers that it closes over. The numbers travel
(nodes/model/patches.py); a rank takes the code from its own ComfyUI's module. Nothing but the functions named here is
made, and no node runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from ...errors import RequestError

# What a function needs of an image whose rows are shared out: its own rows alone, or the image whole while it runs.
ROW_BY_ROW, WHOLE = "row by row", "whole"


@dataclass(frozen=True)
class PatchFunction:
    """`source`: its module; `path`: names of the class, the method and the function in it. `keeps`: the names that it
    closes over; `makes`: of those that it only notes something in, how to make an empty one; `defaults`: of its last
    arguments. `rows`: what it needs of an image in bands; empty for what cannot be had there, with the `reason` in
    words."""

    source: str
    path: tuple[str, str, str]
    keeps: tuple[str, ...] = ()
    makes: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    defaults: tuple[None, ...] = ()
    rows: str = ""
    reason: str = ""


_FREE = "comfy_extras.nodes_freelunch"
_SHRINK = "comfy_extras.nodes_model_downscale"
_SHRINKS = "a patch of this model (PatchModelAddDownscale) changes the resolution between its blocks"
_LISTED = (
    PatchFunction(
        "comfy_extras.nodes_pag",
        ("PerturbedAttentionGuidance", "execute", "perturbed_attention"),
        defaults=(None,),  # no mask
        rows=ROW_BY_ROW,
    ),
    *(
        PatchFunction(
            _FREE,
            (node, "execute", "output_block_patch"),
            ("scale_dict",),
            {"on_cpu_devices": dict},
            rows=WHOLE,
        )
        for node in ("FreeU", "FreeU_V2")
    ),
    PatchFunction(
        _SHRINK,
        ("PatchModelAddDownscale", "execute", "input_block_patch"),
        ("block_number", "sigma_start", "sigma_end", "downscale_factor", "downscale_method"),
        reason=_SHRINKS,
    ),
    PatchFunction(
        _SHRINK,
        ("PatchModelAddDownscale", "execute", "output_block_patch"),
        ("upscale_method",),
        reason=_SHRINKS,
    ),
)
FUNCTIONS: Mapping[str, PatchFunction] = {".".join(one.path): one for one in _LISTED}


# An object of ComfyUI's, whose class a rank cannot find: it is made in a function.
HYPERNETWORK = "load_hypernetwork_patch.hypernetwork_patch"
HYPERNETWORK_SOURCE = "comfy_extras.nodes_hypernetwork"
UNET_PATCHES = frozenset({*FUNCTIONS, HYPERNETWORK})  # of whose rows a UNet in bands knows what they need


def name_of(function: FunctionType | type) -> str:
    """By which UNET_PATCHES would know it."""
    return function.__qualname__.replace("<locals>.", "")


class UNetFunction:
    """One of FUNCTIONS, made again; called as ComfyUI's UNet calls it."""

    def __init__(self, function: Callable[..., Any], entry: PatchFunction) -> None:
        self._function = function
        self.rows, self.reason = entry.rows, entry.reason

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def make_function(name: str, values: Mapping[str, Any]) -> UNetFunction:
    """The function of this name over `values`. Raises RequestError where this ComfyUI has another one."""
    entry = FUNCTIONS[name]
    module = importlib.import_module(entry.source)
    node, method, inner = entry.path
    outer = getattr(getattr(module, node, None), method, None)
    found = getattr(getattr(outer, "__func__", outer), "__code__", None)
    code = next(
        (
            one
            for one in getattr(found, "co_consts", ())
            if isinstance(one, CodeType) and one.co_name == inner
        ),
        None,
    )
    known = {name: values[name] for name in entry.keeps} | {
        name: make() for name, make in entry.makes.items()
    }
    if code is None or set(code.co_freevars) != known.keys():
        raise RequestError(f"the ranks' ComfyUI has another {name} in {entry.source}; restart ComfyUI.")
    cells = tuple(CellType(known[name]) for name in code.co_freevars)
    return UNetFunction(FunctionType(code, vars(module), inner, entry.defaults, cells), entry)


def make_hypernetwork(values: Mapping[str, Any], networks: Mapping[int, nn.Module]) -> UNetFunction:
    """What a hypernetwork does in each attention: it adds to what keys and values are made of, token by token.

    `networks`: by the width of a token, each two (for keys, for values). NovelAI's improvements on Stable Diffusion,
    2022, as the web interfaces' file format has it.
    """
    strength = values["strength"]

    def call(q: Tensor, k: Tensor, v: Tensor, extra_options: Any) -> tuple[Tensor, Tensor, Tensor]:
        pair: Any = networks.get(k.shape[-1])
        if pair is None:
            return q, k, v
        for_keys, for_values = pair
        return q, k + for_keys(k) * strength, v + for_values(v) * strength

    return UNetFunction(call, PatchFunction(HYPERNETWORK_SOURCE, ("", "", ""), rows=ROW_BY_ROW))

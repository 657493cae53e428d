"""Patches of ComfyUI's own that nodes have put on a MODEL, taken apart for the ranks (models/comfyui/patches.py).

What cannot be taken apart stays where it was, and is refused by name. A patch's network (a ControlNet's) travels once,
as one tensor for each of its dtypes; ComfyUI writes into none of them after loading.
"""

from __future__ import annotations

import secrets
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel_backend.models.comfyui.patches import PATCHES, REFERENCE_CACHE, is_part_of
from ...parallel_backend.models.comfyui.run_memory import FRAMES, REFERENCES
from ...parallel_backend.models.comfyui.unet_patches import (
    FUNCTIONS,
    HYPERNETWORK,
    HYPERNETWORK_SOURCE,
    name_of,
)
from ...parallel_backend.wire.arguments import Tree
from .options import FRAME_CACHES
from .shadow import without_loaded_state
from .unsupported import refusal

_PLAIN = frozenset(vars(nn.Module()))  # what every module has
# What ComfyUI's memory manager notes on a network that it moves about.
_MANAGED = ("device", "current_", "model_lowvram", "lowvram_", "model_loaded_", "model_offload_", "dynamic_")
_RUNS = 4  # known at once: of two that take turns, each must find that the ranks have the other's
_SKIP = ("comfy_extras.nodes_slg", "skip")  # in place of a block: leaves its tokens as they are
_AFTER_INPUT = ("comfy_extras.nodes_flux", "model_input_patch")  # belongs to a cache of references


class CarriedPatches:
    """Those of one model's calls, with what is known of them from call to call."""

    def __init__(self) -> None:
        self._weights: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()
        self._runs: list[tuple[object, int, int]] = []  # the latest: what marks it, its number, calls made

    def described(self, options: Mapping[str, Any], latent: Tensor) -> Tree | None:
        """What a call's `transformer_options` carry for the ranks; None where that is nothing. `latent`: [R, C, …]."""
        patches, skipped = options.get("patches") or {}, _skipped(options)
        replaced, frames = _replaced(options), options.get(FRAME_CACHES)
        if not (any(patches.values()) or skipped or replaced or frames):
            return None
        found = _Found(latent)
        lists = {
            kind: [found.number(patch) for patch in listed] for kind, listed in patches.items() if listed
        }
        in_place = [(kind, list(block), found.number(patch)) for kind, block, patch in replaced]
        run = None
        if frames is not None:
            run = self._frames(frames, latent)
        elif found.cache is not None:
            number, call = self._next_call(found.cache.cache)
            run = {"kind": REFERENCES, "number": number, "call": call}
        return {
            "patches": lists,
            "objects": found.objects,
            "networks": [self._network(network) for network in found.networks],
            "skipped": skipped,
            "replaced": in_place,
            "run": run,
            "together": found.together or run is not None,
        }

    def _next_call(self, mark: object) -> tuple[int, int]:
        """(number of the run, calls before this one). `mark`: another object in each run."""
        fresh = (mark, secrets.randbits(60), 0)
        _, number, calls = next((run for run in self._runs if run[0] is mark), fresh)
        others = [run for run in self._runs if run[0] is not mark]
        self._runs = [*others, (mark, number, calls + 1)][-_RUNS:]
        return number, calls

    def _frames(self, state: Mapping[str, Any], latent: Tensor) -> dict[str, Tree]:
        caches = state["kv_caches"]
        if not isinstance(caches, FrameCaches):
            raise refusal("a sampler that keeps frames in its own way")
        number, call = self._next_call(caches)
        ends = [cache["end"] for cache in caches]
        for cache in caches:
            cache["end"] += caches.tokens_of(latent)
        return {
            "kind": FRAMES,
            "number": number,
            "call": call,
            "ends": ends,
            "start_frame": state["start_frame"],
            "rows": caches.rows,
            "tokens": caches.tokens,
            "dtype": caches.dtype,
        }

    def _network(self, network: nn.Module) -> dict[str, Tree]:
        parts, tensors = _parts(network)
        if network not in self._weights:
            # In inference mode nobody could tell later that they are the same still.
            with torch.inference_mode(False), torch.no_grad():
                self._weights[network] = {
                    dtype: torch.cat([tensor.detach().cpu().flatten() for tensor in of_dtype])
                    for dtype, of_dtype in tensors.items()
                }
        return {"parts": parts, "weights": dict(self._weights[network])}


class FrameCaches:
    """Stands for a causal model's list of keys and values of frames before, one a block, which the ranks keep: how far
    each is filled. No list, which ComfyUI would copy with the options that it stands in. `rows`, `tokens`,
    `dtype`: as ComfyUI's sampler asked for; `patch`: sides of the model's patches."""

    def __init__(
        self, blocks: int, rows: int, tokens: int, dtype: torch.dtype, patch: tuple[int, ...]
    ) -> None:
        self._blocks = [{"end": 0} for _ in range(blocks)]
        self.rows, self.tokens, self._patch = rows, tokens, patch
        self.dtype = str(dtype).removeprefix("torch.")

    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter(self._blocks)

    def tokens_of(self, latent: Tensor) -> int:
        count = 1
        for side, size in zip(latent.shape[2:], self._patch, strict=True):
            count *= -(-side // size)
        return count


class _Found:
    """The patches of one call by number, as they are met."""

    def __init__(self, latent: Tensor) -> None:
        self._latent = latent
        self._numbers: dict[int, int] = {}
        self.objects: list[dict[str, Tree]] = []
        self.networks: list[nn.Module] = []
        self.cache: Any = None
        self.together = False

    def number(self, patch: Any) -> int:
        patch = _owner(patch)
        if id(patch) not in self._numbers:
            described = self._describe(patch)
            self._numbers[id(patch)] = len(self.objects)
            self.objects.append(described)
        return self._numbers[id(patch)]

    def _describe(self, patch: Any) -> dict[str, Tree]:
        if isinstance(patch, FunctionType):
            return _described(
                name_of(patch), {one: _held(patch)[one] for one in FUNCTIONS[name_of(patch)].keeps}
            )
        if _is_hypernetwork(patch):
            numbers = [(width, self._network_number(pair)) for width, pair in patch.hypernet.items()]
            return _described(HYPERNETWORK, {"strength": patch.strength, "networks": numbers})
        name = type(patch).__name__
        entry = PATCHES[name]
        if name == REFERENCE_CACHE:
            self.cache = patch
        else:
            _fit(patch, self._latent)
        values = {attribute: getattr(patch, attribute) for attribute in entry.keeps}
        self.together |= any(values[image] is not None and len(values[image]) > 1 for image in entry.images)
        network = getattr(patch, "model_patch", None)
        vae = getattr(patch, "vae", None)
        return {
            "class": name,
            "values": values,
            "network": None if network is None else self._network_number(network.model),
            "compression": None if vae is None else vae.spacial_compression_encode(),
            "of": self.number(patch.patch) if hasattr(patch, "patch") else None,
        }

    def _network_number(self, network: nn.Module) -> int:
        for number, known in enumerate(self.networks):
            if known is network:
                return number
        self.networks.append(network)
        return len(self.networks) - 1


def without_carried(options: Mapping[str, Any]) -> dict[str, Any]:
    """The transformer_options without the patches that can go to the ranks."""
    left = dict(options)
    left["patches"] = {
        kind: [patch for patch in listed if not _is_carried(patch)]
        for kind, listed in (options.get("patches") or {}).items()
    }
    left["patches_replace"] = {
        kind: {
            key: function
            for key, function in by_block.items()
            if not ((kind == "dit" and _is(function, _SKIP)) or _is_listed(function))
        }
        for kind, by_block in (options.get("patches_replace") or {}).items()
    }
    return left


def _skipped(options: Mapping[str, Any]) -> list[Tree]:
    """(list, number) of each block that is left out."""
    replaced = (options.get("patches_replace") or {}).get("dit") or {}
    return [list(key) for key, function in replaced.items() if _is(function, _SKIP)]


def _replaced(options: Mapping[str, Any]) -> list[tuple[str, tuple, FunctionType]]:
    """(kind of attention, block, what stands for it there) of what the ranks know."""
    return [
        (kind, block, function)
        for kind, by_block in (options.get("patches_replace") or {}).items()
        for block, function in by_block.items()
        if _is_listed(function)
    ]


def _described(name: str, values: dict[str, Tree]) -> dict[str, Tree]:
    """Of one of UNET_PATCHES."""
    return {"class": name, "values": values, "network": None, "compression": None, "of": None}


def _is_hypernetwork(patch: Any) -> bool:
    """With nothing that is drawn anew in each call: ComfyUI leaves dropout on."""
    kind = type(patch)
    if (name_of(kind), _source(kind)) != (HYPERNETWORK, HYPERNETWORK_SOURCE):
        return False
    return not any(
        isinstance(part, nn.Dropout) for pair in patch.hypernet.values() for part in pair.modules()
    )


def _is_listed(function: Any) -> bool:
    if not isinstance(function, FunctionType):
        return False
    entry = FUNCTIONS.get(name_of(function))
    return entry is not None and _source(function) == entry.source


def _is_carried(patch: Any) -> bool:
    if _is_listed(patch) or _is_hypernetwork(patch):
        return True
    patch = _owner(patch)
    entry = PATCHES.get(type(patch).__name__)
    return entry is not None and _source(type(patch)) == entry.source


def _owner(patch: Any) -> Any:
    """The object that a function belongs to; any other patch itself."""
    if not _is(patch, _AFTER_INPUT):
        return patch
    return _held(patch)["input_patch_obj"]


def _held(function: FunctionType) -> dict[str, Any]:
    """What it closes over, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _is(function: Any, named: tuple[str, str]) -> bool:
    return isinstance(function, FunctionType) and (_source(function), function.__name__) == named


def _source(found: type | FunctionType) -> str:
    """The module of a class or a function, by its file where it is ComfyUI's: nodes are loaded by other names."""
    path, root = (_file(name) for name in (found.__module__, "comfy.utils"))
    if path is None or root is None or root.parents[1] not in path.parents:
        return found.__module__
    parts = path.relative_to(root.parents[1]).with_suffix("").parts
    return ".".join(parts) if parts[0] in ("comfy", "comfy_extras") else found.__module__


def _file(module: str) -> Path | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    return None if path is None else Path(path).resolve()


def _fit(patch: Any, latent: Tensor) -> None:
    """Has a ControlNet's image encoded anew where it has not the size of the latent's, as its patch would."""
    if not hasattr(patch, "encoded_image_size"):
        return
    import comfy.model_management
    import comfy.utils

    compression = patch.vae.spacial_compression_encode()
    height, width = (side * compression for side in latent.shape[-2:])
    if patch.encoded_image is not None and patch.encoded_image_size == (height, width):
        return

    def scaled(image: Tensor | None) -> Tensor | None:
        if image is None:
            return None
        return comfy.utils.common_upscale(image.movedim(-1, 1), width, height, "area", "center").movedim(
            1, -1
        )

    loaded = comfy.model_management.loaded_models(only_currently_used=True)
    if hasattr(patch, "inpaint_image"):
        patch.encoded_image = patch.encode_latent_cond(scaled(patch.image), scaled(patch.inpaint_image))
    else:
        encode = patch.model_patch.model.process_input_latent_image
        patch.encoded_image = encode(patch.encode_latent_cond(scaled(patch.image)))
    patch.encoded_image_size = (height, width)
    comfy.model_management.load_models_gpu(loaded)


def _parts(network: nn.Module) -> tuple[list[Tree], dict[str, list[Tensor]]]:
    """The modules of a patch's network, the whole first, and its tensors by dtype in the order of their places."""
    modules = list(network.modules())
    numbers = {id(module): number for number, module in enumerate(modules)}
    tensors: dict[str, list[Tensor]] = {}
    ends: dict[str, int] = {}

    def place(tensor: Tensor) -> tuple[bool, str, int, tuple[int, ...]]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        begin = ends.get(dtype, 0)
        ends[dtype] = begin + tensor.numel()
        tensors.setdefault(dtype, []).append(tensor)
        return (isinstance(tensor, nn.Parameter), dtype, begin, tuple(tensor.shape))

    parts: list[Tree] = []
    for module in modules:
        kind = type(module)
        source = _source(kind)
        if not is_part_of(kind, source):
            raise refusal(f"a patch with a network of {kind.__name__}")
        own = {**module._parameters, **module._buffers}
        parts.append(
            {
                "class": (source, kind.__qualname__),
                "values": _values(module),
                "tensors": {name: place(tensor) for name, tensor in own.items() if tensor is not None},
                "absent": [name for name, tensor in module._parameters.items() if tensor is None],
                "children": {
                    name: None if child is None else numbers[id(child)]
                    for name, child in module._modules.items()
                },
            }
        )
    return parts, tensors


def _values(module: nn.Module) -> dict[str, Tree]:
    state = without_loaded_state(module.__dict__)
    return {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in state.items()
        if name not in _PLAIN and not name.startswith(_MANAGED)
    }

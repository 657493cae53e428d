"""Patches of ComfyUI's own that go along with a model call as data: which ones can, and the objects made of them again.

A patch is an object that a model calls between its blocks or inside of them. Those of PATCHES compute with numbers,
tensors and, some, a network of their own (a ControlNet's), so their class and these say all. nodes/model/patches.py
takes them apart; nothing but the classes named here is made, and no constructor runs.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ...errors import RequestError
from ...wire.arguments import map_tensors
from .run_memory import ReferenceCache, RunMemory
from .unet_patches import FUNCTIONS, HYPERNETWORK, make_function, make_hypernetwork

ARGUMENT = "parallel_patches"  # of a model call, by name
# Lists of patches that a model calls between its blocks, where each rank has all tokens if blocks gather what they
# give. The others are called inside of blocks.
BETWEEN_BLOCKS = frozenset({"post_input", "noise_refiner", "double_block"})
# What stands for ComfyUI's own cache of references (FluxKVCache), whose module a rank cannot import.
REFERENCE_CACHE = "KV_Attn_Input"


@dataclass(frozen=True)
class PatchClass:
    """`source`: its module; `keeps`: the plain attributes that go along; `images`: those of them with one image for
    each of a batch, by whose place rows go."""

    source: str
    keeps: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


_NODES = "comfy_extras.nodes_model_patch"
_LLLITE = "comfy.ldm.anima.lllite"
_MULTITALK = "comfy.ldm.wan.model_multitalk"
PATCHES: Mapping[str, PatchClass] = {
    "DiffSynthCnetPatch": PatchClass(
        _NODES, ("strength", "encoded_image", "encoded_image_size"), ("encoded_image",)
    ),
    "ZImageControlPatch": PatchClass(
        _NODES, ("strength", "encoded_image", "encoded_image_size", "is_inpaint"), ("encoded_image",)
    ),
    "UsoStyleProjectorPatch": PatchClass(_NODES, ("encoded_image",)),
    "AnimaLLLitePatch": PatchClass(
        _LLLITE, ("image", "mask", "strength", "sigma_start", "sigma_end"), ("image", "mask")
    ),
    "AnimaLLLiteAttentionPatch": PatchClass(_LLLITE, ("targets",)),
    "AnimaLLLiteMLPPatch": PatchClass(_LLLITE),
    "MultiTalkCrossAttnPatch": PatchClass(_MULTITALK, ("audio_scale",)),
    "MultiTalkGetAttnMapPatch": PatchClass(_MULTITALK, ("ref_target_masks",)),
    REFERENCE_CACHE: PatchClass("comfy_extras.nodes_flux"),
}
# Where the classes of a patch's network come from.
_PARTS = ("torch.nn.modules.", "comfy.ops", "comfy.ldm.lumina.", _LLLITE, _MULTITALK, _NODES)


def is_part_of(kind: type, source: str) -> bool:
    """Whether a patch's network may have modules of this class, which module `source` defines."""
    return issubclass(kind, nn.Module) and f"{source}.".startswith(_PARTS)


def call_inside_blocks(described: Mapping[str, Any], known: Collection[str] = ()) -> bool:
    """Whether a patch looks at the tokens of a block, so that they have to be whole there; not those `known`, of which
    what they need is known otherwise."""
    inside = set(described["patches"]) - BETWEEN_BLOCKS
    numbers = (number for kind in inside for number in described["patches"][kind])
    return any(described["objects"][number]["class"] not in known for number in numbers)


def held_bytes(described: Any) -> int:
    """Of the tensors that a rank keeps for these patches from call to call: networks, images and masks."""
    tensors: list[Tensor] = []
    map_tensors(described, tensors.append)
    return sum(tensor.nbytes for tensor in tensors)


def leaves_something(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments leaves in each rank what later ones need."""
    return ARGUMENT in kwargs and kwargs[ARGUMENT]["run"] is not None


def live_options(described: Mapping[str, Any], memory: RunMemory, network: nn.Module) -> dict[str, Any]:
    """The transformer_options that `described` (nodes/model/patches.py) stands for, of a call of `network`. Raises
    RequestError where this ComfyUI does not have them, or what earlier calls of the run left is gone."""
    options: dict[str, Any] = {}
    run = described["run"]
    kept = None if run is None else memory.enter(run, network)
    if isinstance(kept, dict):  # of frames before this one
        options |= kept
    networks = [_network(parts) for parts in described["networks"]]
    objects: list[Any] = []
    for one in described["objects"]:
        objects.append(kept if one["class"] == REFERENCE_CACHE else _patch(one, networks, objects))
    if described["patches"]:
        options["patches"] = {
            kind: [_called(objects[number], kind) for number in numbers]
            for kind, numbers in described["patches"].items()
        }
    replaced: dict[str, dict[tuple[Any, ...], Any]] = {}
    for kind, block, number in described["replaced"]:
        replaced.setdefault(kind, {})[tuple(block)] = objects[number]
    if described["skipped"]:
        replaced["dit"] = {(name, number): _skip for name, number in described["skipped"]}
    if replaced:
        options["patches_replace"] = replaced
    return options


def _called(patch: Any, kind: str) -> Any:
    return patch.after_input if isinstance(patch, ReferenceCache) and kind == "post_input" else patch


def _skip(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """In place of a block: what it was given."""
    return args


def _patch(one: Mapping[str, Any], networks: list[nn.Module], objects: list[Any]) -> Any:
    name = one["class"]
    if name in FUNCTIONS:
        return make_function(name, one["values"])
    if name == HYPERNETWORK:
        by_width = {width: networks[number] for width, number in one["values"]["networks"]}
        return make_hypernetwork(one["values"], by_width)
    if name not in PATCHES:
        raise RequestError(f"the ranks know no patch {name!r}; restart ComfyUI.")
    entry = PATCHES[name]
    kind = _class(entry.source, name)
    made = kind.__new__(kind)
    state = {attribute: one["values"][attribute] for attribute in entry.keeps}
    if one["network"] is not None:
        state["model_patch"] = SimpleNamespace(model=networks[one["network"]])
    if one["compression"] is not None:
        state["vae"] = SimpleNamespace(spacial_compression_encode=lambda: one["compression"])
    if one["of"] is not None:
        state["patch"] = objects[one["of"]]
    made.__dict__.update({"temp_data": None}, **state)  # what such a patch notes within one call
    return made


def _network(described: Mapping[str, Any]) -> nn.Module:
    """The network whose parts were described, the first being the whole. Its weights are views of what was sent."""
    made = [_part(one, described["weights"]) for one in described["parts"]]
    for module, one in zip(made, described["parts"], strict=True):
        for name, number in one["children"].items():
            module._modules[name] = None if number is None else made[number]
    return made[0]


def _part(one: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    kind = _class(*one["class"])
    if not is_part_of(kind, one["class"][0]):
        raise RequestError(f"{kind.__name__} is no part of a patch's network that the ranks know.")
    made: nn.Module = kind.__new__(kind)
    nn.Module.__init__(made)
    made.__dict__.update(one["values"])
    made.training = False
    for name, (is_parameter, dtype, begin, shape) in one["tensors"].items():
        flat = weights[dtype]
        tensor = flat[begin : begin + math.prod(shape)].view(shape)
        if is_parameter:
            made.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        else:
            made.register_buffer(name, tensor)
    for name in one["absent"]:
        made.register_parameter(name, None)
    return made


def _class(source: str, name: str) -> Any:
    found: Any = importlib.import_module(source) if f"{source}.".startswith(_PARTS) else None
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or found.__module__ != source:
        raise RequestError(f"the ranks' ComfyUI has no {name} in {source}; restart ComfyUI.")
    return found

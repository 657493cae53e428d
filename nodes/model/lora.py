"""The LoRAs that ComfyUI's loaders hand to a MODEL, as changes that the ranks can make themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import comfy.lora
import comfy.utils
import comfy.weight_adapter
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_backend.errors import RequestError
from ...parallel_backend.models.lora_math import check_shapes
from ...parallel_backend.wire.weight_patches import Factor, WeightPatch, WeightPatches, by_key, digest
from .unsupported import refusal

# Where the factors stand in an adapter's weights. alpha is a number, reshape a new shape of the weight.
_LAYOUTS = {
    comfy.weight_adapter.LoRAAdapter: ("lora", ("up", "down", "alpha", "mid", "dora_scale", "reshape")),
    comfy.weight_adapter.LoHaAdapter: (
        "loha",
        ("w1_a", "w1_b", "alpha", "w2_a", "w2_b", "t1", "t2", "dora_scale"),
    ),
    comfy.weight_adapter.LoKrAdapter: (
        "lokr",
        ("w1", "w2", "alpha", "w1_a", "w1_b", "w2_a", "w2_b", "t2", "dora_scale"),
    ),
}
# Of factors; others, such as integers, become float32.
_SENT = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}
PREFIX = "diffusion_model."

# LoRA loaders keep a file's tensors while its strength changes: each is read through once.
_digests: WeakIdKeyDictionary = WeakIdKeyDictionary()


class FileParameters(Protocol):
    """The parameters of a model's file as its LoRAs know them. `shapes`: by key."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def key_of(self, name: str) -> str:
        """The key of what ComfyUI's model calls `name`."""

    def read(self, key: str) -> Tensor:
        """The parameter as stored, mapped."""


class _NotOurs(Exception):
    """An adapter whose maths only ComfyUI knows."""


def weight_patches(patches: Mapping[str, list[tuple]], file: FileParameters) -> WeightPatches:
    """`patches`: a ModelPatcher's, by the names of its model's parameters, in the order of application.

    What is not a kind of change that the ranks know is computed here, by ComfyUI, one tensor after the other. Raises
    RequestError for changes that do not fit the model, naming the tensor.
    """
    shapes = file.shapes
    found: list[WeightPatch] = []
    tensors: dict[str, Tensor] = {}
    for name, entries in patches.items():
        key = file.key_of(name.removeprefix(PREFIX))
        own: dict[str, Tensor] = {}
        try:
            changes = [_patch(key, shapes.get(key), entry, own) for entry in entries]
        except _NotOurs:
            changes = [_merged(key, entries, file, own)]
        found += [change for change in changes if not change.does_nothing]
        tensors |= own
    for key, changes in by_key(found).items():
        check_shapes(shapes[key], changes, tensors)
    return WeightPatches(tuple(found), tensors)


def _patch(key: str, shape: tuple[int, ...] | None, entry: tuple, tensors: dict[str, Tensor]) -> WeightPatch:
    strength, value, base_strength, offset, function = entry
    if isinstance(value, list):
        raise refusal(
            "another model merged into it", "merge the files with stock loaders and save the result"
        )
    kind, parts = _parts(key, shape, value)
    swap = function is comfy.utils.swap_scale_shift
    if function is not None and not swap:
        raise _NotOurs
    alpha = parts.pop("alpha", None)
    factors = []
    for role, tensor in parts.items():
        if tensor.dtype not in _SENT:
            tensor = tensor.float()  # as ComfyUI computes with it
        found = _digest(key, role, tensor)
        tensors[found] = tensor
        factors.append(Factor(role, found))
    return WeightPatch(
        key=key,
        kind=kind,
        factors=tuple(factors),
        strength=float(strength),
        alpha=None if alpha is None else float(alpha),
        base_strength=float(base_strength),
        narrow=() if offset is None else tuple(int(n) for n in offset),
        swap_halves=swap,
    )


def _parts(key: str, shape: tuple[int, ...] | None, value: object) -> tuple[str, dict[str, Tensor | float]]:
    """(kind, factors and alpha by role)."""
    if type(value) in _LAYOUTS:
        kind, roles = _LAYOUTS[type(value)]
        parts = dict(zip(roles, value.weights, strict=True))
        reshape = parts.pop("reshape", None)
        if reshape is not None and tuple(reshape) != shape:
            raise refusal(
                f"a LoRA that makes {key} larger (as those that add an input do)",
                "use the full model that it was taken from",
            )
        return kind, {role: part for role, part in parts.items() if part is not None}
    if isinstance(value, tuple) and len(value) == 1:
        return "diff", {"diff": value[0]}
    if isinstance(value, tuple) and len(value) == 2 and value[0] in ("diff", "set"):
        return value[0], {"diff" if value[0] == "diff" else "value": value[1][0]}
    if isinstance(value, tuple) and value[:1] == ("model_as_lora",):
        raise refusal(
            "another model in the place of a LoRA",
            "save their difference with ComfyUI's Extract and Save Lora and load that",
        )
    raise _NotOurs


def _digest(key: str, role: str, tensor: Tensor) -> str:
    if tensor not in _digests:
        if not torch.isfinite(tensor.float()).all():
            raise RequestError(
                f"The LoRA's {role} for {key} holds NaN or infinite values: the file is damaged, or its training "
                f"failed. Choose another one."
            )
        _digests[tensor] = digest(tensor)
    return _digests[tensor]


def _merged(key: str, entries: list[tuple], file: FileParameters, tensors: dict[str, Tensor]) -> WeightPatch:
    """The weight that ComfyUI itself makes of the file's; the only place where this process reads one."""
    weight = file.read(key).to(torch.float32, copy=True)
    value = comfy.lora.calculate_weight(entries, weight, PREFIX + key)
    found = _digest(key, "merged value", value)
    tensors[found] = value
    return WeightPatch(key, "set", (Factor("value", found),), 1.0)

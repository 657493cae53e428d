"""The weights of a ComfyUI module on one rank, and changing them by ComfyUI's own arithmetic: LoRAs in, LoRAs out.

A change is computed from the file's own value, as ComfyUI does it: cast to its dtype for LoRAs, changed, rounded (for
fp8 by chance, seeded by the weight's name) or quantised anew with new scales. So the bits are those that ComfyUI's own
process would have, whatever the format of the file, but with dynamic VRAM: then it computes them where a layer runs, in
the dtype of that, and which of them it rounds depends on the memory that is free (docs/models-formats.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...errors import RequestError
from ...wire.weight_patches import WeightPatch, by_key
from ..applied_patches import AppliedPatches, Changes
from ..base import ByteSharding
from ..lora_math import check_shapes
from ..tensor_pieces import as_built, take_apart
from .gguf import unpacked
from .key_layouts import whole
from .placing import as_parameter

_ALPHA = "alpha"
PREFIX = "diffusion_model."  # of the module's parameters in ComfyUI's model, and in the seed of rounding


class Patcher(Protocol):
    """What is used of comfy.model_patcher.ModelPatcher."""

    model: Any
    load_device: torch.device
    patches: dict[str, list[tuple[Any, ...]]]
    backup: dict[str, Any]

    def patch_weight_to_device(self, key: str, device_to: torch.device | None = None) -> Any:
        """Puts the weight with its patches, in the format that it had, in its place, and the one that was into
        `backup`."""


class ComfyUIWeights:
    """All parameters of a module (base.Weights), keys being their names in it.

    To be made while they still are views of the mapped file in host memory: those are kept, and cost nothing there.
    `dtypes`: which the module's parameters have, by name, where not the file's.
    """

    def __init__(
        self,
        patcher: Patcher,
        dtypes: Mapping[str, torch.dtype],
        sharding: ByteSharding | None = None,
        absent: Iterable[str] = (),
    ) -> None:
        """`absent`: parameters that this rank does not hold, and LoRAs change elsewhere."""
        self._patcher = patcher
        self._dtypes = dtypes
        self._sharding = sharding
        self._module: nn.Module = patcher.model.diffusion_model
        self._stored = dict(self._module.named_parameters())
        self._ignored = {*_beside_children(self._module), *absent}
        self._applied = AppliedPatches(self._set)  # by name

    def originals(self) -> dict[str, Tensor]:
        """The file's own values by the names that ComfyUI's model has for them, in the file's dtypes."""
        return {PREFIX + key: value for key, value in self._stored.items()}

    def check(self, patches: Sequence[WeightPatch], tensors: Mapping[str, Tensor]) -> None:
        """Raises RequestError, naming the tensor, for changes that do not fit this model. Changes nothing."""
        for key, changes in by_key(patches).items():
            stored = self._stored.get(key)
            if stored is None:
                raise RequestError(
                    f"The LoRA changes {key}, which the ranks' {type(self._module).__name__} does not have; choose a "
                    f"LoRA that was made for this model."
                )
            missing = [f.digest for patch in changes for f in patch.factors if f.digest not in tensors]
            if missing:
                raise RequestError(f"The factor {missing[0]} of the change of {key} was not sent.")
            check_shapes(tuple(stored.shape), changes, tensors)

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self, patches: Sequence[WeightPatch], tensors: Mapping[str, Tensor]) -> int:
        """Makes the weights the file's own with these changes and no others; returns how many tensors that touched.

        Only tensors whose changes differ from those in place are computed anew. When it raises (RequestError for a
        result that is not finite, or memory that ran out), the weights are those of before.
        """
        wanted = {key: found for key, found in by_key(patches).items() if key not in self._ignored}
        return self._applied.apply(wanted, tensors)

    def release_originals(self) -> None:
        """Nothing to do: the file's own values stay where the file is mapped."""

    def _set(
        self, key: str, changes: Changes | None, tensors: Mapping[str, Tensor], *, pristine: bool
    ) -> None:
        """As applied_patches.Change."""
        self._put(key, self._changed(key, changes, tensors) if changes else self._original(key))

    def _original(self, key: str) -> Tensor:
        return as_built(whole(self._stored[key]), self._dtypes.get(key))

    def _changed(self, key: str, changes: Sequence[WeightPatch], tensors: Mapping[str, Tensor]) -> Tensor:
        """The file's value with changes, computed on the device. The parameter is what it was, before and after."""
        owner, name = _place(self._module, key)
        held = getattr(owner, name)
        setattr(owner, name, as_parameter(unpacked(self._original(key))))
        self._patcher.patches = {PREFIX + key: [_entry(change, tensors) for change in changes]}
        try:
            self._patcher.patch_weight_to_device(PREFIX + key, device_to=self._patcher.load_device)
            value: Tensor = getattr(owner, name)
        finally:
            self._patcher.patches = {}
            self._patcher.backup.clear()
            setattr(owner, name, held)
        if not all(map(_is_finite, take_apart(value)[0])):
            raise RequestError(
                f"The LoRA makes {key} infinite or NaN; choose another LoRA, or lower its strength."
            )
        return value

    def _put(self, key: str, value: Tensor) -> None:
        if self._sharding is not None:
            self._sharding.replace(key, value)
            return
        setattr(*_place(self._module, key), as_parameter(value.to(self._patcher.load_device)))


def _entry(change: WeightPatch, tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """A change as a ModelPatcher has it: (strength, adapter, strength of the weight, part, function)."""
    import comfy.utils

    function: Callable[[Tensor], Tensor] | None = comfy.utils.swap_scale_shift if change.swap_halves else None
    return (change.strength, _adapter(change, tensors), change.base_strength, change.narrow or None, function)


def _adapter(change: WeightPatch, tensors: Mapping[str, Tensor]) -> object:
    """What ComfyUI's loaders would have made of the file of a LoRA."""
    import comfy.weight_adapter as adapters

    factors = {factor.role: tensors[factor.digest] for factor in change.factors}
    if change.kind == "diff":
        return ("diff", (factors["diff"],))
    if change.kind == "set":
        return ("set", (factors["value"],))
    kind, roles = {
        # The last one of a LoRA is a new shape of the weight, which is refused before it is sent.
        "lora": (adapters.LoRAAdapter, ("up", "down", _ALPHA, "mid", "dora_scale", "reshape")),
        "loha": (adapters.LoHaAdapter, ("w1_a", "w1_b", _ALPHA, "w2_a", "w2_b", "t1", "t2", "dora_scale")),
        "lokr": (
            adapters.LoKrAdapter,
            ("w1", "w2", _ALPHA, "w1_a", "w1_b", "w2_a", "w2_b", "t2", "dora_scale"),
        ),
    }[change.kind]
    weights = tuple(change.alpha if role == _ALPHA else factors.get(role) for role in roles)
    return kind(set(), weights)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    # torch asks no fp8 whether it is NaN.
    return bool((tensor.float() if tensor.dtype.itemsize == 1 else tensor).isfinite().all())


def _place(module: nn.Module, key: str) -> tuple[nn.Module, str]:
    owner, _, name = key.rpartition(".")
    return module.get_submodule(owner), name


def _beside_children(module: nn.Module) -> list[str]:
    """Parameters of modules whose children have some too: ComfyUI's ModelPatcher leaves these as they are, whatever a
    LoRA says (its _load_list takes leaves only), and so must ranks that are to give the same image."""
    return [
        f"{path}.{name}" if path else name
        for path, owner in module.named_modules()
        if any(True for child in owner.children() for _ in child.parameters())
        for name, _ in owner.named_parameters(recurse=False)
    ]

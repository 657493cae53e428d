"""The weights that a rank holds of a Flux, and changing them: LoRAs in, LoRAs out, the file's own values bit for bit.

A change is computed on the whole original tensor in float32, whatever part of it this rank holds, so that every way of
holding weights gives the same values. Those are then rounded to the dtype that the weight is kept in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from diffusers.hooks.tensor_parallel import TPShardSpec
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import RequestError
from ...wire.weight_patches import WeightPatch, by_key
from ..applied_patches import AppliedPatches, Changes
from ..lora_math import apply_patches, check_shapes, cut_rows
from .checkpoint import FluxFile
from .keys import diffusers_sources
from .tensors import assembled, diffusers_part, original_tensor, parameters_of

# Of a device's memory, what must stay free for the file's own values to be kept beside changed ones.
_FREE_BESIDE_ORIGINALS = 1 / 3


@dataclass(frozen=True, eq=False)
class HeldParameter:
    """A rank's part of the parameter that is called `name` in the whole model: `path` in `owner`.

    `rows`: which of it, where weights are shared out. `original`: the file's value as it was loaded, where having it at
    hand costs nothing (a view of the mapped file).
    """

    name: str
    owner: nn.Module
    path: str
    spec: TPShardSpec | None
    rows: slice | None
    original: Tensor | None

    @property
    def tensor(self) -> Tensor:
        """The parameter, or the memory of this rank's share of it; looked up, because a sleep can put it elsewhere."""
        parameter = self.owner.get_parameter(self.path)
        return parameter if self.rows is None else cast(DTensor, parameter).to_local()


class FluxWeights:
    """All parameters of one rank. `read` gives a tensor of the file, `mapped` a parameter's value as it was loaded,
    `cut` this rank's slice of some rows of a whole parameter; `room` says whether a device has memory to spare."""

    def __init__(
        self,
        file: FluxFile,
        held: Sequence[HeldParameter],
        device: torch.device,
        *,
        read: Callable[[str], Tensor],
        mapped: Callable[[str, TPShardSpec | None, slice], Tensor],
        cut: Callable[[Tensor, TPShardSpec | None, slice], Tensor],
        room: Callable[[int], bool] | None = None,
    ) -> None:
        self._file = file
        self._device = device
        self._read = read
        self._mapped = mapped
        self._cut = cut
        self._room = room or (lambda nbytes: _has_room(device, nbytes))
        self._sources = diffusers_sources(file.dims)
        self._held: dict[str, list[HeldParameter]] = {}
        for parameter in held:
            self._held.setdefault(self._sources[parameter.name].key, []).append(parameter)
        self._applied = AppliedPatches(
            self._set
        )  # by original tensor, also of those that only other ranks hold
        self._kept: dict[str, Tensor] = {}  # the file's values beside changed ones, by parameter

    def check(self, patches: Sequence[WeightPatch], tensors: Mapping[str, Tensor]) -> None:
        """Raises RequestError, naming the tensor, for changes that do not fit this model. Changes nothing."""
        shapes = self._file.original_shapes
        for key, changes in by_key(patches).items():
            if key not in shapes:
                raise RequestError(f"The LoRA changes {key}, which {self._file.name} does not have.")
            missing = [f.digest for patch in changes for f in patch.factors if f.digest not in tensors]
            if missing:
                raise RequestError(f"The factor {missing[0]} of the change of {key} was not sent.")
            check_shapes(shapes[key], changes, tensors)

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self, patches: Sequence[WeightPatch], tensors: Mapping[str, Tensor]) -> int:
        """Makes the weights the file's own with these changes and no others; returns how many tensors that touched.

        Only tensors whose changes differ from those in place are computed anew. When it raises (RequestError for a
        result that is not finite, or memory that ran out), the weights are those of before.
        """
        return self._applied.apply(by_key(patches), tensors)

    def release_originals(self) -> None:
        """Gives back the device memory of the file's values beside changed ones; they come from the file again."""
        self._kept.clear()

    def _set(
        self, key: str, changes: Changes | None, tensors: Mapping[str, Tensor], *, pristine: bool
    ) -> None:
        """As applied_patches.Change."""
        if key not in self._held:
            return
        if changes:
            self._change(key, changes, tensors, pristine=pristine)
        else:
            self._restore(key)

    def _change(self, key: str, changes: Changes, tensors: Mapping[str, Tensor], *, pristine: bool) -> None:
        """`pristine`: the parameters still have the file's values."""
        held = self._held[key]
        dtype = held[0].tensor.dtype
        if self._change_rows(key, changes, tensors):
            return
        weight = _in_range(apply_patches(self._base(key, dtype), changes, tensors), key, dtype)
        for parameter in held:
            part = diffusers_part(self._file, weight, self._sources[parameter.name])
            value = self._cut(part, parameter.spec, parameter.rows or slice(None)).to(dtype)
            self._put(parameter, value, pristine)

    def _change_rows(self, key: str, changes: Changes, tensors: Mapping[str, Tensor]) -> bool:
        """Computes only this rank's rows of weights that are shared out by rows; False where they need the others'."""
        todo, whole = [], self._file.original_shapes[key][0]
        for parameter in self._held[key]:
            source, rows = self._sources[parameter.name], parameter.rows
            swapped = source.swap_halves and self._file.layout == "diffusers"
            if rows is None or swapped or (parameter.spec is not None and parameter.spec.dim is not None):
                return False
            first, count = (source.start or 0) + rows.start, rows.stop - rows.start
            found = [cut_rows(patch, tensors, first, count, whole) for patch in changes] if count > 0 else []
            cut = [part for part in found if part is not None]
            if len(cut) < len(found):
                return False
            todo.append((parameter, rows, cut))
        for parameter, rows, cut in todo:
            share = parameter.tensor
            if not share.numel():
                continue
            stored = self._mapped(parameter.name, parameter.spec, rows).to(self._device)
            weight = _float32_copy(stored, share.dtype)
            for patches, factors in cut:
                apply_patches(weight, patches, factors)
            share.copy_(_in_range(weight, key, share.dtype))
        return True

    def _base(self, key: str, dtype: torch.dtype) -> Tensor:
        """The whole original tensor in float32, rounded first as it is kept, for the caller to write into."""
        kept = {
            parameter.name: self._kept.get(parameter.name)
            for parameter in self._held[key]
            if not parameter.spec
        }
        found = [kept.get(name) for name, _ in parameters_of(self._file.dims, key)]
        parts = [part for part in found if part is not None]
        if len(parts) == len(found):
            return assembled(self._file, key, parts).to(torch.float32)
        stored = original_tensor(self._file, self._read, key).to(self._device)
        return _float32_copy(stored, dtype)

    def _put(self, parameter: HeldParameter, value: Tensor, pristine: bool) -> None:
        tensor, name = parameter.tensor, parameter.name
        original = self._kept.get(name, parameter.original)
        if original is None and pristine and parameter.rows is None and self._room(tensor.nbytes):
            original = self._kept[name] = tensor.data
        if original is None:
            tensor.copy_(value)
        else:  # a slice must not keep the whole tensor alive
            tensor.data = (
                value if parameter.spec is None else value.clone(memory_format=torch.contiguous_format)
            )

    def _restore(self, key: str) -> None:
        for parameter in self._held[key]:
            tensor = parameter.tensor
            original = self._kept.pop(parameter.name, parameter.original)
            if original is not None:
                tensor.data = original
            else:
                value = self._mapped(parameter.name, parameter.spec, parameter.rows or slice(None))
                tensor.copy_(value.to(tensor.device))


def _float32_copy(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """`stored` rounded to the dtype it is kept in, for the caller to write into."""
    weight = stored.to(dtype).to(torch.float32)
    return weight.clone() if weight.data_ptr() == stored.data_ptr() else weight


def _in_range(weight: Tensor, key: str, dtype: torch.dtype) -> Tensor:
    """`weight`, in range of `dtype`: clamped for fp8, which knows only NaN beyond its range. Raises RequestError."""
    low, high = (edge.item() for edge in weight.aminmax())
    limit = torch.finfo(dtype).max
    if not (math.isfinite(low) and math.isfinite(high)):
        raise RequestError(
            f"The LoRA makes {key} infinite or NaN; choose another LoRA, or lower its strength."
        )
    if dtype.itemsize == 1:
        return weight.clamp_(-limit, limit)
    if max(-low, high) > limit:
        raise RequestError(
            f"The LoRA makes values of {key} as large as {max(-low, high):.3g}, which "
            f"{str(dtype).removeprefix('torch.')} cannot hold; lower its strength, or choose a wider weight_dtype."
        )
    return weight


def _has_room(device: torch.device, nbytes: int) -> bool:
    """Whether a device's own memory has room for that much more, and for large images after it."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free - 2 * nbytes > total * _FREE_BESIDE_ORIGINALS

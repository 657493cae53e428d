"""The changes (LoRAs) that are in place in a model's weights: only tensors whose changes differ are computed anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ..wire.weight_patches import WeightPatch

Changes = tuple[WeightPatch, ...]


class Change(Protocol):
    def __call__(
        self, key: str, changes: Changes | None, tensors: Mapping[str, Tensor], *, pristine: bool
    ) -> None:
        """Makes the tensor the file's own with these changes, or the file's own where there are none. `pristine`: it
        has the file's values now."""


class AppliedPatches:
    """By tensor. `change` does the work for one."""

    def __init__(self, change: Change) -> None:
        self._change = change
        # What is in place; None while nobody knows.
        self._applied: dict[str, Changes | None] = {}
        self._factors: Mapping[str, Tensor] = {}

    def apply(self, wanted: Mapping[str, Changes], tensors: Mapping[str, Tensor]) -> int:
        """Makes all tensors the file's own with the changes wanted and no others; returns how many that touched. When
        `change` raises, the weights are those of before."""
        before, factors = dict(self._applied), self._factors
        try:
            return self._change_to(wanted, tensors)
        except BaseException:
            self._change_to(before, factors)
            raise

    def _change_to(self, wanted: Mapping[str, Changes | None], tensors: Mapping[str, Tensor]) -> int:
        touched = 0
        for key in [*(key for key in self._applied if key not in wanted), *wanted]:
            before, changes = self._applied.get(key, ()), wanted.get(key, ())
            if before == changes:
                continue
            self._applied[key] = None
            self._change(key, changes, tensors, pristine=before == ())
            if changes:
                self._applied[key] = changes
            else:
                del self._applied[key]
            touched += 1
        self._factors = {
            f.digest: tensors[f.digest]
            for changes in wanted.values()
            for p in changes or ()
            for f in p.factors
        }
        return touched

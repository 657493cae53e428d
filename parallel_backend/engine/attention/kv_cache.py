"""Keys and values of the step before, which PipeFusion's patches attend to where they have no newer ones.

PipeFusion (Wang, Fang et al. 2024), section 3: inputs of neighbouring steps are so alike that keys and values of one
serve the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..patches import PatchPlan, index_of


class KVCache:
    """The newest keys and values of all tokens that this member of a ring holds, per row, chunk and layer."""

    def __init__(self, ring_index: int, ring_size: int) -> None:
        self._ring_index = ring_index
        self._ring_size = ring_size
        self._held: dict[tuple[int, int], list[Tensor]] = {}  # per layer [2, 1, H, S, D]
        self._complete = False

    def clear(self) -> None:
        self._held.clear()
        self._complete = False

    def whole(self, row: int, chunk: int, plan: PatchPlan, device: torch.device) -> KVRecorder:
        """For a whole image: its keys and values are kept, and nothing is recalled."""
        self._complete = True
        order = index_of(tuple(plan.order(self._ring_index)), device)
        return KVRecorder(self._layers(row, chunk), sum(plan.held(self._ring_index)), order=order)

    def patch(self, row: int, chunk: int, plan: PatchPlan, patch: int, *, first: bool) -> KVRecorder:
        """For one patch: its keys and values replace the older ones, and all are recalled.

        `first`: in the first model call by patches. If no whole image went before, patches are left out there that have
        not been computed yet.
        """
        held = plan.held(self._ring_index)
        last = patch + 1 if first and not self._complete else len(held)
        lengths = tuple(sum(plan.held(member)[:last]) for member in range(self._ring_size))
        slot = slice(sum(held[:patch]), sum(held[: patch + 1]))
        return KVRecorder(
            self._layers(row, chunk), sum(held), slot=slot, lengths=lengths, own=self._ring_index
        )

    def _layers(self, row: int, chunk: int) -> list[Tensor]:
        return self._held.setdefault((row, chunk), [])


@dataclass
class KVRecorder:
    """The cache as the layers of one chunk meet it, one after another.

    `total`: keys that this member can hold; `order`: of a whole image, see PatchPlan.order; `slot`: where a patch's
    keys are held; `lengths`: how many each ring member recalls, this one being number `own`; None for new ones only.
    """

    layers: list[Tensor]
    total: int
    order: Tensor | None = None
    slot: slice | None = None
    lengths: tuple[int, ...] | None = None
    own: int = 0
    _next: int = field(default=0, init=False)

    def recall(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, s, D] of the tokens that were exchanged, in; what to attend to, out."""
        if self._next == len(self.layers):
            self.layers.append(key.new_empty(2, *key.shape[:2], self.total, key.shape[3]))
        held = self.layers[self._next]
        self._next += 1
        if self.order is not None:
            torch.index_select(key, 2, self.order, out=held[0])
            torch.index_select(value, 2, self.order, out=held[1])
            return key, value
        assert self.slot is not None and self.lengths is not None, "a patch has both"
        held[0, :, :, self.slot] = key
        held[1, :, :, self.slot] = value
        seen = slice(0, self.lengths[self.own])
        return held[0, :, :, seen], held[1, :, :, seen]

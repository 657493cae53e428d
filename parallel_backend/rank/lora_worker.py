"""The factors of LoRAs that a rank keeps, and changing a model's weights by them together with all other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import TransportError
from ..wire.payloads import Tensors
from ..wire.protocol import ApplyPatches, RankPatch
from ..wire.weight_patches import RecentSets, WeightPatch, digests_of, parse_description
from .outcome.errors import PeerFailed

if TYPE_CHECKING:
    from ..models.base import Weights


class LoraWorker:
    """Of one model. `all_good(error)`: whether no rank has one; collective. Factors stay in the memory that the parent
    made: one copy on the host for all ranks."""

    def __init__(self, all_good: Callable[[Exception | None], bool]) -> None:
        self._all_good = all_good
        self._factors: dict[str, Tensor] = {}
        self._recent = RecentSets()
        self._applied: tuple[WeightPatch, ...] = ()
        self._weights: Weights | None = None  # those that were changed last

    def keep(self, tensors: Tensors) -> None:
        self._factors.update(tensors)

    def apply(self, weights: Weights, message: ApplyPatches, tensors: Tensors) -> RankPatch:
        """Makes the weights the file's own with these changes and no others, on every rank or on none."""
        begun = time.perf_counter()
        if set(tensors) != {"description"}:
            raise TransportError("weight changes came without a description")
        patches = parse_description(tensors["description"].numpy().tobytes())
        weights.check(patches, self._factors)  # alike on every rank: all refuse, or none
        self._weights, touched, error = weights, 0, None
        try:
            touched = weights.apply(patches, self._factors)
        except Exception as failure:
            error = failure
        if not self._all_good(error):
            if error is None:
                weights.apply(self._applied, self._factors)
            raise error or PeerFailed("another rank could not change its weights")
        self._applied = patches
        kept = self._recent.applied(message.identity, digests_of(patches))
        self._factors = {digest: self._factors[digest] for digest in kept if digest in self._factors}
        return RankPatch(seconds=time.perf_counter() - begun, touched=touched)

    def release_originals(self) -> None:
        """Gives back device memory that only makes the next change faster."""
        if self._weights is not None:
            self._weights.release_originals()

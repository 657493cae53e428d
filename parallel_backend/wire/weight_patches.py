"""Changes of a model's weights, such as LoRAs, as data: what is done to which tensor, with factors named by content.

Names of tensors are those of the model's original layout. The factors of a low-rank adapter travel, never the weights
they make; the same factor at another strength is not sent again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..errors import RequestError, TransportError
from .strict_json import from_json, parse, to_json

# Factors of each kind of change, by their usual names.
KINDS = {
    "lora": ("up", "down", "mid", "dora_scale"),
    "loha": ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2", "dora_scale"),
    "lokr": ("w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b", "t2", "dora_scale"),
    "diff": ("diff",),  # added
    "set": ("value",),  # takes the weight's place, whatever the strength
}
RECENT_SETS = 4  # whose factors ranks keep, so that going back and forth between LoRAs sends nothing
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Factor:
    """One tensor of a change: what it is, and the digest under which the ranks keep it."""

    role: str
    digest: str


@dataclass(frozen=True)
class WeightPatch:
    """One change of the tensor `key`, or of the part `narrow` = (dim, start, length) of it.

    The weight is first multiplied by `base_strength`. `alpha`: as trained, None for 1 / rank left out; `swap_halves`:
    the change was made for a layout that has the two halves of the rows in the other order.
    """

    key: str
    kind: str
    factors: tuple[Factor, ...]
    strength: float
    alpha: float | None = None
    base_strength: float = 1.0
    narrow: tuple[int, ...] = ()
    swap_halves: bool = False

    def __post_init__(self) -> None:
        known = KINDS.get(self.kind)
        if known is None:
            raise RequestError(f"the change of {self.key} is of the unknown kind {self.kind!r}.")
        roles = [factor.role for factor in self.factors]
        if not set(roles) <= set(known) or len(roles) != len(set(roles)):
            raise RequestError(
                f"the change of {self.key} has the factors {roles}; {self.kind} has {list(known)}."
            )
        numbers = (self.strength, self.base_strength, 0.0 if self.alpha is None else self.alpha)
        if not all(math.isfinite(number) for number in numbers):
            raise RequestError(
                f"the change of {self.key} has a strength or alpha that is not a finite number."
            )
        if len(self.narrow) not in (0, 3):
            raise RequestError(f"the change of {self.key} names the part {list(self.narrow)}.")

    @property
    def does_nothing(self) -> bool:
        return self.strength == 0.0 and self.base_strength == 1.0 and self.kind != "set"


@dataclass(frozen=True, eq=False)
class WeightPatches:
    """All changes of one model, in the order of application per tensor, and their factors by digest."""

    patches: tuple[WeightPatch, ...]
    tensors: Mapping[str, Tensor]

    def __deepcopy__(self, memo: dict[int, object]) -> WeightPatches:
        return self  # nothing in it changes, and its tensors are large

    @cached_property
    def description(self) -> bytes:
        """The changes as JSON: the same for the same changes, whatever the order of the tensors they concern."""
        ordered = sorted(self.patches, key=lambda patch: patch.key)  # stable
        return json.dumps(
            [to_json(patch) for patch in ordered], allow_nan=False, separators=(",", ":")
        ).encode()

    @cached_property
    def identity(self) -> str:
        """Names the changes; empty when there are none."""
        return (
            hashlib.blake2b(self.description, digest_size=_DIGEST_BYTES).hexdigest() if self.patches else ""
        )

    @property
    def keys(self) -> set[str]:
        return {patch.key for patch in self.patches}

    @property
    def digests(self) -> set[str]:
        return digests_of(self.patches)


NO_PATCHES = WeightPatches((), {})


def digests_of(patches: Iterable[WeightPatch]) -> set[str]:
    return {factor.digest for patch in patches for factor in patch.factors}


def by_key(patches: Iterable[WeightPatch]) -> dict[str, tuple[WeightPatch, ...]]:
    """The changes of each tensor, in their order."""
    found: dict[str, list[WeightPatch]] = {}
    for patch in patches:
        found.setdefault(patch.key, []).append(patch)
    return {key: tuple(changes) for key, changes in found.items()}


def parse_description(data: bytes) -> tuple[WeightPatch, ...]:
    """The inverse of WeightPatches.description. Raises TransportError for anything else."""
    try:
        items = parse(data.decode())
    except (ValueError, RecursionError) as error:
        raise TransportError(f"a description of weight changes is not valid JSON: {error}") from None
    return from_json(items, tuple[WeightPatch, ...], "weight changes")


def digest(tensor: Tensor) -> str:
    """Names a tensor's dtype, shape and values."""
    data = tensor.detach().cpu().contiguous()
    found = hashlib.blake2b(f"{data.dtype}{list(data.shape)}".encode(), digest_size=_DIGEST_BYTES)
    found.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


class RecentSets:
    """The factors that both ends keep: those of the last RECENT_SETS sets. Both follow the same rule, so neither has to
    tell the other what it dropped."""

    def __init__(self) -> None:
        self._sets: dict[str, set[str]] = {}

    def applied(self, identity: str, digests: set[str]) -> set[str]:
        """Notes the set that is in place now, and returns all digests to keep."""
        self._sets.pop(identity, None)
        self._sets[identity] = digests
        while len(self._sets) > RECENT_SETS:
            del self._sets[next(iter(self._sets))]
        return set().union(*self._sets.values())

    def clear(self) -> None:
        self._sets.clear()

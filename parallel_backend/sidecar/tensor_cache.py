"""The tensors that ranks keep from call to call, so that prompts and references travel once and not with every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from ..wire.arguments import Kept, Tree, map_tensors
from .sent_tensor import SentTensor

LEAST_BYTES = 16 * 1024  # of a tensor that is kept: sending less costs no more than knowing it
MOST_BYTES = 512 * 1024**2  # of all of them, where they came from and on each device
# Arguments that are others in every step; the latent and the timestep come first and without a name.
CHANGING = ("control", "transformer_options")
# One that is made for the ranks alone, and into whose tensors nobody writes.
OURS = "parallel_patches"


@dataclass(frozen=True)
class KnownArguments:
    """Arguments of a call by name with what the ranks keep left out; `new`: what they must be sent, by key."""

    kwargs: dict[str, Tree]
    new: dict[int, Tensor] = field(default_factory=dict)


class KnownTensors:
    """Tensors by the key under which the ranks keep them, the least recently used first."""

    def __init__(self) -> None:
        self._known: dict[int, SentTensor] = {}
        self._forget: list[int] = []
        self._next = 1

    def take_out(self, kwargs: Mapping[str, Tree]) -> KnownArguments:
        """`kwargs` with a Kept in place of each large tensor that steps have in common."""
        new: dict[int, Tensor] = {}
        used: set[int] = set()

        def kept(tensor: Tensor, own: bool) -> Tensor | Kept:
            if tensor.nbytes < LEAST_BYTES:
                return tensor
            key = self._find(tensor)
            if key is None:
                key, self._next = self._next, self._next + 1
                self._known[key] = SentTensor(tensor, own)
                new[key] = self._known[key].copy
            used.add(key)
            return Kept(key)

        found = {
            name: value if name in CHANGING else map_tensors(value, partial(kept, own=name == OURS))
            for name, value in kwargs.items()
        }
        self._make_room(used)
        return KnownArguments(found, new)

    def drop(self, keys: Mapping[int, Tensor]) -> None:
        """Nobody knows whether the ranks have these."""
        for key in keys:
            if self._known.pop(key, None) is not None:
                self._forget.append(key)

    def take_forgotten(self) -> tuple[int, ...]:
        """Keys that are not used again, to be told with the next call."""
        forgotten, self._forget = tuple(self._forget), []
        return forgotten

    def _find(self, tensor: Tensor) -> int | None:
        for key in reversed(self._known):
            if self._known[key].equals(tensor):
                self._known[key] = self._known.pop(key)
                return key
        return None

    def _make_room(self, used: set[int]) -> None:
        held = sum(sent.copy.nbytes for sent in self._known.values())
        for key in [key for key in self._known if key not in used]:
            if held <= MOST_BYTES:
                break
            held -= self._known[key].copy.nbytes
            del self._known[key]
            self._forget.append(key)

"""Renames tensors of files that ComfyUI's loaders cannot use directly: keys with a prefix, and diffusers' layout.

For diffusers' layout, ComfyUI's loader would join queries, keys and values in host memory: 7 of the 24 GB of Flux.1 in
bf16, in every rank. Here the parts stay views of the mapped file and are joined at their destination.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .quantised import METADATA

T = TypeVar("T")

# Tools that save one module of a model or pipeline leave its name in front of every key.
_PREFIXES = ("diffusion_model.", "transformer.")
_BESIDE = ("vae.", "text_encoders.", "first_stage_model.")
_KEEPING = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_MARK, _SINGLE, _DOUBLE = "x_embedder.weight", "single_transformer_blocks.", "transformer_blocks."


def without_prefix(tensors: Mapping[str, T], metadata: Mapping[str, str]) -> dict[str, T]:
    """Returns the tensors of the model by names that ComfyUI knows. Keys stay unchanged if only some of them have the
    prefix: then it belongs to the names of that model family."""
    for prefix in _PREFIXES:
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        others = [key for key in tensors if not key.startswith((prefix, *_BESIDE))]
        if own and not others and METADATA not in metadata:  # that names layers with the prefix too
            return own
    return dict(tensors)


class Joined(Tensor):
    """A tensor made of several, concatenated along dim 0. Any computation first makes it a plain tensor."""

    pieces: tuple[Tensor, ...]

    @staticmethod
    def __new__(cls: type[Joined], pieces: Sequence[Tensor]) -> Joined:
        first = pieces[0]
        shape = (sum(map(len, pieces)), *first.shape[1:])
        make: Any = torch.Tensor._make_wrapper_subclass
        found: Joined = make(cls, shape, dtype=first.dtype, device=first.device)
        found.pieces = tuple(pieces)
        return found

    def on(self, device: torch.device, move: Callable[[Tensor], Tensor] = lambda piece: piece) -> Tensor:
        """Returns the whole tensor on `device`. `move`: brings a piece there."""
        whole, begin = torch.empty(self.shape, dtype=self.dtype, device=device), 0
        for piece in self.pieces:
            whole[begin : begin + len(piece)].copy_(move(piece))
            begin += len(piece)
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KEEPING:
            return cls(args[0].pieces)
        args, kwargs = tree_map_only(cls, lambda joined: joined.on(joined.device), (args, kwargs or {}))
        return func(*args, **kwargs)


def from_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Returns the tensors by the names of ComfyUI's module, with weights of several parts as Joined. Leaves out tensors
    that the module has no name for, as ComfyUI does. Returns None for other files or if parts do not fit."""
    if _MARK not in tensors or not any(name.startswith(_SINGLE) for name in tensors):
        return None
    from comfy.utils import flux_to_diffusers

    sizes = {"depth": _blocks(tensors, _DOUBLE), "depth_single_blocks": _blocks(tensors, _SINGLE)}
    names = flux_to_diffusers(sizes | {"hidden_size": len(tensors[_MARK])})
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        target = names.get(name)
        if isinstance(target, str):
            found[target] = tensor
        elif target is not None and target[1] is None:
            found[target[0]] = target[2](tensor)
        elif target is not None:
            own, (dim, begin, rows) = target[:2]
            if (dim, rows) != (0, len(tensor)):
                return None
            parts.setdefault(own, {})[begin] = tensor
    for name, by_row in parts.items():
        rows, pieces = sorted(by_row), [by_row[begin] for begin in sorted(by_row)]
        if rows != [sum(map(len, pieces[:number])) for number in range(len(pieces))]:
            return None
        found[name] = Joined(pieces)
    return found


def _blocks(tensors: Mapping[str, Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)})

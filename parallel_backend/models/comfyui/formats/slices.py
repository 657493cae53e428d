"""Tensor parallelism: cuts the layers of each block to the rows or columns that a rank holds.

Layers that output heads or hidden channels are cut by rows of their weights, layers that take them as input by columns,
and the ranks' results are summed (Megatron-LM, Shoeybi et al. 2019, §3). The table names these layers (models/tokens).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....errors import RequestError
from ...base import Slices, find_module
from ...tokens.regions import Branch, Region, Sliced
from .key_layouts import Joined

_ATTENTION_PARTS = 3  # queries, keys and values
# ComfyUI's layouts of fp8 weights.
_FP8_LAYOUTS = ("TensorCoreFP8Layout", "TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout")
_PLAIN = (nn.Parameter, Tensor, Joined)


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that a rank holds: some of its rows (`dim` 0) or columns (1), in one or more pieces."""

    dim: int
    pieces: tuple[slice, ...]

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the part: a view if it is one piece, a copy otherwise."""
        return self._cut(parameter, lambda parts: torch.cat(parts, self.dim))

    def of_file(self, parameter: Tensor) -> Tensor:
        """Returns the part of a mapped parameter. Rows in several pieces are a Joined, copied at their destination."""
        return self._cut(
            parameter, lambda parts: Joined(parts) if self.dim == 0 else torch.cat(parts, self.dim)
        )

    def _cut(self, parameter: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        if is_plain(parameter):
            return self._of_values(parameter.detach(), join)
        quantised: Any = parameter
        values = self._of_values(quantised._qdata, functools.partial(torch.cat, dim=self.dim))
        params = replace(quantised._params, orig_shape=tuple(values.shape))
        return cast(Tensor, type(quantised)(values, quantised._layout_cls, params))

    def _of_values(self, values: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        parts = [part for piece in self.pieces for part in _narrow(values, self.dim, piece)]
        return parts[0] if len(parts) == 1 else join(parts)


def _narrow(values: Tensor, dim: int, piece: slice) -> Iterator[Tensor]:
    """Yields views that make up the rows or columns `piece`."""
    if dim or not isinstance(values, Joined):
        yield values.narrow(dim, piece.start, piece.stop - piece.start)
        return
    begin = 0
    for part in values.pieces:
        first, last = max(piece.start - begin, 0), min(piece.stop - begin, len(part))
        if first < last:
            yield part[first:last]
        begin += len(part)


def is_plain(weight: Tensor) -> bool:
    """Returns True for a weight that is not quantised."""
    return type(weight) in _PLAIN


def can_be_cut(weight: Tensor) -> bool:
    """Returns True if some rows or columns of a weight are valid by themselves: plain, or fp8 with one scale."""
    if is_plain(weight):
        return True
    scale = getattr(getattr(weight, "_params", None), "scale", None)
    is_fp8 = str(getattr(weight, "_layout_cls", "")) in _FP8_LAYOUTS
    return is_fp8 and scale is not None and scale.numel() == 1


def slice_blocks(module: nn.Module, regions: Iterable[Region], slices: Slices) -> dict[str, Cut]:
    """Cuts the layers of a module's blocks, whose weights are mapped, to this rank's slice.

    Returns the cut of each changed parameter by its name in the module. Raises RequestError for blocks that the table
    does not describe, and for weights in a format that cannot be cut.
    """
    cuts: dict[str, Cut] = {}
    for region in regions:
        for path, kind in region.lists.items():
            for number, block in enumerate(cast(nn.ModuleList, module.get_submodule(path))):
                if kind.sliced is None:
                    raise _refusal(block, "nobody has described how its layers can be cut")
                for name, cut in _slice_block(block, kind.sliced, slices).items():
                    cuts[f"{path}.{number}.{name}"] = cut
    return cuts


def _slice_block(block: nn.Module, words: Sliced, slices: Slices) -> dict[str, Cut]:
    layers: dict[str, Any] = {name: one for name, one in block.named_modules() if hasattr(one, "in_features")}
    known = [path for branch in words.branches for path in (*branch.into, branch.out)]
    unknown = sorted(layers.keys() - {*known, *words.joined, *words.replicated})
    if unknown:
        raise _refusal(block, f"its layers {', '.join(unknown)} are not known")
    rows: dict[str, list[int]] = {}
    columns: dict[str, list[int]] = {}
    for branch in words.branches:
        rows |= {path: _rows_of(block, layers, path, branch) for path in branch.into if path in layers}
        if branch.out in layers:
            width, heads = layers[branch.out].in_features, _heads_of(block, branch)
            columns[branch.out] = [heads, width - heads] if heads else [width]
    joined = {path: [layers[path].out_features] for path in words.joined if path in layers}
    found = {path: find_module(block, path) for path in words.norms}
    norms = {path: norm for path, norm in found.items() if getattr(norm, "weight", None) is not None}
    cuts: dict[str, Cut] = {}
    for path, widths in {**rows, **joined}.items():
        cut = Cut(0, _pieces(block, path, widths, slices))
        cuts |= _cut_parameters(layers[path], path, {"weight": cut, "bias": cut})
    for path, widths in columns.items():
        layer, cut = layers[path], Cut(1, _pieces(block, path, widths, slices))
        cuts |= _cut_parameters(layer, path, {"weight": cut})
        if slices.index:
            layer.bias = None  # only the first rank adds it to the sum
        _let_meet(layer, "sum", slices.add_up)
    for path in joined:
        _let_meet(layers[path], "join", slices.join)
    for path, norm in norms.items():
        cut = Cut(0, _pieces(block, path, [len(norm.weight)], slices))
        cuts |= _cut_parameters(norm, path, {"weight": cut})
        norm.all_heads = len(norm.weight) * slices.degree
        _let_meet(norm, "norm", slices.add_up)
    for path in words.counts:
        owner, _, name = path.rpartition(".")
        counting = find_module(block, owner)
        if counting is not None:
            _divide(block, counting, name, slices.degree)
    return cuts


def _rows_of(block: nn.Module, layers: dict[str, Any], path: str, branch: Branch) -> list[int]:
    """Returns the widths of the consecutive parts of a layer's output; each part is cut into `degree` slices."""
    layer, out = layers[path], layers.get(branch.out)
    width = layer.in_features if out is None else out.in_features
    heads = _heads_of(block, branch)
    if not heads:
        return [width] * (layer.out_features // width)
    hidden = width - heads
    if layer.out_features in (heads, hidden):
        return [layer.out_features]
    rest = layer.out_features - _ATTENTION_PARTS * heads
    return [heads] * _ATTENTION_PARTS + [hidden] * (rest // hidden)


def _heads_of(block: nn.Module, branch: Branch) -> int:
    return int(operator.attrgetter(branch.heads)(block)) if branch.heads else 0


def _pieces(block: nn.Module, path: str, widths: list[int], slices: Slices) -> tuple[slice, ...]:
    found, begin = [], 0
    for width in widths:
        if width % slices.degree:
            raise _refusal(block, f"{slices.degree} does not divide the {width} channels of {path}")
        size = width // slices.degree
        found.append(slice(begin + slices.index * size, begin + (slices.index + 1) * size))
        begin += width
    return tuple(found)


def _cut_parameters(layer: Any, path: str, cuts: dict[str, Cut]) -> dict[str, Cut]:
    """Cuts parameters of a layer. Returns the cuts by the parameters' names in the block."""
    found = {}
    for name, cut in cuts.items():
        parameter = layer._parameters.get(name)
        if parameter is None:
            continue
        if not can_be_cut(parameter):
            raise RequestError(
                f"tensor_degree cannot split {path}: its weights are quantised with a scale for each part of them. Set "
                f"tensor_degree to 1 (shard_weights takes any format), or load the model in fp8 or bf16."
            )
        setattr(layer, name, nn.Parameter(cut.of_file(parameter), requires_grad=False))
        found[f"{path}.{name}"] = cut
    if "weight" in found and hasattr(layer, "in_features"):
        layer.out_features, layer.in_features = layer.weight.shape
    return found


def _divide(block: nn.Module, counting: Any, name: str, degree: int) -> None:
    count = getattr(counting, name, None)
    if not isinstance(count, int) or count % degree:
        raise _refusal(block, f"{degree} does not divide its {name} ({count})")
    setattr(counting, name, count // degree)


def _refusal(block: nn.Module, reason: str) -> RequestError:
    return RequestError(
        f"tensor_degree cannot split {type(block).__name__} of this ComfyUI: {reason}. Set tensor_degree to 1; "
        f"shard_weights splits the weights of any model."
    )


def _let_meet(layer: Any, way: str, meet: Callable[[Tensor], Tensor]) -> None:
    """Adds a collective to each call of the layer, by giving it a subclass. A `forward` set on the layer itself would
    count as a change that a node made."""
    layer.meet = meet
    kind: Any = type(layer)
    layer.__class__ = _meeting_class(kind, way)


@functools.cache
def _meeting_class(kind: type, way: str) -> type:
    own: Any = kind.forward  # type: ignore[attr-defined]

    def add_up(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return cast(Tensor, self.meet(own(self, *args, **kwargs)))

    def join(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        part = own(self, *args, **kwargs)
        return cast(Tensor, self.meet(part.flatten(0, -2)).reshape(*part.shape[:-1], -1))

    def norm(self: Any, x: Tensor) -> Tensor:
        """Normalises all heads of a token by their root mean square, as torch does: in float32, rounded once."""
        squares = self.meet(x.float().square().sum(-1, keepdim=True))
        scale = torch.rsqrt(squares / self.all_heads + self.eps)
        weight = self.weight.to(x.device, torch.float32)
        # LoRAs of prompts' hooks, if weights are sharded
        for function in getattr(self, "weight_function", ()):
            weight = function(weight)
        return (x.float() * scale * weight).to(x.dtype)

    forward = {"sum": add_up, "join": join, "norm": norm}[way]
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})

"""The maths of weight adapters: what a LoRA, LoHa, LoKr (each also as DoRA), a difference or a value makes of a weight.

The conventions (alpha over rank, which axis DoRA normalises) are those of ComfyUI's comfy.weight_adapter, which reads
the same files. Sources: LoRA (Hu et al. 2021), LoHa and LoKr (Yeh et al. 2023, "LyCORIS"), DoRA (Liu et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import RequestError
from ..wire.weight_patches import Factor, WeightPatch


def apply_patches(weight: Tensor, patches: Sequence[WeightPatch], tensors: Mapping[str, Tensor]) -> Tensor:
    """Changes `weight` (the whole original tensor, float32, the caller's own) in place, and returns it.

    `tensors`: the factors by digest, in any dtype. Raises RequestError for factors that do not fit, naming the tensor.
    """
    for patch in patches:
        try:
            _apply(weight, patch, tensors)
        except (RuntimeError, IndexError, TypeError, KeyError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
                raise
            raise RequestError(_misfit(weight.shape, patch, tensors)) from error
    return weight


def cut_rows(
    patch: WeightPatch, tensors: Mapping[str, Tensor], first: int, count: int, whole: int
) -> tuple[list[WeightPatch], dict[str, Tensor]] | None:
    """The effect of `patch` on `count` rows from `first` on of a tensor of `whole` rows, as changes of those alone.

    None where a row's new value depends on other rows, or is not simply told from the factors.
    """
    roles = {factor.role for factor in patch.factors}
    by_rows = _BY_ROWS.get(patch.kind)
    if by_rows is None or roles & {"mid", "t1", "t2", "dora_scale"} or patch.swap_halves:
        return None
    if patch.narrow and patch.narrow[0] != 0:
        return None
    start, length = patch.narrow[1:] if patch.narrow else (0, whole)
    if any(tensors[f.digest].shape[:1] != (length,) for f in patch.factors if f.role in by_rows):
        return None  # a value for all rows
    low, high = max(start, first), min(start + length, first + count)
    if low >= high:
        return [], {}
    factors, cut = [], {}
    for factor in patch.factors:
        tensor, name = tensors[factor.digest], factor.digest
        if factor.role in by_rows:
            tensor, name = tensor[low - start : high - start], f"{name}[{low}:{high}]"
        factors.append(Factor(factor.role, name))
        cut[name] = tensor
    return [replace(patch, factors=tuple(factors), narrow=(0, low - first, high - low))], cut


def check_shapes(shape: Sequence[int], patches: Sequence[WeightPatch], tensors: Mapping[str, Tensor]) -> None:
    """Raises RequestError, as apply_patches would for a weight of this shape; computes nothing."""
    for patch in patches:
        sizes = tuple((f.role, tuple(tensors[f.digest].shape)) for f in patch.factors)
        if not _fits(tuple(shape), patch.kind, patch.narrow, patch.swap_halves, sizes):
            raise RequestError(_misfit(shape, patch, tensors))


@lru_cache(maxsize=1024)  # a model's blocks are alike, and a meta tensor takes milliseconds
def _fits(
    shape: tuple[int, ...],
    kind: str,
    narrow: tuple[int, ...],
    swap_halves: bool,
    sizes: tuple[tuple[str, tuple[int, ...]], ...],
) -> bool:
    """Whether factors of these sizes change a weight of this shape, tried without memory."""
    if {role for role, _ in sizes} == {"up", "down"}:
        return _product_fits(
            shape, narrow, **dict(sizes)
        )  # by far the most: saves importing what meta tensors need
    factors = tuple(Factor(role, role) for role, _ in sizes)
    patch = WeightPatch("", kind, factors, 1.0, narrow=narrow, swap_halves=swap_halves)
    outlines = {role: torch.empty(size, device="meta") for role, size in sizes}
    try:
        _apply(torch.empty(shape, device="meta"), patch, outlines)
    except (RuntimeError, IndexError, TypeError, KeyError):
        return False
    return True


def _product_fits(
    shape: tuple[int, ...], narrow: tuple[int, ...], up: tuple[int, ...], down: tuple[int, ...]
) -> bool:
    """Whether up @ down, all but the first dim of each made one, has as many values as the (part of the) weight."""
    part = list(shape)
    if narrow:
        dim, start, length = narrow
        if dim not in range(len(shape)) or min(start, length) < 0 or start + length > shape[dim]:
            return False
        part[dim] = length
    if len(up) < 2 or len(down) < 2 or math.prod(up[1:]) != down[0]:
        return False
    return up[0] * math.prod(down[1:]) == math.prod(part)


def _apply(weight: Tensor, patch: WeightPatch, tensors: Mapping[str, Tensor]) -> None:
    part = weight.narrow(*patch.narrow) if patch.narrow else weight
    if patch.base_strength != 1.0:
        part *= patch.base_strength
    factors = {f.role: tensors[f.digest].to(part.device, torch.float32) for f in patch.factors}
    if patch.kind == "set":
        part.copy_(factors["value"])
    elif patch.kind == "diff":
        _add(part, patch, factors["diff"], 1.0)
    else:
        if _multiplies_into(part, patch, factors):
            up, down = factors["up"].flatten(1), factors["down"].flatten(1)
            part.addmm_(up, down, alpha=patch.strength * _scale(patch, down.shape[0]))
            return
        delta, rank = _DELTAS[patch.kind](factors)
        scale = _scale(patch, rank)
        if "dora_scale" in factors:
            _decompose(part, patch, delta.reshape(part.shape) * scale, factors["dora_scale"])
        else:
            _add(part, patch, delta.reshape(part.shape), scale)


def _multiplies_into(part: Tensor, patch: WeightPatch, factors: Mapping[str, Tensor]) -> bool:
    """Whether the product of a LoRA's factors can be added as it is made, without memory for it."""
    if set(factors) != {"up", "down"} or patch.swap_halves or part.is_meta:
        return False
    up, down = factors["up"], factors["down"]
    return part.ndim == 2 and (up.shape[0], down.shape[1:].numel()) == tuple(part.shape)


def _scale(patch: WeightPatch, rank: int | None) -> float:
    return 1.0 if patch.alpha is None or rank is None else patch.alpha / rank


def _add(part: Tensor, patch: WeightPatch, delta: Tensor, scale: float) -> None:
    if delta.shape != part.shape:
        raise RuntimeError("shapes differ")
    part.add_(_in_order(patch, delta), alpha=patch.strength * scale)


def _decompose(part: Tensor, patch: WeightPatch, delta: Tensor, magnitude: Tensor) -> None:
    """DoRA: the changed weight takes its norms, per output or per input, from `magnitude`."""
    changed = part + _in_order(patch, delta)
    if magnitude.shape[0] == changed.shape[0]:
        norm = part.flatten(1).norm(dim=1).reshape(-1, *[1] * (part.ndim - 1))
    else:
        norm = changed.transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *[1] * (part.ndim - 2))
    changed *= magnitude / (norm + torch.finfo(part.dtype).eps)
    if patch.strength == 1.0:
        part.copy_(changed)
    else:
        part.add_(changed - part, alpha=patch.strength)


def _in_order(patch: WeightPatch, delta: Tensor) -> Tensor:
    if not patch.swap_halves:
        return delta
    first, second = delta.chunk(2, dim=0)
    return torch.cat([second, first], dim=0)


def _lora(factors: dict[str, Tensor]) -> tuple[Tensor, int]:
    """up @ down; `mid`, where there is one, is the small convolution of a Tucker decomposition between them."""
    up, down = factors["up"], factors["down"]
    rank = down.shape[0]
    if (mid := factors.get("mid")) is not None:
        width, inner = down.shape[1], down.shape[0]
        down = torch.mm(down.transpose(0, 1).flatten(1), mid.transpose(0, 1).flatten(1))
        down = down.reshape(width, inner, *mid.shape[2:]).transpose(0, 1)
    return torch.mm(up.flatten(1), down.flatten(1)), rank


def _loha(factors: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The product, element by element, of two low-rank matrices."""
    first = _low_rank(factors["w1_a"], factors["w1_b"], factors.get("t1"))
    second = _low_rank(factors["w2_a"], factors["w2_b"], factors.get("t2"))
    return first * second, factors["w1_b"].shape[0]


def _lokr(factors: dict[str, Tensor]) -> tuple[Tensor, int | None]:
    """The Kronecker product of two matrices, each whole or of low rank."""
    first, second, rank = factors.get("w1"), factors.get("w2"), None
    if first is None:
        rank = factors["w1_b"].shape[0]
        first = torch.mm(factors["w1_a"], factors["w1_b"])
    if second is None:
        rank = factors["w2_b"].shape[0]
        second = _low_rank(factors["w2_a"], factors["w2_b"], factors.get("t2"))
    if second.ndim == 4:
        first = first[:, :, None, None]
    return torch.kron(first, second), rank


def _low_rank(a: Tensor, b: Tensor, core: Tensor | None) -> Tensor:
    if core is None:
        return torch.mm(a, b)
    return torch.einsum("i j k l, j r, i p -> p r k l", core, b, a)


# The factors of which each row makes a row of the change.
_BY_ROWS = {"lora": ("up",), "loha": ("w1_a", "w2_a"), "diff": ("diff",), "set": ("value",)}
_DELTAS = {"lora": _lora, "loha": _loha, "lokr": _lokr}


def _misfit(shape: Sequence[int], patch: WeightPatch, tensors: Mapping[str, Tensor]) -> str:
    shapes = ", ".join(
        f"{f.role} {list(tensors[f.digest].shape) if f.digest in tensors else 'missing'}"
        for f in patch.factors
    )
    part = f" (its part {list(patch.narrow)})" if patch.narrow else ""
    return (
        f"The LoRA does not fit this model: {patch.key}{part} has the shape {list(shape)}, and the LoRA's "
        f"{patch.kind} for it has {shapes}. It was made for another model; choose one for Flux.1."
    )

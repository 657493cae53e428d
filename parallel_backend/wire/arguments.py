"""The arguments of any model call as named tensors and back: a closed tree of plain values, never a pickle.

What a model would have got from ComfyUI goes to the ranks as it is: tensors, numbers, strings and None, in lists,
tuples and dicts of those. A tensor that stands at several places travels once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import RequestError, TransportError
from .payloads import Tensors
from .strict_json import parse, shown
from .transport import DTYPES, MAX_TENSORS

# None, bool, int, float, str, Tensor, and lists, tuples and dicts (keys: str or int) of these.
Tree = Any

_STRUCTURE = "structure"  # name of the tensor that holds the tree as JSON; the others are numbered
_DEPTH = 16  # of a tree: what is deeper was not made for a model
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True)
class Kept:
    """Stands in a tree for a tensor that the other side keeps under this key."""

    key: int


_KEPT = "kept."  # before the key, in the name of a tensor that is to be kept


def kept_tensors(tensors: Mapping[int, Tensor]) -> Tensors:
    """What a payload carries beside arguments for the other side to keep."""
    return {f"{_KEPT}{key}": tensor for key, tensor in tensors.items()}


def take_kept(tensors: Tensors) -> dict[int, Tensor]:
    """Takes what `kept_tensors` added out of `tensors`, by key."""
    names = [name for name in tensors if name.startswith(_KEPT) and name.removeprefix(_KEPT).isdecimal()]
    return {int(name.removeprefix(_KEPT)): tensors.pop(name) for name in names}


def pack_arguments(tree: Tree, where: str = "the model call") -> Tensors:
    """`tree` as tensors that a payload can carry. Raises RequestError, naming the place, for what is no such tree."""
    tensors: dict[int, tuple[int, Tensor]] = {}
    text = json.dumps(_described(tree, where, tensors, 0), allow_nan=False, separators=(",", ":"))
    if len(tensors) >= MAX_TENSORS:
        raise RequestError(
            f"{where} has {len(tensors)} tensors; {MAX_TENSORS - 1} can be sent to the devices at once."
        )
    packed = {str(number): tensor for number, tensor in tensors.values()}
    packed[_STRUCTURE] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return packed


def unpack_arguments(tensors: Tensors, kept: Mapping[int, Tensor] | None = None) -> Tree:
    """The tree that `pack_arguments` took apart; tensors stay where they are. Raises TransportError for others.

    `kept`: what stands for a Kept, by its key.
    """
    left = dict(tensors)
    structure = left.pop(_STRUCTURE, None)
    if structure is None or structure.dtype != torch.uint8 or structure.ndim != 1:
        raise TransportError("a payload of arguments does not say how they belong together")
    try:
        described = parse(bytes(structure.tolist()).decode())
    except (ValueError, RecursionError) as error:
        raise TransportError(f"the description of arguments is not valid JSON: {error}") from None
    used: set[str] = set()
    tree = _built(described, _Parts(left, kept or {}), used, 0)
    if used != set(left):
        raise TransportError(f"a payload has unknown tensors: {shown(sorted(set(left) - used))}")
    return tree


def map_tensors(tree: Tree, change: Callable[[Tensor], Tree]) -> Tree:
    """The same tree with `change(tensor)` in place of each tensor, once for a tensor that stands at several places."""
    changed: dict[int, Tree] = {}

    def walk(value: Tree) -> Tree:
        if isinstance(value, Tensor):
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(walk(item) for item in value)
        return value

    return walk(tree)


def _described(value: Tree, where: str, tensors: dict[int, tuple[int, Tensor]], depth: int) -> object:
    """JSON of `value`: plain values as they are, everything else as a list [kind, …]."""
    if depth > _DEPTH:
        raise RequestError(f"{where} is nested more than {_DEPTH} levels deep, which no model call needs.")
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            raise _refused(where, f"a {type(value).__name__}")
        if value.dtype not in DTYPES.values():
            raise _refused(where, f"a tensor of {str(value.dtype).removeprefix('torch.')}")
        number, _ = tensors.setdefault(id(value), (len(tensors), value))
        return ["t", number]
    if isinstance(value, Kept):
        return ["k", value.key]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else ["i", str(value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else ["f", str(value)]
    if type(value) in (list, tuple):
        kind = "l" if type(value) is list else "u"
        return [
            kind,
            *(_described(item, f"{where}[{i}]", tensors, depth + 1) for i, item in enumerate(value)),
        ]
    if type(value) is dict:
        for key in value:
            if type(key) not in (str, int):
                raise _refused(f"{where}: the key {shown(key)}", f"a {type(key).__name__}")
        return [
            "d",
            *(
                [key, _described(item, f"{where}[{key!r}]", tensors, depth + 1)]
                for key, item in value.items()
            ),
        ]
    raise _refused(where, f"a {type(value).__name__}")


def _refused(where: str, what: str) -> RequestError:
    return RequestError(
        f"{where} is {what}, which cannot be sent to the devices: only tensors, numbers, texts, and lists or dicts of "
        f"them can. Take out the node that adds it, or use the stock loader and KSampler for this graph."
    )


@dataclass(frozen=True)
class _Parts:
    """What a tree is built of: tensors by name, and those that are kept."""

    tensors: Tensors
    kept: Mapping[int, Tensor]


def _built(described: object, parts: _Parts, used: set[str], depth: int) -> Tree:
    if described is None or isinstance(described, (bool, int, float, str)):
        return described
    if not isinstance(described, list) or not described or depth > _DEPTH:
        raise _malformed(described)
    kind, *items = described
    if kind == "l":
        return [_built(item, parts, used, depth + 1) for item in items]
    if kind == "u":
        return tuple(_built(item, parts, used, depth + 1) for item in items)
    if kind == "d":
        found: dict[str | int, Tree] = {}
        for item in items:
            if not isinstance(item, list) or len(item) != 2 or type(item[0]) not in (str, int):
                raise _malformed(item)
            found[item[0]] = _built(item[1], parts, used, depth + 1)
        if len(found) != len(items):
            raise TransportError("the description of arguments names a key twice")
        return found
    if len(items) != 1:
        raise _malformed(described)
    (item,) = items
    if kind == "t" and type(item) is int and str(item) in parts.tensors:
        used.add(str(item))
        return parts.tensors[str(item)]
    if kind == "k" and type(item) is int and item in parts.kept:
        return parts.kept[item]
    if kind == "f" and item in _NOT_FINITE:
        return _NOT_FINITE[item]
    if kind == "i" and isinstance(item, str) and len(item) < 40 and item.removeprefix("-").isdecimal():
        return int(item)
    raise _malformed(described)


def _malformed(described: object) -> TransportError:
    return TransportError(f"the description of arguments has {shown(described)}")

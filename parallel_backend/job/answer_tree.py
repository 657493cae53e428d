"""Packs the answer of a text encoder, tensors and plain values in tuples, lists and dicts, into tensors to send."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import RequestError, TransportError

TREE = "tree"  # name of the tensor that holds the structure as JSON; the other tensors are named by number

_PLAIN = (str, int, float, bool, type(None))


def pack_tree(answer: Any) -> dict[str, Tensor]:
    """Returns an answer as CPU tensors by name. Raises RequestError if it holds an object of another kind."""
    tensors: list[Tensor] = []
    form = json.dumps(_form_of(answer, tensors))
    found = {str(number): one.detach().cpu().contiguous() for number, one in enumerate(tensors)}
    return {TREE: torch.frombuffer(bytearray(form.encode()), dtype=torch.uint8), **found}


def unpack_tree(tensors: Mapping[str, Tensor]) -> Any:
    """Returns the answer that pack_tree packed. Raises TransportError for any other tensors."""
    try:
        return _value_of(json.loads(tensors[TREE].numpy().tobytes()), tensors)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise TransportError(f"an answer has no form that is known: {error}") from None


def _form_of(value: Any, tensors: list[Tensor]) -> list[Any]:
    """Returns `value` as [kind, content]; appends its tensors to `tensors`, to which content refers by index."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, _PLAIN):
        return ["value", value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return ["dict", {name: _form_of(one, tensors) for name, one in value.items()}]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_form_of(one, tensors) for one in value]]
    raise RequestError(
        f"The text encoder answered with an object of {type(value).__module__}.{type(value).__qualname__}, which "
        f"devices cannot send back. Connect the CLIP without Parallel CLIP."
    )


def _value_of(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    kind, content = form
    if kind == "tensor":
        return tensors[str(content)]
    if kind == "value":
        return content
    if kind == "dict":
        return {name: _value_of(one, tensors) for name, one in content.items()}
    if kind in ("list", "tuple"):
        found = [_value_of(one, tensors) for one in content]
        return found if kind == "list" else tuple(found)
    raise ValueError(f"the kind {kind}")

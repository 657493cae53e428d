"""Packs what a text encoder answers into tensors that travel: tensors and plain values in tuples, lists and dicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import RequestError, TransportError

TREE = "tree"  # the name of the tensor that holds the form as JSON; the others are called by number

_PLAIN = (str, int, float, bool, type(None))


def pack_tree(answer: Any) -> dict[str, Tensor]:
    """Writes an answer down, its tensors on the CPU. Raises RequestError for one that holds anything else."""
    tensors: list[Tensor] = []
    form = json.dumps(_form_of(answer, tensors))
    found = {str(number): one.detach().cpu().contiguous() for number, one in enumerate(tensors)}
    return {TREE: torch.frombuffer(bytearray(form.encode()), dtype=torch.uint8), **found}


def unpack_tree(tensors: Mapping[str, Tensor]) -> Any:
    """Reads what pack_tree wrote. Raises TransportError for anything else."""
    try:
        return _value_of(json.loads(tensors[TREE].numpy().tobytes()), tensors)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise TransportError(f"an answer has no form that is known: {error}") from None


def _form_of(value: Any, tensors: list[Tensor]) -> list[Any]:
    """Returns [kind, content], and adds the tensors that it names by number."""
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

"""A check of a millisecond or two that a network is unchanged since the latest search, which takes many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel_backend.job.changes import NESTED, SameModules, fields_of, is_note

_SAMPLES = 64  # values compared of each weight
_INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # by bytes of a value; compared as integers, since NaN differs from itself


class SameNetwork:
    """A record of the attributes, children, hooks, containers and objects of all modules, and of a few values of each
    weight and other tensor."""

    def __init__(self, base: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._modules = SameModules(base)
        attributes = [
            value
            for module in base.modules()
            for name, value in module.__dict__.items()
            if name not in NESTED and not is_note(name)
        ]
        found = (one if isinstance(one, (list, dict, set)) else fields_of(one) for one in attributes)
        self._leaves: list[Any] = []  # held, so that no new object gets the id of one
        self._containers = [(one, _contents(one, self._leaves)) for one in found if one is not None]
        tensors = [one for one in (*attributes, *self._leaves) if isinstance(one, Tensor)]
        self._weights = [*weights.values(), *tensors]
        self._places = [_place(weight) for weight in self._weights]
        self._views = _views(self._weights)
        self._samples = [torch.cat(views) for views in self._views]

    def still_holds(self) -> bool:
        return (
            self._modules.still_hold()
            and all(_contents(one, []) == before for one, before in self._containers)
            and [_place(weight) for weight in self._weights] == self._places
            and all(
                torch.equal(torch.cat(views), was)
                for views, was in zip(self._views, self._samples, strict=True)
            )
        )


def _contents(value: Any, leaves: list[Any]) -> Any:
    """Returns the ids of the objects in a container, and adds the objects to `leaves`."""
    if isinstance(value, dict):
        return [(key, _contents(one, leaves)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [_contents(one, leaves) for one in value]
    if isinstance(value, set):
        leaves += value
        return set(map(id, value))
    leaves.append(value)
    return id(value)


def _place(weight: Tensor) -> int:
    return 0 if _is_opaque(weight) else weight.data_ptr()


def _is_opaque(weight: Tensor) -> bool:
    return weight.is_meta or type(weight) not in (Tensor, nn.Parameter) or not weight.is_contiguous()


def _views(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Returns views of values spread over each weight, one list for each device and size of a value. The stride is odd,
    so that the values do not lie in one column of a matrix."""
    found: dict[Any, list[Tensor]] = {}
    with torch.no_grad():
        for weight in weights:
            if not _is_opaque(weight) and weight.numel() and weight.element_size() in _INTEGERS:
                flat = weight.detach().view(-1).view(_INTEGERS[weight.element_size()])
                view = flat[:: (len(flat) // _SAMPLES) | 1][:_SAMPLES]
                found.setdefault((weight.device, weight.element_size()), []).append(view)
    return list(found.values())

"""Tells quickly if a tree of modules is unchanged, to avoid comparing or copying them one by one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import nn

from .changes import HOOKS, is_note

NESTED = ("_parameters", "_buffers", "_modules", *HOOKS)


class SameValues:
    """The values of dicts, compared by identity. Holds them, so that no new object gets the id of one."""

    def __init__(self, dicts: Iterable[Mapping[str, Any]]) -> None:
        self._dicts = list(dicts)
        self._values = self._now()

    def still_hold(self) -> bool:
        """Returns True if all dicts still have the same values."""
        return _are_same(self._now(), self._values)

    def _now(self) -> list[Any]:
        return list(chain.from_iterable([one.values() for one in self._dicts]))


class SameModules:
    """The classes, attributes, children, hooks and parameters of all modules of ComfyUI's model `base`."""

    def __init__(self, base: nn.Module) -> None:
        modules = list(base.modules())
        nested = [module.__dict__[name] for module in modules for name in NESTED]
        self._kinds = [(module, type(module)) for module in modules]
        self._base, self._base_values = base, _base_attributes(base)
        self._values = SameValues([*(module.__dict__ for module in modules[1:]), *nested])

    def still_hold(self) -> bool:
        """Returns True if none of them has changed."""
        return (
            all(type(module) is kind for module, kind in self._kinds)
            and self._values.still_hold()
            and _are_same(_base_attributes(self._base), self._base_values)
        )


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _base_attributes(base: nn.Module) -> list[Any]:
    """Returns the attributes of the model around the network, without the notes that ComfyUI writes at each load."""
    found = [(name, value) for name, value in base.__dict__.items() if not is_note(name)]
    return list(chain.from_iterable(found))

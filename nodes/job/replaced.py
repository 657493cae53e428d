"""Functions and classes of ComfyUI's own modules that other packs have replaced in this process."""

from __future__ import annotations

import os
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ...parallel_backend.job.restore import Replaced

_CODE = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod)
# Packs by their name in sys.modules: (file, True if it is a package).
Packs = dict[str, tuple[str, bool]]


@dataclass(frozen=True)
class _Searched:
    """A module or class as it was searched last: its values by address and type. Code is held, so that no other takes
    its address; objects that can be called are not, since a method of ComfyUI's cache would keep every output in it."""

    owner: Any
    marks: list[int]
    kinds: list[type]
    held: list[Any]
    objects: list[weakref.ref[Any]]
    found: list[Replaced]
    classes: list[type] = field(default_factory=list)


def _note(
    owner: Any, values: Mapping[str, Any], found: list[Replaced], classes: list[type] | None = None
) -> None:
    held: list[Any] = []
    objects: list[weakref.ref[Any]] = []
    for value in values.values():
        if isinstance(value, _CODE):
            held.append(value)
        elif callable(value):
            try:
                objects.append(weakref.ref(value))
            except TypeError:  # typing's forms, slots of classes
                held.append(value)
    everything = values.values()
    marks, kinds = list(map(id, everything)), list(map(type, everything))
    _searched[id(owner)] = _Searched(owner, marks, kinds, held, objects, found, classes or [])


_searched: dict[int, _Searched] = {}


def loaded_packs() -> Packs:
    """Lists the packs that ComfyUI has imported, in their order: it calls each by its path."""
    found: Packs = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if os.sep in name and file and not any(name.startswith(f"{pack}.") for pack in found):
            found[name] = (file, Path(file).name == "__init__.py")
    return found


def replaced_by(packs: Packs, comfyui: str, own: str) -> list[Replaced]:
    """Finds what packs have put into modules below `comfy`. `comfyui`: its folder; `own`: this pack's name. Searches
    again only what differs from the last search."""
    global _latest
    extras = str(Path(comfyui) / "comfy_extras")
    folders = tuple(
        f"{Path(file).parent}{os.sep}" if is_package else file
        for name, (file, is_package) in packs.items()
        if name != own and not file.startswith(extras)
    )
    known = list(map(id, sys.modules.values())), folders
    if _latest is None or _latest.known != known or not _latest.still_holds():
        found, owners = _search(folders)
        _latest = _Latest(known, found, owners)
    return _latest.found


class _Latest:
    """The latest search, as long as every module and class has the values that it had then."""

    def __init__(
        self, known: tuple[list[int], tuple[str, ...]], found: list[Replaced], owners: list[Any]
    ) -> None:
        self.known, self.found = known, found
        self._owners = owners  # held: no other module takes the address of one
        self._dicts = [vars(owner) for owner in owners]
        self._marks, self._kinds = self._now()
        self._objects = [one for owner in owners for one in _searched[id(owner)].objects]

    def still_holds(self) -> bool:
        marks, kinds = self._now()
        return (
            marks == self._marks and kinds == self._kinds and all(one() is not None for one in self._objects)
        )

    def _now(self) -> tuple[list[int], list[type]]:
        values = list(chain.from_iterable([one.values() for one in self._dicts]))
        return list(map(id, values)), list(map(type, values))


_latest: _Latest | None = None


def _search(folders: tuple[str, ...]) -> tuple[list[Replaced], list[Any]]:
    """(what packs have replaced, all modules and classes that were looked at)"""
    found: list[Replaced] = []
    owners: list[Any] = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or not (name == "comfy" or name.startswith("comfy.")):
            continue
        searched = _of_module(module, name, folders)
        found += searched.found
        owners += [module, *searched.classes]
        for kind in searched.classes:
            found += _of_class(kind, name, folders).found
    return found, owners


def _of_module(module: types.ModuleType, name: str, folders: tuple[str, ...]) -> _Searched:
    values = vars(module)
    if not _is_as_before(module, values):
        classes = [value for key, value in values.items() if _is_home(value, key, name)]
        found = [
            Replaced(name, "", key, value)
            for key, value in list(values.items())
            if not _is_home(value, key, name) and _is_of(value, folders)
        ]
        _note(module, values, found, classes)
    return _searched[id(module)]


def _of_class(kind: type, module: str, folders: tuple[str, ...]) -> _Searched:
    values = vars(kind)
    if not _is_as_before(kind, values):
        found = [
            Replaced(module, kind.__qualname__, key, value)
            for key, value in _theirs_of_class(kind, module, folders)
        ]
        _note(kind, values, found)
    return _searched[id(kind)]


def _theirs_of_class(kind: type, module: str, folders: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Finds a class's attributes that are a pack's, and its own methods that a pack has put under another name."""
    values = [(key, _plain(value), value) for key, value in vars(kind).items()]
    is_touched = any(_is_of(plain, folders) for _, plain, _ in values)
    for key, plain, value in values:
        is_moved = (
            is_touched
            and isinstance(plain, types.FunctionType)
            and plain.__name__ not in (key, "<lambda>")
            and plain.__module__ == module
            and plain.__qualname__.split(".")[0] == kind.__name__
            and hasattr(kind, plain.__name__)
        )
        if is_moved or _is_of(plain, folders):
            yield key, value


def _plain(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _is_home(value: Any, key: str, module: str) -> bool:
    return isinstance(value, type) and value.__module__ == module and key == value.__name__


def _is_as_before(owner: Any, values: Mapping[str, Any]) -> bool:
    before = _searched.get(id(owner))
    return (
        before is not None
        and before.marks == list(map(id, values.values()))
        and before.kinds == list(map(type, values.values()))
        and all(one() is not None for one in before.objects)
    )


def _is_of(value: Any, folders: tuple[str, ...]) -> bool:
    """True if the code of `value` lies in one of `folders`."""
    code = getattr(value, "__code__", None)
    if code is not None:
        wrapped = getattr(value, "__wrapped__", None)
        return code.co_filename.startswith(folders) or (wrapped is not None and _is_of(wrapped, folders))
    if not isinstance(value, type) and not callable(value):
        return False
    kind = value if isinstance(value, type) else type(value)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return bool(file) and str(file).startswith(folders)

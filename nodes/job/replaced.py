"""Functions and classes of ComfyUI's own modules that other packs have replaced in this process."""

from __future__ import annotations

import operator
import os
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, compress
from pathlib import Path
from typing import Any

from ...parallel_backend.job.restore import Replaced

_CODE = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod)
_HELD = (*_CODE, types.ModuleType, types.NoneType, str, int, float)
# Packs by their name in sys.modules: (file, True if it is a package).
Packs = dict[str, tuple[str, bool]]


class _Watched:
    """The values of modules and classes as they were searched last. Code and constants are held, so that no other value
    takes their address; all else is known by address and type, and objects that can be called weakly: a method of
    ComfyUI's cache would keep every output in it."""

    def __init__(self, spaces: list[Mapping[str, Any]]) -> None:
        self._spaces = spaces
        values = self._values()
        self._is_held = [isinstance(value, _HELD) for value in values]
        self._is_other = [not is_held for is_held in self._is_held]
        self._held = list(compress(values, self._is_held))
        self._others = self._marks(values)
        self._objects: list[weakref.ref[Any]] = []
        self._slots: list[Any] = []
        for value in compress(values, self._is_other):
            if callable(value):
                try:
                    self._objects.append(weakref.ref(value))
                except TypeError:  # typing's forms, slots of classes
                    self._slots.append(value)

    def still_holds(self) -> bool:
        """Returns True if each value is the one that it was."""
        values = self._values()
        return (
            len(values) == len(self._is_held)
            and all(map(operator.is_, compress(values, self._is_held), self._held))
            and self._marks(values) == self._others
            and all(one() is not None for one in self._objects)
        )

    def _values(self) -> list[Any]:
        return list(chain.from_iterable([space.values() for space in self._spaces]))

    def _marks(self, values: list[Any]) -> tuple[list[int], list[type]]:
        others = list(compress(values, self._is_other))
        return list(map(id, others)), list(map(type, others))


@dataclass(frozen=True)
class _Searched:
    """A module or class with what was found in it, as long as its values are the same."""

    owner: Any  # held: no other takes its address
    values: _Watched
    found: list[Replaced]
    classes: list[type] = field(default_factory=list)


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
    if _latest is None or _latest.packs is not packs or not _latest.values.still_holds():
        extras = str(Path(comfyui) / "comfy_extras")
        folders = tuple(
            f"{Path(file).parent}{os.sep}" if is_package else file
            for name, (file, is_package) in packs.items()
            if name != own and not file.startswith(extras)
        )
        _latest = _search(packs, folders)
    return _latest.found


@dataclass(frozen=True)
class _Latest:
    """The latest search: for which packs, what it found, and the values of all modules and classes that it saw."""

    packs: Packs
    found: list[Replaced]
    values: _Watched


_latest: _Latest | None = None


def _search(packs: Packs, folders: tuple[str, ...]) -> _Latest:
    found: list[Replaced] = []
    spaces: list[Mapping[str, Any]] = [sys.modules]
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or not (name == "comfy" or name.startswith("comfy.")):
            continue
        searched = _of_module(module, name, folders)
        found += searched.found
        spaces += [vars(module), *map(vars, searched.classes)]
        for kind in searched.classes:
            found += _of_class(kind, name, folders).found
    return _Latest(packs, found, _Watched(spaces))


def _of_module(module: types.ModuleType, name: str, folders: tuple[str, ...]) -> _Searched:
    known = _searched.get(id(module))
    if known is None or not known.values.still_holds():
        values = dict(vars(module))
        found = [
            Replaced(name, "", key, value)
            for key, value in values.items()
            if not _is_home(value, key, name) and _is_of(value, folders)
        ]
        classes = [value for key, value in values.items() if _is_home(value, key, name)]
        known = _searched[id(module)] = _Searched(module, _Watched([vars(module)]), found, classes)
    return known


def _of_class(kind: type, module: str, folders: tuple[str, ...]) -> _Searched:
    known = _searched.get(id(kind))
    if known is None or not known.values.still_holds():
        theirs = _theirs_of_class(kind, module, folders)
        found = [Replaced(module, kind.__qualname__, key, value) for key, value in theirs]
        known = _searched[id(kind)] = _Searched(kind, _Watched([vars(kind)]), found)
    return known


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

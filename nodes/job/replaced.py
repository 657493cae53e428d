"""Finds functions, classes and plain values that other packs have replaced in this process, in ComfyUI's modules and in
those of torch by which networks compute."""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import os
import re
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ...parallel_backend.job.changes import are_same
from ...parallel_backend.job.restore import Replaced

# Types of callables that are held. Any other, such as a method of ComfyUI's cache, would keep what it belongs to alive.
_HELD = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    staticmethod,
    classmethod,
    property,
    types.ModuleType,
)
_PLAIN = (bool, int, float, str, types.NoneType, torch.dtype)
# What works for this process alone in ComfyUI's modules: it decides where weights lie, reads files, or runs before a
# job begins. Ranks have devices of their own, and compare their weights with the MODEL's.
_LOCAL = {
    "comfy.model_management": {
        "DISABLE_SMART_MEMORY",
        "EXTRA_RESERVED_VRAM",
        "MAX_PINNED_MEMORY",
        "MIN_WEIGHT_MEMORY_RATIO",
        "NUM_STREAMS",
        "cleanup_models",
        "cleanup_models_gc",
        "current_stream",
        "extra_reserved_memory",
        "free_memory",
        "get_free_memory",
        "get_torch_device",
        "get_total_memory",
        "intermediate_device",
        "load_model_gpu",
        "load_models_gpu",
        "maximum_vram_for_weights",
        "minimum_inference_memory",
        "soft_empty_cache",
        "text_encoder_device",
        "text_encoder_initial_device",
        "text_encoder_offload_device",
        "total_ram",
        "total_vram",
        "unet_inital_load_device",
        "unet_offload_device",
        "unload_all_models",
        "use_more_memory",
        "vae_device",
        "vae_offload_device",
    },
    "comfy.model_patcher": {"partially_load", "partially_unload"},
    "comfy.sample": {"sample", "sample_custom"},
    "comfy.sd": {
        "load_checkpoint",
        "load_checkpoint_guess_config",
        "load_diffusion_model",
        "load_diffusion_model_state_dict",
        "load_state_dict_guess_config",
    },
    "comfy.utils": {"DISABLE_MMAP", "MMAP_TORCH_FILES"},
}
# Modules of torch by which networks compute.
_TORCH = {
    "torch.nn.functional",
    *(f"torch.nn.modules.{name}" for name in ("activation", "conv", "linear", "normalization", "sparse")),
}
# Packs by their name in sys.modules: (file, True if it is a package).
Packs = dict[str, tuple[str, bool]]


class _Code:
    """The functions, classes, modules and other callables in namespaces, as they were when it was made."""

    def __init__(self, spaces: Iterable[Mapping[str, Any]]) -> None:
        self._spaces = list(spaces)
        values = self._values()
        self._others_at = [
            place for place, one in enumerate(values) if callable(one) and not isinstance(one, _HELD)
        ]
        self._others = self._take_others(values)
        self._held = values

    def changed(self) -> list[Any] | None:
        """Returns what has changed since the last call, each object before and after, or None if names have."""
        values = self._values()
        if len(values) != len(self._held) or not are_same(self._take_others(values), self._others):
            return None
        if are_same(values, self._held):
            return []
        pairs = zip(values, self._held, strict=True)
        self._held = values
        return [one for pair in pairs if pair[0] is not pair[1] for one in pair]

    def _values(self) -> list[Any]:
        return list(chain.from_iterable([space.values() for space in self._spaces]))

    def _take_others(self, values: list[Any]) -> list[Any]:
        """Takes the callables that are not held out of `values`; returns references to them."""
        others = [values[place] for place in self._others_at]
        for place in self._others_at:
            values[place] = None
        return list(map(_reference, others))


def _reference(value: Any) -> Any:
    """Returns the one weak reference to an object while it is alive; the object itself if it allows none."""
    try:
        return weakref.ref(value)
    except TypeError:  # typing's forms, slots of classes
        return value


@dataclass
class _Search:
    """The latest search. `packs`: the packs; `found`: the code that it found; `values`: the plain values that were set
    since they were noted; `names`: of all modules of the process; `modules`: those searched; `code`: in the namespaces
    of these and of their classes."""

    packs: Packs
    found: list[Replaced]
    values: list[Replaced]
    names: list[str]
    modules: dict[str, types.ModuleType]
    code: _Code

    def still_holds(self) -> bool:
        """Returns True unless names or code have changed. Looks for values anew if some have."""
        are_the_modules = list(sys.modules) == self.names and all(
            map(operator.is_, map(sys.modules.get, self.modules), self.modules.values())
        )
        changed = self.code.changed() if are_the_modules else None
        if changed is None or any(callable(one) or isinstance(one, _HELD) for one in changed):
            return False
        if changed:
            self.values = _values_set()
        return True


_latest: _Search | None = None
_spaces: list[_Space] = []


@dataclass(frozen=True)
class _Space:
    """A module of ComfyUI or torch, or a class in it (`path`), when it was first seen. `space`: its namespace; `names`:
    those in it then; `plain`: the plain values; `code`: functions, methods, classes and modules, None in the place of
    those that packs had put there by then."""

    module: str
    path: str
    space: Mapping[str, Any]
    names: frozenset[str]
    plain: dict[str, Any]
    code: dict[str, Any]

    @classmethod
    def of(cls, module: str, path: str, owner: types.ModuleType | type) -> _Space:
        space = vars(owner)
        names = {name: value for name, value in space.items() if not name.startswith("__")}
        plain = {name: value for name, value in names.items() if _is_plain(value)}
        others = [name for name in names if _is_of_another_library(name, names[name], module)]
        code = {name: value for name, value in names.items() if isinstance(value, _HELD)}
        code |= dict.fromkeys(others)
        return cls(module, path, space, frozenset(space), plain, code)


def note_values() -> None:
    """Notes the code and plain values in those of these modules that are new: a rank's import sets them alike."""
    noted = {one.module for one in _spaces}
    for name, module in _watched_modules().items():
        if name not in noted:
            _spaces.append(_Space.of(name, "", module))
            _spaces.extend(_Space.of(name, one.__qualname__, one) for one in classes_of(module))


def _values_set() -> list[Replaced]:
    """Returns the plain values that were set since, but for those that functions of the same module set."""
    changed = [
        (one, name, value)
        for one in _spaces
        for name, before in one.plain.items()
        if (value := one.space.get(name, before)) is not before and value != before
    ]
    grown = [one for one in _spaces if len(one.space) > len(one.names)]
    changed += [(one, name, one.space[name]) for one in grown for name in one.space.keys() - one.names]
    return [
        Replaced(one.module, one.path, name, value)
        for one, name, value in changed
        if _is_plain(value)
        and name not in _LOCAL.get(one.module, ())
        and name not in _set_by_itself(one.module)
    ]


def _code_set() -> list[Replaced]:
    """Returns what was set since in the place of functions, methods, classes and modules, and new ones but modules,
    whoever's code they are."""
    return [
        Replaced(one.module, one.path, name, value)
        for one in _spaces
        for name, value in list(one.space.items())
        if value is not one.code.get(name)
        and (name in one.code or (name not in one.names and _is_code(value)))
        and name not in _LOCAL.get(one.module, ())
        and name not in _set_by_itself(one.module)
    ]


@functools.cache
def _set_by_itself(module: str) -> set[str]:
    """Returns the names of the variables that functions of a module set."""
    owners = (sys.modules[module], *classes_of(sys.modules[module]))
    code = [getattr(_function(value), "__code__", None) for one in owners for value in vars(one).values()]
    steps = chain.from_iterable(dis.get_instructions(one) for one in code if one is not None)
    return {step.argval for step in steps if step.opname == "STORE_GLOBAL"}


def loaded_packs() -> Packs:
    """Lists the packs that ComfyUI has imported, in that order: it names each by its path."""
    found: Packs = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if os.sep in name and file and not any(name.startswith(f"{pack}.") for pack in found):
            found[name] = (file, Path(file).name == "__init__.py")
    return found


def replaced_by(packs: Packs, comfyui: str, own: str) -> tuple[list[Replaced], list[Replaced]]:
    """Returns (the code that packs have put into modules of ComfyUI and torch, the plain values that were set there
    since note_values). `comfyui`: its folder; `own`: this pack's name. Searches again only if something differs from
    the last search."""
    global _latest
    if _latest is None or _latest.packs is not packs or not _latest.still_holds():
        extras = str(Path(comfyui) / "comfy_extras")
        folders = tuple(
            f"{Path(file).parent}{os.sep}" if is_package else file
            for name, (file, is_package) in packs.items()
            if name != own and not file.startswith(extras)
        )
        _latest = _search(packs, folders)
    return _latest.found, _latest.values


def classes_of(owner: types.ModuleType | type) -> list[type]:
    """Returns the classes that a module defines, and those within these, such as the layers in comfy.ops."""
    is_module = isinstance(owner, types.ModuleType)
    module, prefix = (owner.__name__, "") if is_module else (owner.__module__, f"{owner.__qualname__}.")
    found = [
        value
        for key, value in vars(owner).items()
        if isinstance(value, type) and (value.__module__, value.__qualname__) == (module, prefix + key)
    ]
    return [*found, *chain.from_iterable(map(classes_of, found))]


def _search(packs: Packs, folders: tuple[str, ...]) -> _Search:
    names, modules = list(sys.modules), _watched_modules()
    found: list[Replaced] = []
    spaces: list[Mapping[str, Any]] = []
    for name, module in modules.items():
        spaces.append(vars(module))
        ignored = _LOCAL.get(name, set())
        for kind in classes_of(module):
            spaces.append(vars(kind))
            theirs = _theirs_of_class(kind, name, folders)
            found += [Replaced(name, kind.__qualname__, *pair) for pair in theirs if pair[0] not in ignored]
        for key, value in list(vars(module).items()):
            if key not in ignored and _is_of(value, folders):
                found.append(Replaced(name, "", key, value))
    theirs = {(one.module, one.path, one.name) for one in found}
    found += [one for one in _code_set() if (one.module, one.path, one.name) not in theirs]
    return _Search(packs, found, _values_set(), names, modules, _Code(spaces))


def _watched_modules() -> dict[str, types.ModuleType]:
    return {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
        and (name == "comfy" or name.startswith("comfy.") or name in _TORCH)
    }


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, (classmethod, property))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _theirs_of_class(kind: type, module: str, folders: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yields a class's attributes that come from a pack, and its own methods that a pack moved to another name."""
    values = [(key, _function(value), value) for key, value in vars(kind).items()]
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


def _is_of_another_library(name: str, value: Any, module: str) -> bool:
    """Returns True for code of a library that neither the source of `module` names nor that of another module that has
    it under this name: a pack put it there."""
    library = str(getattr(_function(value), "__module__", None) or module).partition(".")[0]
    is_usual = library in sys.stdlib_module_names or library in ("torch", module.partition(".")[0])
    if not _is_code(value) or is_usual or _names(sys.modules[module], library):
        return False
    others = [one for one in _watched_modules().values() if vars(one).get(name) is value]
    return not any(_names(one, library) for one in others)


def _names(module: types.ModuleType, word: str) -> bool:
    """Returns True if the source of `module` has this word, or if it has no source, as one that a pack has made."""
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        return True
    return re.search(rf"\b{re.escape(word)}\b", source) is not None


def _function(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return value.func
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _is_of(value: Any, folders: tuple[str, ...]) -> bool:
    """True if the code of `value` lies in one of `folders`."""
    value = _function(value)
    code = getattr(value, "__code__", None)
    if code is not None:
        wrapped = getattr(value, "__wrapped__", None)
        return code.co_filename.startswith(folders) or (wrapped is not None and _is_of(wrapped, folders))
    if not isinstance(value, type) and not callable(value):
        return False
    kind = value if isinstance(value, type) else type(value)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return bool(file) and str(file).startswith(folders)

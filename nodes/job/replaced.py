"""Functions and classes of ComfyUI's own modules that other packs have replaced in this process."""

from __future__ import annotations

import operator
import os
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ...parallel_backend.job.changes import are_same
from ...parallel_backend.job.restore import Replaced

# Types of callables that are held. Any other, such as a method of ComfyUI's cache, would keep what it belongs to alive.
_HELD = (type, types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, types.ModuleType)
# Functions of ComfyUI, by module, that work for this process alone: they decide where weights lie, read files, or run
# before a job begins. Ranks have devices of their own, and compare their weights with the MODEL's.
_LOCAL = {
    "comfy.model_management": {
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

    def is_unchanged(self) -> bool:
        values = self._values()
        if len(values) != len(self._held) or not are_same(self._take_others(values), self._others):
            return False
        if not are_same(values, self._held):
            pairs = zip(values, self._held, strict=True)
            changed = [one for pair in pairs if pair[0] is not pair[1] for one in pair]
            if any(callable(one) or isinstance(one, _HELD) for one in changed):
                return False
            self._held = values  # variables have other data
        return True

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


@dataclass(frozen=True)
class _Search:
    """The latest search. `packs`: the packs; `found`: its result; `names`: of all modules of the process; `modules`:
    ComfyUI's; `code`: in the namespaces of these and of their classes."""

    packs: Packs
    found: list[Replaced]
    names: list[str]
    modules: dict[str, types.ModuleType]
    code: _Code

    def still_holds(self) -> bool:
        return (
            list(sys.modules) == self.names
            and all(map(operator.is_, map(sys.modules.get, self.modules), self.modules.values()))
            and self.code.is_unchanged()
        )


_latest: _Search | None = None


def loaded_packs() -> Packs:
    """Lists the packs that ComfyUI has imported, in that order: it names each by its path."""
    found: Packs = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if os.sep in name and file and not any(name.startswith(f"{pack}.") for pack in found):
            found[name] = (file, Path(file).name == "__init__.py")
    return found


def replaced_by(packs: Packs, comfyui: str, own: str) -> list[Replaced]:
    """Finds what packs have put into modules below `comfy`. `comfyui`: its folder; `own`: this pack's name. Searches
    again only if something differs from the last search."""
    global _latest
    if _latest is None or _latest.packs is not packs or not _latest.still_holds():
        extras = str(Path(comfyui) / "comfy_extras")
        folders = tuple(
            f"{Path(file).parent}{os.sep}" if is_package else file
            for name, (file, is_package) in packs.items()
            if name != own and not file.startswith(extras)
        )
        _latest = _search(packs, folders)
    return _latest.found


def _search(packs: Packs, folders: tuple[str, ...]) -> _Search:
    names = list(sys.modules)
    modules = {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and (name == "comfy" or name.startswith("comfy."))
    }
    found: list[Replaced] = []
    spaces: list[Mapping[str, Any]] = []
    for name, module in modules.items():
        spaces.append(vars(module))
        ignored = _LOCAL.get(name, set())
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name and key == value.__name__:
                spaces.append(vars(value))
                theirs = _theirs_of_class(value, name, folders)
                found += [
                    Replaced(name, value.__qualname__, *pair) for pair in theirs if pair[0] not in ignored
                ]
            elif key not in ignored and _is_of(value, folders):
                found.append(Replaced(name, "", key, value))
    return _Search(packs, found, names, modules, _Code(spaces))


def _theirs_of_class(kind: type, module: str, folders: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yields a class's attributes that come from a pack, and its own methods that a pack moved to another name."""
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

"""Imports ComfyUI's and packs' modules in a rank from the same files, under the same names, as ComfyUI's process."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from ....wire.cache_folder import lock_folder

# Modules in ComfyUI's folder. Packs, this one included, have modules of the same names.
_TOP = {
    "nodes",
    "execution",
    "folder_paths",
    "latent_preview",
    "node_helpers",
    "comfy_extras",
    "comfy_execution",
    "comfy_api",
    "comfy_api_nodes",
    "app",
    "utils",
    "api_server",
    "middleware",
    "comfyui_version",
    "cuda_malloc",
    "protocol",
    "hook_breaker_ac10a0",
    "comfy_config",
}


class _ComfyUIFirst(MetaPathFinder):
    """Finds ComfyUI's modules in its folder, before modules of the same names elsewhere on the path."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if path is not None or name not in _TOP else _spec_in([self._root], name)


class _Quiet:
    """A stand-in for ComfyUI's server: it accepts routes and messages, and does nothing."""

    client_id = None
    last_node_id = None
    last_prompt_id = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Quiet()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], _Quiet)
        return args[0] if is_decorator else _Quiet()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def quiet_server() -> Any:
    """Returns the stand-in for PromptServer.instance."""
    return sys.modules["server"].PromptServer.instance


class Packages:
    """The modules of ComfyUI's process on one rank. `packs`: name in that process -> (file, True if it is a package);
    `waiting`: a context manager around the wait for another rank's turn, by which a rank that hangs is found."""

    def __init__(
        self,
        comfyui: str,
        own: str,
        packs: Mapping[str, tuple[str, bool]],
        search_path: Sequence[str],
        folders: Mapping[str, Any],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._own, self._packs, self._waiting = f"{own}.", dict(packs), waiting
        _put_comfyui_first(comfyui)
        sys.path += [entry for entry in search_path if entry and entry not in sys.path]
        folder_paths = importlib.import_module("folder_paths")
        for name, value in folders.items():
            if isinstance(value, dict):
                current = getattr(folder_paths, name)
                current.clear()
                current.update(value)
            else:
                setattr(folder_paths, name, value)

    def import_packs(self, names: Sequence[str]) -> None:
        """Imports packs in the order of ComfyUI's process. Ranks take turns, because packs write files on import.
        Raises ImportError with the pack's name if it cannot be imported."""
        missing = [name for name in self._packs if name in names and name not in sys.modules]
        if not missing:
            return
        with self._turn():
            for name in missing:
                try:
                    self._import_pack(name)
                except BaseException as error:
                    sys.modules.pop(name, None)
                    if not isinstance(error, Exception):
                        raise
                    raise ImportError(
                        f"{Path(name).name} cannot be imported there: {type(error).__name__}: {error}"
                    ) from error

    def find_module(self, name: str) -> types.ModuleType:
        """Returns the module that has this name in ComfyUI's process."""
        if name.startswith(self._own):
            name = name[len(self._own) :]
        found = sys.modules.get(name)
        if found is not None:
            return found
        pack = next((pack for pack in self._packs if name == pack or name.startswith(f"{pack}.")), None)
        if pack is None:
            return importlib.import_module(name)
        self.import_packs([pack])
        if name != pack:
            _import_below(pack, name)
        return sys.modules[name]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        path = lock_folder() / f"imports-{os.getppid()}"
        with self._waiting():
            descriptor = _locked(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def _import_pack(self, name: str) -> None:
        file, is_package = self._packs[name]
        folders = [str(Path(file).parent)] if is_package else None
        _execute(name, importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders))


def _locked(path: Path) -> int:
    """Waits until no other process holds the lock file, and returns its descriptor."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):  # its holder may have deleted it meanwhile
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


def _put_comfyui_first(root: str) -> None:
    if any(isinstance(finder, _ComfyUIFirst) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _ComfyUIFirst(root))
    server: Any = types.ModuleType("server")
    server.__file__ = f"{root}/server.py"
    server.PromptServer = type("PromptServer", (_Quiet,), {"instance": _Quiet()})
    server.BinaryEventTypes = _Quiet()
    server.__getattr__ = _Quiet().__getattr__
    sys.modules["server"] = server
    for name in _TOP & set(sys.modules):
        if not (getattr(sys.modules[name], "__file__", None) or "").startswith(root):
            del sys.modules[name]


def _import_below(pack: str, name: str) -> None:
    """Imports a module of a pack. `import_module` would split the pack's name, a path, at its dots."""
    above = pack
    for part in name[len(pack) + 1 :].split("."):
        parent, above = sys.modules[above], f"{above}.{part}"
        if above not in sys.modules:
            _execute(above, _spec_in(getattr(parent, "__path__", []), above))
            setattr(parent, part, sys.modules[above])


def _spec_in(folders: Sequence[str], name: str) -> ModuleSpec | None:
    """Returns the spec of the module in `folders` that is named like the last part of `name`."""
    spec = PathFinder.find_spec(name, folders)
    if spec is not None and spec.loader is None:  # a folder without __init__.py, which would follow sys.path
        spec.submodule_search_locations = list(spec.submodule_search_locations or ())
    return spec


def _execute(name: str, spec: ModuleSpec | None) -> None:
    if spec is None:
        raise ModuleNotFoundError(f"{name} has no file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)

"""Imports single modules of nodes/, without the package around them and without ComfyUI's nodes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

import parallel_backend
from comfy_modules import import_comfyui_here

ROOT = Path(__file__).resolve().parents[2]
_PACK = "pack_of_nodes"
COMFYUIS_NODES = ModuleType("nodes")  # in place of ComfyUI's own


def import_node_module(name: str) -> ModuleType:
    """Imports a module such as `nodes.model.arguments` as part of the pack, with the tests' `parallel_backend`."""
    rooms = ("host", "job", "model", "preload", "routes", "runs")
    for folder in (".", "nodes", *(f"nodes/{room}" for room in rooms)):
        package = "" if folder == "." else "." + folder.replace("/", ".")
        if _PACK + package not in sys.modules:
            module = ModuleType(_PACK + package)
            module.__path__ = [str(ROOT / folder)]
            sys.modules[_PACK + package] = module
    for known in [key for key in sys.modules if key.partition(".")[0] == parallel_backend.__name__]:
        sys.modules[f"{_PACK}.{known}"] = sys.modules[known]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nodes", COMFYUIS_NODES)  # else the pack's passes for ComfyUI's
        return importlib.import_module(f"{_PACK}.{name}")


def module_fixture(name: str):
    """Returns a fixture that imports the real ComfyUI and then this module."""

    @pytest.fixture(scope="module")
    def module() -> ModuleType:
        import_comfyui_here()
        return import_node_module(name)

    return module

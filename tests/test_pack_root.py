"""The pack's root: what ComfyUI, its manager and a package installer see first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_LOAD_AS_COMFYUI_DOES = """
import importlib.util, os, sys, threading
spec = importlib.util.spec_from_file_location("/packs/My Pack v1_0", sys.argv[1] + "/__init__.py",
                                              submodule_search_locations=[sys.argv[1]])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
assert callable(module.comfy_entrypoint)
assert not hasattr(module, "NODE_CLASS_MAPPINGS"), "ComfyUI would use these and ignore the V3 entry point"
heavy = {"torch", "numpy", "diffusers", "xfuser", "multiprocessing", "comfy_api"} & set(sys.modules)
assert not heavy, heavy
assert threading.active_count() == 1
"""


def test_importing_the_root_starts_nothing_and_needs_nothing():
    done = subprocess.run(
        [sys.executable, "-I", "-c", _LOAD_AS_COMFYUI_DOES, str(ROOT)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _requirements(name: str) -> dict[str, str]:
    """Returns the version rules of a requirements file by package name in lower case."""
    lines = (line.split("#")[0].split(";")[0].strip() for line in (ROOT / name).read_text().splitlines())
    matches = (re.fullmatch(r"([A-Za-z0-9_.-]+)\s*(.*)", line) for line in lines if line)
    return {match[1].lower(): match[2] for match in matches}


def test_requirements_never_replace_what_the_user_has():
    for package, rule in _requirements("requirements.txt").items():
        assert re.fullmatch(r">=[0-9.]+", rule), (
            f"{package}{rule}: only a lower bound keeps the user's version"
        )


def test_every_requirement_has_a_tested_version_that_satisfies_it():
    pins = _requirements("constraints.txt")
    for package, rule in _requirements("requirements.txt").items():
        pinned = pins[package].removeprefix("==")
        assert _numbers(pinned) >= _numbers(rule.removeprefix(">=")), package


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))

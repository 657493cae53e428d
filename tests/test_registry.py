"""The pack's root: what ComfyUI, its manager, an installer and the Comfy Registry see of it, and its uninstallation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image

from parallel_backend.wire.cache_folder import FOLDER, VARIABLE

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


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


def _requirements(lines: list[str]) -> set[str]:
    stripped = (line.split("#")[0].strip().replace("'", '"') for line in lines)
    return {line for line in stripped if line}


def test_the_metadata_name_the_dependencies_that_the_manager_installs():
    installed = _requirements((ROOT / "requirements.txt").read_text("utf-8").splitlines())
    assert _requirements(PROJECT["dependencies"]) == installed


def test_the_version_is_one_that_the_registry_takes_and_has_an_entry_in_the_change_log():
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"\n## {PROJECT['version']}\n" in changes


def test_linux_and_cuda_are_the_classifiers_in_the_registrys_own_words():
    kinds = [c for c in PROJECT["classifiers"] if c.startswith(("Operating System ::", "Environment ::"))]
    assert kinds == ["Operating System :: POSIX :: Linux", "Environment :: GPU :: NVIDIA CUDA"]


def test_icon_and_banner_have_the_registrys_sizes():
    with Image.open(ROOT / "docs" / "images" / "icon.png") as icon:
        assert icon.format == "PNG" and icon.width <= 800 and icon.height <= 400
    with Image.open(ROOT / "docs" / "images" / "banner.png") as banner:
        assert banner.format == "PNG" and banner.width * 9 == banner.height * 21


def _git(*arguments: str) -> set[str]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", *arguments], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone: the archive is made from what git tracks")
    return set(listed.stdout.splitlines())


def _shipped() -> set[str]:
    """Returns the files of the archive. .comfyignore has patterns like .gitignore, so git itself can read it."""
    return _git() - _git("--cached", "--ignored", "--exclude-from=.comfyignore")


def test_the_archive_has_what_runs_and_neither_tests_nor_benchmarks():
    shipped = _shipped()
    assert {path.split("/")[0] for path in shipped} == {
        *("CHANGELOG.md", "LICENSE", "README.md", "__init__.py", "pyproject.toml"),
        *("constraints.txt", "requirements.txt", "uninstall.py"),
        *("demo_model", "deploy", "docs", "example_workflows", "locales"),
        *("nodes", "parallel_backend", "scripts", "web"),
    }
    everything = _git()
    for folder in ("nodes", "parallel_backend", "web", "locales", "example_workflows", "demo_model", "docs"):
        assert {path for path in everything if path.startswith(f"{folder}/")} <= shipped, folder


def test_the_demo_that_is_shipped_needs_nothing_that_is_not():
    shipped = _shipped()
    assert "scripts/demo" in shipped
    scripts = {Path(path).stem for path in shipped if path.startswith("scripts/")}
    own = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    for path in sorted(shipped):
        if path.startswith("scripts/") and path.endswith(".py"):
            imported = re.findall(r"^(?:from|import) (\w+)", (ROOT / path).read_text("utf-8"), re.MULTILINE)
            assert not (set(imported) & own) - scripts, path


def _rules(name: str) -> dict[str, str]:
    """Returns the version rules of a requirements file by package name in lower case."""
    lines = (line.split("#")[0].split(";")[0].strip() for line in (ROOT / name).read_text().splitlines())
    matches = (re.fullmatch(r"([A-Za-z0-9_.-]+)\s*(.*)", line) for line in lines if line)
    return {match[1].lower(): match[2] for match in matches}


def test_requirements_never_replace_what_the_user_has():
    for package, rule in _rules("requirements.txt").items():
        assert re.fullmatch(r">=[0-9.]+", rule), (
            f"{package}{rule}: only a lower bound keeps the user's version"
        )


def test_every_requirement_has_a_tested_version_that_satisfies_it():
    pins = _rules("constraints.txt")
    for package, rule in _rules("requirements.txt").items():
        pinned, least = (
            [int(part) for part in version.lstrip("=>").split(".")] for version in (pins[package], rule)
        )
        assert pinned >= least, package


def uninstall(cache: Path, **variables: str) -> str:
    """Runs uninstall.py as ComfyUI Manager does, and returns its output."""
    environment = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(cache), **variables}
    command = [sys.executable, "uninstall.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_measurements_go_and_with_them_the_folder(tmp_path):
    folder = tmp_path / FOLDER
    (folder / "compiled" / "fxgraph").mkdir(parents=True)
    for name in ("measurements-1.sqlite", "measurements-1.json", "self-tests.sqlite", "self-tests.lock"):
        (folder / name).write_text("{}")
    assert "4 files" in uninstall(tmp_path)
    assert not folder.exists()
    assert "0 files" in uninstall(tmp_path)


def test_other_files_stay(tmp_path):
    folder = tmp_path / FOLDER
    (folder / "ComfyUI-0.30.0").mkdir(parents=True)
    (folder / "measurements-1.sqlite").write_text("{}")
    assert "1 files" in uninstall(tmp_path)
    assert [entry.name for entry in folder.iterdir()] == ["ComfyUI-0.30.0"]


def test_measurements_in_another_folder_go_and_what_is_compiled_too(tmp_path):
    compiled, other = tmp_path / FOLDER / "compiled", tmp_path / "other"
    for folder in (compiled, other / "compiled"):
        folder.mkdir(parents=True)
    (other / "measurements-1.sqlite").write_text("{}")
    assert "1 files" in uninstall(tmp_path, **{VARIABLE: str(other)})
    assert not compiled.parent.exists()
    assert [entry.name for entry in other.iterdir()] == ["compiled"]  # not ours
    compiled.mkdir(parents=True)
    assert "0 files" in uninstall(tmp_path, **{VARIABLE: "off"})
    assert not compiled.parent.exists()

"""The Comfy Registry gets true metadata, pictures of its sizes, and an archive with only those files that run."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


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
        *(
            "demo_model",
            "deploy",
            "docs",
            "example_workflows",
            "locales",
            "nodes",
            "parallel_backend",
            "scripts",
            "web",
        ),
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

"""Where the set-up looks for a real ComfyUI, and what it says when a named one does not do."""

from __future__ import annotations

from pathlib import Path

import pytest

from comfyui_source import PINNED_VERSION, cache_folder, comfyui_version, find_comfyui
from steps import SetupError


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def make_comfyui(folder: Path, version: str = "0.30.0") -> Path:
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "comfy" / "samplers.py").touch()
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


def test_nothing_is_found_in_an_empty_home():
    assert find_comfyui() is None


def test_the_usual_places_come_before_the_cache_and_named_ones_before_all(tmp_path, monkeypatch):
    cached = make_comfyui(cache_folder() / f"ComfyUI-{PINNED_VERSION}")
    assert find_comfyui() == cached
    usual = make_comfyui(tmp_path / "home" / "comfy" / "ComfyUI")
    assert find_comfyui() == usual
    named = make_comfyui(tmp_path / "named")
    monkeypatch.setenv("COMFYUI_PATH", str(named))
    assert find_comfyui() == named
    explicit = make_comfyui(tmp_path / "explicit")
    assert find_comfyui(explicit) == explicit


def test_a_usual_place_that_is_too_old_is_passed_over(tmp_path):
    make_comfyui(tmp_path / "home" / "ComfyUI", version="0.3.64")
    assert find_comfyui() is None


def test_a_named_folder_that_is_no_comfyui_is_an_error(tmp_path):
    with pytest.raises(SetupError, match="is not a ComfyUI"):
        find_comfyui(tmp_path)


def test_a_named_comfyui_that_is_too_old_is_an_error_with_both_versions(tmp_path):
    old = make_comfyui(tmp_path / "old", version="0.10.2")
    assert comfyui_version(old) == "0.10.2"
    with pytest.raises(SetupError, match=r"0\.10\.2.*0\.11"):
        find_comfyui(old)

"""The places where the set-up looks for a real ComfyUI, and its errors if a named one cannot be used."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest

import comfyui_source
from comfyui_copies import make_comfyui
from comfyui_source import PINNED_VERSION, comfyui_version, find_comfyui
from parallel_backend.wire.cache_folder import user_cache
from steps import SetupError


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_nothing_is_found_in_an_empty_home():
    assert find_comfyui() is None


def test_the_usual_places_come_before_the_cache_and_named_ones_before_all(tmp_path, monkeypatch):
    cached = make_comfyui(user_cache() / f"ComfyUI-{PINNED_VERSION}")
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


def test_its_archive_is_unpacked_by_pythons_without_filters_too(tmp_path, monkeypatch):
    """An example is Python 3.11.2, which Debian 12 has."""
    main = tmp_path / "made" / "x" / comfyui_source.ARCHIVE_FOLDER / "main.py"
    main.parent.mkdir(parents=True)
    main.write_text("here")

    def download(command, **others):
        with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as tar:
            tar.add(tmp_path / "made" / "x", "x")

    def extract_all(self, path, members, *, numeric_owner=False):
        for member in members:
            self.extract(member, path)

    monkeypatch.setattr(comfyui_source, "run_logged", download)
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.setattr(tarfile.TarFile, "extractall", extract_all)
    folder = comfyui_source._unpack_archive(Path(sys.executable), tmp_path, tmp_path / "log")
    assert (folder / "main.py").read_text() == "here"

"""Uninstalling removes the pack's files outside its folder, and no other files."""

import os
import subprocess
import sys
from pathlib import Path

from parallel_backend.wire.cache_folder import FOLDER, VARIABLE

ROOT = Path(__file__).resolve().parent.parent


def uninstall(cache: Path, **variables: str) -> str:
    """Runs uninstall.py as ComfyUI Manager does, and returns its output."""
    environment = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(cache), **variables}
    done = subprocess.run(
        [sys.executable, "uninstall.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_measurements_go_and_with_them_the_folder(tmp_path):
    folder = tmp_path / FOLDER
    (folder / "compiled" / "fxgraph").mkdir(parents=True)
    for name in (
        "measurements-1234.sqlite",
        "measurements-1234.json",
        "self-tests.sqlite",
        "self-tests.lock",
    ):
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
